"""What candidates lower to, against step times worked out by hand on the toy model.

The toy block of 1000 flops takes 1 ms forward and 2 ms backward a sample, the prologue a tenth,
the epilogue twice that; collectives take 5 us and their bytes over the link.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.lower import lower
from claw_plan.planner.score import Scorer
from claw_plan.planner.shards import ShardSizes
from claw_plan.simulator.simulate import makespan_ns, simulate

MS = 1_000_000
LOSS_NS = 8_000
"""All ranks meet for the loss: 8 bytes at the toy link's 1e6 bytes/s, its latency left out."""


def lowered(problem, candidate):
    scorer = Scorer(problem)
    path = scorer.bounds.stage_path(candidate)
    return lower(problem, scorer.shards, candidate, path.cuts).graph, path.cuts


def optimizer_ns(elements):
    """28 bytes an element at the toy's 10 bytes/ns."""
    return 28 * elements // 10


def test_one_device_is_the_sum_of_its_units(toys):
    problem = toys.problem(toys.graph(layers=4), global_batch=2)
    graph, _ = lowered(problem, Candidate(microbatch_size=2))
    passes = 3 * 2 * (4 + 2) * MS + 3 * 2 * MS // 10  # forward + backward, two samples
    parameters = 64 * 8 + 4 * 8 * 8
    assert makespan_ns(graph) == passes + optimizer_ns(parameters)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize("stages, microbatches", [(2, 1), (2, 5), (4, 2), (4, 8), (8, 3)])
def test_pipeline_of_equal_stages_is_the_closed_form(toys, schedule, stages, microbatches):
    """(m + p - 1)(F + B), the first stage's optimizer and the loss; messages are free."""
    graph = toys.graph(layers=2 * stages, hidden=0, tied=False, ends=False)
    problem = toys.problem(
        graph, toys.cluster(devices=stages), global_batch=microbatches, latency_ns=0
    )
    tasks, cuts = lowered(problem, Candidate(pp=stages, schedule=schedule))
    assert {stop - start for start, stop in cuts[1:-1]} <= {2}
    forward_and_backward = 2 * 3 * MS
    first_stage = optimizer_ns(64 * 8 + 2 * 8 * 8)
    passes = (microbatches + stages - 1) * forward_and_backward
    assert makespan_ns(tasks) == passes + first_stage + LOSS_NS


def test_recompute_adds_the_blocks_forward(toys):
    problem = toys.problem(toys.graph(layers=4), global_batch=1)
    plain, _ = lowered(problem, Candidate())
    redone, _ = lowered(problem, Candidate(recompute="full"))
    assert makespan_ns(redone) - makespan_ns(plain) == 4 * MS


def test_tensor_parallel_divides_blocks_and_exchanges_on_the_critical_path(toys):
    problem = toys.problem(toys.graph(layers=4, hidden=100), global_batch=1)
    graph, _ = lowered(problem, Candidate(tp=2))
    whole_units = 3 * 2 * MS + 3 * MS // 10  # prologue and epilogue are not divided
    blocks = 3 * 4 * MS // 2
    exchanges = 8 * (5000 + 100_000)  # one a block and pass; 100 bytes at 1e6 bytes/s
    end = optimizer_ns(64 * 8 + 4 * 8 * 4) + 5000 + LOSS_NS
    assert makespan_ns(graph) == whole_units + blocks + exchanges + end


def test_devices_that_share_cores_take_turns(toys):
    """Four ranks on two cores: compute takes twice as long as with a core each."""
    graph = toys.graph(layers=4, hidden=0)
    roomy = toys.cluster(devices=4, kind="cpu", intra_bytes_per_s=1e12)
    node = roomy.nodes[0]
    tight = replace(roomy, nodes=(replace(node, cores=2),))
    candidate = Candidate(dp_replicate=4)
    times = []
    for cluster in (roomy, tight):
        problem = toys.problem(graph, cluster, global_batch=4)
        timeline = simulate(lowered(problem, candidate)[0])
        times.append(timeline.busy_ns(0, ["forward", "backward", "optimizer"]))
    assert times[1] == 2 * times[0]


def test_tied_gradients_join_the_ends_of_a_pipeline(toys):
    problem = toys.problem(toys.graph(layers=4, tied=True), global_batch=4)
    graph, _ = lowered(problem, Candidate(pp=2))
    assert graph.name.count("tied gradients") == 2  # on both
    assert int(graph.work_bytes[graph.name.index("tied gradients")]) == 4 * 64 * 8


def test_memory_over_time_rises_to_the_microbatches_in_flight(toys):
    """1F1B, 4 stages: stage s holds 4 - s microbatches, 500 bytes a unit, above its states."""
    problem = toys.problem(toys.graph(layers=4, tied=False), global_batch=8)
    scorer, candidate = Scorer(problem), Candidate(pp=4)
    scored = scorer.score(candidate, scorer.bounds.stage_path(candidate).cuts)
    units = [2, 1, 1, 2]
    for stage, cut in enumerate(scored.cuts):
        states = scorer.memory.held(candidate, *cut).always_bytes
        in_flight = (4 - stage) * units[stage] * 500
        assert scored.timeline.peak_memory_bytes(stage) == states + in_flight


