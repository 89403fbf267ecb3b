"""The keys of training files of Axolotl, LLaMA-Factory and TRL, which `shardmake.config.translate` reads.

Each tool is a record: how its file is recognized, its defaults, and a row for each key that a run has as well. A key
that states where or how fast to train is the plan's. Every other key is listed, and never dropped silently.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from shardmake.config.models import Columns
from shardmake.config.optimizers import OPTIMIZERS, TRIED

Values = Mapping[str, Any]
Row = str | Callable[[Any, Values], Any]
"""Dotted key of a run that has the same value, or a function of the value and of the whole file, which returns keys and
values of a run, or None if a run has nothing like it."""
OFF: Final[tuple[Any, ...]] = (None, False, "", "none", 0, [], {})
_PATTERN: Final = re.compile(r"[][\\(){}|*+?^$]")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


@dataclass(frozen=True)
class Tool:
    """One training tool and the names of its keys."""

    name: str
    signs: tuple[frozenset[str], ...]
    """The file is the tool's if it has all keys of one of these sets."""
    keys: Mapping[str, Row]
    batch: tuple[str, str]
    """Keys of the batch of a rank and of the accumulation steps."""
    defaults: Values
    planned: frozenset[str] = frozenset()
    """Keys that spread the training over hardware: the plan decides."""
    idle: frozenset[str] = frozenset()
    """Keys that cannot change the trained model, such as names of folders, or that only complete another key."""
    by_method: Mapping[str, Values] = field(default_factory=dict)
    """Further defaults by method of the run."""
    is_apart: bool = True
    """Its keys are not those of transformers' TrainingArguments with further ones."""


def recognize(values: Any) -> Tool | None:
    """Return the tool whose file has these keys, or None."""
    keys = set(values) if isinstance(values, Mapping) else set()
    return next((tool for tool in TOOLS if any(sign <= keys for sign in tool.signs)), None)


# --- rows that several tools share ------------------------------------------------------------------------------------


def _warmup(value: Any, values: Values) -> Any:
    """Steps are a ratio of known steps; below 1, transformers reads them as the ratio."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    steps = values.get("max_steps") or -1
    ratio = value if value < 1 else value / steps if steps > 0 else -1
    return {"warmup_ratio": ratio} if 0 <= ratio <= 1 else None


def _optimizer(value: Any, values: Values) -> Any:
    rows = ((name, (row.optim, row.fused, name, *row.aliases)) for name, row in OPTIMIZERS.items())
    name = next((name for name, names in rows if value in names), value if value in TRIED else None)
    return {"optimizer": name} if name else None


def _precision(value: Any, values: Values) -> Any:
    halves = [key for key in ("bf16", "fp16") if values.get(key) in (True, "true")]
    return None if len(halves) == 2 else {"precision": halves[0]} if halves else {}


def _trackers(value: Any, values: Values) -> Any:
    names = [value] if isinstance(value, str) else list(value or [])
    return {"report_to": names} if names and names != ["none"] else None


def _above_zero(key: str) -> Row:
    return lambda value, values: {key: value} if isinstance(value, int | float) and value > 0 else {}


def _if_true(**keys: Any) -> Row:
    return lambda value, values: {key.replace("__", "."): one for key, one in keys.items()} if value else {}


def _lora_targets(value: Any, values: Values) -> Any:
    if isinstance(value, str) and _PATTERN.search(value):
        return None
    names = value.split(",") if isinstance(value, str) else value
    whole = names in (["all"], ["all-linear"])
    return {"lora.targets": "all-linear" if whole else names} if names else None


def _loss_types(value: Any, values: Values) -> Any:
    return {"dpo.loss_type": [value] if isinstance(value, str) else list(value)}


def _beta(value: Any, values: Values) -> Any:
    return {"dpo.beta": value, "kto.beta": value}


_TRAINER: Final[dict[str, Row]] = {
    "learning_rate": "learning_rate", "num_train_epochs": "epochs", "max_steps": _above_zero("max_steps"),
    "lr_scheduler_type": "scheduler", "warmup_ratio": "warmup_ratio", "warmup_steps": _warmup,
    "weight_decay": "weight_decay", "max_grad_norm": "max_grad_norm", "seed": "seed", "optim": _optimizer,
    "bf16": _precision, "fp16": _precision, "report_to": _trackers,
    "save_steps": "checkpoints.every_steps", "save_total_limit": "checkpoints.keep",
    "eval_steps": "eval_every_steps",
    "load_best_model_at_end": _if_true(checkpoints__keep_best=True, final_checkpoint="best"),
    "lr_scheduler_kwargs": lambda value, values: {"scheduler_arguments": value} if isinstance(value, dict) else None,
    "torch_compile": "torch_compile", "trust_remote_code": "trust_remote_code",
    "hub_model_id": lambda value, values: (
        {"push.to": f"hub:{value}"} if value and values.get("push_to_hub", True) else None
    ),
    "model_name_or_path": "model", "model_revision": "revision", "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
}  # fmt: skip
"""Keys of transformers' TrainingArguments, and those that TRL and LLaMA-Factory have in common."""
_PLANNED: Final = _words(
    "deepspeed fsdp fsdp_config accelerator_config gradient_checkpointing gradient_checkpointing_kwargs "
    "activation_checkpointing activation_checkpointing_kwargs "
    "ddp_timeout ddp_find_unused_parameters ddp_backend use_liger_kernel attn_implementation tf32 torch_dtype "
    "dtype per_device_eval_batch_size dataloader_num_workers dataloader_pin_memory use_cpu "
    "activation_offloading"
)
_IDLE: Final = _words(
    "output_dir overwrite_output_dir do_train do_eval do_predict logging_dir logging_steps logging_strategy "
    "logging_first_step save_strategy eval_strategy evaluation_strategy eval_on_start run_name disable_tqdm "
    "log_level push_to_hub hub_private_repo hub_strategy resume_from_checkpoint save_only_model "
    "save_safetensors plot_loss file include_num_input_tokens_seen dataset_num_proc preprocessing_num_workers "
    "remove_unused_columns"
)
_HALF: Final = {"lr_scheduler_type": "linear", "warmup_ratio": 0.0, "num_train_epochs": 3.0}
"""Defaults of transformers that differ from a run's."""


