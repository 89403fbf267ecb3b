"""The content of a run's script, chat template and own files counts like a setting; one that cannot be used is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardmake.config.chat_template import read_template
from shardmake.config.effects import (
    CONTENT_KEYS,
    SCRIPT,
    TEMPLATE,
    differences,
    effect_of,
    file_contents,
    result_keys,
    values_of,
)
from shardmake.config.inputs import check_inputs, local_files
from shardmake.config.script_file import module_of, script_file
from shardmake.core.errors import ConfigError
from shardmake.train.user_script import run_script
from tests.unit.config.samples import make_run, write
from tests.unit.plans import make_cluster

DEEPSPEED: dict[str, Any] = {
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000}, "communication_data_type": "fp32",
    "steps_per_print": 10, "amp": {"enabled": False},
}  # fmt: skip


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "ds.json", json.dumps(DEEPSPEED))
    write(tmp_path / "accelerate.yaml", "distributed_type: DEEPSPEED\ndebug: true\n")
    write(tmp_path / "train.py", "steps = 1\n")
    return {"deepspeed_config": "ds.json", "accelerate_config": "accelerate.yaml", "script": "train.py"}


def changed(before: dict[str, str], after: dict[str, str]) -> list[str]:
    return [line.partition(":")[0] for line in differences(before, after)]


def test_a_run_without_own_files_has_the_same_keys() -> None:
    contents = file_contents(make_run())
    assert set(contents) == set(CONTENT_KEYS) and set(contents.values()) == {"null", "{}"}


@pytest.mark.parametrize(("key", "value", "noticed"), [
    ("communication_data_type", "fp16", ["deepspeed_config.content"]),
    ("gradient_clipping", 0.5, ["deepspeed_config.content"]),  # the plan decides it, and refuses another value
    ("torch_autocast", {"enabled": True}, ["deepspeed_config.content"]),  # refused
    ("zero_optimization", {"stage": 3, "reduce_bucket_size": 1000}, ["deepspeed_config.content"]),
    ("zero_optimization", {"stage": 2, "reduce_bucket_size": 2000}, ["deepspeed_config.tuning"]),
    ("wall_clock_breakdown", True, ["deepspeed_config.tuning"]), ("torch_autocast", {"enabled": False}, []),
])  # fmt: skip
def test_an_edit_of_a_deepspeed_file_is_noticed(own: dict[str, str], key: str, value: Any, noticed: list[str]) -> None:
    before = file_contents(make_run(**own))
    write(Path("ds.json"), json.dumps(DEEPSPEED | {key: value}, indent=1))
    assert changed(before, file_contents(make_run(**own))) == noticed


def test_touching_or_formatting_a_file_changes_nothing_but_an_edit_of_a_script_does(own: dict[str, str]) -> None:
    before = file_contents(make_run(**own))
    write(Path("ds.json"), json.dumps(DEEPSPEED, indent=4))
    write(Path("accelerate.yaml"), "# a comment\ndebug: true\ndistributed_type: DEEPSPEED\n")
    Path("train.py").touch()
    assert changed(before, file_contents(make_run(**own))) == []
    write(Path("train.py"), "steps = 2\n")
    assert changed(before, file_contents(make_run(**own))) == ["script.content"]


def test_a_file_that_cannot_be_read_does_not_stop_the_comparison(own: dict[str, str]) -> None:
    write(Path("ds.json"), "{")
    Path("train.py").unlink()
    contents = file_contents(make_run(**own))
    assert [key for key, value in contents.items() if value == "cannot be read"] == [
        "script.content", "deepspeed_config.content", "deepspeed_config.tuning",
    ]  # fmt: skip


def test_the_name_of_an_own_file_does_not_matter_but_its_content_does(own: dict[str, str]) -> None:
    write(Path("other.json"), json.dumps(DEEPSPEED))
    before = values_of(make_run(**own), make_cluster())
    after = values_of(make_run(**own | {"deepspeed_config": "other.json"}), make_cluster())
    assert changed(before, after) == ["deepspeed_config"]
    assert "deepspeed_config" not in result_keys("train") and "deepspeed_config.content" in result_keys("train")


MARKED = (
    "{%- for message in messages %}{% if message.role == 'system' %}{% continue %}{% endif %}{{ message.role }}: "
    "{%- generation -%}{{ message.content }}{%- endgeneration -%}{% endfor %}"
)


@pytest.mark.parametrize(("content", "says"), [
    (b"", "is empty. Write"), (b" \n", "is empty. Write"), (b"\xff\xfe", "cannot read"),
    (b"one\n{% for m in messages %}", "line 2, is not valid Jinja: Unexpected end of template"),
    (b"{{ messages[0] ", "line 1, is not valid Jinja"),
    (None, "runs.chat.data.chat_template: 'chat.jinja' is not a file"),
])  # fmt: skip
def test_unusable_templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, says: str) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path("chat.jinja").write_bytes(content)
    run = make_run(data={"train": "org/data", "chat_template": "chat.jinja"})
    with pytest.raises(ConfigError, match=r"data\.chat_template: .*chat\.jinja") as caught:
        check_inputs("chat", run)
    assert says in str(caught.value)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_template_with_the_tags_of_transformers_is_read_as_it_is(tmp_path: Path, encoding: str) -> None:
    """A byte order mark would be a text before every conversation."""
    (tmp_path / "chat.jinja").write_text(MARKED, encoding)
    assert read_template(tmp_path / "chat.jinja") == MARKED


def test_an_edit_of_the_template_counts_for_data_and_training_and_a_new_name_does_not(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jinja", tmp_path / "b.jinja"
    first.write_text(MARKED)
    second.write_text(MARKED)
    runs = [make_run(data={"train": "org/data", "chat_template": str(path)}) for path in (first, second)]
    assert local_files(runs[0], "data") == [str(first)]
    one, other = (values_of(run, make_cluster()) for run in runs)
    assert [line.partition(":")[0] for line in differences(one, other)] == ["data.chat_template"]
    assert effect_of("data.chat_template").changes == ()
    second.write_text(MARKED + "\n")
    assert TEMPLATE in [line.partition(":")[0] for line in differences(one, values_of(runs[1], make_cluster()))]
    assert effect_of(TEMPLATE).changes == ("data", "plan", "render", "train")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package in the working folder with a module and a program of its own."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "our_lab_programs"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "__main__.py").write_text("print('package')")
    (folder / "tune.py").write_text("import sys\nprint(__name__, sys.argv[0].endswith('tune.py'))")
    return folder


def test_a_module_of_the_working_folder_or_of_an_installed_package_is_found(package: Path) -> None:
    assert script_file("-m our_lab_programs.tune") == package / "tune.py"
    assert script_file("-m our_lab_programs") == package / "__main__.py"
    assert script_file("-m json.tool").name == "tool.py"
    assert (module_of("-m json.tool"), module_of("train.py")) == ("json.tool", None)


@pytest.mark.parametrize(
    "name", ["our_lab_programs.nothing", "nowhere", "json", "sys", "our_lab_programs.tune.more", ""]
)
def test_a_module_that_cannot_be_run_is_refused(package: Path, name: str) -> None:
    run = make_run(script=f"-m {name} ")
    with pytest.raises(ConfigError, match="there is no module"):
        check_inputs("chat", run)


def test_an_edit_of_the_module_counts(package: Path) -> None:
    run = make_run(script="-m our_lab_programs.tune")
    before = values_of(run, make_cluster())
    (package / "tune.py").write_text("print(2)")
    assert [line.partition(":")[0] for line in differences(before, values_of(run, make_cluster()))] == [SCRIPT]


def test_a_module_as_main(package: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(package.parent))
    run_script("-m our_lab_programs.tune")
    assert capsys.readouterr().out == "__main__ True\n"
