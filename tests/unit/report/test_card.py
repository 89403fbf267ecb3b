import re
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from shardmake.config.models import Run
from shardmake.core.errors import ShardmakeError
from shardmake.report.card import card_plots, render_card
from shardmake.report.stage import write_report
from shardmake.run.paths import RunDir
from shardmake.run.sources import PinnedSource, Sources
from tests.finished_run import PLOTS, make_run

DATA = "resources/demo/train.jsonl"


def test_plots_are_shown_and_pushed_beside_the_card(rundir: RunDir) -> None:
    run = make_run()
    shown = re.findall(r"!\[[^]]+\]\(([^)]+)\)", render_card(run, rundir))
    assert set(shown) == PLOTS == card_plots(run, rundir).keys() and len(shown) == len(PLOTS)
    assert all(image.startswith(b"\x89PNG") for image in card_plots(run, rundir).values())


@pytest.mark.parametrize(("to", "place"), [
    ("hub:lab/chat", "lab/chat"), (["file:published/chat", "hub:lab/chat"], "lab/chat"),
    ("file:published/chat", "chat"), ("file:/home/ada/chat/", "chat"), ("s3://bucket/models/chat", "chat"),
    ("file:chat", "chat"),
])  # fmt: skip
def test_how_to_load_names_the_destination_but_no_private_path(rundir: RunDir, to: str | list[str], place: str) -> None:
    card = render_card(make_run(push={"to": to}), rundir)
    assert f'AutoModelForCausalLM.from_pretrained("{place}")' in card
    assert not any(word in card for word in ("published/", "home", "bucket"))
    assert ("`chat` is the folder with this card." in card) == (place == "chat")
    own = render_card(make_run(push={"to": to}), rundir, pushed=False)
    assert 'from_pretrained(".")' in own and "plots/" not in own and "SHA256SUMS" not in own


@pytest.mark.parametrize(("text", "licence"), [
    (b"---\nlicense: apache-2.0\n---\n# Base\n", "apache-2.0"),
    *((text, None) for text in (b"# Base\n", b"---\nlicense: [\n---\n", b"---\nlicense: caf\xe9\n---\n")),
])  # fmt: skip
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


@pytest.mark.parametrize("make", [render_card, write_report])
def test_a_run_that_was_not_evaluated_names_the_stage(rundir: RunDir, make: Callable[[Run, RunDir], object]) -> None:
    rundir.evaluation.unlink()
    with pytest.raises(ShardmakeError, match="shardmake evaluate chat"):
        make(make_run(), rundir)


def test_the_licence_of_what_was_fetched_is_carried_over(tmp_path: Path, rundir: RunDir) -> None:
    base = tmp_path / "cache"
    base.mkdir()
    (base / "README.md").write_text("---\nlicense: mit\n---\n")
    model = PinnedSource(name="lab/base", revision="main", commit="c0ffee", path=str(base))
    Sources(model=model, train=[PinnedSource(name=DATA, path=DATA)]).write(rundir.sources)
    card = ModelCard(render_card(make_run(revision="main"), rundir))
    assert card.data.license == "mit" and str(base) not in str(card)
