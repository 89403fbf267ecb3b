"""The text part of a composite model trains like DDP, resumes, and merges into a model of the base's own class."""

import json
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from shardmake.config.models import Strategy
from shardmake.consolidate.merge import consolidate
from shardmake.run.model_class import ModelClass
from shardmake.run.paths import RunDir
from tests.composites import COMPOSITES, save_composite
from tests.plan_in_process import plan_in_this_process
from tests.workflow.checkout import Checkout
from tests.workflow.forked import Forked, log, losses, official_weights
from tests.workflow.objectives import settings_of, with_examples
from tests.workflow.test_mixtures_resume import check_resume, copy_unpacked

pytestmark = pytest.mark.training
Reference = tuple[Path, dict[int, float]]
TOWERS = ("visual", "vision_tower", "multi_modal_projector")


@pytest.fixture(scope="module")
def reference(forked: Forked, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Reference]]:
    """A base model and its losses under DDP, by its type."""
    found: dict[str, Reference] = {}

    def of(kind: str) -> Reference:
        if kind not in found:
            folder = tmp_path_factory.mktemp(kind)
            base = save_composite(kind, forked.checkout.root / "resources/demo/base", folder / "base")
            found[kind] = base, check_resume(forked, folder, base, "ddp")
            check_merge(RunDir(folder / "run"), base, "ddp")
        return found[kind]

    with pytest.MonkeyPatch.context() as patch:
        plan_in_this_process(patch)
        yield of


QUICK = {("qwen3_5", "zero3"), ("gemma3", "fsdp"), ("mistral3", "zero3")}
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.families)
    for case in product(COMPOSITES, ("zero3", "fsdp"))
]


@pytest.mark.parametrize(("kind", "strategy"), CASES)
def test_composites(
    forked: Forked, reference: Callable[[str], Reference], tmp_path: Path, kind: str, strategy: Strategy
) -> None:
    base, expected = reference(kind)
    assert check_resume(forked, tmp_path, base, strategy) == pytest.approx(expected, abs=2e-4)
    check_merge(RunDir(tmp_path / "run"), base, strategy)


@pytest.mark.parametrize("strategy", ["zero3", "fsdp"])
def test_adapters_change_their_layers_alone(
    forked: Forked, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, strategy: Strategy
) -> None:
    """The base's files have other names than its class; the tower has layers of the target's name."""
    plan_in_this_process(monkeypatch)
    base = save_composite("gemma3", forked.checkout.root / "resources/demo/base", tmp_path / "base")
    lora = {"method": "lora", "lora": {"targets": ["q_proj"]}}
    rundir, planned = RunDir(tmp_path / "run"), forked.plan(strategy, 2, model=str(base), packing=False, **lora)
    copy_unpacked(forked.checkout.run / "data", rundir.data)
    assert forked.train(rundir, planned) == [0, 0], log(rundir)
    found = {}
    for adapter in (False, True):
        found[adapter] = tmp_path / f"adapter-{adapter}"
        options = {"base": base, "adapter": adapter, "model_class": planned[0].workload.model_class}
        consolidate(rundir.checkpoints / "checkpoint-4", found[adapter], **options)
    merged, untouched = (load_file(folder / "model.safetensors") for folder in (found[False], base))
    changed = {name for name in merged if not torch.equal(merged[name], untouched[name])}
    assert changed == {name for name in merged if "language_model" in name and "q_proj" in name}
    theirs = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(base), found[True])
    state = theirs.merge_and_unload().state_dict()
    ours = AutoModelForImageTextToText.from_pretrained(found[False]).state_dict()
    torch.testing.assert_close(ours, state, atol=1e-6, rtol=1e-5)


def check_merge(rundir: RunDir, base: Path, strategy: Strategy) -> None:
    """Compare the merge with the base's towers and with the states as the engine's own tools read them."""
    checkpoint = rundir.checkpoints / "checkpoint-4"
    name = json.loads((base / "config.json").read_text())["architectures"][0]
    part = ModelClass(name=name, text_part=True)
    consolidate(checkpoint, rundir.model, base=base, model_class=part)

    merged, untouched = load_file(rundir.model / "model.safetensors"), load_file(base / "model.safetensors")
    assert merged.keys() == untouched.keys()
    towers = {name for name in merged if any(tower in name.split(".") for tower in TOWERS)}
    assert towers and {name for name in merged if torch.equal(merged[name], untouched[name])} == towers
    files = [json.loads((place / "config.json").read_text()) for place in (rundir.model, base)]
    assert files[0] == files[1]
    assert (rundir.model / "preprocessor_config.json").read_bytes() == (base / "preprocessor_config.json").read_bytes()

    trained = part.load(str(base))
    found = {name: tensor[:] for name, tensor in official_weights(checkpoint, strategy).items()}
    found.setdefault("lm_head.weight", found["model.language_model.embed_tokens.weight"])  # tied in Gemma 3
    trained.load_state_dict(found)
    opened, info = AutoModelForImageTextToText.from_pretrained(rundir.model, output_loading_info=True)
    assert type(opened).__name__ == name and not any(info.values())
    ids = torch.arange(20).view(2, 10)
    with torch.no_grad():
        ours, theirs = (model.eval()(input_ids=ids, use_cache=False).logits for model in (opened, trained))
    assert torch.equal(ours, theirs)


def test_preferences(forked: Forked, inputs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """DPO, whose reference is a second copy of the text part, under ZeRO-3 as under DDP."""
    plan_in_this_process(monkeypatch)
    own = with_examples("dpo", Forked(Checkout.create(tmp_path / "checkout", inputs), forked.server), inputs)
    base = save_composite("mistral3", own.checkout.root / "resources/demo/base", tmp_path / "base")
    found = []
    for strategy in ("ddp", "zero3"):
        rundir = RunDir(tmp_path / strategy)
        planned = own.plan(strategy, 2, model=str(base), **settings_of("dpo"))
        assert own.train(rundir, planned) == [0, 0], log(rundir)
        found.append(losses(rundir))
    assert len(found[0]) == 4 and found[1] == pytest.approx(found[0], abs=1e-4)
