"""Utilisation over unlike devices."""

from __future__ import annotations

import pytest

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.mixed.plan import MixedCandidate, pipeline_on


@pytest.mark.parametrize(
    "ratio, shares, best", [(1.3, (28, 36), 0.994), (2, (20, 44), 0.970), (3, (16, 48), 1.0)]
)
def test_shares_by_speed_reach_the_bound_of_the_batch_over_all_speeds(
    toys, mixed_toys, ratio, shares, best
):
    """Four devices of each of two kinds, 64 samples: algebra.

    No traffic and no optimizer to speak of: only rounding to whole samples is lost.
    """
    graph = toys.graph(layers=2, hidden=0, width=1, tied=False)
    kinds = [
        mixed_toys.ToyKind(devices=4, nic_bytes_per_s=1e12),
        mixed_toys.ToyKind(devices=4, nic_bytes_per_s=1e12, flops_per_s=ratio * 1e6),
    ]
    scorer = mixed_toys.mixed_scorer(toys, kinds, global_batch=64, graph=graph)

    def utilisation(division):
        pipelines = tuple(
            pipeline_on(kind, Candidate(dp_replicate=4), ((0, 4),), share)
            for kind, share in enumerate(division)
        )
        return scorer.score(MixedCandidate(pipelines=pipelines)).utilisation

    # Equal shares take as long as the slow kind, 2 / (1 + ratio) of the speed that there is.
    assert utilisation((32, 32)) == pytest.approx(2 / (1 + ratio), abs=0.004)
    assert utilisation(shares) == pytest.approx(best, abs=0.007)
    sample_ns = 3 * 4_100_000  # forward and two of it backward: 100 + 2 x 1,000 + 2,000 flops
    speeds = [bounds.samples_per_s for bounds in scorer.share_bounds]
    assert speeds == pytest.approx([1e9 / sample_ns, 1e9 * ratio / sample_ns], rel=1e-4)


def test_a_stage_must_fit_in_its_own_kind_of_device(toys, mixed_toys):
    graph = toys.graph(layers=2, width=64)
    kinds = [
        mixed_toys.ToyKind(devices=1, tensor_bytes=10_000),
        mixed_toys.ToyKind(devices=1, flops_per_s=2e6),
    ]
    scorer = mixed_toys.mixed_scorer(toys, kinds, global_batch=4, graph=graph)
    for kind, fits in ((0, False), (1, True)):
        pipeline = pipeline_on(kind, Candidate(), ((0, 4),), 4)
        assert scorer.fits(MixedCandidate(pipelines=(pipeline,))) is fits
