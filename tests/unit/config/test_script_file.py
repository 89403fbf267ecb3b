"""Training programs that are named by their module."""

from pathlib import Path

import pytest

from shardmake.config.effects import SCRIPT, differences, values_of
from shardmake.config.inputs import check_inputs
from shardmake.config.script_file import module_of, script_file
from shardmake.core.errors import ConfigError
from shardmake.train.user_script import run_script
from tests.unit.config.samples import make_run
from tests.unit.plans import make_cluster


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


def test_a_module_runs_as_the_main_program(
    package: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(package.parent))
    run_script("-m our_lab_programs.tune")
    assert capsys.readouterr().out == "__main__ True\n"
