"""The engine that the ranks must find, from the table of strategies."""

from shardmake.config.models import TORCH_DTYPES
from shardmake.run.plan import Choice
from shardmake.run.training_settings import ExpectedDeepSpeed, ExpectedEngine, ExpectedFsdp


def expected_engine(choice: Choice, fsdp_version: int) -> ExpectedEngine:
    """Return what each rank compares with the engine that was built, before it trains."""
    engine = choice.spec
    common = ExpectedEngine(
        engine=engine.library,
        zero_stage=engine.zero_stage,
        world_size=choice.world_size,
        dtype=TORCH_DTYPES[choice.precision],
        offload_optimizer=engine.offload_optimizer,
        offload_param=engine.offload_param,
    )
    if engine.is_deepspeed:
        return ExpectedDeepSpeed(**dict(common), tensor_parallel=choice.tensor_parallel)
    if engine.is_fsdp:
        return ExpectedFsdp(
            **dict(common),
            fsdp_version=fsdp_version,
            reshard_after_forward=engine.reshard_after_forward,
            replicas=choice.nodes if engine.hybrid else 1,
        )
    return common