# --- Axolotl ----------------------------------------------------------------------------------------------------------

_AXOLOTL_TYPES: Final = {
    "chat_template": "chat", "sharegpt": "sharegpt", "alpaca": "alpaca", "completion": "text",
    "chat_template.default": "preference", "bradley_terry.chat_template": "preference",
}  # fmt: skip
_AXOLOTL_COLUMNS: Final = {
    "field_messages": "messages", "field": "text", "message_field_role": "role", "message_field_content": "content",
    "field_chosen": "chosen", "field_rejected": "rejected",
}  # fmt: skip
_AXOLOTL_READ: Final = _words("path name type split data_files message_property_mappings ds_type")


def _axolotl_data(key: str) -> Row:
    def row(value: Any, values: Values) -> Any:
        sources, left = list[dict[str, Any]](), dict[str, Any]()
        for number, one in enumerate(value if isinstance(value, list) else []):
            kind = _AXOLOTL_TYPES.get(str(one.get("type")))
            files = one.get("data_files")
            source = str((files[0] if isinstance(files, list) else files) or one.get("path"))
            split, mapped = one.get("split"), {**(one.get("message_property_mappings") or {})}
            named = {name: one[field] for field, name in _AXOLOTL_COLUMNS.items() if one.get(field)}
            named |= {name: mapped.pop(name) for name in ("role", "content") if name in mapped}
            if kind == "preference" and "messages" in named:
                named["prompt"] = named.pop("messages")
            is_plain = split is None or (str(split).isidentifier() and (split == "train" or not Path(source).exists()))
            place = f"{source}:{split}" if is_plain and split not in (None, "train") else source
            read = {"source": place, "format": kind, "subset": one.get("name"), "columns": named}
            sources.append({name: held for name, held in read.items() if held})
            unread = {name: one[name] for name in one if name not in _AXOLOTL_READ and name not in _AXOLOTL_COLUMNS}
            unread |= {} if kind else {"type": one.get("type")}
            unread |= {} if is_plain else {"split": split}
            unread |= {"message_property_mappings": mapped} if mapped else {}
            unread |= {"data_files": files} if isinstance(files, list) and len(files) > 1 else {}
            left |= {f"datasets[{number}].{name}": held for name, held in unread.items() if held not in OFF}
        return {f"data.{key}": sources, "": left} if sources else None

    return row


def _axolotl_objective(value: Any, values: Values) -> Any:
    known = {"dpo": {"objective": "dpo"}, "kto": {"objective": "kto"}}
    return known.get(value) or ({"objective": "dpo", "dpo.loss_type": ["ipo"]} if value == "ipo" else None)


