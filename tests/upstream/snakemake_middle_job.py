"""Snakemake forgets a job in the middle that failed after a changed parameter, and expands parameters for every job."""

import subprocess
import sys
import tempfile
from pathlib import Path

SNAKEFILE = """
calls = []


def parameter(wildcards):
    calls.append(1)
    Path("calls.txt").write_text(str(len(calls)))
    return config["value"]


from pathlib import Path


rule c:
    input: "b.txt"
    output: "c.txt"
    shell: "cat {input} > {output}"


rule b:
    input: "a.txt"
    output: "b.txt"
    params: parameter
    shell: "test -e works && cat {input} > {output}"


rule a:
    output: "a.txt"
    shell: "date > {output}"
"""


def snakemake(folder: Path, *options: str) -> str:
    """Run Snakemake in ``folder`` and return the line that says what is to do."""
    command = [sys.executable, "-m", "snakemake", "--cores", "1", "--rerun-incomplete", *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    found = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("Nothing to be done")]
    return found[0] if found else f"status {done.returncode}"


with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    (folder / "Snakefile").write_text(SNAKEFILE)
    (folder / "works").touch()
    print("first run:", snakemake(folder, "--config", "value=1"))
    (folder / "works").unlink()
    print("b fails after the parameter changed:", snakemake(folder, "--config", "value=2"))
    (folder / "works").touch()
    print("the same command again:", snakemake(folder, "--config", "value=2"))
    print("b.txt exists:", (folder / "b.txt").exists())
    snakemake(folder, "-n", "--config", "value=2")
    print("calls of the parameter's function in a dry run with nothing to do:", (folder / "calls.txt").read_text())
