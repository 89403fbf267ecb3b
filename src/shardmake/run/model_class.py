"""The class of a run's model: decided once, at plan, and loaded by training, merge and evaluation."""

from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import Field

from shardmake.core.errors import ModelError
from shardmake.core.private_names import private
from shardmake.run.record import RunRecord, optional
from shardmake.run.text_part import text_part

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SHOWN_NAMES = 3
OLD_HEAD = "lm_head.weight"
"""The head over the vocabulary in the families of `shardmake.memory.families`."""
TIE = "tie_word_embeddings"
"""Key of config.json: head and embedding are one weight."""


def is_same_class(one: str, other: str) -> bool:
    """Return True for two spellings of one class, such as ``PhiMoEForCausalLM``, which transformers calls Phimoe."""
    return one.replace("_", "").lower() == other.replace("_", "").lower()


class Heads(NamedTuple):
    """Names of weights that differ between a model and its base: the one that is new, and the one that it replaces."""

    new: str
    replaced: str


class ModelClass(RunRecord):
    """The class that is planned, trained, merged and evaluated."""

    name: str = Field(description="Name of the class.")
    own_code: bool = optional(False, "The class is code beside config.json, not one of transformers.")
    text_part: bool = optional(
        False, "Its towers, such as that for images, are left out; the merge takes them from the base model."
    )
    new_head: str = optional(
        "", "Layer of one output that replaces the base model's head over the vocabulary; empty: none does."
    )

    untied: bool = optional(
        False, "Its config.json ties the head to the embedding, but its files hold both, and so does the model."
    )

    @property
    def config_changes(self) -> dict[str, Any]:
        """Return what differs from the base model's config.json, as keyword arguments of ``from_pretrained``."""
        changes: dict[str, Any] = {"num_labels": 1, "architectures": [self.name]} if self.new_head else {}
        return changes | ({TIE: False} if self.untied else {})

    def find(self) -> Any:
        """Return the class, or transformers' AutoModelForCausalLM, which imports code that lies beside config.json.

        Raises:
            ModelError: The installed transformers does not have the class.
        """
        import transformers

        found = transformers.AutoModelForCausalLM if self.own_code else getattr(transformers, self.name, None)
        if found is None:
            raise ModelError(
                f"Model class not found: {self.name}. transformers {version('transformers')} does not have it. Install "
                "the version of transformers with which the run was planned, or plan it again."
            )
        return text_part(found) if self.text_part else found

    @property
    def whole(self) -> "ModelClass":
        """Return the class with its towers, as it loads a merged model."""
        return self.model_copy(update={"text_part": False})

    def build(self, config: Any, **options: Any) -> "PreTrainedModel":
        """Return a model of ``config`` with new weights; ``options`` are those of ``from_config``."""
        kind = self.find()
        if self.own_code:
            return kind.from_config(config, trust_remote_code=True, **options)
        return private(kind).from_config(config, **options)

    def load(self, model: str, **options: Any) -> "PreTrainedModel":
        """Return the model at ``model`` with all of its weights; ``options`` are those of ``from_pretrained``.

        Raises:
            ModelError: A weight is missing, left over or of another shape, or the code defines another class.
        """
        return self._load(model, None, options)

    def load_base(self, model: str, **options: Any) -> "PreTrainedModel":
        """Return the base model at ``model`` in this class, with random weights in a new head; else as `load`.

        Raises:
            ModelError: The weights are not those of the class, apart from its new head and the head that it replaces.
        """
        return self._load(model, Heads(f"{self.new_head}.weight", OLD_HEAD) if self.new_head else None, options)

    def _load(self, model: str, heads: Heads | None, options: dict[str, Any]) -> "PreTrainedModel":
        network = load_complete(self.find(), model, heads, **self.config_changes, **options)
        if type(network).__name__ != self.name:
            raise ModelError(
                f"{model} is of the class {type(network).__name__}, and the plan is for {self.name}. "
                "Plan the run again."
            )
        return network


def load_complete(kind: Any, model: str, heads: Heads | None = None, **options: Any) -> "PreTrainedModel":
    """Return the model at ``model``, loaded by the class ``kind``; `ModelError` unless every weight is found and used.

    transformers only warns, gives a missing weight random values and ignores one that is left over. Of ``heads``, the
    new weight must be missing, and the replaced one may be left over.
    """
    # Other shapes are reported with the rest; transformers' own error names none of them.
    network, info = kind.from_pretrained(model, output_loading_info=True, ignore_mismatched_sizes=True, **options)
    # An item of the report is a name, or a name and two shapes.
    names = {label: {str(it[0] if isinstance(it, tuple) else it) for it in found} for label, found in info.items()}
    if heads is not None:
        names["missing_keys"] ^= {heads.new}
        names["unexpected_keys"] -= {heads.replaced}
    wrong = {label: sorted(found) for label, found in names.items() if found}
    if wrong:
        parts = (f"{label.replace('_', ' ')}: {', '.join(names[:_SHOWN_NAMES])}" for label, names in wrong.items())
        raise ModelError(
            f"Cannot load {model} completely: {'; '.join(parts)}. If it is a merged model, merge it again (shardmake "
            "consolidate); otherwise check that its files belong together."
        )
    return network
