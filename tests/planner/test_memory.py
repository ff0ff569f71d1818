"""Peaks worked out by hand on the toy model (hidden 100 bytes a sample).

A unit's input is 100, what it saves 400, its forward peak 100 and its backward peak 200 bytes a
sample; the tied table has 512 elements, each of the four blocks 64.
"""

from __future__ import annotations

import pytest

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.memory_moments import moments
from claw_plan.planner.score import Scorer

ELEMENTS = 512 + 4 * 64


def peak(problem, candidate, stage=0):
    scorer = Scorer(problem)
    path = scorer.bounds.stage_path(candidate)
    return scorer.memory.stages(candidate, path.cuts)[stage]


def cpu_problem(toys, **settings):
    return toys.problem(toys.graph(layers=4), toys.cluster(devices=8, kind="cpu"), **settings)


def test_one_device(toys):
    """Small activations: the optimizer's temporaries of the largest tensor make the peak."""
    memory = peak(cpu_problem(toys, global_batch=1), Candidate())
    assert (
        memory.parts
        == {
            "parameters": 4 * ELEMENTS,
            "optimizer": 8 * ELEMENTS,
            "gradients": 4 * ELEMENTS,
            "activations": 0,
            "workspace": 2 * 4 * 512,
            "buffers": 0,
            "context": 0,
        }
        or memory.peak_bytes >= 12 * ELEMENTS + 6 * 500 + 200
    )


def test_activations_at_the_first_backward(toys):
    """With wide activations the peak is there, in the loss, before any gradient is made."""
    graph = toys.graph(layers=4, hidden=10_000)
    problem = toys.problem(graph, toys.cluster(devices=8, kind="cpu"), global_batch=1)
    memory = peak(problem, Candidate())
    assert memory.parts["activations"] == 6 * 50_000 + 20_000
    assert "gradients" not in memory.parts


@pytest.mark.parametrize("stage, held", [(0, 4), (1, 3), (2, 2), (3, 1)])
def test_1f1b_holds_as_many_microbatches_as_stages_remain(toys, stage, held):
    graph = toys.graph(layers=4, hidden=10_000, ends=False, tied=False)
    problem = toys.problem(graph, toys.cluster(devices=4, kind="cpu"), global_batch=8)
    units = [2, 1, 1, 2][stage]
    memory = peak(problem, Candidate(pp=4), stage)
    assert memory.parts["activations"] == held * units * 50_000 + 20_000


def test_gpipe_holds_all(toys):
    graph = toys.graph(layers=4, hidden=10_000, ends=False, tied=False)
    problem = toys.problem(graph, toys.cluster(devices=4, kind="cpu"), global_batch=8)
    memory = peak(problem, Candidate(pp=4, schedule="GPipe"), 3)
    assert memory.parts["activations"] == 8 * 2 * 50_000 + 20_000


def test_recompute_keeps_inputs_and_remakes_one_block(toys):
    """4 blocks keep 10,000 each, both ends 50,000; one block's 40,000 are made again."""
    graph = toys.graph(layers=4, hidden=10_000)
    problem = toys.problem(graph, toys.cluster(devices=8, kind="cpu"), global_batch=1)
    memory = peak(problem, Candidate(recompute="full"))
    at_last_block = 50_000 + 4 * 10_000 + 40_000 + 20_000
    at_epilogue = 2 * 50_000 + 4 * 10_000 + 20_000
    assert memory.parts["activations"] == max(at_last_block, at_epilogue)


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_recompute_of_the_first_blocks_keeps_the_others(toys, blocks):
    """The peak is in the loss: what the first blocks make again comes when the rest is gone."""
    graph = toys.graph(layers=4, hidden=10_000)
    problem = toys.problem(graph, toys.cluster(devices=8, kind="cpu"), global_batch=1)
    memory = peak(problem, Candidate(recompute="full", recompute_blocks=blocks))
    held = 2 * 50_000 + blocks * 10_000 + (4 - blocks) * 50_000
    assert memory.parts["activations"] == held + 20_000


def test_every_stage_recomputes_its_own_first_blocks(toys):
    graph = toys.graph(layers=6, hidden=10_000, ends=False, tied=False)
    problem = toys.problem(graph, toys.cluster(devices=2, kind="cpu"), global_batch=1)
    candidate = Candidate(pp=2, recompute="full", recompute_blocks=2)
    model = Scorer(problem).memory
    assert model.in_flight_bytes(candidate, ((0, 4), (4, 8))) == 2 * 50_000 + 2 * 10_000
    assert model.in_flight_bytes(candidate, ((0, 2), (2, 8))) == 4 * 50_000 + 2 * 10_000


def wide(toys, global_batch=4):
    """Four weights of 64 x 64 that outweigh the table and all activations."""
    graph = toys.graph(layers=4, width=64, tied=False)
    return toys.problem(graph, toys.cluster(devices=8, kind="cpu"), global_batch=global_batch)


WEIGHT, TABLE = 4 * 64 * 64, 4 * 64 * 64


