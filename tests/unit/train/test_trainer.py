"""Models that Accelerate compiles layer by layer, and ranks with offload that are bound to the cores near their GPU."""

import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import TorchDynamoPlugin
from accelerate.utils.other import compile_regions_fsdp2
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shardmake.data.dataset import Collator, check_isolation
from shardmake.train import trainer
from shardmake.train.trainer import bind_to_gpu, compile_layers
from tests.unit.train.conftest import tiny_llama


def test_layers_compiled_in_place_keep_names_hooks_and_static_shapes(one_rank: None) -> None:
    graphs: list[list[torch.SymInt]] = []

    def record(graph: torch.fx.GraphModule, inputs: list[object]) -> object:
        if len(inputs) > 3:  # a layer; torch 2.14 compiles embedding and head as one function, the head for any length
            graphs.append([value for value in inputs if isinstance(value, torch.SymInt)])
        return graph.forward

    torch.compiler.reset()
    plain, model = (tiny_llama(num_hidden_layers=3, vocab_size=64, pad_token_id=None) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    compile_regions_fsdp2(model, backend=record)
    for part in (*model.model.layers, model):
        fully_shard(part)
    collator = Collator(64, 0, packing=True, flat=False)
    check_isolation(model, collator, torch.device("cpu"))
    assert graphs == []
    ids = torch.arange(64) % 60
    batch = collator([{"input_ids": ids, "labels": ids, "position_ids": torch.arange(64)}])
    losses = [one(**batch).loss for one in (plain, model)]
    losses[1].backward()
    assert float(losses[0]) == pytest.approx(float(losses[1]), rel=1e-6)
    assert graphs == [[]], "one graph for all layers"
    assert list(model.state_dict()) == list(plain.state_dict())
    assert all(isinstance(parameter.grad, DTensor) for parameter in model.parameters())


def test_trainer_asks_accelerate_for_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "false")
    compile_layers()
    assert TorchDynamoPlugin(backend="inductor").use_regional_compilation


@pytest.mark.parametrize(("listed", "bound", "message"), [
    ("1,4-7,36-39", {1, 4, 5}, "Bound to the 3 of 6 cores near GPU 0000:1b:00.0."), ("0-31", None, ""),
    ("", None, "Not bound to the cores near GPU 0000:1b:00.0"), ("32-63", None, "Not bound to the cores near GPU 0000:1b:00.0"),
    (None, None, "Not bound to the cores near GPU 0000:1b:00.0"),
], ids=["part-of-the-job", "all-of-the-job", "empty", "outside-the-job", "unknown"])  # fmt: skip
def test_a_rank_is_bound_to_the_cores_of_the_job_near_its_gpu(
    listed: str | None, bound: set[int] | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    if listed is not None:
        (tmp_path / "0000:1b:00.0").mkdir()
        (tmp_path / "0000:1b:00.0/local_cpulist").write_text(f"{listed}\n")
    calls: dict[int, set[int]] = {}
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    monkeypatch.setattr(trainer, "PCI_DEVICES", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3, 4, 5})
    monkeypatch.setattr(os, "sched_setaffinity", calls.__setitem__)
    caplog.set_level(logging.INFO, "shardmake.train.trainer")
    bind_to_gpu(torch.device("cuda", 3))
    assert message in caplog.text and bool(message) == bool(caplog.text)
    assert all(cores == bound for cores in calls.values())
    assert (os.getpid() in calls) == (bound is not None)