AXOLOTL: Final = Tool(
    "Axolotl",
    (frozenset({"base_model", "datasets"}),),
    {
        **{key: row for key, row in _TRAINER.items() if key not in ("optim", "num_train_epochs", "lr_scheduler_type")},
        "base_model": "model", "revision_of_model": "revision", "sequence_len": "sequence_length",
        "num_epochs": "epochs", "lr_scheduler": "scheduler", "optimizer": _optimizer, "sample_packing": "packing",
        "adapter": lambda value, values: (
            {"method": "qlora" if values.get("load_in_4bit") else value} if value in ("lora", "qlora") else None
        ),
        "lora_r": "lora.rank", "lora_target_modules": _lora_targets,
        "lora_target_linear": _if_true(lora__targets="all-linear"),
        "datasets": _axolotl_data("train"), "test_datasets": _axolotl_data("eval"),
        "val_set_size": _above_zero("data.eval_fraction"),
        "train_on_inputs": _if_true(data__loss_on="all"), "rl": _axolotl_objective, "rl_beta": _beta,
        "dpo_beta": _beta, "reward_model": _if_true(objective="reward"),
        "kto_desirable_weight": "kto.desirable_weight", "kto_undesirable_weight": "kto.undesirable_weight",
        "wandb_project": _if_true(report_to=["wandb"]), "use_tensorboard": _if_true(report_to=["tensorboard"]),
        "chat_template": lambda value, values: {} if value == "tokenizer_default" else None,
    },
    ("micro_batch_size", "gradient_accumulation_steps"),
    {"sequence_len": 512, "num_epochs": 1, "learning_rate": 5e-5, "sample_packing": False, "warmup_ratio": 0.03},
    _PLANNED | _words(
        "flash_attention xformers_attention sdp_attention flex_attention eager_attention fsdp_version "
        "eval_batch_size load_in_4bit tensor_parallel_size sequence_parallel_degree "
        "context_parallel_size liger_rope liger_rms_norm liger_glu_activation liger_fused_linear_cross_entropy "
        "plugins"
    ),
    _IDLE | _words(
        "dataset_prepared_path saves_per_epoch evals_per_epoch eval_sample_packing pad_to_sequence_len "
        "model_type tokenizer_type is_llama_derived_model wandb_entity wandb_name wandb_watch "
        "wandb_run_id wandb_log_model strict auto_resume_from_checkpoints dataset_processes hub_strategy debug"
    ),
)  # fmt: skip


# --- LLaMA-Factory ----------------------------------------------------------------------------------------------------

_STAGES: Final[dict[str, dict[str, Any]]] = {
    "sft": {}, "pt": {"data.format": "text"}, "dpo": {"objective": "dpo"}, "kto": {"objective": "kto"},
    "rm": {"objective": "reward"},
}  # fmt: skip


_FACTORY_ROLES: Final = _words(
    "user_tag=human user_tag=user assistant_tag=gpt assistant_tag=assistant observation_tag=observation "
    "observation_tag=tool function_tag=function_call system_tag=system"
)


def _factory_data(key: str) -> Row:
    """Return the row of a list of names that ``dataset_info.json`` describes."""

    def row(value: Any, values: Values) -> Any:
        folder = Path(str(values.get("dataset_dir") or "data"))
        try:
            known = json.loads((folder / "dataset_info.json").read_text())
        except (OSError, ValueError):
            return None
        names = [name.strip() for name in str(value).split(",")]
        made = [_factory_source(known.get(name), folder, values) for name in names]
        return {f"data.{key}": made} if None not in made else None

    return row


def _factory_source(entry: Any, folder: Path, values: Values) -> dict[str, Any] | None:
    """Return a source, or None if a run has nothing like a key of ``entry``."""
    entry = {key: held for key, held in (entry or {}).items() if key not in ("ms_hub_url", "om_hub_url")}
    file, hub, split = entry.pop("file_name", None), entry.pop("hf_hub_url", ""), entry.pop("split", "train")
    named, tags = {**(entry.pop("columns", None) or {})}, {**(entry.pop("tags", None) or {})}
    is_pair, is_chat = entry.pop("ranking", False), entry.pop("formatting", "alpaca") == "sharegpt"
    alike = {"prompt": "instruction", "query": "input", "response": "output"}
    if is_pair or values.get("stage") == "pt":
        alike = {"prompt": "prompt" if is_pair else "text", "messages": "prompt"}
    columns = {alike.get(name, name): column for name, column in named.items() if name != "history" or name != column}
    extra = {name: entry.pop(name) for name in ("subset", "num_samples") if name in entry}
    if is_chat:
        usual = {"role": "from", "content": "value"} if is_pair else {}
        extra |= {} if is_pair else {"format": "sharegpt"}
        columns |= usual | {name: tags.pop(f"{name}_tag") for name in ("role", "content") if f"{name}_tag" in tags}
    entry |= {tag: name for tag, name in tags.items() if f"{tag}={name}" not in _FACTORY_ROLES}
    if not (file or hub) or entry or not str(split).isidentifier() or not columns.keys() <= Columns.model_fields.keys():
        return None
    return {
        "source": str(folder / file) if file else hub + ("" if split == "train" else f":{split}"),
        **({"columns": kept} if (kept := {k: at for k, at in columns.items() if k != at or is_chat}) else {}),
        **{{"num_samples": "limit"}.get(name, name): held for name, held in extra.items()},
    }


