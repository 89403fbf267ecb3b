"""The process group of the ranks."""


def leave_together() -> None:
    """End the process group, if there is one: a rank that just goes sometimes aborts after all the work is done."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
