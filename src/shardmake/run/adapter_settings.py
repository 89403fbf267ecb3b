"""``adapter_config.json``, PEFT's settings of an adapter: the table of those that a merge reproduces."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    model_validator,
)

from shardmake.core.errors import CheckpointError

CONFIG: Final = "adapter_config.json"
WITH_PEFT: Final = "Merge it with PEFT: PeftModel.from_pretrained(base, adapter).merge_and_unload()."
UNMERGED: Final = "It changes more than weights, so it cannot be merged: load the base model and the adapter with PEFT."
NEVER_MERGED: Final = (
    "ADAPTION_PROMPT", "CARTRIDGE", "CPT", "MULTITASK_PROMPT_TUNING", "POLY", "PREFIX_TUNING", "PROMPT_TUNING",
    "P_TUNING", "SHADOW", "XLORA",
)  # fmt: skip
"""Kinds of adapters that PEFT cannot merge either: they add tokens to the input, or depend on it."""
_EMPTY: Final[tuple[Any, ...]] = ("", [], {})
"""Values with which, beside null and false, a setting has no effect. One that a newer PEFT added must have such."""
KEEPS_BASE: Final = (True, False, "gaussian", "eva", "orthogonal", "mica")
"""Values of ``init_lora_weights`` that leave the base weights as they are. PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA
subtract the adapter's first value from them, so that the adapter belongs to these residual weights."""
_CONVERT: Final = (
    "The training changed the base weights at its start, and they are not in the checkpoint. Save the adapter for the "
    "unchanged base with PEFT's save_pretrained(..., path_initial_model_for_weight_conversion=FOLDER), or merge a "
    "checkpoint that holds the base weights."
)


def _proved(default: Any = None) -> Any:
    """Return a setting that merges with every value: its row in tests/unit/run/test_adapter_settings.py compares it."""
    return Field(default)


def _refused(default: Any = None, instead: str = WITH_PEFT) -> Any:
    """Return a setting of which no value but ``default`` can be merged; ``instead`` says what to do."""
    return Field(default, json_schema_extra={"instead": instead})


def _expression(text: str) -> str:
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{text!r} is not a regular expression: {error}") from None
    return text


Pattern = Annotated[str, AfterValidator(_expression)]
Names = list[str] | Pattern | None


