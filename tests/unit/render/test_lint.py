"""`shardmake check`: what it reads, refuses and prints."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from shardmake.cli import app
from shardmake.config.settings import SETTINGS
from shardmake.core.errors import ConfigError, ShardmakeError
from shardmake.render import lint
from shardmake.render.comparison import Comparison, Library, Row, Settings, Value, Verdict
from shardmake.render.engine_settings import MAPPINGS, REFUSED_BESIDE_DEEPSPEED_FILE
from shardmake.render.lint import Report, check, format_report, read_source
from tests.planted_settings import ACCELERATE, ARGUMENTS, AUTO
from tests.unit.render.compared_settings import compare_settings

SCRIPT = """#!/bin/bash
LR=3e-4
accelerate launch --config_file accelerate.yaml --num-processes 4 \\
    train.py --deepspeed ds.json --learning_rate $LR --max_grad_norm 0.5 --seed $SEED  # comment
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    clipping = {key: value for key, value in AUTO.items() if key != "gradient_clipping"}
    contents = {"accelerate.yaml": ACCELERATE, "ds.json": clipping, "args.yaml": ARGUMENTS | {"deepspeed": "ds.json"}}
    for name, values in contents.items():
        (tmp_path / name).write_text(json.dumps(values))
    (tmp_path / "train.sh").write_text(SCRIPT)
    return tmp_path


def texts(reports: list[Report]) -> str:
    return "\n".join(format_report(report, every_row=False) for report in reports)


def test_a_script_and_each_command_name_the_setting_with_both_values(folder: Path) -> None:
    text = texts(check(["train.sh"]))
    assert "note: seed is $SEED, and cannot be compared: only a shell knows its value." in text
    assert "max_grad_norm is 0.5 in train.sh, line 3; gradient_clipping is 1.0, DeepSpeed's default. 1.0 runs" in text
    assert "setting            Trainer  DeepSpeed      Accelerate  what will run" in text
    assert "1 error." in text


OPTIMIZER = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 2,
             "gradient_accumulation_steps": 4, "optimizer": {"type": "AdamW", "params": {"lr": 2e-5}}}  # fmt: skip
FOREIGN = (
    "base_model: x\ndatasets: []\nmicro_batch_size: 2\nlearning_rate: 1.0\nbf16: auto\nlora_r: 8\ndeepspeed: own.json\n"
)
LINES = {
    "torchrun --nproc_per_node 8 train.py --deepspeed own.json --bf16 $BF16 --learning_rate $LR "
    "--per_device_train_batch_size $BATCH --gradient_accumulation_steps ${STEPS:-4}": "In own.json, optimizer.params.lr is",
    "torchrun train.py --deepspeed own.json $ARGS": "$ARGS is not compared: only a shell knows its options.",
    "torchrun train.py --deepspeed $FILE --bf16": "deepspeed names the file $FILE, which only a shell knows.",
    "accelerate launch $OPTIONS train.py --bf16": "They may replace any option of the launcher",
    "accelerate launch --num_processes 4 train.py --bf16": "No errors: ",
    "trl sft --learning_rate 1e-5 --lora_r 8 --accelerate_config zero2": "trl sft starts a training of TRL",
    "llamafactory-cli train own.yaml --bf16 true --learning_rate 2e-5": "starts a training of LLaMA-Factory",
    "axolotl train own.yaml": "axolotl train starts a training of Axolotl, which has settings of its own.",
    "accelerate launch --num_processes 4 -m axolotl.cli.train own.yaml": "axolotl.cli.train starts a training of Axolotl",
    "python -m verl.trainer.main_ppo x=1": "Nothing was compared.",
}


def test_what_cannot_be_compared_is_said_and_is_no_error(folder: Path) -> None:
    (folder / "own.json").write_text(json.dumps(OPTIMIZER))
    (folder / "own.yaml").write_text(FOREIGN)
    (folder / "all.sh").write_text("\n".join(LINES))
    reports = check(["all.sh"])
    said = {
        line: (report.errors, words in texts([report]))
        for (line, words), report in zip(LINES.items(), reports, strict=True)
    }
    assert said == dict.fromkeys(LINES, (0, True))


def test_a_written_value_is_compared_beside_unknown_ones(folder: Path) -> None:
    (folder / "own.json").write_text(json.dumps(OPTIMIZER))
    (folder / "own.sh").write_text("torchrun train.py --deepspeed own.json --learning_rate 1e-5 --bf16 $BF16 $ARGS\n")
    (report,) = check(["own.sh"])
    assert [row.setting for row in report.comparison.contradictions] == ["learning rate"]


