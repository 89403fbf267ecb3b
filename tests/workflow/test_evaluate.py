"""Evaluation of real, tiny models against losses computed another way."""

import csv
import json
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardmake.config.models import Cluster, Run
from shardmake.core.atomic import read_json, unsealed
from shardmake.core.errors import ShardmakeError
from shardmake.core.units import GIB
from shardmake.data.stage import prepare
from shardmake.evaluate import backends, losses
from shardmake.evaluate.assess import in_processes
from shardmake.evaluate.backends import Machine, RankInfo, choose_backend, count_ranks, load_model
from shardmake.evaluate.prompts import continue_prompt
from shardmake.evaluate.scores import IGNORED, Example, ExampleLoss, as_record, plan_passes, score
from shardmake.evaluate.stage import evaluate
from shardmake.run.paths import RunDir
from tests.finished_run import make_run
from tests.workflow.checkout import LOCAL

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCABULARY = 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def network(folder: Path) -> "PreTrainedModel":
    return load_model(str(folder))


def example(length: int, prompt: int, seed: int) -> Example:
    ids = torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[:prompt] = IGNORED
    return {"input_ids": ids, "labels": labels, "position_ids": torch.arange(length)}


def packed(*examples: Example) -> Example:
    return {name: torch.cat([part[name] for part in examples]) for name in examples[0]}


def expected(network: "PreTrainedModel", example: Example) -> float:
    """Summed loss of one example alone, by transformers' own loss."""
    with torch.inference_mode():
        loss = network(input_ids=example["input_ids"][None], labels=example["labels"][None]).loss
    return loss.item() * int((example["labels"][1:] != IGNORED).sum())


SHORT, MIDDLE, LONG = example(40, 10, 1), example(150, 50, 2), example(600, 1, 3)


def score_all(network: "PreTrainedModel", examples: list[Example], tokens: int) -> list[ExampleLoss]:
    return score(network, examples, plan_passes([len(example["input_ids"]) for example in examples], tokens, 1))


def test_the_loss_is_the_mean_over_tokens_not_over_sequences(network: "PreTrainedModel") -> None:
    result = as_record(score_all(network, [SHORT, LONG], 2000))
    assert result.tokens == 30 + 599
    mean = (expected(network, SHORT) + expected(network, LONG)) / 629
    assert result.loss == pytest.approx(mean, rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(mean), rel=1e-4)


def test_losses_by_source_are_those_of_the_sources_alone(network: "PreTrainedModel") -> None:
    examples = [SHORT, packed(MIDDLE, SHORT), LONG]
    passes = plan_passes([len(example["input_ids"]) for example in examples], 2000, 1)
    found = as_record(score(network, examples, passes, [1, 2]), ["a", "b"])
    alone = [as_record(score_all(network, chosen, 2000)) for chosen in (examples[:1], examples[1:])]
    assert [one.loss for one in found.by_source] == pytest.approx([one.loss for one in alone], rel=1e-5)
    assert [(one.name, one.tokens) for one in found.by_source] == [("a", 30), ("b", 100 + 30 + 599)]
    assert found.tokens == sum(one.tokens for one in found.by_source)
    assert found.by_length == as_record(score_all(network, examples, 2000)).by_length


def test_buckets_count_the_length_of_the_example_not_of_the_sequence(network: "PreTrainedModel") -> None:
    by_length = as_record(score_all(network, [packed(MIDDLE, SHORT), LONG], 2000)).by_length
    assert [(bucket.up_to, bucket.tokens) for bucket in by_length] == [(128, 30), (512, 100), (2048, 599)]
    for bucket, part in zip(by_length, [SHORT, MIDDLE, LONG], strict=True):
        assert bucket.loss * bucket.tokens == pytest.approx(expected(network, part), rel=1e-4)


def test_nothing_to_learn_is_an_error(network: "PreTrainedModel") -> None:
    with pytest.raises(ShardmakeError, match=r"no tokens with loss.*data\.loss_on"):
        as_record(score_all(network, [example(10, 10, 0)], 1))


@pytest.mark.parametrize(("layer", "kind"), [(1, "missing keys"), (7, "unexpected keys")])
def test_a_model_that_does_not_load_whole_is_an_error(folder: Path, tmp_path: Path, layer: int, kind: str) -> None:
    tensors, name = load_file(folder / "model.safetensors"), f"model.layers.{layer}.mlp.up_proj.weight"
    if tensors.pop(name, None) is None:
        tensors[name] = torch.zeros(2)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    shutil.copy(folder / "config.json", tmp_path)
    with pytest.raises(ShardmakeError, match=f"Cannot load .* completely: {kind}.*up_proj"):
        load_model(str(tmp_path))


TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def words(folder: Path) -> None:
    """A tokenizer of single characters beside the model."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<user>", "<assistant>", "<end>"]
    alphabet = [*special, *(chr(code) for code in range(32, 127))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(alphabet)}, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")
    fast.add_tokens(["<user>", "<assistant>"])  # no special ones: their text would stay in the decoded prompt
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


@pytest.fixture
def rundir(folder: Path, words: None, tmp_path: Path) -> RunDir:
    """A run whose final model is the base with its head turned, so that the two differ."""
    turn = [{"role": "user", "content": "two?"}, {"role": "assistant", "content": "2"}]
    line = json.dumps({"messages": turn})
    (tmp_path / "train.jsonl").write_text(f"{line}\n" * 4)
    rundir = RunDir(tmp_path / "runs" / "chat")
    shutil.copytree(folder, rundir.model)
    tensors = load_file(rundir.model / "model.safetensors")
    tensors["lm_head.weight"] = -tensors["lm_head.weight"]
    save_file(tensors, rundir.model / "model.safetensors", {"format": "pt"})
    prepare(a_run(folder, tmp_path), rundir)
    return rundir


def a_run(folder: Path, place: Path, prompts: list[str] | None = None, **evaluation: Any) -> Run:
    data = {"train": str(place / "train.jsonl"), "eval": str(place / "train.jsonl")}
    evaluation = {"batch_tokens": 64, "max_new_tokens": 4, "prompts": prompts or [], **evaluation}
    return make_run(model=str(folder), data=data, evaluation=evaluation, sequence_length=32)


Evaluated = Callable[..., dict[str, Any]]


@pytest.fixture
def evaluated(folder: Path, rundir: RunDir, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Evaluated:
    """Evaluate the run with the given settings of its evaluation."""
    caplog.set_level("INFO", "shardmake")

    def run(cluster: Cluster | None = None, **evaluation: Any) -> dict[str, Any]:
        return evaluate(a_run(folder, tmp_path, **evaluation), rundir, cluster).as_json()

    return run


def test_both_models_are_measured_on_the_same_tokens(
    evaluated: Evaluated, rundir: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    result = evaluated()
    assert caplog.messages[0] == "Measuring the base and the tuned model on 2 sequences, whole on 1 rank."
    assert [line.partition(":")[0] for line in caplog.messages[1:]] == ["base", "tuned"]
    assert result == unsealed(read_json(rundir.evaluation, ""))
    assert result["tokens"] == result["base"]["tokens"] == result["tuned"]["tokens"] == 8, "four times 2 and <end>"
    assert result["base"]["loss"] != result["tuned"]["loss"]
    assert {sample["prompt"] for sample in result["samples"]} == {"two?"}
    assert result["samples"][0]["base"] != result["samples"][0]["tuned"]


def test_configured_questions_are_asked_through_the_chat_template(evaluated: Evaluated) -> None:
    assert [one["prompt"] for one in evaluated(prompts=["one?", "three?"])["samples"]] == ["one?", "three?"]


@pytest.mark.parametrize("backend", ["whole", "zero3-offload"])
def test_ranks_share_the_sequences(
    folder: Path, rundir: RunDir, tmp_path: Path, evaluated: Evaluated, backend: str
) -> None:
    """Three sequences on two ranks: under ZeRO-3 the second rank gathers layers for the first one's last sequence."""
    lines = (tmp_path / "train.jsonl").read_text()
    (tmp_path / "train.jsonl").write_text(lines + lines.splitlines(keepends=True)[0] * 4)
    prepare(a_run(folder, tmp_path), rundir)
    together = evaluated(backend=backend, processes=2, batch_tokens=1, losses=True)
    rows = list(csv.DictReader(rundir.evaluation_losses.open()))
    assert len(rows) == 8 and {row["tokens"] for row in rows} == {"2"}
    mean = sum(float(row["tuned_loss"]) for row in rows) / 8
    assert mean == pytest.approx(together["tuned"]["loss"], rel=1e-4)
    alone = evaluated()
    assert (together["backend"], together["ranks"], together["sequences"]) == (backend, 2, 3)
    assert together["samples"] == alone["samples"]
    assert not rundir.evaluation_losses.exists(), "only on request"
    for model in ("base", "tuned"):
        assert together[model]["tokens"] == alone[model]["tokens"] == 16
        assert together[model]["loss"] == pytest.approx(alone[model]["loss"], rel=1e-6)


