"""Young's and Daly's intervals, and the closed form beside a simulation of failures."""

from __future__ import annotations

import math
import statistics

import pytest

from claw_plan.planner.goodput import Failures, daly_ns, expected_ratio, slowdown, young_ns
from claw_plan.simulator.failures import training_time


def test_intervals_of_a_checkpoint_of_a_minute_and_a_failure_every_three_hours():
    """sqrt(2 x 60 x 10,800) = 1138.4 s; Daly's higher order: 1099 s."""
    assert young_ns(60, 10_800) == pytest.approx(1138.4, abs=0.1)
    assert daly_ns(60, 10_800) == pytest.approx(1099, abs=1)
    assert daly_ns(300, 100) == 100


@pytest.mark.parametrize("checkpoint, mtbf", [(60, 10_800), (1080, 86_400), (5, 1_000)])
def test_daly_is_within_a_thousandth_of_the_best_interval(checkpoint, mtbf):
    def waste(interval):
        return expected_ratio(interval, checkpoint, 300, mtbf)

    best = min(waste(mtbf * i / 2000) for i in range(1, 4000))
    assert waste(daly_ns(checkpoint, mtbf)) <= best * 1.001


@pytest.mark.parametrize("restart", [0.0, 200.0])
def test_the_closed_form_is_what_a_simulation_gives(restart):
    """Within 1 %: 200 trainings of 400 intervals each."""
    checkpoint, mtbf = 60.0, 3_000.0
    interval = daly_ns(checkpoint, mtbf)
    work = 400 * interval
    times = [training_time(work, interval, checkpoint, restart, mtbf, seed) for seed in range(100)]
    ratio = expected_ratio(interval, checkpoint, restart, mtbf)
    assert statistics.mean(times) / work == pytest.approx(ratio, rel=0.01)


def test_more_nodes_fail_more_often_and_write_faster():
    failures = Failures(node_mtbf_ns=10**16, state_bytes=10**12)
    assert failures.mtbf_ns(4) == failures.mtbf_ns(1) / 4
    assert failures.checkpoint_ns(4) == failures.checkpoint_ns(1) / 4
    assert 1 < slowdown(failures, 1) < slowdown(failures, 64)
    assert "of the time is useful on 4 nodes" in failures.sentence(4)


def test_a_cluster_that_never_runs_is_bounded():
    assert expected_ratio(10, 1, 1, 0.001) == math.inf
    assert slowdown(Failures(node_mtbf_ns=1000, state_bytes=10**12), 8) == 1e6
