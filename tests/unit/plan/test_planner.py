import json
from pathlib import Path
from typing import Any

import pytest

from shardmake.config.models import Cluster, Run, Slurm
from shardmake.core.errors import ShardmakeError
from shardmake.launch.stage_jobs import ON_GPUS
from shardmake.plan.stage import choose_run, make_plan, plan_run
from shardmake.run.paths import RunDir
from shardmake.run.plan import MemoryEstimates, Plan
from tests.unit.memory.llama_8b import LLAMA_8B

Folders = dict[str, str]

LLAMA = {"model_type": "llama", "max_position_embeddings": 8192}
TINY = {
    **LLAMA, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 512,
}  # fmt: skip
EIGHT = {**LLAMA, **LLAMA_8B}
SEVENTY = {**EIGHT, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
CPU = Cluster(executor="local", processes_per_node=2, cpus_per_node=2, memory_gib_per_node=8.0)


def gpus(**more: Any) -> Cluster:
    values = {
        "executor": "slurm", "accelerator": "h100", "processes_per_node": 8, "cpus_per_node": 64,
        "memory_gib_per_node": 1000.0, "max_nodes": 4,
    }  # fmt: skip
    return Cluster(**{**values, **more})


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    for name, config in (("tiny", TINY), ("eight", EIGHT), ("seventy", SEVENTY)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    return {name: str(tmp_path / name) for name in ("tiny", "eight", "seventy")}


def run_of(model: str, **more: Any) -> Run:
    values = {
        "model": model, "data": {"train": "train.jsonl"}, "sequence_length": 512, "global_batch_size": 32,
        "max_steps": 10, "learning_rate": 1e-4,
    }  # fmt: skip
    return Run(**{**values, **more})


def strategies_of(made: Plan) -> set[str]:
    """Return the strategies of the choice and of its fallbacks."""
    return {made.choice.strategy, *(fallback.choice.strategy for fallback in made.fallbacks)}


def plan(model: str, cluster: Cluster, **more: Any) -> Plan:
    return make_plan("run", run_of(model, **more), cluster)[0]


def own_file(tmp_path: Path, values: dict[str, Any]) -> str:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": "auto"} | values))
    return str(path)


@pytest.mark.parametrize(("changes", "gradients"), [
    ({"strategy": "zero3", "micro_batch_size": 1}, "fp32"), ({"strategy": "zero3", "micro_batch_size": 4}, "bf16"),
    ({"strategy": "zero3", "micro_batch_size": 4, "gradient_dtype": "fp32"}, "fp32"),
    ({"strategy": "fsdp", "micro_batch_size": 1}, "fp32"),
    ({"strategy": "fsdp", "micro_batch_size": 1, "gradient_dtype": "bf16"}, "bf16"),
    ({"strategy": "zero1", "micro_batch_size": 1}, "bf16"), ({"strategy": "ddp", "micro_batch_size": 4}, "fp32"),
    ({"strategy": "zero2", "precision": "fp32"}, "fp32"),
])  # fmt: skip
def test_gradients_of_several_passes_are_in_fp32(folders: Folders, changes: dict[str, Any], gradients: str) -> None:
    assert plan(folders["tiny"], gpus(), **changes).choice.gradients == gradients


def test_auto_takes_no_strategy_that_sums_gradients_in_16_bits(folders: Folders) -> None:
    """ZeRO-1 is considered with one pass per step, and with several if the run asks for bf16."""

    def passes(**changes: Any) -> set[int]:
        memory = make_plan("run", run_of(folders["tiny"], nodes=1, **changes), gpus())[1]
        choices = [candidate.choice for candidate in memory.candidates]
        return {choice.gradient_accumulation_steps for choice in choices if choice.strategy == "zero1"}

    assert passes() == {1} and passes(gradient_dtype="fp32") == set() and passes(gradient_dtype="bf16") == {1, 2, 4}


def test_an_own_file_limits_the_choice_and_its_fallbacks(folders: Folders, tmp_path: Path) -> None:
    offload = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    own = own_file(tmp_path, {"zero_optimization": offload, "train_micro_batch_size_per_gpu": 2})
    made = plan(folders["eight"], gpus(), deepspeed_config=own)
    choices = [made.choice, *(fallback.choice for fallback in made.fallbacks)]
    assert {(choice.strategy, choice.micro_batch_size) for choice in choices} == {("zero3-offload", 2)}
    assert made.own_files == [
        f"{own} limits the choice: zero_optimization.stage 3, zero_optimization.offload_optimizer.device 'cpu', "
        "zero_optimization.offload_param.device 'cpu', train_micro_batch_size_per_gpu 2"
    ]


STAGE_3 = {"zero_optimization": {"stage": 3}}
MISFITS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (STAGE_3, {"strategy": "zero2"}, "the offload of your file is zero3"),
    (STAGE_3, {"strategy": "ddp"}, "strategy ddp does not use DeepSpeed"),
    ({"train_micro_batch_size_per_gpu": 3}, {}, "train_micro_batch_size_per_gpu: 3 in"),
    ({"gradient_clipping": 0.5}, {}, "gradient_clipping: 0.5 in .*, 1.0 in the plan"),
    ({"scheduler": {"type": "WarmupLR"}}, {}, "The run decides it"),
]


def test_an_own_file_that_no_choice_fits_is_refused_by_the_plan(folders: Folders, tmp_path: Path) -> None:
    for values, settings, words in MISFITS:
        with pytest.raises(ShardmakeError, match=words):
            plan(folders["tiny"], gpus(), deepspeed_config=own_file(tmp_path, values), **settings)


def test_the_memory_estimate_counts_the_sizes_of_an_own_file(folders: Folders, tmp_path: Path) -> None:
    zero = {"reduce_bucket_size": 2e9, "overlap_comm": True, "offload_optimizer": {"pin_memory": False}}
    own = own_file(tmp_path, {"zero_optimization": zero})
    asked = {"strategy": "zero2-offload", "micro_batch_size": 1, "gradient_checkpointing": True}
    (_, plain), (made, larger) = (
        make_plan("run", run_of(folders["eight"], **asked, **more), gpus()) for more in ({}, {"deepspeed_config": own})
    )
    before, after = (one.candidates[0] for one in (plain, larger))
    assert after.gpu.allocated > before.gpu.allocated and after.gpu.terms["communication buffers"] > 2 * 2 * 1.9e9
    assert after.host.terms["master weights"] < before.host.terms["master weights"]
    assert made.own_files == [
        f"the memory estimate counts from {own}: zero_optimization.reduce_bucket_size 2000000000.0, "
        "zero_optimization.overlap_comm True, zero_optimization.offload_optimizer.pin_memory False"
    ]


def test_a_tiny_model_on_two_processes_is_plain_ddp(folders: Folders) -> None:
    made = plan(folders["tiny"], CPU)
    assert (made.choice.strategy, made.choice.precision, made.workload.attention) == ("ddp", "fp32", "sdpa")
    assert made.choice.global_batch_size == 32 and made.reason.startswith("ddp")
    assert all(fallback.choice.strategy.startswith(("ddp", "zero")) for fallback in made.fallbacks)


@pytest.mark.parametrize(("changes", "strategy"), [
    *(({"strategy": name, "nodes": 4}, name) for name in ("zero1", "zero3", "fsdp", "zero3-offload")),
    ({"optimizer": "adafactor", "method": "lora"}, "ddp"),
])  # fmt: skip
def test_a_named_strategy_is_respected_and_adafactor_needs_whole_weights(
    changes: dict[str, Any], strategy: str, folders: Folders
) -> None:
    assert strategies_of(plan(folders["eight"], gpus(), **changes)) == {strategy}


def test_hpz_is_taken_by_name_only_and_on_several_nodes(folders: Folders) -> None:
    """It has not run on GPUs. On one node its second shard would be a copy without use."""
    made = plan(folders["tiny"], gpus(), strategy="zero3-hpz")
    assert (made.choice.strategy, made.choice.nodes) == ("zero3-hpz", 2)
    auto = plan(folders["eight"], gpus(), nodes=2)
    assert "zero3-hpz" not in strategies_of(auto)


@pytest.mark.parametrize(("script", "strategy", "said"), [("x.py", "fsdp", 1), ("x.py", "zero3", 0), (None, "fsdp", 0)])
def test_gradients_that_scripts_may_keep_whole(folders: Folders, script: str | None, strategy: str, said: int) -> None:
    """FSDP2 shards gradients when they are synchronized; accelerator.accumulate synchronizes the last ones only."""
    made = plan(folders["eight"], gpus(), script=script, strategy=strategy, micro_batch_size=1, nodes=1)
    assert sum("accelerator.no_sync" in line and "29.9 GiB more" in line for line in made.own_files) == said


def test_a_script_does_not_get_nvme_offload(folders: Folders) -> None:
    """DeepSpeed alone saves what cannot be merged, and resumes without the moments."""
    cluster = gpus(nvme_path="/nvme", nvme_gib_per_node=4000.0)
    made = plan(folders["eight"], cluster, script="train.py", micro_batch_size=1)
    assert "zero3-nvme" not in strategies_of(made)


def test_every_fallback_needs_less_gpu_memory(folders: Folders) -> None:
    run = run_of(folders["eight"], sequence_length=4096, global_batch_size=64, max_steps=1)
    made, memory = make_plan("run", run, gpus())
    taken = [made.choice, *(fallback.choice for fallback in made.fallbacks)]
    needs = [memory.of(choice).gpu.device for choice in taken]
    assert len(needs) > 2 and needs == sorted({*needs}, reverse=True)


def test_a_fallback_with_offload_requests_more_host_memory(folders: Folders) -> None:
    """It needs less of the GPU's memory and more of the node's, so that it does not help after a node's out-of-memory."""
    made = plan(folders["eight"], gpus(), sequence_length=4096)
    offloads = 1 + ["offload" in fallback.choice.strategy for fallback in made.fallbacks].index(True)
    here, there = made.at(offloads - 1), made.at(offloads)
    assert there.choice == made.fallbacks[offloads - 1].choice and there.host_memory > here.host_memory + 16 * 2**30
    asked = [its.resources["train"].memory_gib for its in (here, there)]
    assert there.host_memory < asked[1] * 2**30 and asked[0] < asked[1]
    assert next(made.fallbacks_below(offloads - 1, host=False)) == offloads
    below = next(made.fallbacks_below(offloads - 1, host=True), None)
    assert below is None or made.at(below).host_memory < here.host_memory
    assert not list(made.fallbacks_below(len(made.fallbacks), host=False)) and made.at(0) == made


def test_fallbacks_try_16_bits_before_nvme_and_more_nodes(folders: Folders) -> None:
    cluster = gpus(nvme_path="/nvme", nvme_gib_per_node=4000.0)
    made = plan(folders["eight"], cluster, sequence_length=2048, precision="fp32", global_batch_size=64)
    assert made.choice.precision == "fp32"
    below = [fallback.choice for fallback in made.fallbacks]
    steps = [(choice.nodes, choice.strategy == "zero3-nvme", choice.precision != "fp32") for choice in below]
    assert steps == sorted(steps) and any(choice.precision == "bf16" for choice in below)
    assert plan(folders["tiny"], gpus(accelerator="v100-32gb")).choice.precision == "fp16"
    old = plan(folders["tiny"], gpus(accelerator="v100-32gb"), precision="fp32")
    assert {fallback.choice.precision for fallback in old.fallbacks} <= {"fp32", "fp16"}


def test_memory_json_has_every_candidate_term_by_term(folders: Folders) -> None:
    made, memory = make_plan("run", run_of(folders["tiny"], sequence_length=128, global_batch_size=8), CPU)
    assert len(memory.candidates) == len(made.rejected) + 1
    for candidate in memory.candidates:
        assert sum(candidate.gpu.terms.values()) == candidate.gpu.allocated
        for place in (candidate.host, candidate.nvme, candidate.disk):
            assert sum(place.terms.values()) == place.total
    assert MemoryEstimates.model_validate_json(memory.model_dump_json()) == memory


def test_a_checkpoint_staged_in_memory_counts_as_host_memory(folders: Folders) -> None:
    """Only where saving is asynchronous and the scratch is a tmpfs; the first node holds most."""
    term = "checkpoint in scratch"
    found = {}
    for scratch, asynchronous in (("/dev/shm/here", True), ("/dev/shm/here", False), ("/tmp", True)):
        changes = {"nodes": 2, "max_steps": 1, "checkpoints": {"asynchronous": asynchronous}}
        memory = make_plan("run", run_of(folders["tiny"], global_batch_size=64, **changes), gpus(scratch=scratch))[1]
        found[scratch, asynchronous] = {
            item.choice.strategy: item.host.terms.get(term, 0) for item in memory.candidates
        }
        whole = {item.choice.strategy: item.disk.terms["checkpoints"] / 3 for item in memory.candidates}
    held = found["/dev/shm/here", True]
    assert {strategy: held[strategy] / whole[strategy] for strategy in ("ddp", "zero1", "zero2", "zero3", "fsdp")} == {
        "ddp": 1, "zero1": (2 + 12 / 2) / 14, "zero2": (2 + 12 / 2) / 14, "zero3": 1 / 2, "fsdp": 1 / 2,
    }  # fmt: skip
    assert not any(found["/dev/shm/here", False].values()) and not any(found["/tmp", True].values())


def test_ranks_that_are_kept_ready_count_as_host_memory(folders: Folders) -> None:
    def term(slurm: Slurm, **changes: Any) -> set[bool]:
        run = run_of(folders["tiny"], global_batch_size=64, nodes=1, max_steps=1, **changes)
        memory = make_plan("run", run, gpus(slurm=slurm))[1]
        return {"ready ranks" in item.host.terms for item in memory.candidates}

    in_place = Slurm(partition="gpu", restart_in_place=True)
    assert term(in_place) == {True} and term(Slurm(partition="gpu")) == term(in_place, script="train.py") == {False}


def test_weights_go_to_the_gpu_directly_and_host_ram_follows(folders: Folders) -> None:
    """8B on a node of eight: a copy per rank would be 120 to 240 GiB; a script and CPUs load one per rank."""
    run = run_of(folders["eight"], global_batch_size=64, nodes=1)

    def loading(run: Run, cluster: Cluster) -> dict[str, float]:
        found = make_plan("run", run, cluster)[1].candidates
        return {item.choice.strategy: item.host.terms.get("loading", 0) / 2**30 for item in found}

    direct = loading(run, gpus())
    assert all(direct[strategy] < 40 for strategy in ("ddp", "zero1", "zero2"))
    assert direct["fsdp"] == pytest.approx(30, abs=1)
    own = loading(run.model_copy(update={"script": "train.py"}), gpus())
    assert own["ddp"] > 230 and own["zero2"] > 115


def test_qlora_of_a_70b_model_fits_a_usual_node(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the 16-bit weights per rank would be 1,051 GiB, which left only FSDP."""
    monkeypatch.setattr("shardmake.plan.refusals.find_spec", lambda name: name != "flash_attn")
    made = plan(folders["seventy"], gpus(memory_gib_per_node=400.0), method="qlora", nodes=1, strategy="ddp")
    assert made.host_memory < 40 * 2**30


def test_a_plan_over_several_nodes_names_the_network_that_it_assumes(folders: Folders) -> None:
    words = "The times assume 12.5 GB/s between nodes (100 Gbit/s): set inter_node_gbps in the cluster file."
    assert words in plan(folders["tiny"], gpus(), nodes=2).reason
    assert "assume" not in plan(folders["tiny"], gpus(inter_node_gbps=50), nodes=2).reason
    assert "assume" not in plan(folders["tiny"], gpus(), nodes=1).reason


def test_more_nodes_only_if_they_are_needed(folders: Folders) -> None:
    small = gpus(accelerator="a10", memory_gib_per_node=64.0, processes_per_node=4, max_nodes=8)
    assert plan(folders["eight"], small, sequence_length=2048).choice.nodes > 1


def test_resources_are_at_most_a_node(folders: Folders) -> None:
    for cluster, model in ((CPU, "tiny"), (gpus(), "eight")):
        for asked in plan(folders[model], cluster).resources.values():
            assert 1 <= asked.memory_gib <= cluster.memory_gib_per_node and 1 <= asked.cpus <= cluster.cpus_per_node


def test_a_plan_whose_jobs_slurm_refuses_is_not_written(folders: Folders, tmp_path: Path) -> None:
    refused: list[Plan] = []

    def refuse(plan: Plan) -> None:
        refused.append(plan)
        raise ShardmakeError("Invalid qos specification")

    rundir = RunDir(tmp_path / "runs/run")
    with pytest.raises(ShardmakeError, match="Invalid qos"):
        plan_run(run_of(folders["tiny"], strategy="ddp"), CPU, rundir, refuse)
    assert set(refused[0].resources) >= {"train", *ON_GPUS} and not rundir.plan.exists()


def test_activations_on_the_host_take_less_of_the_gpu_and_more_time(folders: Folders) -> None:
    wanted = {"sequence_length": 8192, "global_batch_size": 16, "micro_batch_size": 2, "strategy": "zero3", "nodes": 1}
    run = run_of(folders["eight"], **wanted, loss="chunked", gradient_checkpointing=True)
    runs = [run.model_copy(update={"activation_offload": offload}) for offload in (False, True)]
    kept, offloaded = (choose_run(run, gpus()).chosen for run in runs)
    inputs = 32 * 2 * 8192 * 4096 * 2
    assert offloaded.memory.host.terms["activations"] == 8 * inputs
    less = kept.memory.gpu.allocated - offloaded.memory.gpu.allocated
    assert inputs / 2 < less <= inputs, "the peak may be in another phase then"
    assert offloaded.step_seconds > kept.step_seconds


def test_activations_on_the_host_are_those_of_checkpointing(folders: Folders) -> None:
    planned = plan(folders["eight"], gpus(), activation_offload=True)
    choices = [planned.choice, *(fallback.choice for fallback in planned.fallbacks)]
    assert all(choice.gradient_checkpointing for choice in choices)


def test_a_service_takes_nodes_beside_those_of_the_ranks(folders: Folders) -> None:
    service = {"script": "train.py", "service_nodes": 1, "service": {"command": "serve"}, "nodes": 2}
    made = plan(folders["tiny"], gpus(max_nodes=3), **service)
    assert (made.choice.nodes, made.job_nodes, made.choice.world_size) == (2, 3, 16)
    assert made.resources["train"].memory_gib == 1000, "the need of the service is not known"
    assert {fallback.memory_gib for fallback in made.fallbacks} <= {1000}
    assert plan(folders["tiny"], gpus(), nodes=2).resources["train"].memory_gib < 1000
