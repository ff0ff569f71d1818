"""Steps that wait for buckets inside the next forward, against two such steps played by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.lower import lower
from claw_plan.planner.lower_ordered import CALL_NS
from claw_plan.planner.score import Scorer
from claw_plan.simulator.simulate import simulate

MS = 1_000_000
BLOCKS = 4
IN_TURN = {"buckets": (1,) * BLOCKS + (1,)}
ORDERED = IN_TURN | {"bucket_order": (0, 1, 2, 4, 3)}


def scorer_of(toys, global_batch=2, inter_bytes_per_s=1e5):
    """Blocks of 1 and 2 ms over a link; the table is an eighth of all blocks' elements each."""
    cluster = toys.cluster(devices=1, nodes=2, inter_bytes_per_s=inter_bytes_per_s)
    graph = toys.graph(layers=BLOCKS)
    return Scorer(toys.problem(graph, cluster, global_batch=global_batch))


def choice_of(scorer, **knobs):
    candidate = Candidate(dp_replicate=2, **knobs)
    return candidate, scorer.bounds.stage_path(candidate).cuts


def timeline_of(scorer, **knobs):
    candidate, cuts = choice_of(scorer, **knobs)
    return simulate(lower(scorer.problem, scorer.shards, candidate, cuts).graph)


def played_ns(cost_of, order, steps=4):
    """Steps in a row, one link and one processor; how far apart the last two backwards begin.

    The loss is left out: the caller takes a link on which its 8 bytes take no time.
    """
    forward, backward = [100_000, *[MS] * BLOCKS, 2 * MS], [200_000, *[2 * MS] * BLOCKS, 4 * MS]
    needs = [*range(BLOCKS, 0, -1), 0]  # the unit that needs each bucket
    elements = [64] * BLOCKS + [64 * 8]
    clock, begins, arrived = 0, [], {}
    for _ in range(steps):
        for unit, lasts in enumerate(forward):
            for number in order if arrived else ():
                if needs[number] == unit:
                    clock = max(clock, arrived[number]) + CALL_NS + 28 * elements[number] // 10
            clock += lasts
        begins.append(clock)
        ready = {}
        for unit in reversed(range(len(backward))):
            clock += backward[unit]
            ready[unit] = clock
        link, arrived = 0, {}
        for number in order:
            link = max(link, ready[needs[number]]) + cost_of(elements[number])
            arrived[number] = link
    return begins[-1] - begins[-2]


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (0, 1, 2, 4, 3), (0, 4, 1, 2, 3)])
@pytest.mark.parametrize("rate", [1e5, 1e6])
def test_the_step_is_how_far_apart_steps_are(toys, order, rate):
    scorer = scorer_of(toys, inter_bytes_per_s=rate)
    candidate, cuts = choice_of(scorer, buckets=IN_TURN["buckets"], bucket_order=order)

    def cost_of(elements):
        return 5_000 + round(4 * elements / rate * 1e9)

    loss_ns = 5_000 + 8 / rate * 1e9
    found = scorer.step_time_ns(candidate, cuts)
    # The loss travels beside buckets, or before them: it takes its time once, at most twice.
    assert 0 <= found - played_ns(cost_of, order) <= 2 * loss_ns + 100


def test_a_unit_waits_for_its_buckets_and_updates_them(toys):
    spans = timeline_of(scorer_of(toys), **ORDERED).spans
    arrived = [span.end_ns for span in spans if span.name == "bucket"]
    updates = [span for span in spans if span.name == "adamw"]
    assert len(arrived) == len(updates) == len(ORDERED["buckets"])
    begins = {span.name: span.start_ns for span in spans}
    # The table leaves before the first block's bucket, which needs it later.
    assert begins["0F0 unit 0"] == arrived[3] + CALL_NS + updates[0].duration_ns
    assert begins["0F0 unit 1"] >= arrived[4] + CALL_NS
    assert sum(span.duration_ns for span in updates) == pytest.approx(
        28 * 64 * (BLOCKS + 8) / 10, abs=len(updates)
    )


def test_microbatches_add_up_and_only_the_first_forward_waits(toys):
    spans = timeline_of(scorer_of(toys, global_batch=6), **ORDERED).spans
    names = [span.name for span in spans if span.stream.endswith("compute")]
    assert names[0] == f"0B2 unit {BLOCKS + 1}"
    assert names[-1] == "0F2"
    assert names.count("accumulate gradients") == 2
    assert [name for name in names if name.startswith("0F") and "unit" in name] == [
        f"0F0 unit {unit}" for unit in range(BLOCKS + 2)
    ]


def test_it_moves_and_holds_what_the_same_buckets_in_turn_do(toys):
    scorer = scorer_of(toys, global_batch=4)
    one, other = (scorer.score(*choice_of(scorer, **knobs)) for knobs in (IN_TURN, ORDERED))
    assert one.memory == other.memory
    peaks = [max(s.bytes for s in found.timeline.memory) for found in (one, other)]
    assert peaks[0] == peaks[1]
    samples = other.timeline.memory
    assert samples[0].bytes == samples[-1].bytes  # it begins where it ends
    moved = [
        lower(scorer.problem, scorer.shards, *choice_of(scorer, **knobs)).moved
        for knobs in (IN_TURN, ORDERED)
    ]
    kinds = [sorted(str(work) for _, works in each[0] for work in works) for each in moved]
    assert kinds[0] == kinds[1]


def test_parts_of_a_step_add_up(toys):
    scorer = scorer_of(toys)
    found = scorer.score(*choice_of(scorer, **ORDERED))
    assert sum(found.parts_ns.values()) == found.step_time_ns
    assert found.step_time_ns == scorer.step_time_ns(found.candidate, found.cuts)
    assert found.candidate == replace(choice_of(scorer)[0], **ORDERED)
