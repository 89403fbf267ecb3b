"""The engine that the ranks must find, from the table of strategies."""

from shardmake.config.models import TORCH_DTYPES
from shardmake.run.plan import Choice
from shardmake.run.training_settings import ExpectedDeepSpeed, ExpectedEngine, ExpectedFsdp


def expected_engine(choice: Choice, fsdp_version: int) -> ExpectedEngine:
    """Return what each rank compares with the engine that was built, before it trains."""
    spec = choice.spec
    common = ExpectedEngine(
        engine=spec.library,
        zero_stage=spec.zero_stage,
        world_size=choice.world_size,
        dtype=TORCH_DTYPES[choice.precision],
        offload_optimizer=spec.offload_optimizer,
        offload_param=spec.offload_param,
    )
    if spec.is_deepspeed:
        return ExpectedDeepSpeed(**dict(common), tensor_parallel=choice.tensor_parallel)
    if spec.is_fsdp:
        return ExpectedFsdp(
            **dict(common),
            fsdp_version=fsdp_version,
            reshard_after_forward=spec.reshard_after_forward,
            replicas=choice.nodes if spec.hybrid else 1,
        )
    return common
