"""A checkout whose own path has characters that a shell would replace or run."""

import subprocess
from pathlib import Path

import pytest

from tests.workflow.checkout import REPOSITORY, Checkout, environment


def test_nothing_in_the_path_of_the_checkout_is_run(tmp_path: Path, inputs: Path) -> None:
    """Also not in that of its environment, which the rules put into PATH."""
    checkout = Checkout.create(tmp_path / "it's a $(touch was-run) `touch was-run` folder", inputs)
    (checkout.root / ".venv").symlink_to((REPOSITORY / ".venv").resolve())
    command = [checkout.root / ".venv/bin/python", "-m", "snakemake", "--profile", "profiles/local"]
    done = subprocess.run(
        [*command, "runs/demo/sources.json"], cwd=checkout.root, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (checkout.run / "sources.json").exists() and not list(tmp_path.rglob("was-run"))


@pytest.mark.parametrize(("name", "code"), [("it's a folder", 0), ('a "', 1), ("$(touch was-run)", 1), ("`id`", 1)])
def test_an_installation_that_would_run_its_own_path_is_refused(tmp_path: Path, name: str, code: int) -> None:
    """pip writes the path between double quotes into its start scripts."""
    folder = tmp_path / name
    folder.mkdir()
    command = ["bash", str(REPOSITORY / "envs/system.sh"), "demo"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert not code or done.stderr.startswith(f"Cannot install in {folder}.")
