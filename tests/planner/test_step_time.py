"""Steps that are extrapolated from a few microbatches, against all of them simulated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from claw_plan.planner import step_time as module
from claw_plan.planner.candidate import Candidate
from claw_plan.planner.lower import lower
from claw_plan.planner.problem import Problem, Training
from claw_plan.planner.schedules import INTERLEAVED
from claw_plan.planner.shards import ShardSizes
from claw_plan.planner.step_time import simulated, step_time
from claw_plan.profiles.trainer import NEUTRAL, Trainer

MEGATRON = Trainer(name="megatron", keeps_compute_copy=True, overlap_loss=0.4, host_ns=3000.0)
FSDP = replace(NEUTRAL, overlap_loss=0.3)
ROUND_ROBIN = Candidate(pp=4, schedule=INTERLEAVED, stages_per_rank=2)


def posed(toys, trainer, global_batch, **sizes) -> Problem:
    cluster = toys.cluster(devices=8)
    return Problem(
        graph=toys.graph(layers=14, **sizes),
        cluster=cluster,
        cost=toys.cost(cluster),
        training=Training(
            global_batch=global_batch,
            seq_len=8,
            precision="bfloat16",
            optimizer="adamw",
            memory_headroom=0.0,
        ),
        trainer=trainer,
    )


def even_cuts(stages: int) -> tuple[tuple[int, int], ...]:
    """Of the 16 units."""
    each = 16 // stages
    return tuple((stage * each, (stage + 1) * each) for stage in range(stages))


@pytest.mark.parametrize("microbatches", [1, 2, 5, 9, 16, 33, 64])
@pytest.mark.parametrize(
    ("candidate", "trainer"),
    [
        (Candidate(), NEUTRAL),
        (Candidate(pp=4), NEUTRAL),
        (Candidate(pp=4, recompute="full"), MEGATRON),
        (Candidate(pp=8, schedule="GPipe"), NEUTRAL),
        (Candidate(pp=2, tp=2), MEGATRON),
        (Candidate(pp=2, dp_shard=2, zero=1), MEGATRON),
        (Candidate(dp_shard=4), FSDP),
        (Candidate(dp_shard=4, zero=2), FSDP),
    ],
)
def test_an_extrapolated_step_is_the_simulated_one(toys, candidate, trainer, microbatches):
    problem = posed(toys, trainer, microbatches * candidate.dp)
    check(problem, candidate, even_cuts(candidate.pp))


@pytest.mark.parametrize("microbatches", [3, 4, 8, 10, 12, 40, 64])
@pytest.mark.parametrize("trainer", [NEUTRAL, MEGATRON])
def test_rounds_of_an_interleaved_schedule_repeat_too(toys, trainer, microbatches):
    check(posed(toys, trainer, microbatches), ROUND_ROBIN, even_cuts(8))


def check(problem: Problem, candidate: Candidate, cuts) -> None:
    shards = ShardSizes(problem.graph)
    whole = simulated(lower(problem, shards, candidate, cuts))
    found = step_time(problem, shards, candidate, cuts)
    count = candidate.num_microbatches(problem.training.global_batch)
    # Flows are rounded up to a nanosecond each, on each of the microbatches.
    assert found.ns == pytest.approx(whole.ns, abs=2 * count)
    assert sum(found.parts_ns.values()) == pytest.approx(found.ns, rel=1e-6)
    assert sum(whole.parts_ns.values()) == pytest.approx(whole.ns, rel=1e-9)


def test_only_as_many_microbatches_are_lowered_as_it_takes(toys, monkeypatch):
    asked = []

    def counting(problem, shards, candidate, cuts, held=(), count=0):
        asked.append(count)
        return lower(problem, shards, candidate, cuts, held, count)

    monkeypatch.setattr(module, "lower", counting)
    problem = posed(toys, NEUTRAL, 4000)
    step_time(problem, ShardSizes(problem.graph), Candidate(pp=4), even_cuts(4))
    assert max(asked) <= 16
    asked.clear()
    step_time(problem, ShardSizes(problem.graph), ROUND_ROBIN, even_cuts(8))
    assert max(asked) <= 32


def test_the_parts_of_one_device_are_its_kernels(toys):
    """No traffic at all: two samples' passes and the optimizer, 28 bytes an element."""
    problem = posed(toys, NEUTRAL, 2)
    found = step_time(problem, ShardSizes(problem.graph), Candidate(microbatch_size=2), ((0, 16),))
    assert found.parts_ns["gemm:float32"] == 2 * 3 * (14_000_000 + 100_000 + 2_000_000)
    assert found.parts_ns["optimizer"] == 28 * (64 * 8 + 14 * 64) // 10


def test_exchanges_are_told_by_their_axis(toys):
    problem = posed(toys, NEUTRAL, 1)
    found = step_time(problem, ShardSizes(problem.graph), Candidate(tp=2), ((0, 16),))
    assert found.parts_ns["tp"] == 14 * 2 * (5000 + 100_000)
