"""A submitit job of two nodes for the harness's own test: each task adds its rank plus one over the network."""

import sys

import submitit
import torch
from submitit.helpers import TorchDistributedEnvironment
from torch import distributed


def add_up() -> tuple[int, str]:
    """Return the sum of rank + 1 over all tasks, and the host of their rendezvous."""
    environment = TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
    distributed.init_process_group("gloo")
    total = torch.tensor([environment.rank + 1])
    distributed.all_reduce(total)
    distributed.destroy_process_group()
    return int(total.item()), environment.master_addr


if __name__ == "__main__":
    executor = submitit.SlurmExecutor(folder=sys.argv[1], max_num_timeout=0)
    executor.update_parameters(nodes=2, ntasks_per_node=1, cpus_per_task=1, mem="1GB", time=5, wckey=None)
    for result in executor.submit(add_up).results():
        print(*result)
