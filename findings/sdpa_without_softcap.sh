#!/usr/bin/env bash
# transformers 5.17.0: Gemma 2 under sdpa is another model than under eager, and nothing says so.
#
# Gemma 2 bounds its attention scores (`attn_logit_softcapping`). Its class declares support of sdpa, which is also the default, and
# passes the bound to the attention function. The function for sdpa takes it among its further arguments and does not use it.
# transformers 5.23.0 raises an error in its place.
#
# Seen (two layers with random weights, a bound of 0.5, one process on a CPU):
#   chosen without being asked: sdpa
#   largest difference of the logits from eager, with the bound: more than 0.01: True
#   largest difference without the bound: below 0.0001: True
#   warnings: 0
#
# Why one would guess otherwise: kernels differ by rounding, a class that lacks a kernel says so, and trainings in sdpa and
# in eager are compared as equal.
set -eu
where=$(mktemp -d)
trap 'rm -rf "$where"' EXIT
python3 -m venv "$where/env"
"$where/env/bin/pip" install -q torch==2.13.0 numpy==2.4.6
"$where/env/bin/pip" install -q transformers==5.17.0
export HF_HOME="$where/cache" HF_HUB_OFFLINE=1
"$where/env/bin/python" - 2>"$where/log" <<'END' || { status=$?; cat "$where/log"; exit $status; }
import sys
import warnings

import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}
sizes |= {"num_key_value_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 1, "initializer_range": 0.2}
ids = torch.arange(24)[None]


def difference(bound):
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(Gemma2Config(**sizes, attn_logit_softcapping=bound)).eval()
    chosen = model.config._attn_implementation
    logits = model(ids).logits
    model.set_attn_implementation("eager")
    return chosen, (logits - model(ids).logits).abs().max().item()


with torch.no_grad(), warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    chosen, bounded = difference(0.5)
    free = difference(None)[1]
seen = [
    f"chosen without being asked: {chosen}",
    f"largest difference of the logits from eager, with the bound: more than 0.01: {bounded > 0.01}",
    f"largest difference without the bound: below 0.0001: {free < 1e-4}",
    f"warnings: {sum('softcap' in str(one.message) for one in warned)}",
]
print(*seen, sep="\n")
expected = [
    "chosen without being asked: sdpa",
    "largest difference of the logits from eager, with the bound: more than 0.01: True",
    "largest difference without the bound: below 0.0001: True",
    "warnings: 0",
]
print("as described" if seen == expected else f"no longer as described: {bounded} {free}")
sys.exit(seen != expected)
END
