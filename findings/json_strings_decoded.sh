#!/usr/bin/env bash
# datasets 5.2.0: one row with a number makes load_dataset("json") decode other rows' strings that read as JSON.
#
# A column of strings loads as strings. When one row of the file has a number or an object there, the column gets the type
# Json, which is for rows of different types. There a string that happens to be JSON is taken for text that is
# already encoded, so it comes back decoded, without a warning.
#
# Seen (value in the file -> value in the data set, with the row 7 added):
#   '07' -> 7    '1.50' -> 1.5    'true' -> True    'null' -> None    '{"city": "Paris"}' -> {'city': 'Paris'}
#   'Paris' -> 'Paris'
# Also seen: with on_mixed_types=None the same file is an error.
#
# Why one would guess otherwise: the type is there to let rows differ, and in JSON itself "07" and 7 are different values. So
# answers to compare as text, and the arguments of tool calls, which some services send as a string of JSON and others as an
# object, are expected to come back as written. And whether a row changes depends on a row elsewhere in the file.
set -eu
where=$(mktemp -d)
trap 'rm -rf "$where"' EXIT
python3 -m venv "$where/env"
"$where/env/bin/pip" install -q datasets==5.2.0
export HF_HOME="$where/cache" HF_HUB_OFFLINE=1 HF_DATASETS_DISABLE_PROGRESS_BARS=1
"$where/env/bin/python" - "$where" <<'END'
import json
import sys
from pathlib import Path

from datasets import load_dataset

folder = Path(sys.argv[1])


def load(name, values, **options):
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps({"answer": value}) + "\n" for value in values))
    return load_dataset("json", data_files=str(file), split="train", **options)["answer"][:]


texts = ["07", "1.50", "true", "null", '{"city": "Paris"}', "Paris"]
alone = load("strings", texts)
mixed = load("mixed", [*texts, 7])
print("strings alone come back as written:", alone == texts)
for text, value in zip(texts, mixed):
    print(f"with a number in the last row: {text!r} -> {value!r}")
try:
    load("strict", [*texts, 7], on_mixed_types=None)
    refused = False
except Exception as error:
    refused = True
    print("on_mixed_types=None:", error.__cause__)
expected = [7, 1.5, True, None, {"city": "Paris"}, "Paris", 7]
same = alone == texts and refused and [(type(a), a) for a in mixed] == [(type(b), b) for b in expected]
print("as described" if same else "CHANGED")
sys.exit(not same)
END
