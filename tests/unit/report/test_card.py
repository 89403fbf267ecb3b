import re
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from shardmake.config.models import Run
from shardmake.config.optimizers import OPTIMIZERS
from shardmake.core.errors import ShardmakeError
from shardmake.report.card import card_plots, render_card
from shardmake.report.records import public_name
from shardmake.report.stage import write_report
from shardmake.run.engine import Engine, LearningSettings
from shardmake.run.evaluation import Sample, SourceScore, TaskScore
from shardmake.run.paths import RunDir
from shardmake.run.sources import PinnedSource, Sources
from shardmake.run.training_settings import AdapterMethod, ScriptProgram
from tests.finished_run import (
    CHOICE,
    COMPLETIONS,
    EVALUATED,
    PLOTS,
    PREFERENCES,
    RATED,
    SCORES,
    SETTINGS,
    TRAINED,
    make_attempt,
    make_data_receipt,
    make_plan,
    make_run,
    make_rundir,
    write_history,
)

SAMPLES = {"to": "file:out", "samples": True}


def test_card_and_report_describe_the_data_that_were_recognized(tmp_path: Path) -> None:
    rundir = make_rundir(tmp_path)
    made = make_data_receipt("d")
    layout = {"data_format": "sharegpt", "columns": {"messages": "dialog"}, "loss_on_assistant": True}
    made.model_copy(update=layout).write(rundir.data_receipt)
    words = "sharegpt (dialog), loss on the assistant's tokens"
    assert f"| Data format | {words} |" in render_card(make_run(), rundir)
    write_report(make_run(), rundir)
    assert f"train.jsonl: {words.replace(chr(39), '&#39;')}</p>" in rundir.report.read_text()
    made.write(rundir.data_receipt)
    assert "| Data format | text (text), loss on all tokens |" in render_card(make_run(), rundir)


def test_card_and_report_name_the_runs_between_the_base_model_and_this_one(tmp_path: Path) -> None:
    rundir = make_rundir(tmp_path)
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
    write_report(run, rundir)
    assert "<td>lab/base at c0ffee after the run sft</td>" in rundir.report.read_text()
    Sources(model=last, train=[data]).write(rundir.sources)
    card = render_card(run.model_copy(update={"model": "run:dpo"}), rundir)
    assert "| Base model | lab/base at `c0ffee` after the runs sft and dpo |" in card


def test_card_and_report_show_the_scores_of_pairs(tmp_path: Path) -> None:
    rundir = make_rundir(tmp_path)
    assert "Reward" not in render_card(make_run(), rundir)
    EVALUATED.model_copy(update={"preferences": PREFERENCES}).write(rundir.evaluation)
    card = render_card(make_run(), rundir)
    assert "| Pairs whose chosen answer is likelier | 50.0% | 75.0% |" in card
    assert "| Reward accuracy | | 87.5% |\n| Reward margin | | 1.2500 |" in card
    write_report(make_run(), rundir)
    page = rundir.report.read_text()
    assert "On 1,200 held-out pairs." in page
    assert '<td>reward margin</td><td></td><td class="number">1.2500</td>' in page


def test_card_and_report_of_a_reward_model(tmp_path: Path) -> None:
    """The base model has no head for rewards: there is no number of it, and no loss or perplexity."""
    rundir = make_rundir(tmp_path)
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
    write_report(make_run(), rundir)
    page = rundir.report.read_text()
    assert "Rewards of 1,200 held-out pairs." in page and "erplexity" not in page
    assert '<td>margin</td><td class="number">1.2500</td>' in page


def test_card_and_report_show_a_perplexity_that_overflows(tmp_path: Path) -> None:
    """The loss is the metric then, and a task without a finite value is left out of the model's index."""
    rundir = make_rundir(tmp_path)
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
    write_report(make_run(), rundir)
    page = rundir.report.read_text()
    assert "8,103.1 → above 1e+308" in page and '<td class="number">not finite</td>' in page