def test_the_file_of_the_program_runs_and_not_that_of_the_launcher(folder: Path) -> None:
    """DeepSpeedPlugin reads the launcher's only if Trainer gave it none."""
    section = {"deepspeed_config": {"deepspeed_config_file": "ds.json"}}
    (folder / "accelerate.yaml").write_text(json.dumps(ACCELERATE | section))
    (folder / "own.json").write_text(json.dumps(AUTO | {"gradient_clipping": 0.3}))
    launch = "accelerate launch --config_file accelerate.yaml train.py --deepspeed own.json --max_grad_norm 1.0"
    (report,) = check(shlex.split(launch))
    assert report.errors == 1 and "gradient_clipping is 0.3 in own.json" in texts([report])
    assert "Nothing reads this file" in texts([report])


@pytest.mark.parametrize("first", ["cat > own.json <<EOF\n{}\nEOF", "tee own.json <<EOF\n{}\nEOF", "cp x own.json"])
def test_a_file_that_the_script_writes_is_not_missing(folder: Path, first: str) -> None:
    (folder / "own.sh").write_text(f"{first}\ntorchrun train.py --deepspeed own.json --bf16 2>&1 | tee log\n")
    (report,) = check(["own.sh"])
    assert report.errors == 0 and "names the file own.json, which only a shell knows" in texts([report])


def test_auto_that_nothing_fills_in_is_an_error(folder: Path) -> None:
    (folder / "auto.json").write_text('{"train_batch_size": 8, "bf16": {"enabled": "auto"}}')
    [report] = check(["deepspeed", "prog.py", "--deepspeed", "--deepspeed_config", str(folder / "auto.json")])
    assert report.errors == 1
    assert re.search(r'auto\.json is read as .*bf16\.enabled is "auto" in .*stops\. Write a', texts([report]), re.S)


def test_a_file_whose_numbers_suit_a_number_of_ranks_is_right(folder: Path) -> None:
    """A file alone, and a command that counts its ranks by the names of GPUs, do not have one rank."""
    steps = {"warmup_num_steps": 100, "total_num_steps": "auto", "warmup_max_lr": 2e-5}
    optimizer = {"type": "AdamW", "params": {"lr": 2e-5}}
    schedule = {"optimizer": optimizer, "scheduler": {"type": "WarmupDecayLR", "params": steps}}
    sizes = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    batch: dict[str, Any] = sizes | {"zero_optimization": {"stage": 2}}
    (folder / "whole.json").write_text(json.dumps(batch))
    (folder / "auto.json").write_text(json.dumps(batch | schedule))
    launch = "deepspeed --include localhost:0,1,2,3 prog.py --deepspeed --deepspeed_config whole.json"
    for words in (["auto.json"], shlex.split(launch)):
        (report,) = check(words)
        assert report.errors == 0 and "train_batch_size 32 suits 4 ranks" in texts([report])


def test_a_file_that_deepspeed_cannot_read_starts_no_plain_process(folder: Path) -> None:
    typos = {"bf16": {"enable": True}, "zero_optimization": {"stage": 2, "offload_optimzer": {"device": "cpu"}}}
    (folder / "typo.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": 8} | typos))
    text = texts(check(shlex.split("torchrun --nproc_per_node 2 train.py --output_dir o --bf16 --deepspeed typo.json")))
    assert "Extra inputs are not permitted" in text and "silently" not in text


def test_the_kind_of_a_file_follows_from_its_keys(folder: Path) -> None:
    (folder / "few.yaml").write_text("output_dir: out\nmax_grad_norm: 0.5\n")
    (folder / "optimizer.json").write_text('{"optimizer": {"type": "AdamW"}, "bf16": {"enabled": true}}')
    kinds = [read_source(folder / name).kind for name in ("few.yaml", "optimizer.json", "accelerate.yaml", "args.yaml")]
    assert kinds == ["training", "deepspeed", "accelerate", "training"]
    (folder / "t.yaml").write_text(yaml.safe_dump({"arguments": ARGUMENTS}))
    assert read_source(folder / "t.yaml").values == ARGUMENTS


