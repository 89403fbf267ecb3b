"""Settings for the real engine: each library's key of each row of the comparison's table, alone and together.

`tests/unit/render/test_comparison.py` checks that no row and no library's key is missing here, and
`tests/workflow/test_engine_truth.py` trains each case and compares every row with what came up.
"""

from dataclasses import replace
from typing import Any

from shardmake.render.comparison import Settings
from tests.planted_settings import (
    ACCELERATE,
    ALL_AUTO,
    ARGUMENTS,
    AUTO,
    KEEPS_OPTIMIZER,
    NVME,
    ON_CPU,
    RANKS,
    SGD,
    WARMUP,
    WARMUP_DECAY,
    adamw,
    schedule,
    zero,
)

DEEPSPEED_FILE = "deepspeed.json"
HALF = {"bf16": {"enabled": True}}
ALLOWED_SGD = SGD | {"zero_allow_untested_optimizer": True}
DDP = ACCELERATE | {"distributed_type": "MULTI_GPU"}
EAGER = DDP | {"dynamo_config": {"dynamo_backend": "EAGER"}}
FSDP = ACCELERATE | {"distributed_type": "FSDP"}
WRAPPED = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}
FSDP2 = {"version": 2, **WRAPPED}
OPTIMIZER = {"offload_optimizer": NVME}
FSDP1 = {"version": 1, "cpu_ram_efficient_loading": False, "sync_module_states": False, **WRAPPED}


def trainer(arguments: dict[str, Any], deepspeed: dict[str, Any] | None = None, **others: Any) -> Settings:
    """Return the settings of a Trainer whose DeepSpeed file has ``deepspeed`` beside "auto"."""
    file = None if deepspeed is None else AUTO | deepspeed
    return Settings(ARGUMENTS | arguments, file, world_size=others.pop("world_size", RANKS), **others)


def launched(section: dict[str, Any], arguments: dict[str, Any] | None = None, **others: Any) -> Settings:
    """Return the settings of a Trainer, or with ``arguments`` None of a script, with DeepSpeed in Accelerate's file."""
    values = None if arguments is None else ARGUMENTS | arguments
    return Settings(values, None, ACCELERATE | {"deepspeed_config": section, **others}, world_size=RANKS)


def script(deepspeed: dict[str, Any], *, on_cpu: bool = False) -> Settings:
    """Return the settings of a script that gets its DeepSpeed file from the launcher."""
    flags = ["--deepspeed_config_file", DEEPSPEED_FILE]
    return Settings(None, AUTO | deepspeed, ACCELERATE, flags, RANKS, named_by_trainer=False, on_cpu=on_cpu)


def fsdp(config: dict[str, Any], file: dict[str, Any] | None = None) -> Settings:
    accelerate = FSDP | {"fsdp_config": {f"fsdp_{key}": value for key, value in (file or FSDP2).items()}}
    return trainer({"fsdp": True, "fsdp_config": config}, accelerate=accelerate)