def _thinking(value: Any, values: Values) -> Any:
    """Return the template's argument if the model is here and its template reads it; another one would be refused."""
    files = [Path(str(values["model_name_or_path"]), one) for one in ("chat_template.jinja", "tokenizer_config.json")]
    is_read = any("enable_thinking" in file.read_text(errors="replace") for file in files if file.is_file())
    return {"data.template_arguments" if is_read else "": {"enable_thinking": value}}


LLAMA_FACTORY: Final = Tool(
    "LLaMA-Factory",
    (frozenset({"model_name_or_path", "finetuning_type"}), frozenset({"model_name_or_path", "stage", "template"})),
    {
        **_TRAINER,
        "stage": lambda value, values: _STAGES.get(value),
        "finetuning_type": lambda value, values: {"full": {}, "lora": {"method": "lora"}}.get(value),
        "quantization_bit": lambda value, values: {"method": "qlora"} if value == 4 else None,
        "lora_rank": lambda value, values: (isinstance(value, int) and {
            "lora.rank": value, "lora.alpha": values.get("lora_alpha") or 2 * value
        }) or None,
        "lora_target": _lora_targets, "cutoff_len": "sequence_length", "dataset": _factory_data("train"),
        "eval_dataset": _factory_data("eval"), "packing": "packing", "neat_packing": _if_true(packing=True),
        "enable_thinking": _thinking,
        "val_size": _above_zero("data.eval_fraction"),
        "train_on_prompt": _if_true(data__loss_on="all"), "pref_beta": _beta, "pref_loss": _loss_types,
        "kto_chosen_weight": "kto.desirable_weight", "kto_rejected_weight": "kto.undesirable_weight",
    },
    ("per_device_train_batch_size", "gradient_accumulation_steps"),
    {
        **_HALF, "per_device_train_batch_size": 8, "learning_rate": 5e-5, "cutoff_len": 2048, "packing": False,
        "finetuning_type": "lora",
    },
    _PLANNED | _words("flash_attn enable_liger_kernel use_unsloth quantization_method double_quantization"),
    _IDLE | _words("dataset_dir overwrite_cache cache_dir tokenized_path use_fast_tokenizer"),
    {"lora": {"lora_rank": 8, "lora_target": "all"}, "qlora": {"lora_rank": 8, "lora_target": "all"}},
)  # fmt: skip


# --- TRL --------------------------------------------------------------------------------------------------------------


def _trl_data(value: Any, values: Values) -> Any:
    split, subset = values.get("dataset_train_split", "train"), values.get("dataset_config")
    name = value if split == "train" or Path(str(value)).exists() else f"{value}:{split}"
    return {"data.train": name, **({"data.subset": subset} if subset else {})}


_TRL_LORA: Final = {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "lora_target_modules": ["q_proj", "v_proj"]}
TRL: Final = Tool(
    "TRL",
    (frozenset({"model_name_or_path", "dataset_name"}), frozenset({"model_name_or_path", "datasets"})),
    {
        **_TRAINER,
        "use_peft": lambda value, values: (
            {"method": "qlora" if values.get("load_in_4bit") else "lora"} if value else {}
        ),
        "dataset_name": _trl_data, "lora_r": "lora.rank", "lora_target_modules": _lora_targets,
        "max_length": "sequence_length", "packing": "packing", "dataset_text_field": "data.columns.text",
        "chat_template_path": "data.chat_template", "beta": _beta,
        "loss_type": lambda value, values: {} if value == "nll" else _loss_types(value, values),  # SFT's cross entropy
        "precompute_ref_log_probs": _if_true(dpo__reference="precomputed", kto__reference="precomputed"),
        "desirable_weight": "kto.desirable_weight", "undesirable_weight": "kto.undesirable_weight",
        "center_rewards_coefficient": "reward.center_rewards_coefficient",
        "completion_only_loss": lambda value, values: {"data.loss_on": "all"} if value is False else {},
        "assistant_only_loss": _if_true(data__loss_on="assistant"),
    },
    ("per_device_train_batch_size", "gradient_accumulation_steps"),
    {**_HALF, "per_device_train_batch_size": 8, "learning_rate": 2e-5, "max_length": 1024, "packing": False},
    _PLANNED | _words("load_in_4bit use_bnb_nested_quant bnb_4bit_quant_type pad_to_multiple_of"),
    _IDLE | _words("dataset_config dataset_train_split dataset_streaming lora_task_type"),
    {"lora": _TRL_LORA, "qlora": _TRL_LORA},
    is_apart=False,
)  # fmt: skip

TOOLS: Final = (AXOLOTL, LLAMA_FACTORY, TRL)
