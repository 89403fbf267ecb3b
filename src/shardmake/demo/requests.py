"""A chat data set that a very small model can learn: a request in plain English, and the options of sbatch for it."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

_NODES = {1: "one", 2: "two", 3: "three", 4: "four", 6: "six", 8: "eight", 12: "twelve", 16: "sixteen"}
_GPUS = {1: "one", 2: "two", 4: "four", 8: "eight"}
_KINDS = {"a100": "A100", "h100": "H100", "h200": "H200", "l40s": "L40S", "v100": "V100", "mi300x": "MI300X"}
_HOURS = (1, 2, 3, 4, 6, 8, 10, 12, 18, 24, 36, 48)
_DAYS = {1: "one day", 2: "two days", 3: "three days", 5: "five days", 7: "a week"}
_MINUTES = {10: "ten minutes", 15: "a quarter of an hour", 20: "twenty minutes", 30: "half an hour"}
_PARTITIONS = ("gpu", "long", "debug", "short", "interactive", "preempt")
_MEMORY = (64, 128, 256, 512)
_SHORT = {"--nodes=": "-N", "--time=": "-t", "--partition=": "-p"}
_OPENINGS = ("I need", "Please give me", "Submit my job to", "Run this on", "Train the model on", "Can I have")


class Limit(NamedTuple):
    """A time limit in words and as Slurm writes it."""

    words: str
    option: str


@dataclass(frozen=True)
class Request:
    """The resources that somebody wants from Slurm."""

    nodes: int
    gpus: int
    kind: str
    limit: Limit
    partition: str | None
    memory: int | None
    exclusive: bool
    requeue: bool

    def short_options(self) -> str:
        """Return the same options in the short spelling that sbatch has for some of them."""
        words = self.options().split()
        for long, short in _SHORT.items():
            words = [word.replace(long, short) for word in words]
        return " ".join(words)

    def options(self) -> str:
        """Return the options of sbatch, always in the same order."""
        found = [f"--nodes={self.nodes}", f"--gpus-per-node={self.kind}:{self.gpus}", f"--time={self.limit.option}"]
        found += [f"--partition={self.partition}"] if self.partition else []
        found += [f"--mem={self.memory}G"] if self.memory else []
        found += ["--exclusive"] if self.exclusive else []
        found += ["--requeue"] if self.requeue else []
        return " ".join(found)

    def sentence(self, rng: random.Random) -> str:
        """Return the request in one of many phrasings."""
        nodes = rng.choice([str(self.nodes), _NODES[self.nodes]]) + (" node" if self.nodes == 1 else " nodes")
        further = list(self._clauses(rng))
        rng.shuffle(further)
        return f"{rng.choice(_OPENINGS)} {nodes}, {', '.join(further)}."

    def _clauses(self, rng: random.Random) -> Iterator[str]:
        gpus, kind = rng.choice([str(self.gpus), _GPUS[self.gpus]]), _KINDS[self.kind]
        each = "per node" if self.nodes == 1 else rng.choice(["each", "per node"])
        yield rng.choice([f"{gpus} {kind} {each}", f"{gpus} GPUs of type {kind} {each}", f"with {gpus} {kind} {each}"])
        yield rng.choice(["for {}", "at most {}", "it takes {}"]).format(self.limit.words)
        if self.partition:
            yield rng.choice(["partition {}", "in the partition {}", "in the {} partition"]).format(self.partition)
        if self.memory:
            yield rng.choice(["{} GB of memory", "with {} GB of RAM"]).format(self.memory)
        if self.exclusive:
            yield rng.choice(["nobody else on the nodes", "the nodes for me alone"])
        if self.requeue:
            yield rng.choice(["restart it if a node fails", "it may be restarted"])

    def conversation(self, rng: random.Random, answer: str | None = None) -> dict[str, list[dict[str, str]]]:
        """Return the request and ``answer``, by default the options, as chat messages."""
        question, answer = self.sentence(rng), answer or self.options()
        return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def make_requests(count: int, rng: random.Random) -> list[Request]:
    """Return ``count`` different requests."""
    found: dict[Request, None] = {}
    while len(found) < count:
        found[_random_request(rng)] = None
    return list(found)


def _random_request(rng: random.Random) -> Request:
    return Request(
        nodes=rng.choice(list(_NODES)),
        gpus=rng.choice(list(_GPUS)),
        kind=rng.choice(list(_KINDS)),
        limit=rng.choice(_LIMITS),
        partition=rng.choice([None, *_PARTITIONS]),
        memory=rng.choice([None, *_MEMORY]),
        exclusive=rng.random() < 0.3,
        requeue=rng.random() < 0.3,
    )


_LIMITS = [
    *(Limit("one hour" if hours == 1 else f"{hours} hours", f"{hours:02}:00:00") for hours in _HOURS),
    *(Limit(words, f"{days}-00:00:00") for days, words in _DAYS.items()),
    *(Limit(words, f"00:{minutes}:00") for minutes, words in _MINUTES.items()),
]
