"""The source of a script's rows: ranks that each shuffle all rows seldom have one in common in their first batches."""

import hashlib
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from accelerate.data_loader import SkipBatchSampler
from torch.utils.data import BatchSampler, DataLoader, RandomSampler


def digest_source(loader: "DataLoader[Any] | None") -> str:
    """Return a digest of the data set from which ``loader`` draws every row once, in a random order; empty for others.

    It covers the number of rows and the first, the middle and the last one. Only torch's own sampler without
    replacement counts: others, such as `DistributedSampler` and those that Accelerate prepares, may leave rows to other
    ranks. A data set that cannot be read by index has no digest.
    """
    if loader is None:
        return ""
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    if type(sampler) is SkipBatchSampler:
        sampler = sampler.batch_sampler
    if type(sampler) is BatchSampler:
        sampler = sampler.sampler
    if type(sampler) is not RandomSampler or sampler.replacement:
        return ""
    try:
        count = len(loader.dataset)  # type: ignore[arg-type]
        with _same_random_numbers_afterwards():
            rows = [loader.dataset[index] for index in sorted({0, count // 2, count - 1})]
    except Exception:  # code of the user's, which may fail in any way outside its loader
        return ""
    digest = hashlib.sha256(str(count).encode())
    for part in _parts(rows):
        digest.update(part)
    return digest.hexdigest()[:16]


def find_shared_source(sources: Sequence[str], group_size: int) -> tuple[int, int] | None:
    """Return two ranks of different groups that draw from the same rows; None if there are none.

    Ranks of a group of ``group_size`` follow each other and need the same rows.
    """
    leaders: dict[str, int] = {}
    for leader in range(0, len(sources), group_size):
        if sources[leader] and sources[leader] in leaders:
            return leaders[sources[leader]], leader
        leaders[sources[leader]] = leader
    return None


@contextmanager
def _same_random_numbers_afterwards() -> Iterator[None]:
    """Restore the random generators of Python, numpy and torch, which a data set may use, on exit."""
    states = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng(devices=[]):
        yield
    random.setstate(states[0])
    numpy.random.set_state(states[1])


def _parts(value: Any) -> Iterator[bytes]:
    """Yield the bytes of what a row holds: tensors, arrays, text and numbers, in nested containers."""
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        yield value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, numpy.ndarray):
        yield value.tobytes()
    elif isinstance(value, Mapping):
        for key in value:
            yield str(key).encode()
            yield from _parts(value[key])
    elif isinstance(value, Iterable) and not isinstance(value, str | bytes):
        for one in value:
            yield from _parts(one)
    else:
        yield repr(value).encode()
