import re
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from shardmake.core.errors import ShardmakeError
from shardmake.report.card import card_plots, render_card
from shardmake.report.records import public_name
from shardmake.report.stage import write_report
from shardmake.run.evaluation import Sample, SourceScore, TaskScore
from shardmake.run.paths import RunDir
from shardmake.run.sources import PinnedSource, Sources
from tests.finished_run import (
    COMPLETIONS,
    EVALUATED,
    PLOTS,
    PREFERENCES,
    RATED,
    SCORES,
    make_data_receipt,
    make_run,
)

SAMPLES = {"to": "file:out", "samples": True}


def test_card_and_report_describe_the_data_that_were_recognized(rundir: RunDir) -> None:
    made = make_data_receipt("d")
    layout = {"data_format": "sharegpt", "columns": {"messages": "dialog"}, "loss_on_assistant": True}
    made.model_copy(update=layout).write(rundir.data_receipt)
    words = "sharegpt (dialog), loss on the assistant's tokens"
    assert f"| Data format | {words} |" in render_card(make_run(), rundir)
    assert f"train.jsonl: {words.replace(chr(39), '&#39;')}</p>" in write_report(make_run(), rundir).read_text()
    made.write(rundir.data_receipt)
    assert "| Data format | text (text), loss on all tokens |" in render_card(make_run(), rundir)


def test_card_and_report_name_the_runs_between_the_base_model_and_this_one(rundir: RunDir) -> None:
    first = PinnedSource(name="lab/base", commit="c0ffee", path="hub")
    second = PinnedSource(name="run:sft", path="runs/a/fetched/model", origin=first)
    last = PinnedSource(name="run:dpo", path="runs/b/fetched/model", origin=second)
    data = PinnedSource(name="resources/demo/train.jsonl", path="resources/demo/train.jsonl")
    run = make_run().model_copy(update={"model": "run:sft"})
    Sources(model=second, train=[data]).write(rundir.sources)
    card = render_card(run, rundir)
    assert ModelCard(card).data.base_model == "lab/base"
    assert "\nlab/base after the run sft, fine-tuned with Shardmake.\n" in card
    assert "| Base model | lab/base at `c0ffee` after the run sft |" in card
    assert "<td>lab/base at c0ffee after the run sft</td>" in write_report(run, rundir).read_text()
    Sources(model=last, train=[data]).write(rundir.sources)
    card = render_card(run.model_copy(update={"model": "run:dpo"}), rundir)
    assert "| Base model | lab/base at `c0ffee` after the runs sft and dpo |" in card


def test_card_and_report_show_the_scores_of_pairs(rundir: RunDir) -> None:
    assert "Reward" not in render_card(make_run(), rundir)
    EVALUATED.model_copy(update={"preferences": PREFERENCES}).write(rundir.evaluation)
    card = render_card(make_run(), rundir)
    assert "| Pairs whose chosen answer is likelier | 50.0% | 75.0% |" in card
    assert "| Reward accuracy | | 87.5% |\n| Reward margin | | 1.2500 |" in card
    page = write_report(make_run(), rundir).read_text()
    assert "On 1,200 held-out pairs." in page
    assert '<td>reward margin</td><td></td><td class="number">1.2500</td>' in page


def test_card_and_report_of_a_reward_model(rundir: RunDir) -> None:
    """The base model has no head for rewards: there is no number of it, and no loss or perplexity."""
    RATED.write(rundir.evaluation)
    card = render_card(make_run(), rundir)
    header = ModelCard(card).data.to_dict()
    assert (header["pipeline_tag"], header["tags"]) == ("text-classification", ["shardmake", "reward-model"])
    (metric,) = header["model-index"][0]["results"][0]["metrics"]
    assert (metric["type"], metric["value"]) == ("accuracy", 0.875)
    assert "On 1,200 pairs of " in card and "The base model has no head for rewards, so it gives none." in card
    assert "| Pairs whose chosen answer has the larger reward | 87.5% |\n| Margin | 1.2500 |" in card
    assert "AutoModelForSequenceClassification.from_pretrained(" in card and "AutoModelForCausalLM" not in card
    assert "erplexity" not in card and "by-length" not in card
    page = write_report(make_run(), rundir).read_text()
    assert "Rewards of 1,200 held-out pairs." in page and "erplexity" not in page
    assert '<td>margin</td><td class="number">1.2500</td>' in page


