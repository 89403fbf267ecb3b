"""Findings of a node's checks, also about its compilers, with stand-ins on PATH."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shardmake.config.attention import Attention
from shardmake.config.strategies import STRATEGY_SPECS
from shardmake.core import process
from shardmake.core.atomic import write_json
from shardmake.launch import preflight, worker
from shardmake.launch.compilers import check_compilers
from shardmake.launch.gpu_status import GpuStatus
from shardmake.launch.outcome import classify
from shardmake.launch.preflight import GIB, PreflightError, check_import, check_node
from shardmake.run.attempt import Attempt, AttemptDir, NodeExit
from shardmake.run.attempt_history import EndReason
from shardmake.run.plan import Plan, Resources
from tests.finished_run import make_data_receipt
from tests.programs import install_programs, write_program
from tests.unit.launch.fake_run import write_attempt
from tests.unit.launch.test_outcome import evidence
from tests.unit.plans import make_cluster, make_plan, make_training_settings


def test_versions_memory_scratch_and_names(tmp_path: Path) -> None:
    assert preflight.check_versions({"torch": "2.13.0"}, {"torch": "2.13.0"}) == []
    found = preflight.check_versions({"torch": "2.12.0"}, {"torch": "2.13.0", "peft": "1"})
    assert [row.found for row in found] == [
        "torch is 2.12.0 on this node and 2.13.0 on the login node",
        "peft is not installed on this node and 1 on the login node",
    ]
    assert preflight.check_memory(8 * GIB, 8 * GIB) == []
    assert "needs 8.0 GiB of memory, and 7.0 GiB are free" in preflight.check_memory(7 * GIB, 8 * GIB)[0].found
    assert preflight.check_scratch(str(tmp_path)) == []
    assert "does not exist" in preflight.check_scratch(f"{tmp_path}/missing")[0].found
    assert "node-of-nobody.invalid" in preflight.check_names("node-of-nobody.invalid")[0].found


def node(tmp_path: Path, host_memory: int = GIB, **changes: object) -> tuple[AttemptDir, Attempt, Plan]:
    """Write a node's folders, for a training that requests more memory than any node has free."""
    resources = {"train": Resources(memory_gib=1 << 20, cpus=2)}
    plan = make_plan("zero3", nodes=1).model_copy(update={"host_memory": host_memory, "resources": resources})
    folder = AttemptDir(tmp_path / "train/attempts/001")
    make_training_settings(model=str(tmp_path / "base")).write(folder.training)
    write_json(tmp_path / "base/config.json", {})
    make_data_receipt("d").write(tmp_path / "data/receipt.json")
    write_json(folder.deepspeed, {})
    attempt = write_attempt(folder, plan, make_cluster(scratch=str(tmp_path)))
    return folder, attempt.model_copy(update=changes), plan


def test_scratch_is_expanded_in_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, attempt, plan = node(tmp_path, scratch=f"{tmp_path}/local-$SLURM_JOB_ID")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(PreflightError, match="the job has no variable SLURM_JOB_ID on this node") as refused:
        check_node(folder, attempt, plan, 0, print)
    assert refused.value.blames_run  # no other node would have it
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    (tmp_path / "local-7").mkdir()
    check_node(folder, attempt, plan, 0, print)
    assert attempt.private == tmp_path / f"local-7/shardmake-{os.getuid()}" and attempt.private.is_dir()


def test_a_node_without_findings_is_reported(tmp_path: Path) -> None:
    """The need of the training counts: a job that requests all of a node's memory never finds all of it free."""
    lines: list[str] = []
    check_node(*node(tmp_path), 0, lines.append)
    assert "all checks of this node passed" in lines[-1]


