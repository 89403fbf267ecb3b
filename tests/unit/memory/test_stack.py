"""Library versions as input of the estimate."""

import pytest

from shardmake.core.errors import ConfigError
from shardmake.memory.read_config import from_config
from shardmake.memory.scenario import LibraryBehavior
from shardmake.memory.stack import parse_stack
from tests.unit.memory.llama_8b import scenario
from tests.unit.memory.test_decoder import SIZES


def test_the_installed_libraries_are_the_default() -> None:
    assert parse_stack("").behavior() == LibraryBehavior()
    assert parse_stack("").adapter_weights("bf16") == "fp32"


@pytest.mark.parametrize(
    ("version", "wide", "copied", "expanded", "expanded_for_flash"),
    [
        ("4.45.2", True, True, True, True),
        ("4.46.0", False, True, True, True),
        ("4.48.3", False, True, True, False),
        ("4.49.0", False, False, True, False),
        ("4.54.0", False, False, False, False),
        ("5.0", False, False, False, False),
    ],
)
def test_logits_and_keys_follow_the_version_of_transformers(
    version: str, wide: bool, copied: bool, expanded: bool, expanded_for_flash: bool
) -> None:
    behavior = parse_stack(f"transformers={version}").behavior()
    found = behavior.returns_wide_logits, behavior.copies_shifted_logits, behavior.expands_keys
    assert (*found, behavior.expands_flash_keys) == (wide, copied, expanded, expanded_for_flash)


@pytest.mark.parametrize(
    ("model_type", "attention", "expanded"),
    [("mistral", "flash", True), ("qwen2", "flash", True), ("llama", "flash", False), ("llama", "sdpa", True)],
)
def test_flash_attention_once_got_repeated_keys_in_some_models(model_type: str, attention: str, expanded: bool) -> None:
    model = from_config({**SIZES, "model_type": model_type})
    case = scenario(model=model, attention=attention, behavior=parse_stack("transformers=4.45").behavior())
    assert case.expands_keys == expanded


@pytest.mark.parametrize(
    ("version", "checks"), [("0.9.2", False), ("0.9.5", True), ("0.11.1", True), ("0.11.2", False)]
)
def test_deepspeed_up_to_0_11_1_checks_flat_gradients_of_every_type(version: str, checks: bool) -> None:
    assert parse_stack(f"deepspeed={version}").behavior().checks_any_type == checks


def test_code_of_its_own_keeps_logits_narrow() -> None:
    behavior = parse_stack("transformers=4.32, logits=own").behavior()
    assert behavior.keeps_logits_narrow and behavior.copies_shifted_logits and not behavior.returns_wide_logits


@pytest.mark.parametrize(
    ("text", "dtype"),
    [("peft=0.6.2", "fp32"), ("peft=0.9", "bf16"), ("peft=0.11.1", "fp32"), ("peft=0.9,adapters=fp32", "fp32")],
)
def test_the_type_of_adapters_follows_the_version_of_peft(text: str, dtype: str) -> None:
    assert parse_stack(text).adapter_weights("bf16") == dtype


def test_the_optimizer_is_fused_from_torch_2_8_and_transformers_4_55_on() -> None:
    fused = {text: not parse_stack(text).behavior().foreach_optimizer for text in ("torch=2.7", "transformers=4.54")}
    assert not any(fused.values())
    assert not parse_stack("torch=2.8,transformers=4.55").behavior().foreach_optimizer
    assert parse_stack("optimizer=foreach").behavior().foreach_optimizer


@pytest.mark.parametrize(
    ("method", "strategy", "bytes_per_weight"),
    [("lora", "ddp", 4), ("lora", "fsdp", 4), ("lora", "zero3", 2), ("qlora", "fsdp", 2), ("full", "ddp", 2)],
)
def test_a_base_in_fp32_stays_in_it_under_lora_except_with_deepspeed(
    method: str, strategy: str, bytes_per_weight: int
) -> None:
    behavior = parse_stack("base=fp32,kbit=plain").behavior()
    assert scenario(method=method, strategy=strategy, behavior=behavior).frozen == bytes_per_weight


@pytest.mark.parametrize(
    ("text", "reentrant", "around"),
    [
        ("", False, False),
        ("transformers=4.57", True, False),
        ("transformers=4.51", True, True),
        ("transformers=4.51,checkpoint=plain", False, False),
        ("transformers=4.38,checkpoint=inside", True, False),
    ],
)
def test_checkpointing_is_reentrant_before_transformers_5(text: str, reentrant: bool, around: bool) -> None:
    behavior = parse_stack(text).behavior()
    assert (behavior.recomputes_whole, behavior.checkpoints_units) == (reentrant, around)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("transformer=4.38", "Did you mean 'transformers'?"),
        ("torch=new", "It is not a version"),
        ("kbit=no", "Write one of widened, norms, plain"),
        ("torch", "It is not a version"),
    ],
)
def test_other_entries_are_refused(text: str, part: str) -> None:
    with pytest.raises(ConfigError, match="--stack has an unknown") as caught:
        parse_stack(text)
    assert part in str(caught.value)