def test_card_and_report_show_a_perplexity_that_overflows(rundir: RunDir) -> None:
    """The loss is the metric then, and a task without a finite value is left out of the model's index."""
    tuned = SCORES.model_copy(update={"loss": 1234.5, "perplexity": None})
    tasks = [TaskScore(task="texts", metric="word_perplexity", base=2.0, tuned=None)]
    EVALUATED.model_copy(update={"tuned": tuned, "tasks": tasks}).write(rundir.evaluation)
    card = render_card(make_run(), rundir)
    (metric,) = (
        found for one in ModelCard(card).data.to_dict()["model-index"][0]["results"] for found in one["metrics"]
    )
    assert (metric["type"], metric["value"]) == ("loss", 1234.5)
    assert "| Perplexity | 8,103.10 | above 1e+308 |" in card
    assert "| texts, word_perplexity | 2.0000 | not finite |" in card
    page = write_report(make_run(), rundir).read_text()
    assert "8,103.1 → above 1e+308" in page and '<td class="number">not finite</td>' in page


def test_card_and_report_show_the_scores_of_completions_with_labels(rundir: RunDir) -> None:
    EVALUATED.model_copy(update={"completions": COMPLETIONS}).write(rundir.evaluation)
    card = render_card(make_run(), rundir)
    assert "| Mean reward of desirable completions | | 0.2500 |" in card
    assert "| Mean reward of undesirable completions | | -1.0000 |\n| Reward accuracy | | 87.5% |" in card
    page = write_report(make_run(), rundir).read_text()
    assert '<td>undesirable</td><td class="number">500</td><td class="number">-1.0000</td>' in page
    assert "larger reward in 87.5% of all pairs" in page


def test_card_shows_what_the_receipts_hold(rundir: RunDir) -> None:
    card = ModelCard(render_card(make_run(), rundir))
    assert card.data.to_dict() == {
        "base_model": "lab/base",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["shardmake"],
        "model-index": [
            {
                "name": "chat",
                "results": [
                    {
                        "task": {"type": "text-generation"},
                        "dataset": {"type": "train.jsonl", "name": "train.jsonl (evaluation split)"},
                        "metrics": [{"type": "perplexity", "value": 12.18}],
                    },
                    {
                        "task": {"type": "text-generation"},
                        "dataset": {"type": "sums", "name": "sums"},
                        "metrics": [{"type": "acc", "value": 0.75}],
                    },
                ],
            }
        ],
    }
    for line in (
        "| Base model | lab/base |",
        "| Data | train.jsonl |",
        "| Examples | 1 example, 1 token in 1 sequence |",
        "| Objective | supervised fine-tuning |",
        "| Method | full fine-tuning |",
        "| Optimizer | AdamW of PyTorch, betas 0.9 and 0.999, epsilon 1e-08 |",
        "| Weight decay | 0.01, not on norms and biases |",
        "| Learning rate | 0.0005 at its peak, cosine schedule |",
        "| Warm-up | 3 steps |",
        "| Gradient clipping | norm 1 |",
        "| Length | 60 optimizer steps, 245,760 tokens |",
        "| Global batch | 16 sequences = 4 per forward pass x 2 accumulation steps x 2 ranks |",
        "| Sequence length | 256 tokens, packed |",
        "| Precision | bf16 in training, bf16 in these files |",
        "| Attention | sdpa |",
        "| Seed | 42 |",
        "| Strategy | zero2, no checkpointing, micro batch 4, 1 node: the fastest of 2 candidates that fit (11 of 40 GiB). |",
        "| World size | 2 ranks on 1 node |",
        "| Training loss at the end | 2.4100 |",
        "| Hardware | 2 CPU ranks on 1 node |",
        "| Time | 0.50 h, 1.00 process-hours, 2 attempts, finished 2023-11-14 |",
        "| Libraries | torch 2.13.0, transformers 5.23.0 |",
        "| Loss | 9.0000 | 2.5000 |",
        "| Perplexity | 8,103.10 | 12.18 |",
        "| Loss, up to 128 tokens | 2.6000 | 2.6000 |",
        "| Loss, longer | 2.4000 | 2.4000 |",
        "| sums, acc | 0.2500 | 0.7500 |",
        "On 4,096 tokens of 10 % of the examples of train.jsonl, which were held out. "
        "None of these examples has the same tokens as a training example. The loss is the mean over tokens.",
    ):
        assert f"\n{line}\n" in f"{card.text}\n"