def test_all_findings_are_reported_at_once(tmp_path: Path) -> None:
    folder, attempt, plan = node(tmp_path, host_memory=GIB << 20, versions={"torch": "0.0"})
    (tmp_path / "base/config.json").unlink()
    (tmp_path / "data/receipt.json").unlink()
    with pytest.raises(PreflightError) as error:
        check_node(folder, attempt, plan, 1, print)
    assert not error.value.blames_run
    for words in ("on the login node", "of memory, and", "base/config.json cannot be read", "data/receipt.json"):
        assert words in str(error.value)


def on_gpus(monkeypatch: pytest.MonkeyPatch, capability: float) -> None:
    """Let a node have GPUs of this capability, and a torch that can use them."""
    gpus = [GpuStatus(str(number), f"GPU-{number}", 0, 0, 580, capability) for number in range(2)]
    monkeypatch.setattr(preflight, "list_released_gpus", lambda visible: gpus)
    monkeypatch.setattr(preflight, "installed_cuda", lambda: "12.8")


def planned_attention(plan: Plan, attention: Attention) -> Plan:
    return plan.model_copy(update={"workload": plan.workload.model_copy(update={"attention": attention})})


def test_a_gpu_that_the_attention_kernel_lacks_blames_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus(monkeypatch, 7.5)
    folder, attempt, plan = node(tmp_path, accelerator="a100-80gb")
    words = "compute capability 7.5, and attention: varlen needs 8.0 or newer"
    with pytest.raises(PreflightError, match=words) as error:
        check_node(folder, attempt, planned_attention(plan, "varlen"), 1, print)
    assert error.value.blames_run
    check_node(folder, attempt, planned_attention(plan, "sdpa"), 1, print)


def test_a_torch_without_flash_attention_blames_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The import is real. A build of torch for CPUs has no FlashAttention, one for CUDA has."""
    on_gpus(monkeypatch, 9.0)
    folder, attempt, plan = node(tmp_path, accelerator="a100-80gb")
    varlen = planned_attention(plan, "varlen")
    if torch.backends.cuda.is_flash_attention_available():
        check_node(folder, attempt, varlen, 1, print)
        return
    words = "attention: varlen cannot be used on this node: ImportError: this build of torch has no FlashAttention"
    with pytest.raises(PreflightError, match=words) as error:
        check_node(folder, attempt, varlen, 1, print)
    assert error.value.blames_run


BROKEN = "raise ImportError('flash_attn_2_cuda.so: undefined symbol: _ZN3c105ErrorC2E')"


@pytest.mark.parametrize(("source", "words"), [
    (BROKEN, "ImportError: flash_attn_2_cuda.so: undefined symbol: _ZN3c105ErrorC2E: install flash-attn for this"),
    ("", "cannot import name 'flash_attn_func'"), ("import os; os.abort()", "the import crashed or took longer than 300 s"),
    ("def flash_attn_func(): ...\nflash_attn_varlen_func = 1", "transformers finds no flash-attn 2.3.3 or newer, or no"),
], ids=["ABI", "flash-attn-4", "crash", "no-GPU"])  # fmt: skip
def test_the_node_imports_flash_attention_for_real(source: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn/__init__.py").write_text(source)
    (finding,) = check_import("flash", {**os.environ, "PYTHONPATH": str(tmp_path)})
    assert words in finding.found and "set attention: varlen" in finding.found
    assert check_import("eager", os.environ) == []


@pytest.mark.parametrize(("cgroup", "file", "text"), [
    ("0::/slurm/job_1/step_0\n", "slurm/job_1/step_0/memory.events", "low 0\noom 2\noom_kill 2\noom_group_kill 0\n"),
    ("5:cpu:/x\n4:memory:/job_1\n0::/\n", "memory/job_1/memory.oom_control", "oom_kill_disable 0\noom_kill 2\n"),
])  # fmt: skip
def test_the_kernels_count_of_killed_processes(tmp_path: Path, cgroup: str, file: str, text: str) -> None:
    (tmp_path / "cgroup").write_text(cgroup)
    assert worker.oom_kills(tmp_path / "cgroup", tmp_path) is None, "nothing counts"
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(text)
    assert worker.oom_kills(tmp_path / "cgroup", tmp_path) == 2


H100 = "".join(f"{n}, GPU-{n}, 1, 0, 580.65.06, 9.0, Default, Not Active, 16, 16\n" for n in range(8))
NOT_REPORTED = "".join(f"{n}, GPU-{n}, [N/A], [N/A], 580.65.06, [N/A], [N/A], [N/A], [N/A], [N/A]\n" for n in range(2))


Work = Callable[[str], tuple[NodeExit, str]]


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Work:
    """Return a function that runs a worker on a node with such an nvidia-smi: its exit record and the node's log."""

    def until_the_ranks_start(nvidia_smi: str) -> tuple[NodeExit, str]:
        folder, attempt, plan = node(tmp_path, accelerator="h100", processes_per_node=2, gpu_memory=int(79.1 * GIB))
        attempt.write(folder.settings)
        planned_attention(plan, "sdpa").write(folder.plan)
        install_programs(tmp_path, monkeypatch, {"nvidia-smi": nvidia_smi})
        monkeypatch.setattr(preflight, "installed_cuda", lambda: "12.8")
        monkeypatch.setattr(worker, "StopRequest", lambda file: SimpleNamespace(signal_name=None))
        monkeypatch.setattr(worker, "launch_command", lambda *_: ["sh", "-c", "env; exit 7"])
        worker.main(folder.root, worker.WorkerNode(rank=0, start=0))
        (exited,) = folder.exits()
        return exited, folder.log(0).read_text()

    return until_the_ranks_start


