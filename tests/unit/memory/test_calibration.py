"""The fit of a GPU's own memory to the probe's measurements."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmake.core.errors import ShardmakeError
from shardmake.core.units import GIB
from shardmake.memory.calibration import fit


@given(
    st.integers(0, GIB), st.one_of(st.none(), st.integers(0, GIB)), st.integers(0, GIB), st.integers(0, GIB),
    st.lists(st.integers(GIB, 8 * GIB), min_size=2, max_size=4),
)  # fmt: skip
def test_a_fit_recovers_its_parts(context: int, nccl: int | None, pools: int, occupied: int, sizes: list[int]) -> None:
    rest = context + (nccl or 0) + occupied
    observations = [(size + pools, size + pools + rest, size) for size in sizes]
    found = fit(observations, nccl, occupied, "a GPU", "node7", "today")
    assert (found.context, found.nccl, found.pools) == (context, nccl, pools)


def test_less_reserved_than_predicted_gives_no_pools() -> None:
    assert fit([(GIB, 2 * GIB, 3 * GIB)], None, 0, "", "", "").pools == 0


def test_impossible_measurements_are_rejected() -> None:
    with pytest.raises(ShardmakeError, match="Another process used the GPU"):
        fit([(GIB, GIB // 2, GIB)], None, 0, "", "", "")
