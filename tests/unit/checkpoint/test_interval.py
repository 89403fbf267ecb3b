"""Young's interval between saves and its cost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmake.checkpoint.interval import interval_seconds, job_mtbf_seconds, lost_share


def test_values_of_the_literature() -> None:
    """Eight nodes with 6.5 failures per 1000 node-days save for a minute every four hours and lose less than 1%."""
    mtbf = job_mtbf_seconds(24 * 1000 / 6.5, nodes=8)
    assert mtbf / 3600 == pytest.approx(461.5, abs=0.1) and interval_seconds(60, mtbf) / 60 == pytest.approx(235, abs=1)
    assert lost_share(60, interval_seconds(60, mtbf), mtbf) == pytest.approx(0.0085, abs=1e-4)


@given(save=st.floats(0.1, 1e3), mtbf=st.floats(1e4, 1e8), factor=st.floats(0.1, 10))
def test_interval_is_optimal(save: float, mtbf: float, factor: float) -> None:
    best = interval_seconds(save, mtbf)
    assert lost_share(save, best, mtbf) <= lost_share(save, best * factor, mtbf) * (1 + 1e-12)
