"""`shardmake estimate`: it agrees with the plan, explains itself, and has DeepSpeed's own table."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shardmake.cli import app
from shardmake.commands.deepspeed_table import deepspeed_table, largest_layer
from shardmake.commands.estimate import estimate, resolve_request
from shardmake.commands.estimate_request import EstimateRequest
from shardmake.commands.estimate_table import DISK_TERMS, GPU_TERMS, HOST_TERMS, NVME_TERMS, mark, print_table
from shardmake.config.models import STRATEGIES, Cluster, GradientDtype, Method, Precision, Run, Strategy
from shardmake.config.objectives import OBJECTIVES
from shardmake.config.strategies import STRATEGY_SPECS
from shardmake.core.errors import ConfigError
from shardmake.core.units import GIB
from shardmake.memory import closed_form
from shardmake.memory.buckets import Buckets
from shardmake.memory.host import host_terms
from shardmake.memory.model import ParameterSpec
from shardmake.plan.stage import make_plan
from shardmake.plan.verdict import Headroom
from tests.unit.memory.llama_8b import scenario
from tests.unit.plan.test_choose import candidate as make_candidate
from tests.unit.plans import LLAMA, make_model

CONFIG = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4,
    "num_attention_heads": 16, "vocab_size": 32000,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_the_second_result_comes_from_the_cache_and_is_equal(model: str, tmp_path: Path) -> None:
    first = estimate(EstimateRequest(model, strategies=["zero3"]))
    assert len(list(tmp_path.rglob("estimate-*.json"))) == 2
    assert estimate(EstimateRequest(model, strategies=["zero3"])) == first


IMPORTED = """
import sys
from shardmake.cli import app
app(["--quiet", "estimate", "--json", sys.argv[1]], standalone_mode=False)
print(*sorted({"torch", "transformers", "yaml", "safetensors", "packaging", "rich"} & {*sys.modules}), file=sys.stderr)
"""


def test_an_estimate_of_sizes_starts_without_the_libraries_that_it_does_not_use(model: str) -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTED, model], capture_output=True, text=True, check=True)
    assert "zero3" in done.stdout and done.stderr == "\n"


def test_every_strategy_with_the_documented_keys(model: str) -> None:
    result = json.loads(json.dumps(estimate(EstimateRequest(model, gradient_checkpointing=True)).as_json()))
    names = [candidate["strategy"] for candidate in result["candidates"]]
    assert names == [name for name in STRATEGIES if not (STRATEGY_SPECS[name].hybrid or STRATEGY_SPECS[name].hpz)]
    for candidate in result["candidates"]:
        assert set(candidate) == {
            "strategy", "gradient_checkpointing", "nodes", "gpu", "host", "nvme", "disk", "fits", "headroom",
            "chosen", "reason", "step_seconds",
        }  # fmt: skip
        assert set(candidate["gpu"]) == {"allocated", "reserved", "wanted", "device", "phase", "terms"}


def test_a_deepspeed_file_gives_stage_and_sizes(model: str, tmp_path: Path) -> None:
    own = tmp_path / "ds.json"
    own.write_text(json.dumps({"zero_optimization": {"stage": 2, "reduce_bucket_size": 2e9}}))
    (plain,) = estimate(EstimateRequest(model, strategies=["zero2"], gradient_checkpointing=True)).rows
    counted = estimate(EstimateRequest(model, gradient_checkpointing=True, deepspeed_config=str(own))).rows
    assert [row.choice.strategy for row in counted] == ["zero2", "zero2-offload"]
    assert counted[0].memory.gpu.allocated > plain.memory.gpu.allocated
    own.write_text(json.dumps({"zero_optimization": {"mics_shard_size": 2}}))
    with pytest.raises(ConfigError, match="mics_shard_size"):
        estimate(EstimateRequest(model, deepspeed_config=str(own)))


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
@pytest.mark.parametrize("gradient_dtype", ["auto", "fp32"])
def test_every_term_is_explained(model: str, method: Method, gradient_dtype: GradientDtype) -> None:
    rows = estimate(EstimateRequest(model, method=method, gradient_dtype=gradient_dtype)).rows
    for memory in (row.memory for row in rows):
        assert set(memory.gpu.terms) <= set(GPU_TERMS) and set(memory.host.terms) <= set(HOST_TERMS)
        assert set(memory.nvme.terms) <= set(NVME_TERMS) and set(memory.disk.terms) <= set(DISK_TERMS)


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_term_beside_a_reference_is_explained(strategy: Strategy, precision: Precision, copies: bool) -> None:
    setup = scenario(
        strategy=strategy, precision=precision, reference_weights=True, has_script=copies, checkpoint_in_memory=copies,
    )  # fmt: skip
    phases = closed_form.phases(setup, Buckets(), closed_form.Profile(1, 1, 1, 1, 1))
    assert {term for terms in phases.values() for term in terms} <= set(GPU_TERMS)
    assert set(host_terms(setup, Buckets())) <= set(HOST_TERMS)


def test_table_and_explanation_are_printed(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    print_table(estimate(EstimateRequest(model, strategies=["zero3"])), explain=True)
    shown = " ".join(capsys.readouterr().out.split())
    assert "logits and loss" in shown and "a100-80gb, 79.1 GiB" in shown and "312 TFLOP/s" in shown
    assert "yes*" in shown and "* zero3, no checkpointing, micro batch 1, 1 node: about " in shown
    assert "host: processes: 1.5 GiB per rank" in shown and "disk: checkpoints: those kept" in shown
    assert "12.5 GB/s between nodes" in shown and "error of sharded trainings: " in shown


def test_a_quantized_base_counts_as_dequantized(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    declared = tmp_path / "config.json"
    declared.write_text(json.dumps({**CONFIG, "quantization_config": {"quant_method": "fp8"}}))
    found, plain = (estimate(EstimateRequest(name, strategies=["zero2"])) for name in (str(declared), model))
    assert [row.memory for row in found.rows] == [row.memory for row in plain.rows] and not plain.notes
    (note,) = found.as_json()["notes"]
    print_table(found)
    assert "as if it were dequantized" in note and "shardmake fetch NAME --dequantize FOLDER" in note
    assert note[1:] in " ".join(capsys.readouterr().out.split())


def test_a_step_that_was_scaled_is_named(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = replace(estimate(EstimateRequest(model, strategies=["zero3"])), traced_tokens=43)
    assert result.as_json()["traced_tokens"] == 43
    print_table(result)
    assert "a step of 43 tokens was traced, and its bytes scaled to 4,096." in " ".join(capsys.readouterr().out.split())


def test_the_table_marks_the_choice_tight_and_slow_rows() -> None:
    chosen = make_candidate("fsdp", 14.2, 78.5, Headroom.TIGHT)
    safe = make_candidate("fsdp-offload", 83.9, 16.7)
    near, large = make_candidate("zero3", 15.0, 60.0), make_candidate("ddp", 5.0, 300.0)
    assert [mark(row, chosen) for row in (chosen, safe, near, large)] == ["tight*", "slow", "yes", "no"]


def test_a_row_fits_a_terminal_of_80_columns(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    print_table(estimate(EstimateRequest(model, strategies=["zero3-offload-optimizer"])))
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("zero3-offload-optimizer")]
    assert len(rows) == 2 and all(len(row) <= 80 and not row.endswith("…") for row in rows)


@pytest.mark.parametrize("memory", [1024.0, 4.0])
def test_estimate_and_plan_choose_the_same(model: str, memory: float) -> None:
    request, cluster = hardware(model)
    result = estimate(replace(request, gpu_memory=memory))
    run = Run(
        model=model, data={"train": "train.jsonl"}, sequence_length=4096, global_batch_size=4, micro_batch_size=1,
        max_steps=100, learning_rate=1e-4, nodes=2, attention="sdpa",
    )  # fmt: skip
    plan, _ = make_plan("run", run, cluster.model_copy(update={"gpu_memory_gib": memory}))
    assert result.choice is not None and result.choice.choice == plan.choice
    (chosen,) = (row for row in result.as_json()["candidates"] if row["chosen"])
    assert chosen["strategy"] == plan.choice.strategy


def hardware(model: str) -> tuple[EstimateRequest, Cluster]:
    """Return the same two nodes as command-line options and as a cluster file; everything fits on them."""
    request = EstimateRequest(
        model, nodes=2, gpus_per_node=2, gpu_memory=1024.0, host_memory=1000.0, accelerator="h100", attention="sdpa"
    )
    cluster = Cluster(
        executor="slurm", accelerator="h100", gpu_memory_gib=1024.0, max_nodes=2, processes_per_node=2,
        cpus_per_node=32, memory_gib_per_node=1000.0, nvme_path="/nvme",
    )  # fmt: skip
    return request, cluster


@pytest.mark.parametrize("settings", [
    *({"strategies": [one], "gradient_checkpointing": on} for one in STRATEGIES for on in (True, False)),
    {"loss": "chunked"}, {"activation_offload": True}, {"objective": "dpo"},
    {"objective": "dpo", "reference": "precomputed"}, {"objective": "dpo", "method": "lora"},
    {"objective": "kto", "micro_batch": 2},
    {"objective": "kto", "micro_batch": 2, "reference": "precomputed"}, {"objective": "reward"},
], ids=lambda options: "-".join(str(value) for value in options.values()))  # fmt: skip
def test_estimate_and_plan_agree_to_the_byte(settings: dict[str, Any], model: str) -> None:
    """The plan of a run with one candidate has the bytes and seconds of the estimate."""
    request, cluster = hardware(model)
    request = replace(request, **{"strategies": ["zero2"], "gradient_checkpointing": True} | settings)
    (estimated,) = estimate(request).as_json()["candidates"]
    run = Run(
        model=request.model, data={"train": "train.jsonl"}, sequence_length=4096, max_steps=100,
        global_batch_size=4 * request.micro_batch, micro_batch_size=request.micro_batch, method=request.method,
        objective=request.objective, packing=request.objective == "sft",
        **({request.objective: {"reference": request.reference}} if request.reference else {}), learning_rate=1e-4,
        strategy=request.strategies[0], gradient_checkpointing=request.gradient_checkpointing, nodes=2,
        attention="sdpa", loss=request.loss, activation_offload=request.activation_offload,
    )  # fmt: skip
    (candidate,) = make_plan("run", run, cluster)[1].candidates
    planned = candidate.model_dump(mode="json")
    keys = ("gpu", "host", "nvme", "disk", "reason", "step_seconds")
    assert {key: planned[key] for key in keys} == {key: estimated[key] for key in keys}


def test_an_objective_takes_the_attention_kernel_of_its_padded_examples(model: str) -> None:
    kernels = {
        name: resolve_request(EstimateRequest(model, objective=name, micro_batch=2)).attention for name in OBJECTIVES
    }
    assert kernels == {"sft": "varlen", "dpo": "sdpa", "kto": "sdpa", "reward": "sdpa"}


def test_without_strategy_the_planners_strategies_are_estimated(model: str) -> None:
    request, _ = hardware(model)
    rows = estimate(replace(request, method="qlora", gradient_checkpointing=True)).rows
    assert [row.choice.strategy for row in rows] == [name for name in STRATEGIES if STRATEGY_SPECS[name].four_bits]


def test_a_flag_that_helps_is_suggested_without_a_value(model: str) -> None:
    sizes = {"gpus_per_node": 1, "sequence_length": 65536, "loss": "chunked", "method": "lora"}
    request = EstimateRequest(model, gpu_memory=1024.0, **sizes)  # type: ignore[arg-type]
    kept, offloaded = (
        min(
            row.memory.gpu.device - row.memory.gpu.reserved + row.memory.gpu.allocated
            for row in estimate(replace(request, activation_offload=offload)).rows
        )
        for offload in (False, True)
    )
    result = estimate(replace(request, gpu_memory=(kept + offloaded) / 2 / 2**30))
    assert result.advice is not None and "--activation-offload: " in result.advice


def test_a_change_that_is_suggested_sees_as_many_tokens_per_step(model: str) -> None:
    request = EstimateRequest(
        model, gpus_per_node=4, gpu_memory=6.0, sequence_length=8192, micro_batch=4, accumulation=3
    )
    advice = estimate(request).advice or ""
    assert "--sequence-parallel 2 --accumulation 6" in advice or "--sequence-parallel 4 --accumulation 12" in advice
    assert re.search(r"--micro-batch (2 --accumulation 6|1 --accumulation 12):", advice)


def test_a_named_strategy_is_kept_by_what_is_suggested_or_its_change_is_named(model: str) -> None:
    request = EstimateRequest(
        model, gpus_per_node=4, gpu_memory=4.0, sequence_length=2048, micro_batch=1, strategies=["ddp"]
    )
    advice = estimate(request).advice or ""
    for one in advice.split("; or "):
        option, _, text = one.partition(": ")
        assert text.startswith(option.removeprefix("--strategy ") if "--strategy" in option else "ddp with"), one
    assert "--strategy" in advice


def test_cpu_ranks_without_a_limit_have_none_in_their_figures(model: str) -> None:
    (row,) = estimate(EstimateRequest(model, accelerator="cpu", strategies=["ddp"], gradient_checkpointing=True)).rows
    assert re.fullmatch(r"fits: [\d.]+ GiB of a node's RAM", row.reason)


BAD = [
    (EstimateRequest("x", gpu_memory=81920), "If that were MiB, write 80"),
    (EstimateRequest("x", reference="precomputed"), "--reference has no effect with --objective sft"),
    (EstimateRequest("x", gradient_dtype="bf16", precision="fp32"), "gradient_dtype: bf16 needs precision: bf16"),
    (EstimateRequest("x", objective="kto"), "micro_batch_size: 1 cannot be combined with objective: kto"),
    (EstimateRequest("x", gpu_memory=0), "memory of one GPU in GiB"),
    (EstimateRequest("x", sequence_length=0), "--sequence-length is 0"),
    (EstimateRequest("x", accelerator="h1000"), r"--accelerator: 'h1000' is .*Did you mean 'h100"),
    (EstimateRequest("x", sequence_length=10**9), r"is 1000000000\. Write a number from 1 to 10,000,000\."),
]


def test_no_model_and_an_unknown_strategy_are_refused_before_the_model_is_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^No model is named\. Name a hub id, a model folder or a config\.json\.$"):
        estimate(EstimateRequest(""))
    with pytest.raises(ConfigError, match=r"^There is no strategy 'fsdp2'\. Did you mean 'fsdp'\?"):
        estimate(EstimateRequest(str(tmp_path / "absent"), strategies=["fsdp2"]))


def test_sequences_are_at_most_as_long_as_the_model_has_positions(tmp_path: Path) -> None:
    short = tmp_path / "config.json"
    short.write_text(json.dumps(CONFIG | {"max_position_embeddings": 512}))
    assert estimate(EstimateRequest(str(short), strategies=["ddp"])).request.sequence_length == 512
    with pytest.raises(ConfigError, match=r"^sequence_length is 513, but LlamaForCausalLM has only 512 positions"):
        estimate(EstimateRequest(str(short), sequence_length=513))


def test_the_memory_is_that_of_the_accelerator(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    ddp = EstimateRequest(model, accelerator="H200", strategies=["ddp"])
    print_table(estimate(ddp))
    assert "8 GPUs of 139.8 GiB" in " ".join(capsys.readouterr().out.split())
    assert resolve_request(ddp).hardware.gpu_memory == int(139.8 * GIB)
    assert resolve_request(replace(ddp, gpu_memory=94.0)).hardware.gpu_memory == 94 * GIB


@pytest.mark.parametrize(("options", "message"), BAD, ids=str)
def test_bad_options_are_rejected(options: EstimateRequest, message: str, model: str) -> None:
    with pytest.raises(ConfigError, match=message):
        estimate(EstimateRequest(**{**vars(options), "model": model}))


def figures(text: str) -> list[tuple[str, str]]:
    """Host and GPU of each line."""
    return re.findall(r"(\d+\.\d\d)GB \| +(\d+\.\d\d)GB", text)


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 1), (2, 8)])
def test_the_rows_are_those_that_deepspeed_prints(nodes: int, gpus: int, capsys: pytest.CaptureFixture[str]) -> None:
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_cold
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs_all_cold

    model = make_model(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, vocab_size=128256)
    estimate_zero2_model_states_mem_needs_all_cold(model.parameters, gpus, nodes)
    estimate_zero3_model_states_mem_needs_all_cold(model.parameters, largest_layer(model), gpus, nodes)
    theirs = figures(capsys.readouterr().out)
    table = deepspeed_table(model, nodes, gpus)
    assert len(theirs) == 8 and figures(table) == theirs and table.count("ZeRO-2") == 2 and table.count("ZeRO-3") == 6


def test_zero2_rows_against_deepspeeds_documentation_and_formula() -> None:
    """Of ``docs/code-docs/source/memory.rst``: 2851e6 parameters, 8 GPUs on one node.

    Without offload the page has 15.93 GiB, from 4 + 16 / 8 bytes per parameter; the code has 2 + 18 / 8 today.
    """
    count = 2_851_000_000
    model = replace(make_model(), tensors=(ParameterSpec("model.weight", (count,), "linear"),))
    gpu = (2 + 18 / 8) * count / GIB
    assert figures(deepspeed_table(model, 1, 8))[:2] == [("127.45", "5.31"), ("127.45", f"{gpu:.2f}")]


def test_the_command_prints_the_table_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    words = ["estimate", str(tmp_path), "--deepspeed-table", "--gpus-per-node", "4", "--nodes", "2"]
    made = CliRunner().invoke(app, words)
    assert made.exit_code == 0 and made.stdout.startswith("DeepSpeed's estimate of params")
    assert "HW: 2 nodes, 4 GPUs per node." in made.stdout and len(figures(made.stdout)) == 8
