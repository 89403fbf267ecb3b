"""Composite models whose text part is of a family: ``model.language_model``, beside towers that are not loaded."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardmake.memory.families import family_of, written_down
from shardmake.memory.model import Model


@dataclass(frozen=True)
class Composite:
    """A class of transformers."""

    name: str
    """The first part of its name."""
    towers: Mapping[str, str]
    """The towers in the class's order, and the part of the config that each needs, which ends with ``_config``."""
    images: str | None = None
    """The only model type of the tower for images that is known; None if the class has one type alone."""
    tied: bool = True
    """Embedding and head are one if the config does not say it."""
    renames_text: bool = False  # it takes `text_type`
    may_lack: bool = False
    """A tower is absent if the config has no such part; other classes build it with defaults."""


_PROJECTED = dict.fromkeys(("vision_tower", "multi_modal_projector"), "vision")
_VISUAL = {"visual": "vision"}
COMPOSITES = {
    "gemma3": Composite("Gemma3", _PROJECTED, "siglip_vision_model"),
    "gemma4": Composite(
        "Gemma4",
        {"vision_tower": "vision", "audio_tower": "audio", "embed_vision": "vision", "embed_audio": "audio"},
        may_lack=True,
    ),
    "kimi_k25": Composite("Kimi_K25", dict.fromkeys(("vision_tower", "mm_projector"), "vision"), renames_text=True),
    "mistral3": Composite("Mistral3", _PROJECTED, "pixtral"),
    "qwen3_5": Composite("Qwen3_5", _VISUAL, tied=False),
    "qwen3_5_moe": Composite("Qwen3_5Moe", _VISUAL, tied=False),
}


def text_part(config: Mapping[str, Any], source: str) -> Model | None:
    """Return the text part of the composite model that ``config`` describes; None if it is not written down."""
    text, composite = config.get("text_config"), COMPOSITES.get(config["model_type"])
    if composite is None or not isinstance(text, Mapping):
        return None
    if composite.renames_text:
        text = {**text, "model_type": text_type(text)}
    if (family := family_of(text)) is None:
        return None
    tied = config.get("tie_word_embeddings", composite.tied)
    model = written_down(family, {**text, "tie_word_embeddings": tied}, source, "model.language_model")
    architecture = f"{composite.name}ForConditionalGeneration"
    return replace(model, model_type=config["model_type"], architecture=architecture, config=config)


def text_type(text: Mapping[str, Any]) -> str:
    """Return the type of a model of text, or of the text part of a composite, as transformers takes it."""
    kind = str(text.get("model_type"))
    return {"kimi_k2": "deepseek_v3"}.get(kind, kind)


def absent_towers(config: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the towers of the composite model that ``config`` describes; None if it has a part that is not known."""
    composite = COMPOSITES[config["model_type"]]
    parts = {key.removesuffix("_config"): part for key, part in config.items() if key.endswith("_config")}
    parts = {key: part for key, part in parts.items() if isinstance(part, Mapping) and key not in _OTHER_PARTS}
    images = parts.get("vision", {}).get("model_type", composite.images)
    if parts.keys() - {*composite.towers.values()} or composite.images not in (None, images):
        return None
    found = (name for name, part in composite.towers.items() if part in parts or not composite.may_lack)
    return tuple(f"model.{name}" for name in found)


_OTHER_PARTS = ("text", "quantization", "compression", "generation")