def test_a_wrong_number_that_auto_takes_from_the_arguments_is_one_error_of_the_arguments(folder: Path) -> None:
    values = ARGUMENTS | {"deepspeed": "ds.json", "gradient_accumulation_steps": 0}
    (folder / "args.yaml").write_text(json.dumps(values))
    text = texts(check(["args.yaml"]))
    assert (
        "gradient_accumulation_steps is 0 in args.yaml. Training stops or learns nothing: it needs at least 1." in text
    )
    assert "1 error." in text and "ds.json." not in text


def test_files_are_combined_with_those_that_they_name(folder: Path) -> None:
    (folder / "other.yaml").write_text(json.dumps(ARGUMENTS | {"deepspeed": "ds.json", "max_grad_norm": 0.5}))
    first, second = check(["accelerate.yaml", "args.yaml", "other.yaml"])
    assert (first.errors, second.errors) == (0, 1)
    assert set(first.names) == {"Accelerate", "DeepSpeed", "Trainer"}


def test_a_named_file_that_is_not_there_is_an_error(folder: Path) -> None:
    section = {"deepspeed_config": {"deepspeed_config_file": "other.json"}}
    (folder / "accelerate.yaml").write_text(json.dumps(ACCELERATE | section))
    (report,) = check(["accelerate.yaml", "ds.json"])
    assert report.errors == 1
    assert (
        'deepspeed_config.deepspeed_config_file is "other.json" in accelerate.yaml. The file does not exist'
        in texts([report])
    )