@pytest.mark.parametrize(("ranks", "kept"), [(0, 0), (2, 2)])
def test_neighbours_keep_their_part_of_blocks_until_backward(toys, ranks, kept):
    """When the last block's backward begins, three others are still kept in halves."""
    problem = wide(toys)
    model = Scorer(problem).memory
    candidate = Candidate(dp_shard=4, reshard_ranks=ranks)
    sizes = model._sizes(candidate, 0, ((0, 6),))
    gathered = max(moment.gathered for moment in moments(sizes) if not moment.workspace)
    assert gathered == TABLE + 2 * WEIGHT + WEIGHT + kept * WEIGHT // 2


@pytest.mark.parametrize(("microbatches", "weights"), [(1, 2), (4, 3)])
def test_blocks_of_a_pipeline_stay_gathered_after_a_backward(toys, microbatches, weights):
    """Both of the stage's, and what the one before is reduced from; else one is freed by then."""
    model = Scorer(wide(toys, global_batch=4 * microbatches)).memory
    sizes = model._sizes(Candidate(pp=2, dp_shard=4), 0, ((0, 3),))
    gathered = max(moment.gathered for moment in moments(sizes))
    assert gathered == TABLE + weights * WEIGHT


def test_a_group_of_blocks_is_gathered_whole(toys):
    problem = wide(toys)
    peaks = {}
    for blocks in (1, 2, 4):
        sizes = Scorer(problem).memory._sizes(
            Candidate(dp_shard=4, blocks_per_group=blocks), 0, ((0, 6),)
        )
        peaks[blocks] = max(moment.gathered for moment in moments(sizes))
    # A group, the next one's, and what the one before is reduced from.
    assert peaks == {1: TABLE + 3 * WEIGHT, 2: TABLE + 4 * WEIGHT, 4: TABLE + 4 * WEIGHT}


def test_states_shrink_with_the_shard_degree(toys):
    problem = cpu_problem(toys, global_batch=8)
    for shards in (1, 2, 4, 8):
        parts = peak(problem, Candidate(dp_shard=shards)).parts
        assert parts["parameters"] == 4 * ELEMENTS // shards
        assert parts["optimizer"] == 8 * ELEMENTS // shards


def test_accelerators_keep_their_context(toys):
    problem = toys.problem(toys.graph(), toys.cluster(kind="cuda"), global_batch=4)
    assert peak(problem, Candidate()).parts["context"] == 1_800_000_000


def test_headroom_is_taken_off_the_capacity(toys):
    cluster = toys.cluster(memory_bytes=1000, kind="cpu")
    problem = toys.problem(cluster=cluster, headroom=0.25)
    assert peak(problem, Candidate()).capacity_bytes == 750


def test_an_interleaved_rank_sums_its_stages(toys):
    """Narayanan et al. 2021: the first of p ranks holds 1 + (p - 1) / (p v) of all layers."""
    graph = toys.graph(layers=8, hidden=10_000, ends=False, tied=False)
    problem = toys.problem(graph, toys.cluster(devices=2, kind="cpu"), global_batch=8)
    candidate = Candidate(pp=2, schedule="Interleaved1F1B", stages_per_rank=2)
    cuts = ((0, 3), (3, 5), (5, 7), (7, 10))
    model = Scorer(problem).memory
    first, second = model.stages(candidate, cuts)
    # Rank 0: 2 ahead of the other stage, 2 of warm-up, and the one that runs: 3 and 2 in flight.
    assert first.parts["activations"] == (3 * 3 + 2 * 2) * 50_000 + 20_000
    # Rank 1 has two fewer ahead: 2 and 1 in flight.
    assert second.parts["activations"] == (2 * 2 + 1 * 3) * 50_000 + 20_000
    assert model.in_flight_bytes(candidate, cuts) == (3 * 3 + 2 * 2) * 50_000


@pytest.mark.parametrize(("smaller_by", "fits"), [(0, True), (1, False)])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_pipeline_fits_where_every_rank_does(toys, rank, smaller_by, fits):
    graph = toys.graph(layers=4, hidden=10_000, ends=False, tied=False)
    candidate, cuts = Candidate(pp=2), ((0, 2), (2, 6)) if rank else ((0, 5), (5, 6))
    wide = toys.problem(graph, toys.cluster(devices=2, kind="cpu"), global_batch=1)
    peaks = [stage.peak_bytes for stage in Scorer(wide).memory.stages(candidate, cuts)]
    assert peaks.index(max(peaks)) == rank
    cluster = toys.cluster(devices=2, kind="cpu", memory_bytes=max(peaks) - smaller_by)
    narrow = toys.problem(graph, cluster, global_batch=1)
    assert Scorer(narrow).memory.fits(candidate, cuts) is fits


def test_a_fuller_device_is_likelier_to_run_out(toys):
    memories = []
    for memory_bytes in (10_000_000_000, 5_000_000_000, 3_000_000_000):
        problem = toys.problem(cluster=toys.cluster(memory_bytes=memory_bytes))
        memories.append(peak(problem, Candidate()))
    chances = [memory.out_of_memory_probability for memory in memories]
    assert chances == sorted(chances)
    assert chances[0] < 0.01 and chances[-1] > 0.5  # 3.25 GB lie outside the tensors
    low, high = memories[0].shown.interval_bytes
    assert low < 3_250_000_000 < high
    assert memories[0].spread == 0.09