def test_card_and_report_show_the_scores_of_completions_with_labels(tmp_path: Path) -> None:
    rundir = make_rundir(tmp_path)
    EVALUATED.model_copy(update={"completions": COMPLETIONS}).write(rundir.evaluation)
    card = render_card(make_run(), rundir)
    assert "| Mean reward of desirable completions | | 0.2500 |" in card
    assert "| Mean reward of undesirable completions | | -1.0000 |\n| Reward accuracy | | 87.5% |" in card
    write_report(make_run(), rundir)
    page = rundir.report.read_text()
    assert '<td>undesirable</td><td class="number">500</td><td class="number">-1.0000</td>' in page
    assert "larger reward in 87.5% of all pairs" in page


def test_values_of_own_files_are_stated_without_paths(tmp_path: Path) -> None:
    rundir = make_rundir(tmp_path)
    values = {"zero_optimization.reduce_bucket_size": 1000, "aio.path": "/scratch/ada"}
    SETTINGS.model_copy(update={"own_files": values}).write(rundir.training)
    row = "| Own settings files | zero_optimization.reduce_bucket_size 1000 |"
    assert row in render_card(make_run(), rundir)


def test_card_shows_what_the_receipts_hold(tmp_path: Path) -> None:
    card = ModelCard(render_card(make_run(), make_rundir(tmp_path)))
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


def test_plots_are_shown_and_pushed_beside_the_card(tmp_path: Path) -> None:
    run, rundir = make_run(), make_rundir(tmp_path)
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
    tmp_path: Path, to: str | list[str], place: str
) -> None:
    card = render_card(make_run(push={"to": to}), make_rundir(tmp_path))
    assert f'AutoModelForCausalLM.from_pretrained("{place}")' in card
    assert not any(word in card for word in ("published/", "home", "bucket"))
    assert ("`chat` is the folder with this card." in card) == (place == "chat")


def example_of(card: str) -> str:
    """Return the Python block of the card, which must be valid Python."""
    block = card.partition("```python\n")[2].partition("```")[0]
    compile(block, "card", "exec")
    return block


def test_evaluation_examples_are_published_only_if_asked(tmp_path: Path) -> None:
    rundir = make_rundir(tmp_path)
    for run in (make_run(), make_run(push={"to": "file:out"})):
        card = render_card(run, rundir)
        assert "What does len do?" not in card and "## Samples" not in card
    prompts = make_run(evaluation={"prompts": ["What does len do?"]})
    for run in (prompts, make_run(push=SAMPLES)):
        assert "Prompt:\n\n```text\nWhat does len do?" in render_card(run, rundir)


def test_the_example_generates_with_the_chat_template_if_there_is_one(tmp_path: Path) -> None:
    run, rundir = make_run(push=SAMPLES), make_rundir(tmp_path)
    assert 'inputs = tokenizer("What does len do?", return_tensors="pt")' in example_of(render_card(run, rundir))
    (rundir.model / "chat_template.jinja").write_text("{{ messages }}")
    messages = 'messages = [{"role": "user", "content": "What does len do?"}]'
    assert messages in example_of(render_card(run, rundir))


def test_a_prompt_of_several_lines_with_quotes_is_valid_python(tmp_path: Path) -> None:
    rundir = make_rundir(tmp_path)
    sample = Sample(prompt='Say "é"\n\\and ```stop```', base="", tuned="")
    EVALUATED.model_copy(update={"samples": [sample]}).write(rundir.evaluation)
    assert r'tokenizer("Say \"é\"\n\\and' in render_card(make_run(push=SAMPLES), rundir)


def test_the_gpus_are_named(tmp_path: Path) -> None:
    rundir = make_rundir(tmp_path)
    write_history(rundir, [(0, 900, range(1, 31), "x"), (0, 900, range(31, 61), "finished")], accelerator="a100-80gb")
    lines = [line for line in rundir.metrics.read_text().splitlines() if "tokens_per_second" not in line]
    rundir.metrics.write_text("\n".join(lines))
    assert "| Hardware | 2 x A100-80GB on 1 node |" in render_card(make_run(), rundir)
    assert "plots/memory.png" in render_card(make_run(), rundir)


