#!/usr/bin/env bash
# transformers 5.23.0: adding tokens throws away a head that from_pretrained has just refused to tie.
#
# Some published folders say tie_word_embeddings: true and hold a head and an embedding of different values. from_pretrained
# keeps both and says that it will not tie them. model.config still says true, though, and resize_token_embeddings ends with
# tie_weights, which reads the config alone: the head becomes the embedding. The resize reports that it has initialized new
# rows of the head, and these are gone as well. Nothing warns, and the model saves and loads with the wrong head.
#
# Seen (a head of other values than the embedding, two rows added):
#   loaded: head and embedding are one weight: False, difference of logits to the saved model: 0.0000
#   resized: head and embedding are one weight: True, difference of logits of the old tokens: 0.7811
#   with tie_word_embeddings=False for from_pretrained: one weight: False, difference: 0.0000
#
# Why one would guess otherwise: the message reads as a decision for the model that is returned, and the resize handles head
# and embedding as two weights until its last line.
set -eu
where=$(mktemp -d)
trap 'rm -rf "$where"' EXIT
python3 -m venv "$where/env"
"$where/env/bin/pip" install -q torch==2.13.0
"$where/env/bin/pip" install -q transformers==5.23.0
export HF_HOME="$where/cache" HF_HUB_OFFLINE=1
"$where/env/bin/python" -W ignore - "$where/model" <<'END'
import json
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()
folder = sys.argv[1]
torch.manual_seed(0)
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
saved = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False)).eval()
saved.save_pretrained(folder)
config = Path(folder, "config.json")
config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": True}))
tokens = torch.arange(10)[None]


@torch.no_grad()
def state(model):
    """Whether head and embedding are one weight, and how far the logits of the old tokens are from the saved model's."""
    difference = (model(tokens).logits[..., :64] - saved(tokens).logits).abs().max().item()
    return model.lm_head.weight is model.model.embed_tokens.weight, difference


model = LlamaForCausalLM.from_pretrained(folder).eval()
loaded = state(model)
model.resize_token_embeddings(66, mean_resizing=False)
resized = state(model)
other = LlamaForCausalLM.from_pretrained(folder, tie_word_embeddings=False).eval()
other.resize_token_embeddings(66, mean_resizing=False)
untied = state(other)
print(f"loaded: head and embedding are one weight: {loaded[0]}, difference of logits to the saved model: {loaded[1]:.4f}")
print(f"resized: head and embedding are one weight: {resized[0]}, difference of logits of the old tokens: {resized[1]:.4f}")
print(f"with tie_word_embeddings=False for from_pretrained: one weight: {untied[0]}, difference: {untied[1]:.4f}")
same = loaded == (False, 0.0) and resized[0] and resized[1] > 0.1 and untied == (False, 0.0)
print("as described" if same else "CHANGED")
sys.exit(not same)
END
