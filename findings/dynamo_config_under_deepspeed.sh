#!/usr/bin/env bash
# accelerate 1.15.0: what a configuration file says of torch.compile is lost when the same file names DeepSpeed.
#
# `dynamo_config` in the file of `accelerate launch`, or `--dynamo_backend`, reaches the program as ACCELERATE_DYNAMO_* variables.
# For DeepSpeed another function of the launcher builds the environment, and it sets none of them. The program trains without
# compilation; neither the launcher nor Accelerator says so.
#
# Seen (one process on a CPU, two files that differ in `distributed_type` alone):
#   MULTI_GPU: INDUCTOR True
#   DEEPSPEED: NO False
#   lines of the launcher about it: 0
#
# Why one would guess otherwise: the file is one, Accelerator compiles a DeepSpeed engine if its plugin asks for it, and for all
# other kinds of launch, FSDP too, the same keys work.
set -eu
where=$(mktemp -d)
trap 'rm -rf "$where"' EXIT
python3 -m venv "$where/env"
"$where/env/bin/pip" install -q torch==2.13.0 setuptools wheel numpy==2.4.6
DS_BUILD_OPS=0 "$where/env/bin/pip" install -q --no-build-isolation deepspeed==0.19.8
"$where/env/bin/pip" install -q accelerate==1.15.0
cd "$where"
cat >show.py <<'END'
from accelerate.utils import TorchDynamoPlugin

plugin = TorchDynamoPlugin()
print(plugin.backend.value, plugin.use_regional_compilation)
END
export DS_ACCELERATOR=cpu
port=$(env/bin/python -c "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); print(s.getsockname()[1])")
for kind in MULTI_GPU DEEPSPEED; do
  cat >"$kind.yaml" <<END
compute_environment: LOCAL_MACHINE
distributed_type: $kind
num_machines: 1
num_processes: 1
mixed_precision: 'no'
use_cpu: false
dynamo_config:
  dynamo_backend: INDUCTOR
  dynamo_use_regional_compilation: true
END
  env/bin/accelerate launch --config_file "$kind.yaml" --main_process_port "$port" show.py >out 2>"$kind.log" || { cat "$kind.log"; exit 1; }
  echo "$kind: $(tail -n 1 out)" | tee -a seen
done
echo "lines of the launcher about it: $(grep -ciE 'dynamo|compil' DEEPSPEED.log || true)" | tee -a seen
diff - seen <<'END' || { echo "no longer as described"; exit 1; }
MULTI_GPU: INDUCTOR True
DEEPSPEED: NO False
lines of the launcher about it: 0
END
echo "as described"
