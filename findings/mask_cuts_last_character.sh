#!/usr/bin/env bash
# transformers 5.23.0 with tokenizers 0.23.3: the assistant mask ends inside the last character of an answer.
#
# apply_chat_template(return_assistant_tokens_mask=True) ends the mask at the token that holds the last character of the
# {% generation %} block. A byte-level tokenizer writes a rare character, such as an emoji, as several tokens, and the
# question "which token holds this character" is answered with the first of them. The others are left out of the mask. A
# character of several tokens elsewhere in the answer is whole.
#
# Seen (end-of-turn token after the block; bytes as tokens, as a byte-level BPE writes characters that it did not merge):
#   'yes!': 4 of 4 tokens in the mask      '🗼 yes': 8 of 8      'yes 🗼': 5 of 8, which read 'yes �'
# With the end-of-turn token inside of the block all three are masked whole.
#
# Why one would guess otherwise: the mask is of tokens, and a token that encodes text of the block belongs to it. Answers
# in ASCII show nothing, and neither does an emoji elsewhere. A model that is trained with this mask is never taught to finish
# the emoji that ends its answer.
set -eu
where=$(mktemp -d)
trap 'rm -rf "$where"' EXIT
python3 -m venv "$where/env"
"$where/env/bin/pip" install -q transformers==5.23.0 tokenizers==0.23.3 jinja2==3.1.6
export HF_HOME="$where/cache" HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error
"$where/env/bin/python" -W ignore - <<'END'
import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

signs = sorted(pre_tokenizers.ByteLevel.alphabet())
core = Tokenizer(models.BPE(vocab={sign: i for i, sign in enumerate(signs)}, merges=[]))
core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
core.decoder = decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")
turn = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}INSIDE{% endgeneration %}OUTSIDE"
    "{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
)
templates = {
    "end of turn outside": turn.replace("INSIDE", "").replace("OUTSIDE", "<|end|>"),
    "end of turn inside": turn.replace("INSIDE", "<|end|>").replace("OUTSIDE", ""),
}
end = tokenizer.convert_tokens_to_ids("<|end|>")
found = {}
for name, template in templates.items():
    for answer in ("yes!", "🗼 yes", "yes 🗼"):
        rows = [{"role": "user", "content": "well?"}, {"role": "assistant", "content": answer}]
        out = tokenizer.apply_chat_template(rows, chat_template=template, return_dict=True, return_assistant_tokens_mask=True)
        masked = [i for i, mask in zip(out["input_ids"], out["assistant_masks"]) if mask and i != end]
        whole = len(answer.encode())
        found[name, answer] = whole - len(masked)
        print(f"{name}, {answer!r}: {len(masked)} of {whole} tokens in the mask, which read {tokenizer.decode(masked)!r}")
same = found == {key: 3 if key == ("end of turn outside", "yes 🗼") else 0 for key in found}
print("as described" if same else "CHANGED")
sys.exit(not same)
END
