"""Moments of ranks small enough to list by hand."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from claw_plan.planner.memory_moments import Chunk, Moment, RankSizes, moments
from claw_plan.planner.memory_states import COPIED, SHARDED, WHOLE
from claw_plan.planner.memory_units import UnitMemory
from claw_plan.planner.shards import GroupSize

UNIT = UnitMemory(holds=100, remade=0, forward_peak=10, backward_peak=30)
GROUP = GroupSize(whole=8, shard=4, trainable_whole=8, trainable_shard=4, largest=4, count=1)


def chunk(flight=1, units=2, root_head=0, root_tail=0, unit=UNIT):
    return Chunk(
        units=[unit] * units,
        groups=[GROUP] * units,
        root=GroupSize(),
        root_head=root_head,
        root_tail=root_tail,
        flight=flight,
    )


def sizes(kind, *chunks, microbatches=1, owned=0, pipeline=False):
    return RankSizes(
        kind=kind,
        chunks=chunks,
        compute=2,
        gradient=4,
        microbatches=microbatches,
        accumulates_whole=pipeline,
        gathered_after_forward=pipeline,
        owned=owned,
    )


def most(found, name):
    return max(getattr(moment, name) for moment in found)


def test_activations_of_all_in_flight_and_the_pass_that_runs():
    found = list(moments(sizes(COPIED, chunk(flight=3))))
    assert most(found, "activations") == 3 * 200 + 30


def test_stages_of_a_rank_share_its_memory():
    """The other stage's microbatches are there while this one runs."""
    found = list(moments(sizes(COPIED, chunk(flight=3), chunk(flight=2, units=1))))
    assert most(found, "activations") == 3 * 200 + 2 * 100 + 30


def test_recompute_makes_one_unit_at_a_time():
    unit = UnitMemory(holds=10, remade=90, forward_peak=10, backward_peak=30)
    found = list(moments(sizes(COPIED, chunk(unit=unit))))
    assert most(found, "activations") == 2 * 10 + 90 + 30


def test_megatron_keeps_gradients_in_their_buffer():
    """Beside it one weight's, the head's in both precisions, and fp32 copies for the step."""
    found = list(moments(sizes(COPIED, chunk(root_tail=50), owned=7)))
    assert most(found, "gradients") == 0
    assert Moment(activations=200, workspace=(2 + 4) * 50) in found
    assert Moment(workspace=4 * 7) in found


def test_what_is_held_all_the_time_is_added():
    parts = Moment(gradients=4, workspace=3).added_to({"context": 1, "gradients": 32})
    assert parts == {"context": 1, "gradients": 36, "workspace": 3}


def test_the_embedding_s_gradient_is_made_last():
    found = list(moments(sizes(COPIED, chunk(flight=2, root_head=50))))
    assert Moment(activations=200, workspace=2 * 50) in found


def test_whole_parameters_have_all_gradients_at_the_step():
    found = list(moments(sizes(WHOLE, chunk())))
    assert found[-1] == Moment(gradients=4 * 16, workspace=2 * 4 * 4)
    assert found[0] == Moment(activations=100 + 10)


def test_fully_shard_gathers_a_unit_and_the_next():
    found = list(moments(sizes(SHARDED, chunk(units=3))))
    assert found[0].gathered == 2 * (8 + 8)
    assert most(found, "gathered") == 4 * 8 + 2 * 16  # a reduction's buffer, and two gathered


def test_under_a_pipeline_stages_stay_gathered_with_whole_gradients():
    rank = sizes(SHARDED, chunk(units=1), chunk(units=1), microbatches=4, pipeline=True)
    found = list(moments(rank))
    assert most(found, "gradients") >= 2 * 4 * 8
    assert min(moment.gradients for moment in found) >= 4 * 8 + 4 * 4
    assert most(found, "gathered") >= 2 * 2 * 8


def zero_2(microbatches, **knobs):
    """Three units of 8 elements, of 4 on this rank, in 2 bytes; activations of next to nothing."""
    unit = UnitMemory(holds=0, remade=0, forward_peak=0, backward_peak=0)
    options = {"kind": SHARDED, "compute": 2, "gradient": 4, "accumulates_whole": False}
    options |= {"chunks": [chunk(units=3, unit=unit)], "gathered_after_forward": True} | knobs
    return list(moments(RankSizes(microbatches=microbatches, **options)))


def test_the_last_backward_frees_what_stayed_gathered():
    """Beside 24 gathered elements no input of a reduction; it comes when a unit has gone."""
    assert most(zero_2(1), "gathered") == 2 * 16 + 4 * 8
    assert most(zero_2(1, frees_in_backward=False), "gathered") == 2 * 24 + 4 * 8


def test_earlier_microbatches_keep_all_gathered():
    """The first of two has no earlier gradients beside its own; the second of three has."""
    assert most(zero_2(2), "gathered") == 2 * 24 + 4 * 8
    first = max(m.gradients for m in zero_2(2) if m.gathered == 2 * 24 + 4 * 8)
    later = max(m.gradients for m in zero_2(3) if m.gathered == 2 * 24 + 4 * 8)
    assert (first, later) == (4 * 2 * 4 + 2 * 8, 4 * 3 * 4 + 2 * 8)


def test_codes_are_there_when_gradients_have_been_copied():
    """Of a shard of 4 elements a thousand bytes: beside the shard alone, and the input."""
    coded = [
        m for m in zero_2(1, scattered=lambda elements: 250 * elements) if m.workspace >= 1000
    ]
    assert coded == [
        Moment(gradients=4 * 4 * done, gathered=4 * 8 + 2 * 8 * (3 - done), workspace=1000)
        for done in (1, 2, 3)
    ]


SIZE = st.integers(0, 50)
UNITS = st.lists(
    st.tuples(
        st.builds(
            UnitMemory, holds=SIZE, remade=SIZE, forward_peak=SIZE, backward_peak=SIZE, late=SIZE
        ),
        st.builds(
            GroupSize, whole=SIZE, shard=SIZE, trainable_whole=SIZE, trainable_shard=SIZE,
            largest=SIZE,
        ),
        st.integers(1, 7),
    ),
    min_size=1,
    max_size=4,
)  # fmt: skip


@given(
    runs=UNITS,
    microbatches=st.integers(1, 3),
    pipeline=st.booleans(),
    keeps=st.booleans(),
    frees=st.booleans(),
    code=st.integers(0, 9),
    near=st.integers(0, 2),
    flight=st.integers(1, 4),
    root=st.builds(GroupSize, whole=SIZE, trainable_whole=SIZE, trainable_shard=SIZE),
)
@settings(deadline=None, max_examples=300)
def test_no_unit_inside_a_run_of_like_ones_needs_more_than_its_ends(
    runs, microbatches, pipeline, keeps, frees, code, near, flight, root
):
    rank = RankSizes(
        kind=SHARDED,
        chunks=[
            Chunk(
                units=[unit for unit, _, count in runs for _ in range(count)],
                groups=[group for _, group, count in runs for _ in range(count)],
                root=root,
                root_head=3,
                root_tail=5,
                flight=flight,
            )
        ],
        compute=2,
        gradient=4,
        microbatches=microbatches,
        accumulates_whole=pipeline,
        gathered_after_forward=keeps,
        frees_in_backward=frees,
        near_shards=near,
        scattered=lambda elements: code * elements,
    )
    [chunk] = rank.chunks
    most = max(moments(rank), key=sum)
    vars(chunk)["corners"] = frozenset(range(len(chunk.units)))
    everywhere = [*moments(rank)]
    assert most == max(everywhere, key=sum)
