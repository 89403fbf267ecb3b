"""Merge checkpoints with one flipped bit or one truncated file each, and count the outcomes.

    python -m benchmarks.consolidate_flips CHECKPOINT... [--count 2000] [--seed 1] [--out FILE]

CHECKPOINT is a small checkpoint, such as ``tests/workflow/consolidate_train.py`` writes. Nine of ten copies have one
flipped bit, the tenth is cut. Half of the places are anywhere in a file, the other half in its first 16 KiB, where
torch writes the pickle. Each copy is merged completely, with ``--raw``, so that no config decides about names. Memory
beside that of libraries is limited to 512 MiB, and a merge that takes more than 30 s ends the benchmark.
"""

import argparse
import collections
import hashlib
import itertools
import json
import logging
import multiprocessing
import os
import random
import resource
import shutil
import signal
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks.machine import machine
from shardmake.checkpoint.formats.dtypes import Target
from shardmake.checkpoint.formats.registry import read_checkpoint
from shardmake.consolidate.merge import consolidate
from shardmake.core.errors import ShardmakeError

LIMIT = 512 << 20
SECONDS = 30
PICKLE = 16 << 10
DTYPES: tuple[Target, ...] = ("keep", "bf16")
SAME, OTHER = "same bytes", "other bytes, types, shapes or names"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", type=Path, nargs="+")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/consolidate_flips.json"))
    options = parser.parse_args()
    found = {}
    for checkpoint, dtype in itertools.product(options.checkpoints, DTYPES):
        context = multiprocessing.get_context("spawn")  # the peak memory is that of one checkpoint
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            contents = read_checkpoint(checkpoint)
            name = f"{contents.format}, {contents.world_size} ranks, --dtype {dtype}"
            found[name] = pool.submit(damage, checkpoint, dtype, options.count, options.seed).result()
    result = {"machine": machine(), "limit_mib": LIMIT >> 20, "seed": options.seed, "merges": found}
    options.out.write_text(json.dumps(result, indent=2) + "\n")


def damage(checkpoint: Path, dtype: Target, count: int, seed: int) -> dict[str, int]:
    """Merge ``count`` damaged copies; return how many ended in each way, and the peak resident memory in MiB."""
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process if a merge hangs
    logging.disable()
    outcomes: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as root:
        copy = shutil.copytree(checkpoint, Path(root) / "checkpoint")
        expected = merged(copy, Path(root), dtype)
        before = peak_mib()
        files = sorted(path for path in copy.rglob("*") if path.is_file() and path.suffix != ".py")
        chance = random.Random(seed)
        for number in range(count):
            path = chance.choice(files)
            content = path.read_bytes()
            path.write_bytes(damaged(content, chance, is_cut=number % 10 == 9))
            signal.alarm(SECONDS)
            outcomes[outcome(copy, Path(root), dtype, expected)] += 1
            signal.alarm(0)
            path.write_bytes(content)
    return {**dict(outcomes.most_common()), "peak_mib_undamaged": before, "peak_mib": peak_mib()}


def damaged(content: bytes, chance: random.Random, *, is_cut: bool) -> bytes:
    """Return ``content`` with one other bit, or only its beginning."""
    at = chance.randrange(len(content) if chance.random() < 0.5 else min(len(content), PICKLE))
    changed = bytes([content[at] ^ 1 << chance.randrange(8)])
    return content[:at] if is_cut else content[:at] + changed + content[at + 1 :]


def outcome(checkpoint: Path, root: Path, dtype: Target, expected: dict[str, str]) -> str:
    """Merge ``checkpoint`` and say how that ended."""
    try:
        found = merged(checkpoint, root, dtype)
    except ShardmakeError as error:
        left = ", with files left behind" if any((root / name).exists() for name in ("out", ".out.partial")) else ""
        return type(error).__name__ + left
    except Exception as error:  # the benchmark is about these
        return f"traceback of {type(error).__name__}"
    return SAME if found == expected else OTHER


def merged(checkpoint: Path, root: Path, dtype: Target) -> dict[str, str]:
    """Merge to ``root/out``; return a digest of the bytes, type and shape of each tensor by name."""
    out = root / "out"
    consolidate(checkpoint, out, dtype=dtype, raw=True, workers=2)
    content = (out / "model.safetensors").read_bytes()
    shutil.rmtree(out)
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    return {
        name: hashlib.sha256(
            f"{entry['dtype']} {entry['shape']} ".encode()
            + content[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]]
        ).hexdigest()
        for name, entry in header.items()
    }


def peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


if __name__ == "__main__":
    os.environ.setdefault("MALLOC_ARENA_MAX", "2")
    main()
