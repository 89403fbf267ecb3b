"""The libraries' own parsers: keys that they accept, refuse and ignore; they are asked once for the same content."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardmake.config.models import STRATEGIES, Strategy
from shardmake.config.strategies import STRATEGY_SPECS
from shardmake.core.errors import ShardmakeError
from shardmake.memory.buckets import auto_sizes
from shardmake.render.check import Files, Rendering, ask_once, check_rendered, read_with_libraries
from shardmake.render.launcher_settings import IGNORED_IN_FILE
from shardmake.render.stage import launch_flags, render_files
from shardmake.run.plan import Choice
from tests.finished_run import with_arguments
from tests.unit.plans import make_cluster, make_model, make_plan, make_run
from tests.unit.render.test_stage import drawn_choices


def render(strategy: Strategy, **settings: Any) -> Files:
    return render_files(make_plan(strategy), make_run(**settings), make_cluster(), make_model(), Path("plan"))


def check(strategy: Strategy, files: Files) -> None:
    plan = make_plan(strategy)
    flags = launch_flags(plan, Path("plan"), machine_rank=1, address="localhost", port=1)
    check_rendered([Rendering(files, plan.choice, flags)], "/tmp")


WORLD_SIZE = 4
choices = drawn_choices(
    nodes=st.sampled_from([1, 2]), processes_per_node=st.just(1), tensor_parallel=st.sampled_from([1, 2])
).map(lambda choice: possible(choice))


def possible(choice: Choice) -> Choice:
    """``choice`` on the ranks that there are, with tensor parallelism only where it goes."""
    size = choice.tensor_parallel if choice.spec.tensor_parallel else 1
    return choice.model_copy(update={"processes_per_node": WORLD_SIZE // choice.nodes, "tensor_parallel": size})


runs = st.fixed_dictionaries({
    "optimizer": st.sampled_from(["adamw", "adafactor", "sgd"]),
    "scheduler": st.sampled_from(["cosine", "linear", "constant", "constant_with_warmup"]),
    "warmup_ratio": st.floats(0, 1), "max_grad_norm": st.floats(0.1, 10), "method": st.sampled_from(["full", "lora"]),
    "eval_every_steps": st.just("never") | st.integers(1, 100),
})  # fmt: skip
accelerators = st.sampled_from(["cpu", "a100-80gb"])


@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn=st.lists(st.tuples(choices, runs, accelerators), min_size=24, max_size=24))
def test_whatever_is_rendered_is_understood(drawn: list[tuple[Choice, dict[str, Any], str]]) -> None:
    """All three parsers accept every plan and agree with it; every strategy is among them."""
    drawn += [(make_plan(strategy).choice, {}, "a100-80gb") for strategy in STRATEGIES]
    renderings = [make_rendering(choice, settings, accelerator) for choice, settings, accelerator in drawn]
    answers = read_with_libraries(renderings, "/tmp")
    assert [(answer, one.choice) for answer, one in zip(answers, renderings, strict=True) if answer] == []


def make_rendering(choice: Choice, settings: dict[str, Any], accelerator: str) -> Rendering:
    plan = make_plan("ddp").model_copy(update={"choice": choice})
    run = make_run(global_batch_size=choice.global_batch_size, **settings)
    files = render_files(plan, run, make_cluster(accelerator=accelerator), make_model(), Path("plan"))
    return Rendering(files, choice, launch_flags(plan, Path("plan"), machine_rank=0, address="localhost", port=1))


def test_every_parser_refuses_errors_in_its_own_file() -> None:
    files = render("zero2")
    broken = replace(
        files,
        accelerate=files.accelerate | {"num_processes": 3, "rdzv_backend": "c10d"},
        deepspeed=files.deepspeed
        | {"gradient_accumulation_steps": 3, "gradient_clipping": "auto", "zero_optimisation": {}},
        training=with_arguments(files.training, bf16=False),
    )
    with pytest.raises(ShardmakeError) as refusal:
        check("zero2", broken)
    message = str(refusal.value)
    assert "num_processes is 3 in accelerate.yaml. Each of the 2 machines starts 1, silently." in message
    assert "accelerate.yaml: num_processes is understood as 4; planned is 3" in message
    assert 'rdzv_backend is "c10d" in accelerate.yaml. Accelerate ignores the key in a file' in message
    assert "deepspeed.json: train_batch_size is understood as 24; planned is 16" in message
    assert "gradient_accumulation_steps is 2 in training.json; gradient_accumulation_steps is 3 in deepspeed" in message
    assert "the precision is fp32 in training.json; bf16.enabled is true in deepspeed.json" in message
    assert "zero_optimisation is {} in deepspeed.json. DeepSpeed does not know this key and ignores it" in message
    assert "gradient_clipping" not in message


def test_a_script_decides_whether_it_uses_the_optimizer_and_the_schedule_of_its_file(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    own = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.8, 0.9]}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": 500}},
    }
    for changes in ({}, {"script": str(script)}):
        files = render("zero2", **changes)
        files = replace(files, deepspeed=files.deepspeed | own)
        if changes:
            check("zero2", files)
        else:
            with pytest.raises(ShardmakeError, match="schedule: "):
                check("zero2", files)


def test_misspelt_keys_are_refused() -> None:
    files = render("zero3")
    zero = files.deepspeed["zero_optimization"] | {"stage3_prefetch_bucket": 1}
    broken = replace(
        files, accelerate=files.accelerate | {"num_machine": 2}, deepspeed=files.deepspeed | {"zero_optimization": zero},
        training=with_arguments(files.training, learnig_rate=1.0, of_tomorrow=1),
    )  # fmt: skip
    expected = r"(?s)num_machine.*learnig_rate.*stage3_prefetch_bucket.*does not read of_tomorrow"
    with pytest.raises(ShardmakeError, match=expected):
        check("zero3", broken)


def test_ignored_keys_are_those_of_the_installed_accelerate(tmp_path: Path) -> None:
    """Every flat key of the file, written with another value than its default; some do not reach the arguments."""
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    plain = render("ddp").accelerate
    fields = [name for name in ClusterConfig.__dataclass_fields__ if not name.endswith("_config")]
    others = {name: _another_value(name) for name in fields if name not in plain and name != "debug"}
    path = tmp_path / "accelerate.yaml"
    path.write_text(yaml.safe_dump(plain | others))
    launched, _, _ = _validate_launch_command(launch_command_parser().parse_args(["--config_file", str(path), "x.py"]))
    lost = {name for name, value in others.items() if getattr(launched, name) != value}
    assert {name for name in lost if not name.startswith("tpu_")} == set(IGNORED_IN_FILE)


def _another_value(name: str) -> object:
    from accelerate.commands.config.config_args import ClusterConfig

    default = ClusterConfig.__dataclass_fields__[name].default
    return not default if isinstance(default, bool) else 7 if name.endswith(("port", "rank")) else "other"


@pytest.mark.parametrize("strategy", [strategy for strategy in STRATEGIES if STRATEGY_SPECS[strategy].is_deepspeed])
def test_a_file_with_auto_gives_the_engine_of_the_plan(strategy: Strategy) -> None:
    """Trainer turns a user's file with "auto" into the rendered file, key by key."""
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    explicit, auto = render(strategy), render(strategy).deepspeed
    for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"):
        auto[key] = "auto"
    auto["bf16"]["enabled"] = auto["fp16"]["enabled"] = "auto"
    auto["zero_optimization"] |= dict.fromkeys(auto_sizes(64).keys() & auto["zero_optimization"].keys(), "auto")
    read = HfTrainerDeepSpeedConfig(auto)
    read.trainer_config_process(_Arguments(explicit.training.arguments))
    read.trainer_config_finalize(_Arguments(explicit.training.arguments), _Sized(), 10)
    assert read.config == explicit.deepspeed