def measure_apart(arguments: tuple[str, RankInfo, int]) -> tuple[float, int, list[int]]:
    """Be one of two ranks with different numbers of labels, whose answers end at different lengths."""
    folder, rank, eos = arguments
    losses._LOGITS = 32 * VOCABULARY
    with backends.process_group(rank):
        network = load_model(folder, "zero3-offload", rank)
        network.generation_config.eos_token_id = eos
        answer = continue_prompt(network, [5, 6, 7], 6)
        total = score(network, [SHORT, MIDDLE, LONG], [[[2], [0]], [[1], []]][rank.number])
    return sum(one.total for one in total), sum(one.tokens for one in total), answer


def test_ranks_under_zero3_may_differ_in_labels_and_answers(folder: Path, network: "PreTrainedModel") -> None:
    answer = continue_prompt(network, [5, 6, 7], 6)
    with backends.rendezvous_of("zero3-offload", 2) as rendezvous:
        ends = [VOCABULARY - 1, answer[0]]
        assert ends[0] not in answer
        ranks = [(str(folder), RankInfo(rank, 2, rendezvous), ends[rank]) for rank in range(2)]
        (loss, tokens, long), (other, others, short) = in_processes(measure_apart, ranks)
    assert (long, short) == (answer, answer[:1])
    assert (tokens, others) == (599 + 30, 100)
    assert loss == pytest.approx(expected(network, LONG) + expected(network, SHORT), rel=1e-5)
    assert other == pytest.approx(expected(network, MIDDLE), rel=1e-5)


def answer_apart(arguments: tuple[str, RankInfo]) -> list[int]:
    folder, rank = arguments
    with backends.process_group(rank):
        return continue_prompt(load_model(folder, "zero3", rank), [5, 6, 7], 6)


