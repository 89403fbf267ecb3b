#!/usr/bin/env bash
# accelerate 1.15.0: with DDP and compilation layer by layer, unwrap_model returns the DDP wrapper instead of the model.
#
# With `use_regional_compilation`, Accelerator.prepare copies the wrapper and the modules around the layers, and keeps the original
# wrapper as an attribute of the copy. `unwrap_model` removes the wrappers of the original, and then returns the copy, which still
# is a DistributedDataParallel. `keep_torch_compile=False` returns the model.
#
# Seen (a Llama of three layers, one process on a CPU over gloo):
#   compiled as a whole: OptimizedModule, save_pretrained True
#   layer by layer: DistributedDataParallel, save_pretrained False
#   layer by layer, keep_torch_compile=False: LlamaForCausalLM, save_pretrained True
#
# Why one would guess otherwise: the documented way to save is unwrap_model(model).save_pretrained(...). It works without
# compilation and with a model that is compiled as a whole; here it raises AttributeError after the training.
set -eu
where=$(mktemp -d)
trap 'rm -rf "$where"' EXIT
python3 -m venv "$where/env"
"$where/env/bin/pip" install -q torch==2.13.0 numpy==2.4.6
"$where/env/bin/pip" install -q accelerate==1.15.0 transformers==5.23.0
export HF_HOME="$where/cache" HF_HUB_OFFLINE=1 ACCELERATE_USE_CPU=true
export RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1
MASTER_PORT=$("$where/env/bin/python" -c "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); print(s.getsockname()[1])")
export MASTER_PORT
"$where/env/bin/python" -W ignore - 2>"$where/log" <<'END' || { status=$?; cat "$where/log"; exit $status; }
import sys

from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import TorchDynamoPlugin
from transformers import LlamaConfig, LlamaForCausalLM

sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 64}


def prepared(regional):
    AcceleratorState._reset_state(reset_partial_state=False)
    plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=regional)
    accelerator = Accelerator(cpu=True, dynamo_plugin=plugin)
    return accelerator, accelerator.prepare(LlamaForCausalLM(LlamaConfig(**sizes)))


def described(model):
    return f"{type(model).__name__}, save_pretrained {hasattr(model, 'save_pretrained')}"


accelerator, whole = prepared(False)
seen = [f"compiled as a whole: {described(accelerator.unwrap_model(whole))}"]
accelerator, layers = prepared(True)
seen.append(f"layer by layer: {described(accelerator.unwrap_model(layers))}")
model = accelerator.unwrap_model(layers, keep_torch_compile=False)
seen.append(f"layer by layer, keep_torch_compile=False: {described(model)}")
print(*seen, sep="\n")
expected = [
    "compiled as a whole: OptimizedModule, save_pretrained True",
    "layer by layer: DistributedDataParallel, save_pretrained False",
    "layer by layer, keep_torch_compile=False: LlamaForCausalLM, save_pretrained True",
]
print("as described" if seen == expected else "no longer as described")
sys.exit(seen != expected)
END
