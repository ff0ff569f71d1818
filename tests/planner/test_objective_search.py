"""Bounds of times become bounds of values; what opens them is opened once."""

from __future__ import annotations

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.objective import Cost
from claw_plan.planner.objective_search import Valued
from claw_plan.planner.search import Branch, Evaluated

CHOICE = (Candidate(dp_shard=8), ((0, 6),))


def test_a_run_takes_the_least_value_of_any_number_of_devices():
    inner = Branch(20, (8, 1), 1, lambda: Evaluated(CHOICE, 25))
    outer = Branch(10, (), 1, lambda: [inner])
    valued = Valued(Cost(devices_per_node=4), [2, 6, 8])
    run = valued.branch(outer)
    assert run.bound_ns == 10
    (group,) = run.open()
    assert (group.bound_ns, group.order) == (40, (8, 1))
    assert group.open() == Evaluated(CHOICE, 50)
    assert valued.times_ns == {CHOICE: 25}


def test_what_does_not_fit_has_no_value():
    pruned = Branch(20, (8,), 3, lambda: Evaluated(None, None, 3))
    opened = Valued(Cost(devices_per_node=4), [8]).branch(pruned).open()
    assert opened == Evaluated(None, None, 3)