@pytest.mark.parametrize(("rows", "visible", "phase", "words"), [
    (H100, None, "training", ""), (H100.replace("580.65.06, 9.0", "580.65.06, 8.0"), "6,7", "training", ""),
    (NOT_REPORTED, None, "training", ""), (H100.replace("Default", "Exclusive_Process"), None, "training", ""),
    (H100.replace("Default", "Prohibited"), "0,1", "preflight", "GPU 1 is in the compute mode Prohibited"),
    (H100, "MIG-1,MIG-2", "preflight", "2 MIG slices are visible, but CUDA shows only the first"),
    (H100.replace("580.65.06", "470.256.02"), None, "run preflight", "driver is 470"),
    (H100.replace("16, 16", "16, 16, 81559"), None, "training", ""),
    (H100.replace("16, 16", "16, 16, 40960"), None, "run preflight", "counts on 79.1 GiB of GPU memory, and a GPU here has 40.0"),
    ("", None, "preflight", "nvidia-smi does not answer"), (f"SLOW{H100}", None, "training", ""),
], ids=["8-h100", "2-a100", "not-reported", "exclusive", "prohibited", "mig", "driver", "memory", "smaller", "none", "slow"])  # fmt: skip
def test_recorded_gpus_through_the_worker_up_to_the_start_of_the_ranks(
    work: Work, monkeypatch: pytest.MonkeyPatch, rows: str, visible: str | None, phase: str, words: str
) -> None:
    """A call is slow if the persistence daemon does not run, so that each one starts the driver."""
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    exited, log = work(f"{'sleep 1; ' * rows.startswith('SLOW')}printf '{rows.removeprefix('SLOW')}'")
    assert (exited.phase, exited.returncode) == (phase, 7 if phase == "training" else None), exited.message
    assert words in exited.message
    assert ("TORCH_NCCL_COORD_CHECK_MILSEC=200" in log) == (phase == "training"), "the environment of the ranks"