@pytest.mark.parametrize("ranks, rounds", [(2, 2), (4, 2), (4, 3)])
def test_interleaving_divides_the_bubble_of_the_lowered_step(toys, ranks, rounds):
    """m (F + B) + (p - 1)(F + B)/v with v = 2 stages of one block; messages are free."""
    graph = toys.graph(layers=2 * ranks, hidden=0, tied=False, ends=False)
    count = ranks * rounds
    problem = toys.problem(graph, toys.cluster(devices=ranks), global_batch=count, latency_ns=0)
    tasks, _ = lowered(problem, Candidate(pp=ranks, schedule="Interleaved1F1B", stages_per_rank=2))
    step = 2 * count * 3 * MS + (ranks - 1) * 3 * MS
    # Each of the two stages has its own optimizer step.
    end = optimizer_ns(64 * 8 + 8 * 8) + optimizer_ns(8 * 8) + LOSS_NS
    assert makespan_ns(tasks) == step + end


def test_a_split_backward_runs_weights_late_and_the_first_stage_all_at_once(toys):
    """ZB1P on two ranks and two microbatches, worked out by hand: F = I = W = 1 ms, messages free.

    Rank 0: F0 F1 (0-2), waits for 1I0 until 3, then W0 of all of its backward (3-5); 1I1 ended at
    4, so W1 follows (5-7). Rank 1: F0 1-2, I0 2-3, F1 3-4, I1 4-5, W0 5-6, W1 6-7.
    """
    graph = toys.graph(layers=2, hidden=0, tied=False, ends=False)
    problem = toys.problem(graph, toys.cluster(devices=2), global_batch=2, latency_ns=0)
    tasks, _ = lowered(problem, Candidate(pp=2, schedule="InterleavedZeroBubble"))
    spans = {
        span.name: (span.start_ns // MS, span.end_ns // MS)
        for span in simulate(tasks).spans
        if span.kind in ("forward", "backward") and span.name[1] in "FIWB"
    }
    assert spans["0F1"] == (1, 2) and "0I0" not in spans
    assert (spans["1F0"], spans["1I0"]) == ((1, 2), (2, 3))
    assert (spans["0W0"], spans["0W1"]) == ((3, 5), (5, 7))
    assert {spans["1W0"], spans["1W1"]} == {(5, 6), (6, 7)}


def test_under_recompute_the_first_part_runs_the_whole_backward(toys):
    graph = toys.graph(layers=4, hidden=0, tied=False, ends=False)
    problem = toys.problem(graph, toys.cluster(devices=2), global_batch=4, latency_ns=0)
    tasks, _ = lowered(
        problem, Candidate(pp=2, schedule="InterleavedZeroBubble", recompute="full")
    )
    spans = [s for s in simulate(tasks).spans if s.name.startswith("1I")]
    assert [s.kind for s in spans] == ["recompute", "backward"] * 4
    assert {s.duration_ns for s in spans if s.kind == "backward"} == {2 * 2 * MS}
    assert not [s for s in simulate(tasks).spans if s.name.startswith("1W") and s.duration_ns]


def test_the_v_sends_nothing_where_its_ends_meet(toys):
    graph = toys.graph(layers=4, tied=True)
    problem = toys.problem(graph, toys.cluster(devices=2), global_batch=4)
    tasks, _ = lowered(problem, Candidate(pp=2, schedule="ZBVZeroBubble", stages_per_rank=2))
    sends = [s.name for s in simulate(tasks).spans if s.name.startswith("send")]
    assert {name.split()[1][:2] for name in sends} == {"0F", "2F", "1I", "3I"}
    assert not [s for s in simulate(tasks).spans if s.name == "tied gradients"]


@pytest.mark.parametrize(("blocks", "again"), [(0, (2, 3)), (1, (1, 1)), (2, (2, 2)), (3, (2, 3))])
def test_the_first_blocks_of_each_stage_run_again(toys, blocks, again):
    """A stage with fewer blocks runs all of its own again."""
    problem = toys.problem(toys.graph(layers=5), global_batch=1)
    candidate = Candidate(pp=2, recompute="full", recompute_blocks=blocks)
    graph = lower(problem, ShardSizes(problem.graph), candidate, ((0, 3), (3, 7))).graph
    found = [
        span.end_ns - span.start_ns for span in simulate(graph).spans if span.kind == "recompute"
    ]
    forward_ns = problem.recompute_time(1, "plain", 1, 1).compute_ns
    assert sorted(found) == sorted(count * forward_ns for count in again)
