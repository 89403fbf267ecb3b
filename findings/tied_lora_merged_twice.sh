#!/usr/bin/env bash
# PEFT 0.21.2 with transformers 5.23.0: LoRA on a tied head with ensure_weight_tying=True is merged twice.
#
# The flag puts the same two LoRA matrices on the embedding and on the head, so the adapter trains and runs as one tied
# layer. The weight below is one tensor too. merge_and_unload goes through both layers, and adds the update to that tensor
# once for each. The merged model is still tied, saves and loads without a complaint, and has the update at double strength.
#
# Seen (target_modules=["lm_head"]; the same with ["embed_tokens"]):
#   both layers have the same update: True
#   the merged weight is the old one plus 2.00 times the update
#   largest difference of logits, merged and not: 40.1711
# Without the tie: 1.00 times the update, and a difference of 0.0000.
# The merge warns that tied layers in target_modules can lead to "complications", also with the flag; it does not say which.
#
# Why one would guess otherwise: without the flag the two layers run with different weights, so that no merge into one tensor
# can be right, and the warning reads as if meant for that. With the flag there is one update for one tensor, and adding it
# once is exact.
set -eu
where=$(mktemp -d)
trap 'rm -rf "$where"' EXIT
python3 -m venv "$where/env"
"$where/env/bin/pip" install -q torch==2.13.0
"$where/env/bin/pip" install -q transformers==5.23.0 peft==0.21.2
export HF_HOME="$where/cache" HF_HUB_OFFLINE=1
"$where/env/bin/python" -W ignore - "$where" <<'END'
import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()

sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, pad_token_id=None)
tokens = torch.arange(8)[None]
same = True
for tied, target in ((True, "lm_head"), (True, "embed_tokens"), (False, "lm_head")):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=tied)).eval()
    before = model.lm_head.weight.detach().clone()
    config = LoraConfig(r=2, lora_alpha=2, target_modules=[target], ensure_weight_tying=tied, init_lora_weights=False)
    adapted = get_peft_model(model, config).eval()
    update = model.lm_head.get_delta_weight("default").detach().clone()
    shared = tied and torch.equal(update, model.model.embed_tokens.get_delta_weight("default"))
    with torch.no_grad():
        expected = adapted(tokens).logits
        merged = adapted.merge_and_unload().eval()
        merged.save_pretrained(f"{sys.argv[1]}/{tied}{target}")
        again = LlamaForCausalLM.from_pretrained(f"{sys.argv[1]}/{tied}{target}").eval()
        difference = (again(tokens).logits - expected).abs().max().item()
    change = again.lm_head.weight.detach() - before
    times = ((change * update).sum() / (update * update).sum()).item()
    print(f"tied: {tied}, target: {target}")
    print(f"  both layers have the same update: {shared}")
    print(f"  the merged weight is the old one plus {times:.2f} times the update")
    print(f"  largest difference of logits, merged and not: {difference:.4f}")
    exact = torch.allclose(change, (2 if tied else 1) * update, atol=1e-5)
    same &= exact and shared == tied and (difference > 0.1) == tied
print("as described" if same else "CHANGED")
sys.exit(not same)
END
