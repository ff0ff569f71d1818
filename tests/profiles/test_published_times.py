"""Published collectives as planning sees them."""

from __future__ import annotations

from dataclasses import replace

from claw_plan.profiles.cost_model import ClusterCostModel
from claw_plan.profiles.hardware_text import hardware_of
from claw_plan.profiles.published_rows import CollectiveRow
from claw_plan.profiles.published_times import collective_times_ns
from claw_plan.profiles.work import CollectiveWork


def test_collectives_are_the_cost_models_own() -> None:
    hardware = hardware_of("H100", 8, 8)
    work = CollectiveWork(op="all_reduce", bytes=1 << 26, group_size=8, nodes=1)
    row = CollectiveRow(
        id="a",
        family="f",
        group="g",
        cluster=hardware.cluster,
        device_name=hardware.device_name,
        work=work,
        measured_ns=1.0,
    )
    expected = ClusterCostModel(hardware.cluster).collective(work).alone_ns
    part = replace(row, id="b", time_share=0.125)
    assert collective_times_ns([row, part]) == {"a": expected, "b": expected / 8}
