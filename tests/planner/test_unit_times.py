"""Times prepared together are those made one by one."""

from __future__ import annotations

from itertools import product

from claw_plan.planner import unit_times
from claw_plan.planner.candidate import Candidate
from claw_plan.planner.unit_times import UnitTimes, pass_floor_ns


def test_prepared_times_are_those_made_alone(toys, monkeypatch):
    monkeypatch.setattr(unit_times, "WORTH_A_PROCESS", 2)
    problem = toys.problem(toys.graph(layers=3, flops=1000, hidden=10, width=8), toys.cluster())
    several = [
        Candidate(microbatch_size=size, recompute=recompute, schedule=schedule)
        for size, recompute, schedule in product(
            (1, 2, 3), ("none", "full", "half"), ("1F1B", "InterleavedZeroBubble")
        )
    ]
    prepared = UnitTimes(problem)
    prepared.prepare([*several, several[0]])
    monkeypatch.setattr(UnitTimes, "of", None)  # none is made after
    found = [prepared.floors(candidate) for candidate in several]
    monkeypatch.undo()
    assert found == [UnitTimes(problem).of(each, pass_floor_ns) for each in several]
    assert len({str(times) for times in found}) > 6


def test_what_is_known_of_another_batch_is_taken_over(toys):
    problem = toys.problem(global_batch=8)
    known, other = UnitTimes(problem), UnitTimes(problem.with_batch(4))
    one = known.floors(Candidate(microbatch_size=2))
    other.adopt(known)
    assert other.floors(Candidate(microbatch_size=2)) is one
    assert other.problem.training.global_batch == 4
