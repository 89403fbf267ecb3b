"""The text part of a composite model: its own class without the towers, such as those for images and sounds.

Text passes through the decoder, its embedding and its head alone. All else that the class holds beside them is left
out, so that it takes no memory and no optimizer can change it. Names of weights, config and class stay those of the
base model. The merge copies the weights of the towers from there.
"""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shardmake.core.private_names import private

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


def composite_class(config: Any) -> str | None:
    """Return the name of the class of a composite model's config in transformers; None for a model of text alone."""
    from transformers.models.auto import modeling_auto as auto

    causal = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if config.get_text_config() is config and config.model_type in causal:
        return None
    tables = (auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, causal)
    return next((str(table[config.model_type]) for table in tables if config.model_type in table), None)


def towers(model: "PreTrainedModel") -> list[str]:
    """Return the names of the modules and parameters of a composite model that its text does not pass through."""
    text = [model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()]
    kept = {name for name, module in model.named_modules() if any(module is part for part in text)}
    paths = [name.split(".") for name in kept]  # the model itself has the empty name
    parents = {".".join(path[:end]) for path in paths for end in range(len(path))}
    parents -= {parent for parent in parents if any(parent == name or parent.startswith(f"{name}.") for name in kept)}
    return [child for parent in sorted(parents) for child in _children(model, parent) if child not in kept | parents]


def _children(model: "nn.Module", parent: str) -> Iterator[str]:
    module = model.get_submodule(parent)
    for name in [*private(module).modules, *private(module).parameters]:
        yield f"{parent}.{name}".lstrip(".")


def text_part(kind: type["PreTrainedModel"]) -> type["PreTrainedModel"]:
    """Return the composite class ``kind`` without its towers, whose weights it leaves in the files."""

    base: Any = kind

    class TextPart(base):
        accepts_loss_kwargs = True  # Trainer then gives the loss the number of tokens of all ranks and passes
        all_tied_weights_keys: dict[str, str]

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.absent = towers(self)
            for name in self.absent:
                parent, _, last = name.rpartition(".")
                owner = self.get_submodule(parent)
                if last in private(owner).parameters:  # its class would initialize the parameter
                    private(owner).is_hf_initialized = True
                delattr(owner, last)
            held = dict(self.named_parameters(remove_duplicate=False))
            ties = self.all_tied_weights_keys
            self.all_tied_weights_keys = {name: owner for name, owner in ties.items() if name in held}
            # Older files have other names before that of the tower: none instead of ``model.``, for example.
            patterns = {rf"^(\w+\.)?{re.escape(name.rpartition('.')[2])}(\.|$)" for name in self.absent}
            own = private(self)
            own.keys_to_ignore_on_load_unexpected = set(own.keys_to_ignore_on_load_unexpected or ()) | patterns

    # transformers finds the conversions of weights by the name of the class and of its module.
    TextPart.__name__ = TextPart.__qualname__ = kind.__name__
    TextPart.__module__ = kind.__module__
    return TextPart