def swapped(sections: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return Accelerate's keys for offload ``sections`` of a DeepSpeed file, with ZeRO-3."""
    keys = {f"{name}_{key}": value for name, section in sections.items() for key, value in section.items()}
    return {"zero_stage": 3, **keys}


CASES: dict[str, Settings] = {
    "batch per rank: Trainer": trainer({"per_device_train_batch_size": 2}),
    "batch per rank: Trainer, auto": trainer({"per_device_train_batch_size": 2}, {}),
    "batch per rank: DeepSpeed equal": trainer({}, {"train_micro_batch_size_per_gpu": 4}),
    "batch per rank: DeepSpeed differs": trainer({}, {"train_micro_batch_size_per_gpu": 2}),
    "batch per rank: script, DeepSpeed": script({"train_micro_batch_size_per_gpu": 4}),
    "accumulation steps: Trainer": trainer({"gradient_accumulation_steps": 2}),
    "accumulation steps: Trainer, auto": trainer({"gradient_accumulation_steps": 2}, {}),
    "accumulation steps: DeepSpeed equal": trainer({"gradient_accumulation_steps": 2}, {"gradient_accumulation_steps": 2}),
    "accumulation steps: DeepSpeed differs": trainer({}, {"gradient_accumulation_steps": 2}),
    "accumulation steps: Accelerate equal": launched({"gradient_accumulation_steps": 2}, {"gradient_accumulation_steps": 2}),
    "accumulation steps: script, DeepSpeed": script({"gradient_accumulation_steps": 2}),
    "accumulation steps: script, auto": script({"gradient_accumulation_steps": "auto"}),
    "accumulation steps: script, Accelerate": launched({"gradient_accumulation_steps": 2}),
    "total batch: DeepSpeed auto": trainer({"gradient_accumulation_steps": 2}, {"train_batch_size": "auto"}),
    "total batch: DeepSpeed equal": trainer({"gradient_accumulation_steps": 2}, {"train_batch_size": 16}),
    "total batch: DeepSpeed differs": trainer({"gradient_accumulation_steps": 2}, {"train_batch_size": 8}),
    "total batch: script, DeepSpeed": script({"train_micro_batch_size_per_gpu": 4, "train_batch_size": 8}),
    "gradient clipping: Trainer": trainer({"max_grad_norm": 0.5}),
    "gradient clipping: Trainer, auto": trainer({"max_grad_norm": 0.5}, {}),
    "gradient clipping: DeepSpeed differs": trainer({}, {"gradient_clipping": 0.5}),
    "gradient clipping: Accelerate equal": launched({"gradient_clipping": 0.5}, {"max_grad_norm": 0.5}),
    "gradient clipping: Accelerate differs": launched({"gradient_clipping": 0.5}, {}),
    "gradient clipping: script, DeepSpeed": script({"gradient_clipping": 0.5}),
    "gradient clipping: script, Accelerate": launched({"gradient_clipping": 0.5}),
    "learning rate: Trainer": trainer({"learning_rate": 2e-4}),
    "learning rate: Trainer, no optimizer in the file": trainer({"learning_rate": 2e-4}, {}),
    "learning rate: DeepSpeed auto": trainer({"learning_rate": 2e-4}, adamw(**ALL_AUTO)),
    "learning rate: DeepSpeed differs": trainer({}, adamw(**ALL_AUTO | {"lr": 2e-4})),
    "learning rate: WarmupLR differs": trainer({}, schedule("WarmupLR", warmup_max_lr=2e-4, warmup_num_steps="auto")),
    "learning rate: WarmupLR without a peak": trainer({}, schedule("WarmupLR", warmup_num_steps="auto")),
    "learning rate: script, DeepSpeed": script(adamw(lr=2e-4)),
    "learning rate: script, auto": script(adamw(lr="auto", weight_decay="auto")),
    "betas: Trainer": trainer({"adam_beta1": 0.8}, {}),
    "betas: DeepSpeed auto": trainer({"adam_beta2": 0.95}, adamw(**ALL_AUTO)),
    "betas: DeepSpeed equal": trainer({"adam_beta1": 0.8}, adamw(**ALL_AUTO | {"betas": [0.8, 0.999]})),
    "betas: DeepSpeed without": trainer({"adam_beta1": 0.8}, adamw(lr="auto", eps="auto", weight_decay="auto")),
    "epsilon: Trainer": trainer({"adam_epsilon": 1e-6}, {}),
    "epsilon: DeepSpeed auto": trainer({"adam_epsilon": 1e-6}, adamw(**ALL_AUTO)),
    "epsilon: DeepSpeed differs": trainer({}, adamw(**ALL_AUTO | {"eps": 1e-6})),
    "weight decay: Trainer": trainer({"weight_decay": 0.1}, {}),
    "weight decay: DeepSpeed auto": trainer({"weight_decay": 0.1}, adamw(**ALL_AUTO)),
    "weight decay: DeepSpeed differs": trainer({"weight_decay": 0.1}, adamw(**ALL_AUTO | {"weight_decay": 0.2})),
    "optimizer: Trainer": trainer({"optim": "sgd"}, {}),
    "optimizer: Trainer, adafactor": trainer({"optim": "adafactor"}),
    "optimizer: DeepSpeed": trainer({}, ALLOWED_SGD),
    "optimizer: DeepSpeed equal": trainer({"optim": "sgd"}, ALLOWED_SGD),
    "optimizer: DeepSpeed Adam": trainer({}, {"optimizer": {"type": "Adam", "params": {"torch_adam": True, **ALL_AUTO}}}),
    "optimizer: script, DeepSpeed": script(ALLOWED_SGD | adamw(lr="auto", weight_decay=0.1)),
    "schedule: Trainer": trainer({"lr_scheduler_type": "cosine"}),
    "schedule: Trainer, constant": trainer({"lr_scheduler_type": "constant"}, {}),
    "schedule: DeepSpeed equal": trainer({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 1}, WARMUP),
    "schedule: DeepSpeed cosine": trainer({"lr_scheduler_type": "cosine", "max_steps": 4}, schedule("WarmupCosineLR", total_num_steps="auto")),
    "schedule: DeepSpeed LRRangeTest": trainer({}, schedule("LRRangeTest", lr_range_test_min_lr=2e-4)),
    "schedule: DeepSpeed OneCycle": trainer({}, schedule("OneCycle", cycle_min_lr=1e-5, cycle_max_lr=2e-4)),
    "schedule: DeepSpeed OneCycle with fixed betas": trainer({}, schedule("OneCycle", cycle_min_lr=1e-5, cycle_max_lr=2e-4, cycle_momentum=False)),
    "schedule: script, DeepSpeed": script(
        adamw(lr="auto") | schedule("WarmupDecayLR", warmup_max_lr="auto", warmup_num_steps="auto", total_num_steps=8)
    ),
    "warm-up steps: Trainer": trainer({"warmup_steps": 3, "max_steps": 5}),
    "warm-up steps: Trainer, a ratio": trainer({"warmup_steps": 0.5, "max_steps": 6}, {}),
    "warm-up steps: Trainer, constant": trainer({"warmup_steps": 1, "lr_scheduler_type": "constant"}, {}),
    "warm-up steps: DeepSpeed auto": trainer({"warmup_steps": 3, "max_steps": 5}, WARMUP),
    "warm-up steps: DeepSpeed equal": trainer({"warmup_steps": 3, "max_steps": 5}, schedule("WarmupLR", warmup_max_lr="auto", warmup_num_steps=3)),
    "warm-up steps: DeepSpeed against a ratio": trainer({"warmup_steps": 0.5, "max_steps": 6}, WARMUP),
    "total steps: Trainer": trainer({"max_steps": 3}, {}),
    "total steps: DeepSpeed auto": trainer({"max_steps": 3, "warmup_steps": 1}, WARMUP_DECAY),
    "total steps: DeepSpeed differs": trainer(
        {"max_steps": 3, "warmup_steps": 1},
        schedule("WarmupDecayLR", total_num_steps=4, warmup_num_steps="auto", warmup_max_lr="auto"),
    ),
    "precision: Trainer": trainer({"bf16": True}),
    "precision: Trainer, no section in the file": trainer({"bf16": True}, {}),
    "precision: DeepSpeed auto": trainer({"bf16": True}, {"bf16": {"enabled": "auto"}}),
    "precision: DeepSpeed equal": trainer({"bf16": True}, HALF),
    "precision: DeepSpeed differs": trainer({}, HALF),
    "precision: Accelerate equal": launched({"zero_stage": 2}, {"bf16": True}, mixed_precision="bf16"),
    "precision: Accelerate differs": launched({"zero_stage": 2}, {}, mixed_precision="bf16"),
    "precision: DDP, Accelerate": trainer({}, accelerate=DDP | {"mixed_precision": "bf16"}),
    "precision: script, Accelerate": launched({"zero_stage": 2}, mixed_precision="bf16"),
    "precision: script, DeepSpeed": script(HALF),
    "precision: script, DDP": Settings(None, None, DDP | {"mixed_precision": "bf16"}, world_size=RANKS),
    "ZeRO stage: DeepSpeed 0": trainer({}, zero(0)),
    "ZeRO stage: DeepSpeed 1": trainer({}, zero(1)),
    "ZeRO stage: DeepSpeed 3": trainer({}, zero(3)),
    "ZeRO stage: Accelerate": launched({"zero_stage": 3}, {}),
    "ZeRO stage: Accelerate's default": launched({}, {}),
    "ZeRO stage: Accelerate beside a file": Settings(ARGUMENTS, AUTO, ACCELERATE | {"deepspeed_config": {"zero_stage": 3}}, world_size=RANKS),
    "ZeRO stage: script, Accelerate": launched({"zero_stage": 1}),
    "optimizer offload: DeepSpeed": trainer({}, zero(2, offload_optimizer=ON_CPU) | KEEPS_OPTIMIZER),
    "optimizer offload: DeepSpeed, stage 3": trainer({}, zero(3, offload_optimizer=ON_CPU) | KEEPS_OPTIMIZER),
    "parameter offload: DeepSpeed": trainer({}, zero(3, offload_param=ON_CPU)),
    "parameter offload: Accelerate": launched({"offload_param_device": "cpu", "zero_stage": 3}, {}),
    "16-bit weights on save: DeepSpeed": trainer({}, zero(3, stage3_gather_16bit_weights_on_model_save=True)),
    "16-bit weights on save: Accelerate": launched({"zero3_save_16bit_model": True, "zero_stage": 3}, {}),
    "16-bit weights on save: script, auto": script(zero(3, stage3_gather_16bit_weights_on_model_save="auto")),
    "compilation: Trainer": trainer({"torch_compile_backend": "eager"}),
    "compilation: Accelerate": trainer({}, accelerate=EAGER),
    "compilation: both": trainer({"torch_compile_backend": "eager"}, accelerate=EAGER),
    "compilation: script, Accelerate": Settings(None, None, EAGER, world_size=RANKS),
    "engine: no launcher": trainer({}, world_size=1),
    "engine: DeepSpeed of the launcher for nobody": trainer({}, {}, accelerate=DDP, named_by_trainer=False),
    "engine: DeepSpeed of Trainer beside DDP": trainer({}, {}, accelerate=DDP),
    "engine: both name the file": trainer({}, {}, accelerate=ACCELERATE, flags=["--deepspeed_config_file", DEEPSPEED_FILE]),
    "engine: Accelerate's type for CPUs": trainer({}, accelerate=ACCELERATE | {"distributed_type": "MULTI_CPU"}),
    "engine: a script without a GPU": script({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}, on_cpu=True),
    "engine: a script without a GPU, auto": script(adamw(lr="auto") | {"train_batch_size": "auto"}, on_cpu=True),
    "engine: a script without a GPU and a file": replace(launched({"zero_stage": 2}), on_cpu=True),
    "engine: Trainer without a GPU and a file": replace(launched({"zero_stage": 2}, {}), on_cpu=True),
    "engine: Trainer without a GPU, a total batch": trainer({}, {"train_batch_size": 8}, on_cpu=True),
    "engine: DDP without a GPU": trainer({}, on_cpu=True),
    "engine: Trainer without a GPU": trainer({}, {}, on_cpu=True),
    "engine: Trainer without a GPU, use_cpu": trainer({"use_cpu": True}, {}, on_cpu=True),
    "FSDP version: Trainer": fsdp(FSDP2),
    "FSDP version: script, Accelerate": Settings(
        None, None, FSDP | {"fsdp_config": {f"fsdp_{key}": value for key, value in FSDP2.items()}}, world_size=RANKS
    ),
    "engine: FSDP without a GPU": replace(fsdp(FSDP2), on_cpu=True),
    "engine: FSDP without a GPU, use_cpu": replace(trainer({"fsdp": True, "fsdp_config": FSDP2, "use_cpu": True}), on_cpu=True),
    "FSDP version: differs": fsdp(FSDP2, {"version": 1}),
    "FSDP reshard after forward: Trainer": fsdp(FSDP2 | {"reshard_after_forward": False}),
    "FSDP reshard after forward: Accelerate": fsdp(FSDP2, FSDP2 | {"reshard_after_forward": False}),
    "FSDP state dict type: Trainer": fsdp(FSDP2 | {"state_dict_type": "SHARDED_STATE_DICT"}),
    "FSDP state dict type: Accelerate": fsdp(FSDP2, FSDP2 | {"state_dict_type": "SHARDED_STATE_DICT"}),
    "FSDP cpu offload: Trainer": fsdp(FSDP2 | {"cpu_offload": True}),
    "FSDP cpu offload: Accelerate": fsdp(FSDP2, FSDP2 | {"offload_params": True}),
    "FSDP activation checkpointing: Trainer": fsdp(FSDP2 | {"activation_checkpointing": True}),
    "FSDP activation checkpointing: Accelerate": fsdp(FSDP2, FSDP2 | {"activation_checkpointing": True}),
    "FSDP transformer layer cls to wrap: Trainer": fsdp(FSDP2 | {"transformer_layer_cls_to_wrap": ["LlamaMLP"]}),
    "FSDP transformer layer cls to wrap: Accelerate": fsdp({"version": 2}, FSDP2 | {"transformer_layer_cls_to_wrap": "LlamaMLP"}),
    "FSDP backward prefetch: Trainer": fsdp(FSDP1 | {"backward_prefetch": "backward_post"}, FSDP1),
    "FSDP backward prefetch: Accelerate": fsdp(FSDP1, FSDP1 | {"backward_prefetch": "BACKWARD_POST"}),
    "FSDP use orig params: Trainer": fsdp(FSDP1 | {"use_orig_params": False}, FSDP1),
    "FSDP use orig params: Accelerate": fsdp(FSDP1, FSDP1 | {"use_orig_params": False}),
    **{
        f"NVMe path of the {name}: {library}": settings
        for name, offload in (("optimizer", OPTIMIZER), ("parameters", {**OPTIMIZER, "offload_param": NVME}))
        for library, settings in (
            ("DeepSpeed", trainer({}, zero(3, **offload))),
            ("Accelerate", launched(swapped(offload), {})),
        )
    },
    "optimizer offload: Accelerate": launched({"zero_stage": 2, "offload_optimizer_device": "cpu"}, {}),
}  # fmt: skip

COMPILES = {name for name in CASES if name.startswith("NVMe path") or name == "optimizer offload: Accelerate"}
"""Cases for which DeepSpeed first compiles an extension for minutes: only with ``make test-nvme``."""
