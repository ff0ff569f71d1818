from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from claw_plan.cli.replay_report import print_replay, replay_object
from claw_plan.executor.replay import CollectiveRow, Replay, StepTime
from claw_plan.executor.replay_stragglers import Straggler
from claw_plan.executor.resimulate import Resimulation
from claw_plan.simulator.timeline import SIMULATED, Timeline

MS = 1_000_000


@pytest.fixture
def found() -> Replay:
    row = CollectiveRow(
        step=3, op="all_gather", bytes=None, count=2, group_size=None, duration_ns=5 * MS,
        transfer_ns=None, waiting_ns=None,
    )  # fmt: skip
    return Replay(
        traces=(),
        matched=(),
        world_size=None,
        steps=tuple(
            StepTime(number=number, start_ns=7 * MS, time_ns=20 * MS, by_rank_ns={0: 20 * MS})
            for number in (3, 4)
        ),
        typical=3,
        step_time_ns=20 * MS,
        range_ns=(18 * MS, 25 * MS),
        parts_ns={},
        utilisation={0: 0.0},
        collectives=(row,),
        stragglers=(Straggler(rank=4, late_ns=MS, share=0.05, cause="input"),),
        warnings=("one thing",),
    )


def test_what_is_not_known_is_null(found: Replay) -> None:
    value = replay_object(found, None, ("another",))
    assert value["collectives"] == [
        {"step": 3, "op": "all_gather", "bytes": None, "count": 2, "group_size": None,
         "duration_ms": 5.0, "transfer_ms": None, "waiting_ms": None}
    ]  # fmt: skip
    assert value["steps"][0]["start_ms"] == 0.0
    assert value["stragglers"] == [{"rank": 4, "cause": "input", "late_ms": 1.0, "share": 0.05}]
    assert value["warnings"] == ["one thing", "another"]
    assert "resimulated" not in value


def test_the_report_prints_what_is_known(found: Replay) -> None:
    predicted = Resimulation(
        step_time_ns=10 * MS,
        unchanged_ns=20 * MS,
        recorded_ns=20 * MS,
        timeline=Timeline(origin=SIMULATED, spans=()),
    )
    out = StringIO()
    print_replay(found, predicted, (), Console(file=out, width=100))
    text = out.getvalue()
    assert "2 steps of 18.0 ms to 25.0 ms; step 3: 20.0 ms" in text
    assert "all_gather" in text and "one thing" in text
    assert "with the change      10.0 ms  -50" in text
    assert "Critical path" not in text  # without times there is none
