"""Train a tiny model once per case, with the Trainer and DeepSpeed on two forked CPU ranks, and record what trained.

Usage: ``python -m tests.workflow.engine_cases CASES.json RESULTS.json``. A case holds ``trainer`` (keyword arguments of
TrainingArguments), ``deepspeed`` (a file's content or null), and ``environment`` (variables that a launcher sets).
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

RANKS = 2
SECONDS_PER_CASE = 90
SECONDS_FOR_THE_OTHER_RANK = 10
"""Time to record the error of rank 0 after rank 1 has ended."""


def main() -> None:
    """Run all cases and write a list with one result per case."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    cases = json.loads(Path(sys.argv[1]).read_text())
    import_libraries()
    results = []
    for number, case in enumerate(cases):
        results.append(run_case(case, Path(sys.argv[2]).with_suffix(f".case{number}.json")))
        print(number, json.dumps(results[-1])[:300], flush=True)
    Path(sys.argv[2]).write_text(json.dumps(results))


def import_libraries() -> None:
    """Import what every rank needs, once."""
    import deepspeed.runtime.zero.muon.original_muon  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401
    from transformers import Trainer  # noqa: F401

    from shardmake.core.environment import leave_collectives_to_gloo

    leave_collectives_to_gloo()


def run_case(case: dict[str, Any], answer: Path) -> dict[str, Any]:
    """Fork the ranks of one case and return what rank 0 found, or ``{"error": "timeout"}``."""
    from tests.fork_server import free_port

    answer.unlink(missing_ok=True)
    port = free_port()
    children = [fork_rank(case, rank, port, answer) for rank in range(RANKS)]
    deadline, running = time.monotonic() + SECONDS_PER_CASE, set(children)
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        running.discard(pid)
        if pid and os.waitstatus_to_exitcode(status):
            deadline = min(deadline, time.monotonic() + SECONDS_FOR_THE_OTHER_RANK)
        if time.monotonic() > deadline:
            for child in running:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.02)
    return dict(json.loads(answer.read_text())) if answer.exists() else {"error": "timeout", "message": ""}


def fork_rank(case: dict[str, Any], rank: int, port: int, answer: Path) -> int:
    """Fork one rank, which writes ``answer`` if it is rank 0, and return its process id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **case.get("environment", {})}
        try:
            found = train(case, answer.parent)
            status = 0
        except BaseException as error:
            found = {"error": type(error).__name__, "message": str(error)[:2000]}
        if rank == 0:
            answer.write_text(json.dumps(found))
    finally:
        os._exit(status)


def train(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train and return the engine's settings and what the steps did."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    set_seed(0)
    given = {
        "output_dir": str(folder / "output"), "use_cpu": True, "ddp_backend": "gloo", "max_steps": 2,
        "report_to": "none", "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True,
    }  # fmt: skip
    arguments = TrainingArguments(**given | case["trainer"], deepspeed=case["deepspeed"])
    partitions_at_load = is_deepspeed_zero3_enabled()
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(64, (512, 8)).tolist()]
    seen: list[int] = []

    def collate(batch: list[dict[str, Any]]) -> dict[str, Any]:
        seen.append(len(batch))
        return {key: torch.tensor([row[key] for row in batch]) for key in batch[0]}

    trainer = Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collate)
    trainer.train()
    return describe(trainer) | {"micro_batches": len(seen), "partitions_at_load": partitions_at_load}


def describe(trainer: Any) -> dict[str, Any]:
    """Return what the trained engine did."""
    engine = trainer.model_wrapped
    rates = [line["learning_rate"] for line in trainer.state.log_history if "learning_rate" in line]
    norms = [line.get("grad_norm") for line in trainer.state.log_history if "learning_rate" in line]
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    found = {"class": type(engine).__name__, "rates": rates, "norms": norms, "losses": losses}
    if found["class"] != "DeepSpeedEngine":
        return found
    offload, parameters = engine.zero_offload_optimizer(), engine.zero_offload_param()
    return found | {
        "accumulation": engine.gradient_accumulation_steps(),
        "clipping": engine.gradient_clipping(),
        "micro": engine.train_micro_batch_size_per_gpu(),
        "batch": engine.train_batch_size(),
        "global_steps": engine.global_steps,
        "micro_steps": engine.micro_steps,
        "stage": int(engine.zero_optimization_stage()),
        "optimizer": type(engine.basic_optimizer).__name__,
        "zero_optimizer": type(engine.optimizer).__name__,
        "scheduler": type(engine.lr_scheduler).__name__,
        "weight_decay": max(group["weight_decay"] for group in engine.basic_optimizer.param_groups),
        "eps": engine.basic_optimizer.param_groups[0].get("eps"),
        "initial_rate": engine.basic_optimizer.param_groups[0].get("initial_lr"),
        "peak": max(getattr(engine.lr_scheduler, "max_lrs", [0])),
        "warmup": getattr(engine.lr_scheduler, "warmup_num_steps", None),
        "bf16": engine.bfloat16_enabled(),
        "fp16": engine.fp16_enabled(),
        "autocast": str(engine.torch_autocast_dtype()) if engine.torch_autocast_enabled() else None,
        "offload_optimizer": str(getattr(offload.device, "value", offload.device)) if offload else None,
        "offload_param": str(getattr(parameters.device, "value", parameters.device)) if parameters else None,
        "zero_init": any(hasattr(p, "ds_id") for p in engine.module.parameters()),
    }


if __name__ == "__main__":
    main()
