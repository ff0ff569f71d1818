from __future__ import annotations

import pytest

from claw_plan.profiles.measurement import Measurement
from claw_plan.profiles.work import CollectiveWork

WORK = CollectiveWork(op="send", bytes=1, group_size=2, nodes=1)


def test_middle_and_spread() -> None:
    measurement = Measurement(device="a/b", work=WORK, samples_ns=(30, 10, 20, 25))
    assert measurement.median_ns == 22
    assert measurement.spread_ns == 20


@pytest.mark.parametrize("samples_ns", [(), (1, -1)])
def test_a_failure_never_becomes_a_number(samples_ns: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="non-negative samples"):
        Measurement(device="a/b", work=WORK, samples_ns=samples_ns)
