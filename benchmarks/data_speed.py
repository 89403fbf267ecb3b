"""Speed, memory and scratch of the data stage, beside a plain `datasets.map` and beside TRL's preparation.

    python -m benchmarks.data_speed [--large] [--only CASE] [RESULTS.json]
    python -m benchmarks.data_speed --gigabytes N [RESULTS.json]

Chats of few turns and of 50 turns, and a template with and without generation marks, with 1 and 2 processes. Each
program reads the same JSON lines in a process of its own, and start-up is not counted: the time begins after imports
and the load of the tokenizer. The plain map renders and tokenizes in batches. TRL renders, tokenizes and packs. The
data stage reads, renders, tokenizes, finds the learned tokens, checks, packs and writes. Ratios are of one run; beside
other load, those of CPU seconds are the better ones.

``large``: 100,000 chats, and 20,000 of 50 turns; otherwise 2,000 and 200. Memory is the anonymous memory of all
processes together, scratch the largest size of the run's folder without what stays in it. A run that is killed halfway
and started again shows what a kill costs. With ``--gigabytes``, the data stage alone runs on one file of that size,
which repeats the rows of 100,000 chats.
"""

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import psutil

from benchmarks.consolidate import anonymous_tree
from benchmarks.machine import machine

LENGTH: Final = 2048
HEAD: Final = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
TAIL: Final = "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
BODY: Final = "{{ m['content'] + '<|im_end|>' }}"
LEARNED: Final = f"{{% generation %}}{BODY}{{% endgeneration %}}"
MARKED: Final = f"{{% if m['role'] == 'assistant' %}}{LEARNED}{{% else %}}{BODY}{{% endif %}}"
TEMPLATES: Final = {
    "plain template": f"{HEAD}{BODY}{{{{ '\n' }}}}{TAIL}",
    "marked template": f"{HEAD}{MARKED}{{{{ '\n' }}}}{TAIL}",
}
OURS: Final = """
import shardmake.data.build, shardmake.data.stage, trl.data_utils, datasets
from shardmake.config.models import Run
from shardmake.data.stage import prepare
from shardmake.run.tokenizer import load_tokenizer
from shardmake.run.paths import RunDir
run = Run.model_validate(request["run"])
load_tokenizer(run)
start = now()
prepare(run, RunDir(Path(request["folder"], "runs", "speed")), cpus=request["processes"])
"""
PLAIN: Final = """
import datasets
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(request["run"]["model"])
def encode(batch):
    texts = [tokenizer.apply_chat_template(messages, tokenize=False) for messages in batch["messages"]]
    return {"input_ids": tokenizer(texts, add_special_tokens=False)["input_ids"]}
rows = datasets.Dataset.from_json(request["run"]["data"]["train"], cache_dir=request["folder"])
processes = request["processes"] if request["processes"] > 1 else None
start = now()
rows.map(encode, batched=True, batch_size=100, remove_columns=rows.column_names, num_proc=processes)
"""
TRL: Final = """
import datasets
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer
model = request["run"]["model"]
tokenizer = AutoTokenizer.from_pretrained(model)
network = LlamaForCausalLM(LlamaConfig.from_pretrained(model))
rows = datasets.Dataset.from_json(request["run"]["data"]["train"], cache_dir=request["folder"])
config = SFTConfig(request["folder"], packing=True, max_length=request["run"]["sequence_length"], report_to="none",
    assistant_only_loss=request["marked"], use_cpu=True, bf16=False,
    dataset_num_proc=request["processes"] if request["processes"] > 1 else None)
start = now()
SFTTrainer(network, config, train_dataset=rows, processing_class=tokenizer)
"""
FRAME: Final = """
import json, os, sys, time
from pathlib import Path
request = json.loads(sys.argv[1])
def now():
    return time.perf_counter(), sum(os.times()[:4])
def main():
{body}
    print("SECONDS", *(end - begin for begin, end in zip(start, now())))
if __name__ == "__main__":
    main()
"""


class Measured(NamedTuple):
    """One program on one case: seconds, CPU seconds, and the peaks of memory and of the folder's size in bytes."""

    seconds: float
    cpu: float
    memory: int
    folder: int


def words(seed: int) -> list[str]:
    """Return pseudo-words, the frequent ones first."""
    draw = random.Random(seed)
    syllables = ["ka", "ro", "mi", "ten", "sol", "vir", "lu", "pas", "en", "tor", "gri", "ny"]
    return ["".join(draw.choices(syllables, k=draw.randint(1, 4))) for _ in range(5000)]