def test_a_hanging_nvidia_smi_blames_the_node(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver excludes that node and resumes."""
    monkeypatch.setattr(process, "SECONDS", 0.5)
    exited, _ = work("exec sleep 60")
    outcome = classify(evidence(exits=[exited]))
    words = f"{exited.host} failed its preflight checks: nvidia-smi does not answer."
    assert (outcome.end, outcome.host, outcome.message) == (EndReason.PREFLIGHT, exited.host, words)


OFFLOADED = {name for name, spec in STRATEGY_SPECS.items() if spec.is_deepspeed and spec.offload_optimizer}
# The answer of GCC 8, which Rocky Linux 8 has.
GCC_8 = "echo \"c++: error: unrecognized command line option '-std=c++20'; did you mean '-std=c++2a'?\" >&2; exit 1"


@pytest.fixture
def fakebin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH without programs."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path / "bin"


def findings(strategy: str, *, on_gpus: bool = False, **variables: str) -> list[str]:
    rows = check_compilers(STRATEGY_SPECS[strategy], {"PATH": os.environ["PATH"], **variables}, on_gpus=on_gpus)
    return [row.found for row in rows]


@pytest.mark.usefixtures("fakebin")
@pytest.mark.parametrize("strategy", STRATEGY_SPECS)
def test_only_offload_of_the_optimizer_needs_a_compiler(strategy: str) -> None:
    found = findings(strategy)
    assert bool(found) == (strategy in OFFLOADED), found
    assert all("c++: No such file or directory" in finding for finding in found)


def test_an_old_compiler_is_named_with_its_error(fakebin: Path) -> None:
    write_program(fakebin / "c++", GCC_8)
    (finding,) = findings("zero2-offload")
    assert "unrecognized command line option '-std=c++20'" in finding
    assert "install g++ 10 or newer" in finding and "slurm.setup" in finding
    write_program(fakebin / "g++-13")
    assert findings("zero2-offload", CXX="g++-13") == []


def test_nvme_needs_libaio_and_on_gpus_the_cuda_toolkit(fakebin: Path, tmp_path: Path) -> None:
    missing = 'case "$*" in *-laio*) echo "fatal error: libaio.h: No such file or directory" >&2; exit 1;; esac'
    write_program(fakebin / "c++", missing)
    (finding,) = findings("zero3-nvme")
    assert "libaio.h: No such file" in finding and "libaio-dev" in finding
    write_program(fakebin / "c++")
    assert findings("zero3-nvme") == []
    (finding,) = findings("zero3-nvme", on_gpus=True, CUDA_HOME=str(tmp_path / "missing"))
    assert "needs nvcc" in finding and "slurm.setup" in finding
    write_program(tmp_path / "cuda/bin/nvcc")
    assert findings("zero3-nvme", on_gpus=True, CUDA_HOME=str(tmp_path / "cuda")) == []
    write_program(fakebin / "nvcc")
    assert findings("zero3-nvme", on_gpus=True) == [], "torch takes the folder above that of nvcc"


@pytest.mark.usefixtures("fakebin")
def test_what_is_compiled_already_needs_no_compiler(tmp_path: Path) -> None:
    for name in ("cpu_adam", "async_io"):
        (tmp_path / "cache" / name).mkdir(parents=True)
        (tmp_path / "cache" / name / f"{name}.so").touch()
    assert findings("zero3-nvme", on_gpus=True, TORCH_EXTENSIONS_DIR=str(tmp_path / "cache")) == []


def test_the_compiler_of_this_machine_passes() -> None:
    assert shutil.which("c++"), "envs/system.sh installs it"
    assert findings("zero3-offload", on_gpus=True, **os.environ) == []


def test_the_check_of_a_node_blames_the_run(fakebin: Path, tmp_path: Path) -> None:
    folder, attempt, _ = node(tmp_path)
    write_program(fakebin / "c++", GCC_8)
    plan = make_plan("zero3-offload", nodes=1).model_copy(update={"host_memory": 1})
    with pytest.raises(PreflightError, match="Adam for offload cannot be compiled") as error:
        check_node(folder, attempt, plan, 0, print)
    assert error.value.blames_run
    write_program(fakebin / "good")
    compiler = {"environment": {"CXX": str(fakebin / "good")}}
    check_node(folder, attempt.model_copy(update=compiler), plan, 0, print)
