from pathlib import Path

import datasets
import pytest

from shardmake.core.atomic import write_json
from shardmake.memory.read_config import from_config
from shardmake.report.flops import flops_per_token, mean_context, utilization
from shardmake.report.history import read_history
from shardmake.run.paths import RunDir
from tests.finished_run import make_run, write_history

LLAMA_7B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000, "tie_word_embeddings": False,
}  # fmt: skip
MATRICES = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 32000 * 4096


def test_six_flops_a_weight_and_the_attention_apart() -> None:
    model = from_config(LLAMA_7B)
    assert flops_per_token(model, "full", 0) == 6 * MATRICES
    # PaLM's 12 L H Q T with T the sequence length counts both triangles; half of it is the causal part
    assert flops_per_token(model, "full", 2048.5) - 6 * MATRICES == pytest.approx(12 * 32 * 4096 * 2048.5)
    assert flops_per_token(model, "lora", 0) == 4 * MATRICES, "frozen weights need no gradient of their own"
    tied = from_config({**LLAMA_7B, "tie_word_embeddings": True})
    assert flops_per_token(tied, "full", 0) == 6 * MATRICES, "an embedding counts where it is also the head"


def test_of_a_mixture_only_the_chosen_experts_count() -> None:
    config = {
        "model_type": "mixtral", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 100, "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }  # fmt: skip
    expected = 2 * (4 * 64 * 64 + 2 * 3 * 64 * 128 + 8 * 64) + 100 * 64
    assert flops_per_token(from_config(config), "full", 0) == 6 * expected


def write_lengths(rundir: RunDir, rows: list[list[int]]) -> None:
    datasets.Dataset.from_dict({"seq_lengths": rows}).save_to_disk(str(rundir.data / "train"))


def test_a_token_attends_within_its_example(rundir: RunDir) -> None:
    write_lengths(rundir, [[3, 1], [4]])
    assert mean_context(rundir) == pytest.approx((1 + 2 + 3 + 1 + 1 + 2 + 3 + 4) / 8)


def test_utilization_is_the_share_of_all_ranks_peak(tmp_path: Path, rundir: RunDir) -> None:
    write_history(rundir, [(0, 900, range(1, 3), "finished")], accelerator="a100-80gb")
    write_lengths(rundir, [[1]])
    write_json(tmp_path / "base" / "config.json", LLAMA_7B)
    used = utilization(make_run(model=str(tmp_path / "base")), rundir, read_history(rundir))
    assert used is not None and used[0] == [1, 2]
    per_token = 6 * MATRICES + 12 * 32 * 4096
    assert used[1] == pytest.approx([204.8 * per_token / (2 * 312e12)] * 2)


def test_cpus_have_none(rundir: RunDir) -> None:
    assert utilization(make_run(), rundir, read_history(rundir)) is None
