"""The class of a run's model: decided once, at plan, and loaded by training, merge and evaluation."""

import operator
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from pydantic import Field

from shardmake.core.errors import ModelError
from shardmake.run.record import RunRecord

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SHOWN_NAMES = 3


class ModelClass(RunRecord):
    """The class that is planned, trained, merged and evaluated."""

    name: str = Field(description="Name of the class.")
    own_code: bool = Field(
        False, exclude_if=operator.not_, description="The class is code beside config.json, not one of transformers."
    )

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
        return found

    def load(self, model: str, **options: Any) -> "PreTrainedModel":
        """Return the model at ``model`` with all of its weights; ``options`` are those of ``from_pretrained``.

        Raises:
            ModelError: A weight is missing, left over or of another shape, or the code defines another class.
        """
        network = load_complete(self.find(), model, **options)
        if type(network).__name__ != self.name:
            raise ModelError(
                f"{model} is of the class {type(network).__name__}, and the plan is for {self.name}. "
                "Plan the run again."
            )
        return network


def load_complete(kind: Any, model: str, **options: Any) -> "PreTrainedModel":
    """Return the model at ``model``, loaded by the class ``kind``; `ModelError` unless every weight is found and used.

    transformers only warns, gives a missing weight random values and ignores one that is left over.
    """
    # Other shapes are reported with the rest; transformers' own error names none of them.
    network, info = kind.from_pretrained(model, output_loading_info=True, ignore_mismatched_sizes=True, **options)
    wrong = {label: sorted(_name(item) for item in found) for label, found in info.items() if found}
    if wrong:
        parts = (f"{label.replace('_', ' ')}: {', '.join(names[:_SHOWN_NAMES])}" for label, names in wrong.items())
        raise ModelError(
            f"Cannot load {model} completely: {'; '.join(parts)}. If it is a merged model, merge it again (shardmake "
            "consolidate); otherwise check that its files belong together."
        )
    return network


def _name(item: Any) -> str:
    """Return the name in an item of transformers' report: a name, or a name and two shapes."""
    return str(item[0] if isinstance(item, tuple) else item)
