"""Read damaged copies of a checkpoint under a memory limit: python flips.py FOLDER COUNT SEED; prints the outcomes."""

import collections
import json
import random
import resource
import signal
import sys
from pathlib import Path

from shardmake.checkpoint.formats.registry import read_checkpoint
from shardmake.checkpoint.formats.torch_zip_reader import read_record
from shardmake.checkpoint.formats.unpickle import locate
from shardmake.core.errors import CheckpointError

LIMIT = 512 << 20
SECONDS = 20


def plan(folder: Path) -> dict[str, object]:
    """Return every tensor's pieces with the bytes of their records, whose checksums are compared as in a merge."""
    return {
        name: [
            (read_record(locate(piece.record, tensor.dtype)), piece.start, piece.at, piece.count)
            for piece in tensor.pieces
        ]
        for name, tensor in read_checkpoint(folder).tensors.items()
    }


def main(folder: Path, count: int, seed: int) -> None:
    """Damage one file at a time, nine times by a bit and the tenth by its length, and count the outcomes."""
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process if one reading hangs
    expected, files = plan(folder), sorted(path for path in folder.rglob("*") if path.is_file())
    outcomes: collections.Counter[str] = collections.Counter()
    chance = random.Random(seed)
    for number in range(count):
        path = chance.choice(files)
        content = path.read_bytes()
        at = chance.randrange(len(content))
        changed = bytes([content[at] ^ 1 << chance.randrange(8)])
        path.write_bytes(content[:at] if number % 10 == 9 else content[:at] + changed + content[at + 1 :])
        signal.alarm(SECONDS)
        try:
            found = plan(folder)
            same = found == expected
            renamed = all(found[name] == expected[name] for name in found.keys() & expected.keys())
            outcomes["same plan" if same else "other names" if renamed else "another plan"] += 1
        except CheckpointError:
            outcomes["CheckpointError"] += 1
        except Exception as error:  # the test reports it
            outcomes[f"{type(error).__name__}: {path.name} byte {at}"] += 1
        signal.alarm(0)
        path.write_bytes(content)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    sys.stdout.write(json.dumps({**outcomes, "peak MiB": peak}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
