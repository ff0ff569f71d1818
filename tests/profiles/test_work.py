from __future__ import annotations

from typing import Any

import pytest

from claw_plan.profiles.work import CollectiveWork, OpWork


def op(**changes: Any) -> OpWork:
    values: dict[str, Any] = {"kind": "gemm", "dims": (1, 2, 3, 4), "dtype": "float32"}
    return OpWork(**(values | {"flops": 48, "bytes": 104} | changes))


def test_equal_work_is_one_key() -> None:
    assert {op(): 1}[op()] == 1
    assert op() != op(phase="backward")


@pytest.mark.parametrize("change", [{"kind": "magic"}, {"flops": -1}, {"bytes": -1}])
def test_kernels_that_cannot_be(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="but got"):
        op(**change)


@pytest.mark.parametrize(
    "change", [{"op": "gossip"}, {"bytes": -1}, {"group_size": 0}, {"nodes": 0}, {"nodes": 3}]
)
def test_collectives_that_cannot_be(change: dict[str, Any]) -> None:
    values: dict[str, Any] = {"op": "send", "bytes": 1, "group_size": 2, "nodes": 1}
    assert CollectiveWork(**values).backend == "nccl"
    with pytest.raises(ValueError, match=r"but got|not a collective"):
        CollectiveWork(**(values | change))