def test_a_hub_data_set_is_named_by_its_id(tmp_path: Path) -> None:
    card = ModelCard(render_card(make_run(data={"train": "lab/talk:train_sft"}), make_rundir(tmp_path)))
    assert card.data.datasets == ["lab/talk"]
    assert "| Data | lab/talk:train_sft |" in card.text


def test_a_sample_with_backticks_does_not_break_its_fence(tmp_path: Path) -> None:
    assert "Base:\n\n````text\n```\n````\n" in render_card(make_run(push=SAMPLES), make_rundir(tmp_path))


def test_the_same_run_gives_the_same_card(tmp_path: Path) -> None:
    run, rundir = make_run(), make_rundir(tmp_path)
    assert render_card(run, rundir) == render_card(run, rundir)


def test_local_sources_are_shown_by_the_last_part_of_the_path(tmp_path: Path) -> None:
    base = tmp_path / "home" / "ada" / "my-base"
    base.mkdir(parents=True)
    run = make_run(model=str(base), data={"train": str(tmp_path / "secret-project" / "train.jsonl")})
    card = render_card(run, make_rundir(tmp_path))
    assert "my-base" in card and "ada" not in card and "secret-project" not in card
    assert ModelCard(card).data.base_model is None


def test_names_of_files_are_neither_html_nor_cells(tmp_path: Path) -> None:
    rundir = make_rundir(tmp_path)
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


def test_the_licence_of_the_base_model_is_carried_over(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Base\n")
    assert ModelCard(render_card(make_run(model=str(base)), make_rundir(tmp_path))).data.license == "apache-2.0"


@pytest.mark.parametrize("text", [b"# Base\n", b"---\nlicense: [\n---\n", b"---\nlicense: caf\xe9\n---\n"])
def test_a_base_card_that_states_no_licence_or_cannot_be_read_is_no_obstacle(tmp_path: Path, text: bytes) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "README.md").write_bytes(text)
    assert ModelCard(render_card(make_run(model=str(base)), make_rundir(tmp_path))).data.license is None