def test_plots_are_shown_and_pushed_beside_the_card(rundir: RunDir) -> None:
    run = make_run()
    shown = re.findall(r"!\[[^]]+\]\(([^)]+)\)", render_card(run, rundir))
    assert set(shown) == PLOTS == card_plots(run, rundir).keys() and len(shown) == len(PLOTS)
    assert all(image.startswith(b"\x89PNG") for image in card_plots(run, rundir).values())


@pytest.mark.parametrize(
    ("to", "place"),
    [
        ("hub:lab/chat", "lab/chat"),
        (["file:published/chat", "hub:lab/chat"], "lab/chat"),
        ("file:published/chat", "chat"),
        ("file:/home/ada/chat/", "chat"),
        ("s3://bucket/models/chat", "chat"),
        ("file:chat", "chat"),
    ],
)
def test_how_to_load_names_the_destination_without_private_paths(
    rundir: RunDir, to: str | list[str], place: str
) -> None:
    card = render_card(make_run(push={"to": to}), rundir)
    assert f'AutoModelForCausalLM.from_pretrained("{place}")' in card
    assert not any(word in card for word in ("published/", "home", "bucket"))
    assert ("`chat` is the folder with this card." in card) == (place == "chat")
    own = render_card(make_run(push={"to": to}), rundir, pushed=False)
    assert 'from_pretrained(".")' in own and "plots/" not in own and "SHA256SUMS" not in own


def example_of(card: str) -> str:
    """Return the Python block of the card, which must be valid Python."""
    block = card.partition("```python\n")[2].partition("```")[0]
    compile(block, "card", "exec")
    return block


def test_evaluation_examples_are_published_only_if_asked(rundir: RunDir) -> None:
    for run in (make_run(), make_run(push={"to": "file:out"})):
        card = render_card(run, rundir)
        assert "What does len do?" not in card and "## Samples" not in card
    prompts = make_run(evaluation={"prompts": ["What does len do?"]})
    for run in (prompts, make_run(push=SAMPLES)):
        assert "Prompt:\n\n```text\nWhat does len do?" in render_card(run, rundir)


def test_the_example_generates_with_the_chat_template_if_there_is_one(rundir: RunDir) -> None:
    run = make_run(push=SAMPLES)
    assert 'inputs = tokenizer("What does len do?", return_tensors="pt")' in example_of(render_card(run, rundir))
    (rundir.model / "chat_template.jinja").write_text("{{ messages }}")
    messages = 'messages = [{"role": "user", "content": "What does len do?"}]'
    assert messages in example_of(render_card(run, rundir))


def test_a_prompt_of_several_lines_with_quotes_is_valid_python(rundir: RunDir) -> None:
    sample = Sample(prompt='Say "é"\n\\and ```stop```', base="", tuned="")
    EVALUATED.model_copy(update={"samples": [sample]}).write(rundir.evaluation)
    assert r'tokenizer("Say \"é\"\n\\and' in render_card(make_run(push=SAMPLES), rundir)


def test_a_hub_data_set_is_named_by_its_id(rundir: RunDir) -> None:
    card = ModelCard(render_card(make_run(data={"train": "lab/talk:train_sft"}), rundir))
    assert card.data.datasets == ["lab/talk"]
    assert "| Data | lab/talk:train_sft |" in card.text


def test_a_sample_with_backticks_does_not_break_its_fence(rundir: RunDir) -> None:
    assert "Base:\n\n````text\n```\n````\n" in render_card(make_run(push=SAMPLES), rundir)


def test_the_same_run_gives_the_same_card(rundir: RunDir) -> None:
    run = make_run()
    assert render_card(run, rundir) == render_card(run, rundir)


def test_local_sources_are_shown_by_the_last_part_of_the_path(tmp_path: Path, rundir: RunDir) -> None:
    base = tmp_path / "home" / "ada" / "my-base"
    base.mkdir(parents=True)
    run = make_run(model=str(base), data={"train": str(tmp_path / "secret-project" / "train.jsonl")})
    card = render_card(run, rundir)
    assert "my-base" in card and "ada" not in card and "secret-project" not in card
    assert ModelCard(card).data.base_model is None


