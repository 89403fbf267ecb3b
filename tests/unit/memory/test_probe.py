"""The probe's arithmetic, its refusals, its use; its training step on the CPU. Measuring itself needs a GPU."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmake.commands.estimate import EstimateRequest, estimate
from shardmake.commands.estimate_table import print_table
from shardmake.core import process
from shardmake.core.errors import ShardmakeError
from shardmake.core.units import GIB
from shardmake.memory import calibration
from shardmake.memory.calibration import Calibration, fit
from shardmake.memory.probe import probe
from shardmake.memory.read_config import from_config

Patch = pytest.MonkeyPatch

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 512,
}  # fmt: skip
FOUND = Calibration(GIB // 2, 2 * GIB, GIB // 4, "a GPU", "node7", "2026-01-31")


@pytest.mark.parametrize(("script", "words"), [
    (None, "no nvidia-smi. Run it on a compute node"), ("exec sleep 60", "nvidia-smi does not answer"),
    ("exit 6", "nvidia-smi fails or finds none"),
], ids=["none", "hangs", "fails"])  # fmt: skip
def test_a_machine_without_a_gpu_is_refused(tmp_path: Path, monkeypatch: Patch, script: str | None, words: str) -> None:
    if script:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin" if script else "")
    monkeypatch.setattr(process, "SECONDS", 0.5)
    with pytest.raises(ShardmakeError, match=words):
        probe(from_config(CONFIG))


def test_other_architectures_are_rejected() -> None:
    with pytest.raises(ShardmakeError, match="not gpt2"):
        probe(replace(from_config(CONFIG), model_type="gpt2", decoder=None))


def test_the_estimate_uses_and_names_it(tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    question = EstimateRequest(str(tmp_path / "config.json"), accelerator="h100", strategies=["ddp", "fsdp"])
    before = estimate(question)
    calibration.keep("h100", FOUND)
    after = estimate(question)
    outside = [row.memory.gpu.device - row.memory.gpu.reserved for row in after.rows]
    assert outside == [FOUND.context + 2 * GIB, FOUND.context + 2 * GIB + FOUND.pools] * 2
    assert [row.memory.gpu.reserved for row in before.rows] == [row.memory.gpu.reserved for row in after.rows]
    assert after.as_json()["calibration"]["host"] == "node7" and before.as_json()["calibration"] is None
    print_table(after)
    assert "as measured on node7" in " ".join(capsys.readouterr().out.split())
    other = estimate(EstimateRequest(str(tmp_path / "config.json"), accelerator="a100-80gb", strategies=["ddp"]))
    assert other.measured is None


def test_the_probes_step_runs_under_fsdp() -> None:
    code = (
        "import json, sys; from torch import distributed; from shardmake.memory import probe\n"
        "distributed.init_process_group('gloo', rank=0, world_size=1, store=distributed.HashStore())\n"
        f"config = {CONFIG!r}\n"
        "model = probe.sharded(config, 'cpu'); probe.train(model, 512, 64, 'cpu')\n"
        "tied = probe.sharded({**config, 'tie_word_embeddings': True}, 'cpu'); probe.train(tied, 512, 64, 'cpu')\n"
        "print(type(model).__name__)"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "FSDPLlamaForCausalLM", done.stderr[-2000:]


@given(
    st.integers(0, GIB), st.one_of(st.none(), st.integers(0, GIB)), st.integers(0, GIB), st.integers(0, GIB),
    st.lists(st.integers(GIB, 8 * GIB), min_size=2, max_size=4),
)  # fmt: skip
def test_a_fit_recovers_its_parts(context: int, nccl: int | None, pools: int, occupied: int, sizes: list[int]) -> None:
    rest = context + (nccl or 0) + occupied
    observations = [(size + pools, size + pools + rest, size) for size in sizes]
    found = fit(observations, nccl, occupied, "a GPU", "node7", "today")
    assert (found.context, found.nccl, found.pools) == (context, nccl, pools)


def test_less_reserved_than_predicted_gives_no_pools() -> None:
    assert fit([(GIB, 2 * GIB, 3 * GIB)], None, 0, "", "", "").pools == 0


def test_impossible_measurements_are_rejected() -> None:
    with pytest.raises(ShardmakeError, match="Another process used the GPU"):
        fit([(GIB, GIB // 2, GIB)], None, 0, "", "", "")