UNREADABLE: dict[str, tuple[bytes | None, str]] = {
    "half.json": (b'{"a\\ud800": 1}', "line 1 is not valid JSON: the text has half of a pair of Unicode surrogates"),
    "latin.yaml": ("learning_rate: 1  # für".encode("latin-1"), "line 1 is not valid UTF-8"),
    "empty.yaml": (b"", "holds nothing"), "list.json": (b"[1, 2]", "holds a list"),
    "broken.json": (b'{\n"a" 1}', "line 2 is not valid JSON"),
    "broken.yaml": (b"a: 1\nb: [1\n", "line 3 is not valid YAML"),
    "twice.json": (b'{"bf16": {"enabled": true, "enabled": false}}', "the key 'enabled' occurs twice"),
    "odd.yaml": (b"a: 1", "not a known configuration file"),
    "self.yaml": (
        b"zero_optimization: &all {stage: 2, more: *all}", "cannot be read: it holds a value that is not valid",
    ),
    "none.yaml": (None, "does not exist"), ".": (None, "is a folder"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_file_that_cannot_be_read_is_named(name: str, tmp_path: Path) -> None:
    content, message = UNREADABLE[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_source(tmp_path / name)


def test_numbers_are_read_as_the_libraries_read_them(tmp_path: Path) -> None:
    """YAML 1.1 takes 5e8 for text, which DeepSpeed's JSON does not."""
    for name in ("ds.json", "ds.yaml"):
        (tmp_path / name).write_text('{"train_batch_size": 8, "zero_optimization": {"reduce_bucket_size": 5e8}}')
    values = [read_source(tmp_path / name).values for name in ("ds.json", "ds.yaml")]
    assert [value["zero_optimization"]["reduce_bucket_size"] for value in values] == [5e8, "5e8"]


def test_a_command_that_starts_no_training_is_refused() -> None:
    with pytest.raises(ShardmakeError, match="starts with none of"):
        check(["ls", "--all"])


def test_the_refused_keys_are_those_of_the_installed_accelerate() -> None:
    """Each of them, named by the launcher as read from its file, makes the plugin raise beside a DeepSpeed file."""
    from accelerate.utils import DeepSpeedPlugin

    environment = pytest.MonkeyPatch()
    for key in (*REFUSED_BESIDE_DEEPSPEED_FILE, "mixed_precision"):
        environment.setenv("ACCELERATE_CONFIG_DS_FIELDS", f"deepspeed_config_file,{key}")
        with pytest.raises(ValueError, match="will be ignored"):
            DeepSpeedPlugin(hf_ds_config=dict(AUTO))
    environment.setenv("ACCELERATE_CONFIG_DS_FIELDS", "deepspeed_config_file,zero3_init_flag")
    DeepSpeedPlugin(hf_ds_config=dict(AUTO))
    environment.undo()


@pytest.mark.parametrize("verdict", ["equal", "stops", "differs"])
def test_the_exit_status_and_json(verdict: Verdict, monkeypatch: pytest.MonkeyPatch) -> None:
    values: dict[Library, Value] = {"Trainer": Value(0.5, True, "max_grad_norm")}
    report = Report("x", {}, Comparison([Row("gradient clipping", values, 1.0, verdict, "1.0 runs.")], []))
    monkeypatch.setattr(lint, "check", lambda words, ranks, on_cpu: [report])
    printed = CliRunner().invoke(app, ["check", "--json", "x.yaml"])
    (answer,) = json.loads(printed.stdout)
    assert printed.exit_code == answer["errors"] == (0 if verdict == "equal" else 1)
    text = CliRunner().invoke(app, ["check", "--all", "x.yaml"]).stdout
    assert "gradient clipping  0.5      -          -           " in text


ODD: dict[str, Settings] = {
    "text for a number": Settings(accelerate=ACCELERATE | {"num_processes": "eight"}),
    "no number": Settings(accelerate=ACCELERATE | {"num_processes": None}),
    "text for a section": Settings(accelerate=ACCELERATE | {"deepspeed_config": "ds.json"}),
    "a null section": Settings(ARGUMENTS, AUTO | {"bf16": None}),
    "a number for a section": Settings(ARGUMENTS, AUTO | {"tensor_parallel": 4}),
    "no type of launch": Settings(accelerate={"num_processes": 2}),
    "an optimizer without a name": Settings(ARGUMENTS, AUTO | {"optimizer": {"params": {"lr": "auto"}}}),
    "an unknown schedule": Settings(ARGUMENTS | {"lr_scheduler_type": "cosinus"}, AUTO),
    "an unknown key": Settings(ARGUMENTS, AUTO | {"zero_optimization": {"stage": 2, "bucket": 1}}),
    "a misspelled argument": Settings(ARGUMENTS | {"lerning_rate": "1e-4"}, AUTO),
    "an ignored key": Settings(ARGUMENTS, AUTO | {"zero_optimisation": {"stage": 2}}),
    "a key that is ignored in a file": Settings(accelerate=ACCELERATE | {"rdzv_backend": "c10d"}),
    "an unknown key of a section": Settings(accelerate=ACCELERATE | {"deepspeed_config": {"deepspeed_fil": "x"}}),
}
ODD_KEYS = [
    "num_processes", "num_processes", "deepspeed_config", "bf16", "tensor_parallel", "distributed_type",
    "optimizer.type", "lr_scheduler_type", "zero_optimization.bucket", "lerning_rate", "zero_optimisation", "rdzv_backend",
    "deepspeed_config.deepspeed_fil",
]  # fmt: skip


def test_values_that_a_library_cannot_use_are_named() -> None:
    """A misspelled training argument is an error, because transformers stops on it or never reads it."""
    found = [[problem.key for problem in one.problems] for one in compare_settings(list(ODD.values()))]
    assert dict(zip(ODD, found, strict=True)) == dict(zip(ODD, [[key] for key in ODD_KEYS], strict=True))


# --- any value in any key ---------------------------------------------------------------------------------------------

scalars = (
    st.none() | st.booleans() | st.integers(-9, 1 << 70) | st.floats() | st.sampled_from(["auto", "x", "1", "", "true"])
)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner))


def mappings(*keys: str) -> st.SearchStrategy[dict[str, Any]]:
    """Draw a few of the dotted ``keys`` with any values."""
    return st.dictionaries(st.sampled_from(keys), values, max_size=4).map(nested)


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in flat.items():
        section, _, name = key.rpartition(".")
        if not section:
            found[key] = value
        elif isinstance(found.setdefault(section, {}), dict):
            found[section][name] = value
    return found


@st.composite
def drawn_settings(draw: st.DrawFn) -> Settings:
    """Draw settings with any values in any keys that the libraries have."""
    from accelerate.commands.config.config_args import ClusterConfig
    from transformers import TrainingArguments

    shared = [key for setting in SETTINGS.values() if setting.is_shared for key in setting.deepspeed_keys]
    deepspeed = mappings(*MAPPINGS, *shared, "elasticity", "steps_per_print", "communication_data_type", "x")
    arguments = mappings(*TrainingArguments.__dataclass_fields__)
    sections = [f"deepspeed_config.{key}" for key in REFUSED_BESIDE_DEEPSPEED_FILE]
    sections += [key for setting in SETTINGS.values() for key in setting.accelerate if key.startswith("fsdp_config.")]
    accelerate = mappings(*ClusterConfig.__dataclass_fields__, *sections, "dynamo_backend", "x")
    return Settings(
        trainer=draw(st.none() | arguments.map(lambda one: ARGUMENTS | one)),
        deepspeed=draw(st.none() | deepspeed.map(lambda one: AUTO | one)),
        accelerate=draw(st.none() | accelerate.map(lambda one: ACCELERATE | one)),
    )


@settings(
    max_examples=3, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate]
)
@given(cases=st.lists(drawn_settings(), min_size=25, max_size=25))
def test_any_value_in_any_key_gives_a_comparison(cases: list[Settings]) -> None:
    assert len(compare_settings(cases)) == len(cases)