def test_names_of_files_are_neither_html_nor_cells(rundir: RunDir) -> None:
    name = "a|b<i>.jsonl"
    source = SourceScore(name=name, loss=1.0, perplexity=2.72, tokens=3, exact=0.0)
    scores = SCORES.model_copy(update={"by_source": [source]})
    EVALUATED.model_copy(update={"base": scores, "tuned": scores}).write(rundir.evaluation)
    card = render_card(make_run(model="bases/x|<b>", data={"train": f"data/{name}", "eval": f"data/{name}"}), rundir)
    body = card.partition("# ")[2]
    assert "<i>" not in body and "<b>" not in body
    assert "x\\|&lt;b>, fine-tuned with Shardmake" in body
    assert "| Loss, examples of a\\|b&lt;i>.jsonl | 1.0000 | 1.0000 |" in body
    rows = [line for line in body.splitlines() if line.startswith("| ")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {3, 4}


@pytest.mark.parametrize(
    ("text", "licence"),
    [
        (b"---\nlicense: apache-2.0\n---\n# Base\n", "apache-2.0"),
        *((text, None) for text in (b"# Base\n", b"---\nlicense: [\n---\n", b"---\nlicense: caf\xe9\n---\n")),
    ],
)
def test_the_licence_of_the_base_model_is_carried_over_if_its_card_states_one(
    tmp_path: Path, rundir: RunDir, text: bytes, licence: str | None
) -> None:
    (tmp_path / "README.md").write_bytes(text)
    assert ModelCard(render_card(make_run(model=str(tmp_path)), rundir)).data.license == licence


def test_a_local_base_passes_on_its_own_base_and_licence(tmp_path: Path, rundir: RunDir) -> None:
    header = "base_model: lab/origin\nlicense: other\nlicense_name: lab-1\nlicense_link: LICENSE\nlanguage: [de]"
    (tmp_path / "README.md").write_text(f"---\n{header}\n---\n")
    data = ModelCard(render_card(make_run(model=str(tmp_path)), rundir)).data.to_dict()
    assert (data["base_model"], data["license"], data["license_name"]) == ("lab/origin", "other", "lab-1")
    assert (data["license_link"], data["language"]) == ("LICENSE", ["de"])


def write_sources(rundir: RunDir, train: str, evaluation: str) -> None:
    sources = {"train": {"files": [{"sha256": train}]}, "eval": {"files": [{"sha256": evaluation}]}}
    make_data_receipt("d").model_copy(update={"sources": sources}).write(rundir.data_receipt)


def test_files_of_the_data_are_named_with_their_checksums(rundir: RunDir) -> None:
    write_sources(rundir, "a" * 64, "b" * 64)
    card = render_card(make_run(data={"train": "data/x/train.jsonl", "eval": "data/x/eval.jsonl"}), rundir)
    assert f"| Data | train.jsonl, SHA-256 `{'a' * 16}...` |" in card
    assert f"| Evaluation data | eval.jsonl, SHA-256 `{'b' * 16}...` |" in card
    assert "On 4,096 tokens of eval.jsonl. None of these examples has the same tokens" in card


@pytest.mark.parametrize(
    ("repeated", "said"), [(1, "1 of these examples has the same tokens"), (30, "30 of these examples have the same")]
)
def test_evaluation_examples_that_were_trained_on_are_counted(rundir: RunDir, repeated: int, said: str) -> None:
    make_data_receipt("d").model_copy(update={"repeated": repeated}).write(rundir.data_receipt)
    assert said in render_card(make_run(), rundir)


def test_a_run_that_was_not_evaluated_names_the_stage(rundir: RunDir) -> None:
    rundir.evaluation.unlink()
    with pytest.raises(ShardmakeError, match="shardmake evaluate chat"):
        render_card(make_run(), rundir)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("lab/base", "lab/base"),
        ("lab/talk:train", "lab/talk:train"),
        ("/data/ada/base", "base"),
        ("resources/demo/base", "base"),
        ("./base", "base"),
    ],
)
def test_public_names(source: str, name: str) -> None:
    assert public_name(source) == name


def test_what_was_fetched_is_named_by_its_commit(tmp_path: Path, rundir: RunDir) -> None:
    base = tmp_path / "cache"
    base.mkdir()
    (base / "README.md").write_text("---\nlicense: mit\n---\n")
    sources = Sources(
        model=PinnedSource(name="lab/base", revision="main", commit="c0ffee", path=str(base)),
        train=[PinnedSource(name="resources/demo/train.jsonl", path="resources/demo/train.jsonl")],
    )
    rundir.sources.write_text(sources.model_dump_json())
    card = ModelCard(render_card(make_run(revision="main"), rundir))
    assert "| Base model | lab/base at `c0ffee` |" in card.text
    assert card.data.license == "mit" and str(base) not in str(card)
