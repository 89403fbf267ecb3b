import re
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from shardmake.core.errors import ShardmakeError
from shardmake.report.card import public_name, render_card
from shardmake.report.stage import card_plots, write_report
from shardmake.run.sources import PinnedSource, Sources
from tests.finished_run import PLOTS, make_data_receipt, make_run, make_rundir, write_history


def test_card_and_report_describe_the_data_that_were_recognized(tmp_path: Path) -> None:
    rundir = make_rundir(tmp_path)
    made = make_data_receipt("d")
    layout = {"format": "sharegpt", "columns": {"messages": "dialog"}, "loss_on_assistant": True}
    made.model_copy(update=layout).write(rundir.data_receipt)
    words = "sharegpt (dialog), loss on the assistant's tokens"
    assert f"| Data format | {words} |" in render_card(make_run(), rundir)
    write_report(make_run(), rundir)
    assert f"train.jsonl: {words.replace(chr(39), '&#39;')}</p>" in rundir.report.read_text()
    made.write(rundir.data_receipt)
    assert "| Data format | text (text), loss on all tokens |" in render_card(make_run(), rundir)


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
                    }
                ],
            }
        ],
    }
    for line in (
        "| Base model | lab/base |",
        "| Data | train.jsonl |",
        "| Strategy | zero2. The fastest that fits: 11 GiB of 40 GiB. |",
        "| Hardware | 2 x CPU ranks on 1 node(s) |",
        "| Ranks | 2 (1 x 2) |",
        "| Time | 0.50 h, 1.00 device hours, 2 attempt(s) |",
        "| Loss | 9.0000 | 2.5000 |",
        "| Perplexity | 8103.10 | 12.18 |",
        "| Loss, up to 128 tokens | 2.6000 | 2.6000 |",
        "| Loss, longer | 2.4000 | 2.4000 |",
        "| sums, acc | 0.2500 | 0.7500 |",
        "torch 2.13.0, transformers 5.23.0",
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
        ("file:published/chat", "THIS_REPOSITORY_OR_FOLDER"),
    ],
)
def test_how_to_load_names_the_hub_where_the_model_goes_there(tmp_path: Path, to: str | list[str], place: str) -> None:
    card = render_card(make_run(push={"to": to}), make_rundir(tmp_path))
    assert f'AutoModelForCausalLM.from_pretrained("{place}")' in card and "published" not in card


def test_the_gpus_are_named(tmp_path: Path) -> None:
    rundir = make_rundir(tmp_path)
    write_history(rundir, [(0, 900, range(1, 61), "finished")], accelerator="a100-80gb")
    lines = [line for line in rundir.metrics.read_text().splitlines() if "tokens_per_second" not in line]
    rundir.metrics.write_text("\n".join(lines))
    assert "| Hardware | 2 x A100-80GB on 1 node(s) |" in render_card(make_run(), rundir)


def test_a_hub_data_set_is_named_by_its_id(tmp_path: Path) -> None:
    card = ModelCard(render_card(make_run(data={"train": "lab/talk:train_sft"}), make_rundir(tmp_path)))
    assert card.data.datasets == ["lab/talk"]
    assert "| Data | lab/talk:train_sft |" in card.text


def test_a_sample_with_backticks_does_not_break_its_fence(tmp_path: Path) -> None:
    assert "Base:\n\n````text\n```\n````\n" in render_card(make_run(), make_rundir(tmp_path))


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


def test_the_licence_of_the_base_model_is_carried_over(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Base\n")
    assert ModelCard(render_card(make_run(model=str(base)), make_rundir(tmp_path))).data.license == "apache-2.0"


def test_adapters_are_named_as_the_method_and_loaded_like_any_model(tmp_path: Path) -> None:
    card = render_card(make_run(method="lora"), make_rundir(tmp_path))
    assert "| Method | LoRA, merged into the base model |" in card


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
        train=PinnedSource(name="resources/demo/train.jsonl", path="resources/demo/train.jsonl"),
    )
    rundir.sources.write_text(sources.model_dump_json())
    card = ModelCard(render_card(make_run(revision="main"), rundir))
    assert "| Base model | lab/base at `c0ffee` |" in card.text
    assert card.data.license == "mit" and str(base) not in str(card)