@pytest.mark.timeout(120)
def test_a_micro_batch_that_fails_with_its_default_too_ends_the_reading() -> None:
    batch = {"train_micro_batch_size_per_gpu": "x", "train_batch_size": 4, "gradient_accumulation_steps": 2}
    assert len(compare_settings([Settings(trainer=None, deepspeed=batch, accelerate=None)])) == 1


FSDP, ZERO = (f"distributed_type: {name}\nnum_processes: 2" for name in ("FSDP", "DEEPSPEED"))
STOPS = "error: the options in own.yaml: Accelerator() stops with"
WRONG: list[tuple[str, str, bool]] = [  # a file, words of the error, and whether it is the only one
    (f"{FSDP}\nfsdp_config: {{fsdp_version: two}}", f"{STOPS} ValueError: invalid literal", False),
    (f"{ZERO}\ndeepspeed_config: {{deepspeed_config_file: 5}}", f"{STOPS} AttributeError", False),
    (
        f"{ZERO}\ndeepspeed_config: {{deepspeed_config_file: configs}}",
        "configs is not a file, and the run stops.",
        False,
    ),
    ("distributed_type: {a: 1}\nnum_processes: 2", 'distributed_type is {"a": 1}', True),
    ("distributed_type: [FSDP]\nnum_processes: 2", 'distributed_type is ["FSDP"]', True),
    ("distributed_type: FSDP\nnum_processes: {a: 2}", 'num_processes is {"a": 2}', True),
    ('{"train_micro_batch_size_per_gpu": -1, "zero_optimization": {"stage": 2}}', "per_gpu is -1", True),
    (
        '{"train_batch_size": 1, "bf16": {"enabled": true}, "fp16": {"enabled": true}, "zero_optimization": {"stage": 2}}',
        "DeepSpeed stops: bfloat16 and fp16 modes cannot be simultaneously enabled.",
        True,
    ),
    (
        "distributed_type: MULTI_GPU\nnum_processes: 8\ngpu_ids: 0,1",
        "starts 8 ranks on 2 GPUs, so ranks fail for lack of a GPU.",
        True,
    ),
    (
        "distributed_type: MULTI_GPU\nnum_processes: 8\nnum_machines: 2\nmachine_rank: 0\nmain_process_ip: a\n"
        "main_process_port: 1\ngpu_ids: 0,1,2",
        "starts 4 ranks on 3 GPUs",
        True,
    ),
]


@pytest.mark.parametrize(("text", "words", "alone"), WRONG)
def test_a_value_at_which_a_training_stops_is_an_error(folder: Path, text: str, words: str, alone: bool) -> None:
    (folder / "configs").mkdir()
    (folder / "own.yaml").write_text(text)
    said = texts(check(["own.yaml"]))
    assert words in said
    assert not alone or ("missing" not in said and "1 error." in said)


def test_numbers_that_training_cannot_use_are_errors(folder: Path) -> None:
    values = {"output_dir": "o", "per_device_train_batch_size": -3, "gradient_accumulation_steps": 0}
    values |= {"learning_rate": float("inf"), "adam_beta2": 1.0, "weight_decay": -0.1, "max_grad_norm": float("nan")}
    (folder / "args.json").write_text(json.dumps(values))
    text = texts(check(["args.json"]))
    for key, value, needed in (
        ("per_device_train_batch_size", "-3", "it needs at least 1"),
        ("gradient_accumulation_steps", "0", "it needs at least 1"),
        ("learning_rate", "Infinity", "it needs at least 0 and less than inf"),
        ("weight_decay", "-0.1", "it needs at least 0"),
        ("adam_beta2", "1.0", "it needs at least 0 and less than 1"),
    ):
        assert f"error: {key} is {value} in args.json. Training stops or learns nothing: {needed}" in text
    assert "error: max_grad_norm is NaN in args.json. NaN is not a number. Write one." in text
    assert "6 errors." in text and "DeepSpeed" not in text