class _Arguments:
    """As much of TrainingArguments as the DeepSpeed integration reads, without its device."""

    fp16_full_eval = bf16_full_eval = save_on_each_node = False
    world_size = 4

    def __init__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)

    def get_warmup_steps(self, steps: int) -> int:
        return int(self.__dict__["warmup_steps"])


class _Sized:
    class config:  # noqa: N801
        hidden_size = make_model().hidden_size


@pytest.mark.parametrize(
    ("precision", "accelerator", "wanted", "rendered"),
    [
        ("fp32", "h100", True, True),
        ("fp32", "h100", False, False),  # transformers turns it on for a compiled model unless it is off
        ("bf16", "h100", False, None),
        ("fp32", "cpu", False, None),
    ],
)
def test_tf32_is_stated_for_fp32_on_gpus_and_can_be_checked_without_a_gpu(
    precision: str, accelerator: str, wanted: bool, rendered: bool | None
) -> None:
    plan = make_plan("ddp", precision=precision)
    cluster = make_cluster(accelerator=accelerator, memory_gib_per_node=512.0)
    files = render_files(plan, make_run(tf32=wanted), cluster, make_model(), Path("plan"))
    assert files.training.arguments.get("tf32") is rendered
    if wanted:
        flags = launch_flags(plan, Path("plan"), machine_rank=1, address="localhost", port=1)
        check_rendered([Rendering(files, plan.choice, flags)], "/tmp")


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


class Parsers:
    """Parsers that find ``problems``, and count how often they are asked."""

    def __init__(self, problems: list[list[str]]) -> None:
        self.problems, self.asked = problems, 0

    def __call__(self) -> list[list[str]]:
        self.asked += 1
        return self.problems


@pytest.mark.usefixtures("empty_cache")
def test_accepted_content_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parsers = Parsers([[], []])
    for _ in range(3):
        assert ask_once("module", {"world_size": 2}, parsers) == [[], []]
    assert parsers.asked == 1
    ask_once("module", {"world_size": 4}, parsers)
    assert parsers.asked == 2, "another content"
    monkeypatch.setattr("shardmake.render.check._software", lambda: ["another version"])
    ask_once("module", {"world_size": 4}, parsers)
    assert parsers.asked == 3, "another library"


@pytest.mark.usefixtures("empty_cache")
def test_a_refusal_is_not_kept() -> None:
    parsers = Parsers([[], ["the disk is full"]])
    for _ in range(2):
        assert ask_once("module", {}, parsers) == [[], ["the disk is full"]]
    assert parsers.asked == 2


@pytest.mark.usefixtures("empty_cache")
def test_the_files_of_several_runs_are_checked_at_once() -> None:
    both = Barrier(2, timeout=30)

    def parsers() -> list[list[str]]:
        both.wait()
        return []

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(lambda size: ask_once("module", {"world_size": size}, parsers), (2, 4))] == [[], []]
