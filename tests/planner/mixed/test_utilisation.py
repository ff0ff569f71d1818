"""Every nanosecond of every device is useful or lost to something that has a name."""

from __future__ import annotations

import pytest

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.mixed.plan import MixedCandidate, MixedRank, Pipeline, pipeline_on
from claw_plan.planner.mixed.utilisation import (
    DIVIDED,
    IDLE,
    KINDS,
    LOSSES,
    MICROBATCH,
    NAMES,
    USEFUL,
    WAITING,
    in_tenths,
)


def one_pipeline(batch: int) -> MixedCandidate:
    ranks = tuple(MixedRank(kind=k, place=0, candidate=Candidate(pp=2)) for k in (0, 1))
    return MixedCandidate(pipelines=(Pipeline(batch=batch, ranks=ranks, cuts=((0, 2), (2, 6))),))


def sharing(first: Candidate, second: Candidate, batches: tuple[int, int]) -> MixedCandidate:
    return MixedCandidate(
        pipelines=tuple(
            pipeline_on(kind, candidate, ((0, 6),), batch)
            for kind, (candidate, batch) in enumerate(zip((first, second), batches, strict=True))
        )
    )


@pytest.mark.parametrize(
    "mixed",
    [
        one_pipeline(8),
        sharing(Candidate(dp_shard=2), Candidate(dp_replicate=2), (4, 4)),
        sharing(Candidate(tp=2), Candidate(dp_shard=2, microbatch_size=2), (4, 4)),
        sharing(Candidate(), Candidate(recompute="full"), (2, 6)),
    ],
)
def test_shares_add_up_to_the_whole(toys, mixed_toys, mixed):
    kinds = [mixed_toys.ToyKind(), mixed_toys.ToyKind(flops_per_s=2e6, nic_bytes_per_s=1e6)]
    scorer = mixed_toys.mixed_scorer(toys, kinds, global_batch=8)
    scored = scorer.score(mixed)
    shares = scored.shares_of_speed
    assert set(shares) == {USEFUL, *LOSSES}
    assert sum(shares.values()) == pytest.approx(1, abs=1e-12)
    assert all(share >= -1e-9 for share in shares.values())
    assert round(sum(10 * share for share in in_tenths(shares).values())) == 1000
    speed = sum(2 * bounds.samples_per_s for bounds in scorer.share_bounds)
    assert scored.utilisation == pytest.approx(8e9 / speed / scored.step_time_ns, rel=1e-9)


def test_what_is_lost_has_the_right_name(toys, mixed_toys):
    """One device each, one twice as fast, no traffic to speak of; 100 + 2 x 1,000 + 2,000 flops.

    Of 8 samples each takes 4: the fast one waits for half of the step, a third of all speed.
    """
    graph = toys.graph(layers=2, hidden=0, width=1, tied=False)
    quick = {"devices": 1, "nic_bytes_per_s": 1e15}
    kinds = [mixed_toys.ToyKind(**quick), mixed_toys.ToyKind(**quick, flops_per_s=2e6)]
    scorer = mixed_toys.mixed_scorer(toys, kinds, global_batch=8, graph=graph)
    even = MixedCandidate(
        pipelines=tuple(pipeline_on(k, Candidate(), ((0, 4),), 4) for k in (0, 1))
    )
    shares = scorer.score(even).shares_of_speed
    assert shares[USEFUL] == pytest.approx(2 / 3, abs=2e-3)
    assert shares[WAITING] == pytest.approx(1 / 3, abs=2e-3)
    alone = MixedCandidate(pipelines=(pipeline_on(1, Candidate(), ((0, 4),), 8),))
    shares = scorer.score(alone).shares_of_speed
    assert shares[IDLE] == pytest.approx(1 / 3) and shares[WAITING] == 0
    assert shares[USEFUL] == pytest.approx(2 / 3, abs=2e-3)


def test_tensor_parallelism_loses_what_it_does_not_divide(toys, mixed_toys):
    """Ends are computed by both: 2,100 of 4,100 flops twice, so 2,100 of 6,200 are lost."""
    graph = toys.graph(layers=2, hidden=0, width=1, tied=False)
    kinds = [mixed_toys.ToyKind(), mixed_toys.ToyKind(flops_per_s=1.0001e6)]
    scorer = mixed_toys.mixed_scorer(toys, kinds, global_batch=4, graph=graph)
    pipelines = tuple(pipeline_on(k, Candidate(tp=2), ((0, 4),), 2) for k in (0, 1))
    shares = scorer.score(MixedCandidate(pipelines=pipelines)).shares_of_speed
    kernels = shares[USEFUL] + shares[DIVIDED]
    assert shares[DIVIDED] / kernels == pytest.approx(2100 / 6200, abs=1e-3)
    assert shares[MICROBATCH] == pytest.approx(0, abs=1e-6)
    assert shares[KINDS] > 0 and shares[NAMES["tp_comm_exposed"]] > 0


def test_tenths_of_a_percent_add_up(toys):
    assert in_tenths({"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}) == {"a": 33.4, "b": 33.3, "c": 33.3}