class AdapterSettings(BaseModel):
    """The settings of LoRA in PEFT 0.21; one of a newer PEFT is refused unless it is off."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)
    peft_type: str = _proved("")
    r: PositiveInt = _proved(8)
    lora_alpha: FiniteFloat = _proved(8)
    use_rslora: bool = _proved(False)
    rank_pattern: dict[Pattern, PositiveInt] = _proved({})
    alpha_pattern: dict[Pattern, FiniteFloat] = _proved({})
    fan_in_fan_out: bool = _proved(False)
    bias: str = _proved("none")
    init_lora_weights: bool | str = _proved(True)
    target_modules: Names = _proved()
    exclude_modules: Names = _proved()
    layers_to_transform: list[int] | int | None = _proved()
    layers_pattern: Names = _proved()
    modules_to_save: list[str] | None = _proved()
    trainable_token_indices: list[NonNegativeInt] | dict[str, list[NonNegativeInt]] | None = _proved()
    ensure_weight_tying: bool = _proved(False)
    use_dora: bool = _proved(False)
    lora_dropout: Any = _proved(0.0)
    task_type: Any = _proved()
    auto_mapping: Any = _proved()
    peft_version: Any = _proved()
    base_model_name_or_path: Any = _proved()
    revision: Any = _proved()
    inference_mode: Any = _proved(False)
    runtime_config: Any = _proved()
    megatron_core: Any = _proved("megatron.core")
    loftq_config: Any = _proved({})
    eva_config: Any = _proved()
    corda_config: Any = _proved()
    lora_ga_config: Any = _proved()
    qalora_group_size: Any = _proved(16)
    alora_invocation_tokens: Any = _refused(instead=UNMERGED)
    arrow_config: Any = _refused(instead=UNMERGED)
    use_qalora: Any = _refused(False, UNMERGED)
    megatron_config: Any = _refused()
    velora_config: Any = _refused()
    monteclora_config: Any = _refused()
    layer_replication: Any = _refused(instead=UNMERGED)
    lora_bias: Any = _refused(False)
    target_parameters: list[str] = _proved([])
    use_bdlora: Any = _refused()
    kasa_config: Any = _refused()

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if values.get("peft_type") not in (None, "LORA"):  # refused by its kind, whatever its other settings
            return {"peft_type": values["peft_type"]}
        return {k: v for k, v in values.items() if v is not None or k in ("r", "lora_alpha")}

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the settings; raise `CheckpointError` for a damaged file."""
        try:
            return cls.parse(json.loads(path.read_bytes()))
        except (ValueError, RecursionError) as error:
            found = error.errors()[0] if isinstance(error, ValidationError) else {"loc": (), "msg": str(error)}
            where = ".".join(map(str, found["loc"][:2])) or "the file"
            raise CheckpointError(
                f"Cannot read the adapter's settings in {path}: {where}: {found['msg']}. Copy the file again, or "
                "write it with PEFT's save_pretrained."
            ) from None

    @classmethod
    def parse(cls, values: Any) -> Self:
        """Return the settings in ``values``: JSON data, or those of a live adapter with its enumerations and sets."""
        return cls.model_validate(json.loads(json.dumps(values, default=_as_json)))

    def refused(self, holds_base: bool) -> Mapping[str, str]:
        """Return the settings that cannot be merged by name, each with what to do.

        Args:
            holds_base: The checkpoint holds the base weights of the training.
        """
        if self.peft_type != "LORA":
            kind = f"peft_type {self.peft_type or '(missing)'}"
            return {kind: UNMERGED if self.peft_type in NEVER_MERGED else WITH_PEFT}
        found = {}
        for name, field in type(self).model_fields.items():
            instead, value = (field.json_schema_extra or {}).get("instead"), getattr(self, name)  # type: ignore[union-attr]
            if instead and value is not None and value is not False and value != field.default:
                found[name] = str(instead)
        newer = f"PEFT {self.peft_version or 'of another version'} wrote a setting that this version does not know. "
        unknown = (self.model_extra or {}).items()
        found |= {name: newer + WITH_PEFT for name, value in unknown if value is not False and value not in _EMPTY}
        if self.init_lora_weights not in KEEPS_BASE and not holds_base:
            found[f"init_lora_weights {self.init_lora_weights}"] = _CONVERT
        return found

    def decisive(self) -> dict[str, Any]:
        """Return the settings that are not the default and decide what a merge computes, without names of modules."""
        known = type(self).model_fields
        names = ("target_modules", "target_parameters", "exclude_modules", "layers_pattern")
        used = (key for key, field in known.items() if field.annotation is not Any or field.json_schema_extra)
        values = {key: getattr(self, key) for key in used if key not in names} | (self.model_extra or {})
        return {key: value for key, value in values.items() if key not in known or value != known[key].default}

    def adapts(self, parameter: str) -> bool:
        """Return True if ``target_parameters`` chooses the parameter."""
        return _chooses(self.target_parameters, parameter)

    def targets(self, module: str) -> bool:
        """Return True if ``target_modules`` chooses the module, in any layer; False if layers are chosen as well."""
        chosen = _chooses(self.target_modules, module) and not _chooses(self.exclude_modules, module)
        return chosen and self.layers_to_transform is None

    def rank(self, module: str) -> int:
        """Return the rank of the factors of ``module``, or of a parameter that was chosen by its name, as in PEFT."""
        return next((rank for pattern, rank in self.rank_pattern.items() if _matches(pattern, module)), self.r)

    def scale(self, module: str) -> float:
        """Return the factor of ``B @ A``: alpha / r, or alpha / sqrt(r) for rank-stabilised LoRA."""
        found = (alpha for pattern, alpha in self.alpha_pattern.items() if _matches(pattern, module))
        alpha, rank = next(found, self.lora_alpha), self.rank(module)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def tokens(self, module: str) -> list[int]:
        """Return the rows of the embedding ``module`` that were trained; its tied head has the same."""
        held = self.trainable_token_indices or []
        if isinstance(held, list):
            return held
        found = [rows for name, rows in held.items() if module == name or module.endswith(f".{name}")]
        return next(iter(found or (held.values() if len(held) == 1 else ())), [])


def _chooses(names: Names, module: str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names or ())


def _matches(pattern: str, module: str) -> bool:
    return re.match(rf"(.*\.)?({pattern})$", module) is not None


def _as_json(value: Any) -> Any:
    """Return a set as a list, an enumeration's member by its value, and another object as text."""
    return sorted(value) if isinstance(value, set | frozenset) else str(getattr(value, "value", value))