def test_a_local_base_passes_on_its_own_base_and_licence(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    header = "base_model: lab/origin\nlicense: other\nlicense_name: lab-1\nlicense_link: LICENSE\nlanguage: [de]"
    (base / "README.md").write_text(f"---\n{header}\n---\n")
    data = ModelCard(render_card(make_run(model=str(base)), make_rundir(tmp_path))).data.to_dict()
    assert (data["base_model"], data["license"], data["license_name"]) == ("lab/origin", "other", "lab-1")
    assert (data["license_link"], data["language"]) == ("LICENSE", ["de"])


def test_adapters_are_stated_with_their_settings(tmp_path: Path) -> None:
    rundir = make_rundir(tmp_path)
    method = AdapterMethod(kind="lora", rank=8, alpha=16, dropout=0.1, targets=["q_proj", "v_proj"])
    SETTINGS.model_copy(update={"method": method}).write(rundir.training)
    row = "| Method | LoRA: rank 8, alpha 16, dropout 0.1, on q_proj, v_proj; merged into the base model |"
    assert row in render_card(make_run(method="lora"), rundir)


@pytest.mark.parametrize(
    ("arguments", "rows"),
    [
        ({"lr_scheduler_type": "constant"}, ["| Warm-up | none |", "constant schedule |"]),
        ({"warmup_steps": 0.05}, ["| Warm-up | 0.05 of all steps |"]),
        ({"num_train_epochs": 2.0}, ["| Length | 60 optimizer steps (2 epochs), 245,760 tokens |"]),
        ({"optim": "adafactor", "weight_decay": 0.0}, ["| Optimizer | Adafactor |", "| Weight decay | 0 |"]),
        *(({"optim": spec.optim}, [f"| Optimizer | {spec.label}"]) for spec in OPTIMIZERS.values()),
        (
            {"optim": "adamw_torch_fused"},
            ["| Optimizer | AdamW of PyTorch, fused, betas 0.9 and 0.999, epsilon 1e-08 |"],
        ),
    ],
)
def test_settings_are_those_that_were_rendered(tmp_path: Path, arguments: dict[str, object], rows: list[str]) -> None:
    rundir = make_rundir(tmp_path)
    SETTINGS.with_arguments(**arguments).write(rundir.training)
    assert [row for row in rows if row not in render_card(make_run(), rundir)] == []


def test_what_the_ranks_found_is_stated_rather_than_what_was_rendered(tmp_path: Path) -> None:
    learning = LearningSettings(
        optimizer="AdamW",
        learning_rate=0.004,
        betas=[0.9, 0.999],
        epsilon=1e-8,
        weight_decay=0.2,
        decays_vectors=True,
        schedule="linear",
        warmup_steps=7,
        steps=60,
        rates=[],
        max_grad_norm=0.25,
        dtype="bfloat16",
        autocast="bfloat16",
        micro_batch_size=4,
        gradient_accumulation_steps=2,
        global_batch_size=16,
    )
    rundir = make_rundir(tmp_path)
    TRAINED.model_copy(update={"learning": learning}).write(rundir.train_receipt)
    card = render_card(make_run(), rundir)
    assert "| Learning rate | 0.004 at its peak, linear schedule |" in card
    assert "| Warm-up | 7 steps |" in card
    assert "| Weight decay | 0.2 |" in card
    assert "| Gradient clipping | norm 0.25 |" in card
    assert "| Precision | bf16 under autocast in training, bf16 in these files |" in card


def test_a_fallback_is_stated_as_what_trained(tmp_path: Path) -> None:
    rundir = make_rundir(tmp_path)
    smaller = CHOICE.model_copy(update={"micro_batch_size": 2, "gradient_accumulation_steps": 4})
    make_plan().model_copy(update={"choice": smaller}).write(rundir.attempts / "002/plan.json")
    card = render_card(make_run(), rundir)
    assert "| Strategy | zero2, micro batch 2: a fallback of the plan, which began with zero2 |" in card
    assert "= 2 per forward pass x 4 accumulation steps x 2 ranks" in card


def test_the_commit_of_the_workflow_is_stated(tmp_path: Path) -> None:
    rundir = make_rundir(tmp_path)
    attempt = make_attempt(2, rundir, "cpu").model_copy(update={"commit": "c0ffee123456"})
    attempt.write(rundir.attempts / "002/attempt.json")
    assert "transformers 5.23.0 at `c0ffee123456` |" in render_card(make_run(), rundir)


def write_sources(rundir: RunDir, train: str, evaluation: str) -> None:
    sources = {"train": {"files": [{"sha256": train}]}, "eval": {"files": [{"sha256": evaluation}]}}
    make_data_receipt("d").model_copy(update={"sources": sources}).write(rundir.data_receipt)


def test_files_of_the_data_are_named_with_their_checksums(tmp_path: Path) -> None:
    rundir = make_rundir(tmp_path)
    write_sources(rundir, "a" * 64, "b" * 64)
    card = render_card(make_run(data={"train": "data/x/train.jsonl", "eval": "data/x/eval.jsonl"}), rundir)
    assert f"| Data | train.jsonl, SHA-256 `{'a' * 16}...` |" in card
    assert f"| Evaluation data | eval.jsonl, SHA-256 `{'b' * 16}...` |" in card
    assert "On 4,096 tokens of eval.jsonl. None of these examples has the same tokens" in card


@pytest.mark.parametrize(
    ("repeated", "said"), [(1, "1 of these examples has the same tokens"), (30, "30 of these examples have the same")]
)
def test_evaluation_examples_that_were_trained_on_are_counted(tmp_path: Path, repeated: int, said: str) -> None:
    rundir = make_rundir(tmp_path)
    make_data_receipt("d").model_copy(update={"repeated": repeated}).write(rundir.data_receipt)
    assert said in render_card(make_run(), rundir)


SCRIPT = ScriptProgram(path="/home/ada/train.py", args=["--token", "x"], sha256="e" * 64)
FOUND = Engine(
    api="accelerate", engine="deepspeed", zero_stage=3, world_size=2, dtype="float32", offload_optimizer="cpu",
    micro_batch_size=1, gradient_accumulation_steps=4, global_batch_size=8,
)  # fmt: skip


def make_script_run(rundir: RunDir, found: Engine | None, metrics: str = "") -> Run:
    """A run that a script trained; ``metrics`` are the lines that it wrote."""
    SETTINGS.model_copy(update={"program": SCRIPT}).write(rundir.training)
    TRAINED.model_copy(update={"steps": None, "tokens": None, "loss": None, "trained": found}).write(
        rundir.train_receipt
    )
    rundir.metrics.write_text(metrics)
    return make_run(script="train.py")


def test_a_script_is_stated_as_its_ranks_found_it(tmp_path: Path) -> None:
    rundir = make_rundir(tmp_path)
    card = render_card(make_script_run(rundir, FOUND.model_copy(update={"rows_compared": True})), rundir)
    for row in (
        "| Rows | different on every rank, compared at the first step |",
        f"| Trained by | `train.py` (SHA-256 `{'e' * 16}...`) with Accelerate |",
        "| Data | train.jsonl; the script may have read other data |",
        "| Engine | DeepSpeed ZeRO-3, optimizer states on cpu |",
        "| World size | 2 ranks |",
        "| Precision | fp32 in training, bf16 in these files |",
        "| Global batch | 8 sequences = 1 per forward pass x 4 accumulation steps x 2 ranks |",
        "| Learning rate | set by the script |",
        "| Length | set by the script |",
    ):
        assert row in card
    assert "which were held out. The script may have trained on them." in card
    planned = ("0.0005", "zero2", "cosine", "256 tokens", "AdamW", "fine-tuning", "ada", "--token")
    assert [word for word in planned if word in card.partition("## Evaluation")[0].replace("fine-tuned", "")] == []


def test_a_script_without_an_engine_states_nothing_of_the_plan_as_fact(tmp_path: Path) -> None:
    rundir = make_rundir(tmp_path)
    card = render_card(make_script_run(rundir, None), rundir)
    for row in (
        "| Engine | set by the script; the plan was zero2 |",
        "| World size | 2 ranks were started |",
        "| Precision | set by the script in training, bf16 in these files |",
        "| Global batch | set by the script |",
    ):
        assert row in card


def test_a_script_that_logged_its_learning_rate_has_it_in_the_card(tmp_path: Path) -> None:
    rundir = make_rundir(tmp_path)
    run = make_script_run(rundir, FOUND, '{"step": 1, "learning_rate": 0.25}\n{"step": 2, "learning_rate": 0.125}\n')
    card = render_card(run, rundir)
    assert "| Learning rate | 0.25 at its peak, as the script logged it |" in card
    assert re.findall(r"plots/([a-z-]+)\.png", card) == ["optimizer", "by-length"]


def test_a_script_without_metrics_pushes_no_empty_plots(tmp_path: Path) -> None:
    rundir = make_rundir(tmp_path)
    run = make_script_run(rundir, FOUND)
    assert re.findall(r"plots/([a-z-]+)\.png", render_card(run, rundir)) == ["by-length"]
    assert card_plots(run, rundir).keys() == {"plots/by-length.png"}


def test_a_run_that_was_not_evaluated_names_the_stage(tmp_path: Path) -> None:
    rundir = make_rundir(tmp_path)
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


def test_what_was_fetched_is_named_by_its_commit(tmp_path: Path) -> None:
    rundir = make_rundir(tmp_path)
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
