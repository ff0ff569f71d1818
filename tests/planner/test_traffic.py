"""What ranks move, predicted: totals by closed forms of the toy model, rows, differences."""

from __future__ import annotations

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.lower_end import TIED, WORLD
from claw_plan.planner.score import Scorer
from claw_plan.planner.traffic import (
    Kind,
    Moved,
    differences,
    predict_traffic,
    rows_of,
    traffic_of,
)

TABLE, BLOCK = 4 * 64 * 8, 4 * 8 * 8
"""Bytes of the toy's table and of each of its blocks' weights."""

LOSS = Moved(1, 8)


def predicted(problem, candidate):
    scorer = Scorer(problem)
    path = scorer.bounds.stage_path(candidate)
    return predict_traffic(problem, scorer.shards, candidate, path.cuts)


def test_replicas_meet_in_buckets(toys):
    problem = toys.problem(toys.graph(layers=4), global_batch=4)
    [one, *others] = predicted(problem, Candidate(dp_replicate=4, bucket_bytes=1000))
    # All ranks lie on the one axis, so that the loss is summed in the same group.
    whole = Moved(2 + 1, TABLE + 4 * BLOCK + 8)
    assert one == {Kind("all_reduce", "dp_replicate", 4): whole}
    assert others == [one] * 3


def test_shards_are_gathered_for_each_pass(toys):
    problem = toys.problem(toys.graph(layers=4), global_batch=8)
    [one, *_] = predicted(problem, Candidate(dp_shard=2, dp_replicate=2))  # two microbatches
    assert one == {
        Kind("all_gather", "dp_shard", 2): Moved(2 * 9, 2 * (TABLE + 8 * BLOCK)),
        Kind("reduce_scatter", "dp_shard", 2): Moved(2 * 5, 2 * (TABLE + 4 * BLOCK)),
        Kind("all_reduce", "dp_replicate", 2): Moved(5, (TABLE + 4 * BLOCK) // 2),
        Kind("all_reduce", WORLD, 4): LOSS,
    }


def test_pipeline_ranks_send_and_receive_and_sum_what_is_tied(toys):
    """100 bytes a message; three stages, of which the middle one does both, both ways."""
    problem = toys.problem(toys.graph(layers=4, hidden=100, tied=True), global_batch=5)
    first, middle, last = predicted(problem, Candidate(pp=3))
    ends = {
        Kind("send", "pp", 3): Moved(5, 500),
        Kind("recv", "pp", 3): Moved(5, 500),
        Kind("all_reduce", TIED, 2): Moved(1, TABLE),
        Kind("all_reduce", "pp", 3): LOSS,
    }
    assert first == last == ends
    assert middle == {
        Kind("send", "pp", 3): Moved(10, 1000),
        Kind("recv", "pp", 3): Moved(10, 1000),
        Kind("all_reduce", "pp", 3): LOSS,
    }


def test_codes_are_counted_message_by_message(toys):
    """One bucket of four ranks: three parts go straight, three come back around the ring."""
    problem = toys.problem(toys.graph(layers=4), toys.cluster(devices=4), global_batch=4)
    candidate = Candidate(dp_replicate=4, codec="int8", collective="ring")
    elements = (TABLE + 4 * BLOCK) // 4
    part = elements // 4 + 4 * -(-elements // 4 // 256)
    for rank in predicted(problem, candidate):
        assert rank == {
            Kind("send", "dp_replicate", 4): Moved(6, 6 * part),
            Kind("recv", "dp_replicate", 4): Moved(6, 6 * part),
            Kind("all_reduce", "dp_replicate", 4): LOSS,
        }


def test_rows_hold_equal_ranks_together_and_read_back():
    one, other = Kind("all_gather", "dp_shard", 4), Kind("send", "pp", 2)
    ranks = [{one: Moved(2, 8)}, {one: Moved(2, 8), other: Moved(1, 3)}, {one: Moved(3, 12)}]
    ranks.append(dict(ranks[0]))
    rows = rows_of(ranks)
    assert [row.ranks for row in rows] == ["0-1,3", "1", "2"]
    assert traffic_of(rows, 4) == ranks


def test_a_difference_names_rank_kind_and_both_amounts():
    kind = Kind("all_reduce", "tp", 2)
    assert differences([{kind: Moved(2, 8)}], [{kind: Moved(2, 8)}]) == []
    assert differences([{kind: Moved(2, 8)}, {}], [{kind: Moved(3, 9)}, {}]) == [
        "rank 0: all_reduce over tp (2 ranks): predicted 2 of 8 bytes, counted 3 of 9 bytes"
    ]
