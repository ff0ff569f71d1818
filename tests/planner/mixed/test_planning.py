"""The answer on several kinds is never slower than what equal devices can do."""

from __future__ import annotations

import pytest

from claw_plan.planner.mixed.planning import plan_alone, plan_mixed, report_of
from claw_plan.planner.score import Scorer
from claw_plan.planner.search import SearchReport
from claw_plan.planner.search_space import search_space
from claw_plan.planner.space import Space


@pytest.mark.parametrize("ratio", [2, 4])
def test_unlike_devices_beat_one_kind_alone_and_all_divided_alike(toys, mixed_toys, ratio):
    """Eight samples over links that cost nothing: 3 and 5, or 1 and 7, instead of 4 and 4."""
    kinds = [
        mixed_toys.ToyKind(devices=1, nic_bytes_per_s=1e9),
        mixed_toys.ToyKind(devices=1, nic_bytes_per_s=1e9, flops_per_s=ratio * 1e6),
    ]
    graph = toys.graph(layers=3, hidden=10)
    whole = mixed_toys.mixed_scorer(toys, kinds, global_batch=8, graph=graph).problem.whole
    scorer = Scorer(whole)
    slowest = search_space(scorer, Space(whole, {}))
    known_ns = slowest.times_ns[slowest.ranked[0][0]]
    answer = plan_mixed(plan_alone(whole, mixed_toys.ToyMixedCost), known_ns=known_ns)
    assert answer.mixed is not None
    alone = answer.alone.fastest
    assert alone is not None and alone[0].name == "k1"
    assert answer.mixed.step_time_ns < min(known_ns, alone[1].step_time_ns)
    assert answer.bound_ns is not None and answer.bound_ns <= answer.mixed.step_time_ns


def test_what_fits_on_no_kind_is_told(toys, mixed_toys):
    kinds = [
        mixed_toys.ToyKind(devices=1, tensor_bytes=10),
        mixed_toys.ToyKind(devices=1, flops_per_s=2e6, tensor_bytes=10),
    ]
    whole = mixed_toys.mixed_scorer(toys, kinds, global_batch=2).problem.whole
    answer = plan_mixed(plan_alone(whole, mixed_toys.ToyMixedCost), known_ns=None)
    assert answer.mixed is None and answer.alone.fastest is None
    assert all(isinstance(found, str) for found in answer.alone.found.values())


def test_the_report_counts_both_searches_and_keeps_the_wider_gap(toys, mixed_toys):
    kinds = [
        mixed_toys.ToyKind(devices=1, nic_bytes_per_s=1e9, flops_per_s=speed * 1e6)
        for speed in (1, 2)
    ]
    graph = toys.graph(layers=2, hidden=10)
    whole = mixed_toys.mixed_scorer(toys, kinds, global_batch=8, graph=graph).problem.whole
    answer = plan_mixed(plan_alone(whole, mixed_toys.ToyMixedCost), known_ns=None)
    assert answer.mixed is not None
    alike = SearchReport(
        space=10, space_per_knob={}, bound_pruned=7, memory_pruned=1, simulated=2, seconds=0.5,
        gap=0.0,
    )  # fmt: skip
    report = report_of(answer, alike, answer.mixed.step_time_ns)
    assert report.space == 10 + answer.searched.space + answer.shared.space
    assert answer.bound_ns is not None
    expected = 1 - answer.bound_ns / answer.mixed.step_time_ns
    assert report.gap == pytest.approx(expected) and 0 <= report.gap < 1