def chats(count: int, turns: int) -> Iterator[dict[str, Any]]:
    """Yield conversations of ``turns`` answers (0: one to three), of about 60 words a message."""
    draw, known = random.Random(7), words(7)
    weights = [1 / (rank + 1) for rank in range(len(known))]
    drawn = draw.choices(known, weights, k=200_000)
    for _ in range(count):
        messages = []
        for _ in range(turns or draw.randint(1, 3)):
            for role, most in (("user", 40), ("assistant", 120)):
                at, size = draw.randrange(len(drawn) - most), draw.randint(most // 4, most)
                messages.append({"role": role, "content": " ".join(drawn[at : at + size])})
        yield {"messages": messages}


def write_model(folder: Path, template: str) -> None:
    """Write a byte-level BPE, trained on the words, and a small config."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    rule = pre_tokenizers.Split(Regex(r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([rule, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    special, alphabet = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=4000, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator((" ".join(words(7)) for _ in range(1)), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = template
    fast.save_pretrained(folder)
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaConfig(vocab_size=len(fast), max_position_embeddings=LENGTH, **small).save_pretrained(folder)


def size_of(folder: Path) -> int:
    """Return the bytes of all files below ``folder``."""
    total = 0
    for where, _, names in os.walk(folder):  # which passes over folders that disappear
        for name in names:
            with suppress(FileNotFoundError):
                total += Path(where, name).stat().st_size
    return total


def measure(body: str, request: dict[str, Any], kill_after: float | None = None) -> Measured:
    """Run a program to its end, or kill it with all its processes ``kill_after`` seconds after it began to work."""
    program = FRAME.format(body="\n".join(f"    {line}" for line in body.strip().splitlines()))
    script = Path(request["folder"], "program.py")
    script.write_text(program)
    with Path(request["folder"], "log").open("w+") as log:
        process = psutil.Popen([sys.executable, str(script), json.dumps(request)], stdout=log, stderr=log)
        memory = folder = 0
        began: float | None = None
        while process.poll() is None:
            work = Path(request["folder"], "runs")
            memory = max(memory, anonymous_tree(process.pid))
            folder = max(folder, size_of(work) if work.exists() else 0)
            began = began or (time.perf_counter() if folder else None)
            if kill_after and began and time.perf_counter() - began > kill_after:
                for one in (*process.children(recursive=True), process):
                    one.kill()
            time.sleep(0.1)
        log.seek(0)
        text = log.read()
    found = [line.split()[1:] for line in text.splitlines() if line.startswith("SECONDS")]
    if not found and kill_after is None:
        raise RuntimeError(f"the program failed:\n{text[-3000:]}")
    seconds, cpu = map(float, found[0] if found else (0, 0))
    return Measured(seconds, cpu, memory, folder)


def write_case(scratch: Path, count: int, turns: int, template: str, least_bytes: int = 0) -> dict[str, Any]:
    """Write model and rows of a case below ``scratch`` and return its run; rows repeat up to ``least_bytes``."""
    base = scratch / "case"
    (base / "model").mkdir(parents=True)
    write_model(base / "model", TEMPLATES[template])
    train, lines = base / "train.jsonl", "".join(json.dumps(row) + "\n" for row in chats(count, turns))
    with train.open("w") as file:
        for _ in range(max(1, -(-least_bytes // len(lines)))):
            file.write(lines)
    run = {"model": str(base / "model"), "data": {"train": str(train)}, "sequence_length": LENGTH}
    return run | {"global_batch_size": 8, "max_steps": 1, "learning_rate": 1e-4}


def one_file(gigabytes: float, scratch: Path) -> dict[str, Any]:
    """Return the figures of the data stage with two processes on one file."""
    run = write_case(scratch, 100_000, 0, "plain template", int(gigabytes * 1e9))
    work, size = scratch / "work", Path(run["data"]["train"]).stat().st_size
    work.mkdir()
    ours = measure(OURS, {"run": run, "folder": str(work), "processes": 2})
    scratch_bytes = ours.folder - size_of(work / "runs/speed/data")
    return {
        "case": "one file", "input_bytes": size, "seconds": round(ours.seconds), "memory_mib": ours.memory >> 20,
        "scratch_times_input": round(scratch_bytes / size, 2),
    }  # fmt: skip


def compare(name: str, count: int, turns: int, template: str, scratch: Path) -> dict[str, Any]:
    """Return the figures of one case."""
    run = write_case(scratch, count, turns, template)
    train = Path(run["data"]["train"])
    figures: dict[str, Any] = {"case": name, "rows": count, "input_bytes": train.stat().st_size}

    def once(body: str, processes: int, kill_after: float | None = None, *, fresh: bool = True) -> Measured:
        folder = scratch / "work"
        if fresh:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        request = {"run": run, "folder": str(folder), "processes": processes, "marked": "marked" in template}
        return measure(body, request, kill_after)

    for processes in (1, 2):
        plain, trl, ours = (once(body, processes) for body in (PLAIN, TRL, OURS))
        written = size_of(scratch / "work/runs/speed/data")
        figures[f"{processes} processes"] = {
            "rows_per_second": round(count / ours.seconds), "times_plain": round(ours.seconds / plain.seconds, 2),
            "times_faster_than_trl": round(trl.seconds / ours.seconds, 2),
            "cpu_times_plain": round(ours.cpu / plain.cpu, 2), "cpu_times_less_than_trl": round(trl.cpu / ours.cpu, 2),
            "memory_mib": ours.memory >> 20,
            "scratch_times_input": round((ours.folder - written) / train.stat().st_size, 2),
        }  # fmt: skip
    killed = once(OURS, 2, kill_after=ours.seconds / 2)
    again = once(OURS, 2, fresh=False)
    finished = bool(killed.seconds)  # before the kill, as it may on a small case
    figures["time_after_a_kill_halfway"] = None if finished else round(again.seconds / ours.seconds, 2)
    shutil.rmtree(scratch / "case")
    return figures


def main() -> None:
    """Measure every case and print, or write, the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", type=Path)
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--gigabytes", type=float)
    options = parser.parse_args()
    few, many = (100_000, 20_000) if options.large else (2_000, 200)
    cases = [
        (f"{label}, {template}", count, turns, template)
        for label, count, turns in (("1 to 3 turns", few, 0), ("50 turns", many, 50))
        for template in TEMPLATES
    ]
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes share the cores, not threads within one
    with tempfile.TemporaryDirectory() as scratch:
        if options.gigabytes:
            found = [one_file(options.gigabytes, Path(scratch))]
        else:
            found = [compare(*case, Path(scratch)) for case in cases if options.only in case[0]]
    text = json.dumps({"machine": machine(), "large": options.large, "cases": found}, indent=2)
    if options.results:
        options.results.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