def test_ranks_have_the_ties_that_rank_0_finds_in_the_files(
    folder: Path, network: "PreTrainedModel", tmp_path: Path
) -> None:
    """The config of a script's model may tie a head that its files hold apart."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "tie_word_embeddings": True}))
    with backends.rendezvous_of("zero3", 2) as rendezvous:
        ranks = [(str(tmp_path), RankInfo(rank, 2, rendezvous)) for rank in range(2)]
        assert in_processes(answer_apart, ranks) == [continue_prompt(network, [5, 6, 7], 6)] * 2


def test_evaluation_starts_again_with_smaller_passes(
    evaluated: Evaluated, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    alone = evaluated(batch_tokens=1)
    call = losses.LossPerToken.__call__

    def small_gpu(self: Any, inputs: Any, labels: torch.Tensor) -> torch.Tensor:
        if len(labels) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB.")
        return call(self, inputs, labels)

    monkeypatch.setattr(losses.LossPerToken, "__call__", small_gpu)
    found = evaluated(batch_tokens=1000)
    assert found["base"] == alone["base"] and found["tuned"] == alone["tuned"]
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "ran out of GPU memory" in warning and "Set evaluation.batch_tokens" in warning


@pytest.mark.parametrize("shards", [1, 2])
def test_bin_files_are_sized_and_loaded(folder: Path, network: "PreTrainedModel", tmp_path: Path, shards: int) -> None:
    tensors = list(load_file(folder / "model.safetensors").items())
    size = sum(tensor.nbytes for _, tensor in tensors)
    names = ["pytorch_model.bin"] if shards == 1 else [f"pytorch_model-{n}-of-2.bin" for n in (1, 2)]
    parts = [dict(tensors[number::shards]) for number in range(shards)]
    for name, part in zip(names, parts, strict=True):
        torch.save(part, tmp_path / name)
    if shards > 1:
        places = {key: name for name, part in zip(names, parts, strict=True) for key in part}
        index = {"metadata": {"total_size": size}, "weight_map": places}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (tmp_path / "training_args.bin").write_bytes(bytes(size))
    shutil.copy(folder / "config.json", tmp_path)
    assert size < backends.weights_size(tmp_path) < 1.2 * size
    assert score_all(load_model(str(tmp_path)), [SHORT], 1) == score_all(network, [SHORT], 1)


@pytest.mark.parametrize(("weights", "gpus", "host", "nvme", "backend", "ranks"), [
    (14, 0, 64, None, "whole", 1), (14, 1, 64, None, "whole", 1), (14, 8, 64, None, "whole", 8),
    (70, 1, 500, None, "device-map", 1), (14, 0, 32, None, "device-map", 1), (140, 8, 500, None, "zero3", 8),
    (800, 8, 1500, None, "zero3-offload", 8), (800, 8, 500, "/nvme", "zero3-nvme", 8),
])  # fmt: skip
def test_the_fastest_way_that_fits_is_taken(
    weights: int, gpus: int, host: int, nvme: str | None, backend: str, ranks: int
) -> None:
    machine = Machine(gpus, 80 * GIB, host * GIB, nvme)
    chosen = choose_backend(weights * GIB, machine)
    assert (chosen, count_ranks(chosen, machine, None)) == (backend, ranks)
    assert count_ranks(chosen, machine, 2) == (1 if backend == "device-map" else 2)


def test_what_fits_nowhere_is_read_from_its_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = load_model(str(folder))
    room = sum(parameter.nbytes for parameter in whole.parameters()) // 2
    monkeypatch.setattr(backends, "this_machine", lambda nvme: Machine(0, 0, int(room / 0.8), nvme))
    spread = load_model(str(folder), "device-map")
    assert {"cpu", "disk"} <= set(spread.hf_device_map.values())
    tokens = torch.arange(32).reshape(2, 16)
    with torch.no_grad():
        assert torch.equal(spread(tokens).logits, whole(tokens).logits)
    assert losses.LossPerToken(spread, tokens[0]).in_parts
    assert score_all(spread, [SHORT, LONG], 1) == score_all(whole, [SHORT, LONG], 1)


@pytest.mark.nvme
def test_parameters_on_nvme(evaluated: Evaluated, tmp_path: Path) -> None:
    alone = evaluated()
    (nvme := tmp_path / "nvme").mkdir()
    found = evaluated(Cluster(**LOCAL, nvme_path=str(nvme)), backend="zero3-nvme", processes=2)
    assert found["backend"] == "zero3-nvme" and found["samples"] == alone["samples"]
    assert found["tuned"]["loss"] == pytest.approx(alone["tuned"]["loss"], rel=1e-6)


CHOICE = {
    "task": "lab_sums", "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": ["2", "3"],
    "doc_to_target": "answer", "metric_list": [{"metric": "acc"}],
}  # fmt: skip
TEXT = {
    "task": "lab_texts", "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{question}}",
    "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
}  # fmt: skip


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder with tasks of our own for `lm_eval`."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    questions = [{"question": f"one and {n}?", "answer": n % 2} for n in range(1, 9)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in questions))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "sums.jsonl")}}}
    for task in (CHOICE, TEXT):
        (folder / f"{task['task']}.yaml").write_text(json.dumps({**task, **data, "test_split": "test"}))
    return folder


def test_tasks_of_lm_eval(evaluated: Evaluated, tasks: Path) -> None:
    (found,) = evaluated(lm_eval=["lab_sums"], lm_eval_path=str(tasks))["tasks"]
    assert (found["task"], found["metric"]) == ("lab_sums", "acc")
    # The tuned model's head is the base's turned: what one holds for likelier, the other holds for less likely.
    assert found["base"] + found["tuned"] == pytest.approx(1) and 0 <= found["base"] <= 1


def test_a_perplexity_that_overflows_is_null_in_valid_json(
    rundir: RunDir, evaluated: Evaluated, tasks: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A model with a loss far above 709 nats: also lm_eval's perplexity overflows."""
    tensors = load_file(rundir.model / "model.safetensors")
    tensors["lm_head.weight"] *= 1e6
    save_file(tensors, rundir.model / "model.safetensors", {"format": "pt"})
    evaluated(lm_eval=["lab_texts"], lm_eval_path=str(tasks))
    found = json.loads(rundir.evaluation.read_text(), parse_constant=pytest.fail)
    assert found["base"]["perplexity"] == pytest.approx(math.exp(found["base"]["loss"]))
    assert found["tuned"]["loss"] > 1000 and found["tuned"]["perplexity"] is None
    values = {score["metric"]: (score["base"], score["tuned"]) for score in found["tasks"]}
    assert values["word_perplexity"][1] is None and values["bits_per_byte"][1] > 1000
    assert all(base > 0 for base, _ in values.values())
    assert caplog.messages[-1].startswith("tuned: loss") and "perplexity above 1e+308, 8 tokens" in caplog.messages[-1]


@pytest.mark.parametrize(("evaluation", "message"), [
    ({"backend": "zero3-nvme", "processes": 1}, r"zero3-nvme needs node-local NVMe\. Set nvme_path"),
    ({"lm_eval": ["lab_sumz"], "lm_eval_path": "tasks"}, r"unknown task 'lab_sumz'\. Did you mean 'lab_sums'"),
    ({"lm_eval": ["sums"]}, r"lm_eval is not installed\. Install it \(pip install lm_eval\)"),
], ids=["no NVMe", "a misspelt task of lm_eval", "no package lm_eval"])  # fmt: skip
@pytest.mark.usefixtures("tasks")
def test_what_evaluation_refuses(
    evaluated: Evaluated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evaluation: dict[str, Any], message: str
) -> None:
    if "installed" in message:
        monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ShardmakeError, match=message):
        evaluated(**evaluation)
