"""When messages are asked for, held against torch's own placing of receives."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining.schedules import _Action, _add_send_recv

from claw_plan.planner.actions import parse_action
from claw_plan.planner.candidate import Candidate
from claw_plan.planner.lower import lower
from claw_plan.planner.receives import receive_places
from claw_plan.planner.schedules import rank_of_stage, schedule_actions
from claw_plan.planner.score import Scorer
from claw_plan.simulator.engine import finish_times_ns


def torch_places(rows, home):
    """For each message the number of computations before its receive, in torch's rows."""
    actions = {
        rank: [_Action.from_str(str(action)) for action in row] for rank, row in enumerate(rows)
    }
    found = {}
    for row in _add_send_recv(
        actions, stage_to_rank=home.__getitem__, num_stages=len(home)
    ).values():
        computed = 0
        for action in row:
            kind = action.computation_type.name
            if kind == "RECV_F":
                found[action.stage_index - 1, "F", action.microbatch_index] = computed
            elif kind == "RECV_B":
                found[action.stage_index + 1, "B", action.microbatch_index] = computed
            elif not kind.startswith("SEND"):
                computed += 1
    return found


@pytest.mark.parametrize(
    ("schedule", "stages_per_rank"),
    [
        ("GPipe", 1),
        ("1F1B", 1),
        ("Interleaved1F1B", 2),
        ("InterleavedZeroBubble", 2),
        ("ZBVZeroBubble", 2),
        ("DualPipeV", 2),
    ],
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_receives_stand_where_torch_puts_them(schedule, stages_per_rank, ranks):
    rows = schedule_actions(schedule, ranks, 8, stages_per_rank)
    home = [rank_of_stage(schedule, i, ranks) for i in range(ranks * stages_per_rank)]
    places = receive_places(rows, home)
    assert places == torch_places(rows, home)
    assert places  # some message crosses


def test_a_later_rank_asks_for_a_forward_just_before_it():
    """By hand: rank 1 asks for microbatch 1 behind its own forward of microbatch 0."""
    rows = [
        [parse_action(text) for text in ("0F0", "0F1", "0B0", "0B1")],
        [parse_action(text) for text in ("1F0", "1F1", "1B0", "1B1")],
    ]
    assert receive_places(rows, [0, 1]) == {
        (0, "F", 0): 0,
        (0, "F", 1): 1,
        (1, "B", 0): 2,
        (1, "B", 1): 3,
    }


def test_nothing_leaves_before_it_was_asked_for(toys):
    """Two hosts, GPipe with two microbatches; a message is 2 ms under way and lasts 1 ms.

    A pass forward takes 2 ms, one back 4. Rank 1 asks for the second microbatch behind its own
    forward of the first: the word takes 2 ms, the message 3.
    """
    cluster = toys.cluster(nodes=2, devices=1, kind="cpu", inter_bytes_per_s=1e5)
    graph = toys.graph(layers=4, hidden=100, tied=False, ends=False)
    problem = toys.problem(graph, cluster, global_batch=2, latency_ns=2_000_000)
    scorer = Scorer(problem)
    candidate = Candidate(pp=2, schedule="GPipe")
    cuts = scorer.bounds.stage_path(candidate).cuts
    graph = lower(problem, scorer.shards, candidate, cuts).graph
    ends_ms = dict(zip(graph.name, finish_times_ns(graph)[1] / 1e6, strict=True))
    assert ends_ms["0F0"] == 2
    assert ends_ms["send 0F0"] == 2 + 2 + 1  # asked for at 0, heard of at 2
    assert ends_ms["1F0"] == 5 + 2
    assert ends_ms["ask 0F1"] == 7 + 2
    assert ends_ms["send 0F1"] == 9 + 2 + 1
    assert ends_ms["1F1"] == 12 + 2
    # Rank 0 asks for gradients as soon as it has run its forwards: they leave when made.
    assert ends_ms["1B0"] == 14 + 4
    assert ends_ms["send 1B0"] == 18 + 3
