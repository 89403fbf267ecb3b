"""Groups of ranks that read the same rows: those of a tensor-parallel or sequence-parallel group."""

from accelerate import Accelerator
from torch.distributed.device_mesh import init_device_mesh

from shardmake.core.private_names import private


def share_rows(accelerator: Accelerator, group_size: int) -> None:
    """Let each ``group_size`` ranks that follow each other read the same rows from prepared data loaders.

    Accelerate's data loaders read this mesh, but Accelerate creates it only after them if DeepSpeed trains (accelerate
    1.15). Without it, each rank of a group would silently get different data. They know a group by the name "tp"
    whatever it shares. FSDP would shard over a mesh of Accelerate's own, so only the data loaders get this one.
    """
    if group_size > 1 and getattr(accelerator.state, "ds_device_mesh", None) is None:
        shape = (accelerator.num_processes // group_size, group_size)
        mesh = init_device_mesh(accelerator.device.type, shape, mesh_dim_names=("dp_shard", "tp"))
        accelerator.state.ds_device_mesh = mesh
        private(accelerator).prepare_device_mesh = lambda: mesh
