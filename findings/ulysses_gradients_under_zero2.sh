#!/usr/bin/env bash
# accelerate 1.15.0 with DeepSpeed 0.19.8 and transformers 5.23.0: sequence parallelism multiplies the gradients of ZeRO-1 and 2.
#
# `ParallelismConfig(sp_size=N, sp_backend="deepspeed")` gives each rank a part of each sequence. Under ZeRO-3 the gradient is that
# of the whole sequence; under ZeRO-1 and ZeRO-2 it is N times that. Clipping by norm then begins N times too early.
#
# Seen (a tiny Llama, 64 tokens, first step of Trainer, two processes on a CPU against one):
#   loss: equal under ZeRO-1, 2 and 3
#   norm of the gradient, two ranks over one: ZeRO-1 2.00, ZeRO-2 2.00, ZeRO-3 1.00
#
# Why one would guess otherwise: the stage shards states and does not change a training. Adam's update does not depend on the scale
# of its gradients, so the losses without clipping are right too. Compare `grad_norm` with that of a run without `sp_size`.
set -eu
where=$(mktemp -d)
trap 'rm -rf "$where"' EXIT
python3 -m venv "$where/env"
"$where/env/bin/pip" install -q torch==2.13.0 setuptools wheel numpy==2.4.6
DS_BUILD_OPS=0 "$where/env/bin/pip" install -q --no-build-isolation deepspeed==0.19.8
"$where/env/bin/pip" install -q transformers==5.23.0 accelerate==1.15.0
cat >"$where/seen.py" <<'END'
import json
import os
import sys

import torch
from torch.multiprocessing.spawn import start_processes

TOKENS = 64


def first_step(rank, ranks, stage, folder):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    from accelerate import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    handler = DeepSpeedSequenceParallelConfig(
        sp_seq_length=TOKENS, sp_seq_length_is_variable=False, sp_attn_implementation="sdpa"
    )
    shared = ParallelismConfig(sp_size=ranks, sp_backend="deepspeed", sp_handler=handler) if ranks > 1 else None
    zero = {"zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": 1, "gradient_clipping": "auto"}
    arguments = TrainingArguments(
        output_dir=f"{folder}/out", per_device_train_batch_size=1, max_steps=1, logging_steps=1, report_to="none",
        save_strategy="no", max_grad_norm=1e9, deepspeed=zero, parallelism_config=shared, disable_tqdm=True,
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=TOKENS, attn_implementation="sdpa",
    )
    tokens = torch.randint(0, 64, (TOKENS,))
    row = {"input_ids": tokens, "labels": tokens, "position_ids": torch.arange(TOKENS)}
    trainer = Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=[row])
    trainer.train()
    if rank == 0:
        seen = next(log for log in trainer.state.log_history if "grad_norm" in log)
        with open(f"{folder}/{stage}-{ranks}.json", "w") as file:
            json.dump([seen["loss"], seen["grad_norm"]], file)


def one_training(ranks, stage, folder, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    start_processes(first_step, (ranks, stage, folder), nprocs=ranks, start_method="spawn")
    with open(f"{folder}/{stage}-{ranks}.json") as file:
        return json.load(file)


if __name__ == "__main__":
    folder, *ports = sys.argv[1:]
    norms, same = [], True
    for stage in (1, 2, 3):
        (loss, norm), (other, larger) = (one_training(ranks, stage, folder, ports.pop()) for ranks in (1, 2))
        same &= abs(loss - other) < 1e-4
        norms.append(round(larger / norm, 2))
    print(f"\nloss: {'equal' if same else 'not equal'} under ZeRO-1, 2 and 3")
    ratios = ", ".join(f"ZeRO-{stage} {ratio:.2f}" for stage, ratio in enumerate(norms, 1))
    print(f"norm of the gradient, two ranks over one: {ratios}")
    same &= norms == [2.0, 2.0, 1.0]
    print("as described" if same else "CHANGED")
    sys.exit(not same)
END
export HF_HOME="$where/cache" HF_HUB_OFFLINE=1 DS_ACCELERATOR=cpu ACCELERATE_USE_DEEPSPEED=true GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1
ports=$("$where/env/bin/python" - <<'END'
import socket
held = [socket.socket() for _ in range(6)]
for one in held:
    one.bind(("127.0.0.1", 0))
print(*(one.getsockname()[1] for one in held))
END
)
"$where/env/bin/python" -W ignore "$where/seen.py" "$where" $ports 2>"$where/log" || { status=$?; cat "$where/log"; exit $status; }
