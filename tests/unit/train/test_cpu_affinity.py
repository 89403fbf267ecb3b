"""Ranks with offload are bound to the cores near their GPU, among those that the job may use."""

import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shardmake.train import trainer
from shardmake.train.trainer import bind_to_gpu, parse_cores


@pytest.mark.parametrize(("text", "cores"), [("0-3,8,12-13\n", {0, 1, 2, 3, 8, 12, 13}), ("5\n", {5}), ("\n", set())])
def test_cores_as_the_kernel_lists_them(text: str, cores: set[int]) -> None:
    assert parse_cores(text) == cores


@pytest.mark.parametrize(
    ("listed", "bound", "message"),
    [
        ("4-7,36-39", {4, 5}, "Bound to the 2 of 6 cores near GPU 0000:1b:00.0."),
        ("0-31", None, ""),
        ("32-63", None, "Not bound to the cores near GPU 0000:1b:00.0"),
        (None, None, "Not bound to the cores near GPU 0000:1b:00.0"),
    ],
    ids=["part-of-the-job", "all-of-the-job", "outside-the-job", "unknown"],
)
def test_a_rank_is_bound_to_the_cores_of_the_job_near_its_gpu(
    listed: str | None,
    bound: set[int] | None,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if listed is not None:
        (tmp_path / "0000:1b:00.0").mkdir()
        (tmp_path / "0000:1b:00.0/local_cpulist").write_text(f"{listed}\n")
    calls: dict[int, set[int]] = {}
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    monkeypatch.setattr(trainer, "PCI_DEVICES", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3, 4, 5})
    monkeypatch.setattr(os, "sched_setaffinity", calls.__setitem__)
    with caplog.at_level(logging.INFO, "shardmake.train.trainer"):
        bind_to_gpu(torch.device("cuda", 3))
    assert message in caplog.text and bool(message) == bool(caplog.text)
    assert all(cores == bound for cores in calls.values())
    assert (os.getpid() in calls) == (bound is not None)
