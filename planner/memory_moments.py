"""The moments of a rank's step at which something large is alive, each as parts in bytes.

One walk over the units for each way of keeping parameters (`memory_states`). What is alive when
is read off torch's own FSDPMemTracker (tests/validation/test_memory_tracker.py compares):

- activations of every microbatch in flight; of a recomputed block only its input;
- sharded: the root group gathered all the time; each block, or run of blocks, gathered while it
  runs, the next one's gather buffer beside it; between forward and backward what `reshard_ranks`
  leave of it; in backward its gradients, and the previous one's reduce-scatter input in fp32; its
  own input beside the gradients that are copied into it, then beside codes and the shard that
  they become, the gradients gone; at the end of backward the root's gradients and input. What
  stays gathered after forward goes block by block in the last backward, under a pipeline after;
- whole: gradients from the first backward on, and the optimizer's temporaries;
- copied: gradients lie in a buffer of their own that is always there; what autograd makes of one
  weight is added to it and freed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

from claw_plan.planner.memory_states import COPIED, SHARDED, Parts
from claw_plan.planner.memory_units import UnitMemory
from claw_plan.planner.problem import STORED_BYTES
from claw_plan.planner.shards import GroupSize


class Moment(NamedTuple):
    """What is alive at once beside what a rank holds all the time, in bytes."""

    gradients: int = 0
    gathered: int = 0
    activations: int = 0
    workspace: int = 0

    def beside(self, other: Moment) -> Moment:
        """Both together."""
        return Moment(*(one + more for one, more in zip(self, other, strict=True)))

    def added_to(self, static: Parts) -> Parts:
        """All parts of a rank's memory, `static` those that it holds all the time."""
        more = {name: size for name, size in self._asdict().items() if size}
        return static | {name: static.get(name, 0) + size for name, size in more.items()}


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One stage of a rank. Lists are over its units, a run of blocks gathered together as one.

    `flight` counts microbatches in flight, `late` those whose gradients of weights wait.
    """

    units: list[UnitMemory]
    groups: list[GroupSize]
    root: GroupSize
    root_head: int
    root_tail: int
    flight: int
    late: int = 0

    @cached_property
    def corners(self) -> frozenset[int]:
        """The units at which the peak may be: of a run of like ones the two at either end.

        Between those every size changes linearly from unit to unit, or is the larger of two that
        do, so that no unit in the middle needs more than both.
        """
        found: set[int] = set()
        start = 0
        for _, run in groupby(zip(self.units, self.groups, strict=True)):
            end = start + len([*run])
            found.update(range(start, min(start + 2, end)), range(max(start, end - 2), end))
            start = end
        return frozenset(found)

    @cached_property
    def waiting(self) -> int:
        """Gradients kept for the weights that wait."""
        return self.late * sum(unit.late for unit in self.units)

    @cached_property
    def held(self) -> int:
        """Activations of one microbatch."""
        return sum(unit.holds for unit in self.units)

    @property
    def whole(self) -> int:
        """Elements of all its parameters."""
        return self.root.whole + sum(group.whole for group in self.groups)

    @property
    def trainable_whole(self) -> int:
        """Elements of those that have gradients."""
        return self.root.trainable_whole + sum(group.trainable_whole for group in self.groups)

    @property
    def trainable_shard(self) -> int:
        """Elements of the rank's part of those."""
        return self.root.trainable_shard + sum(group.trainable_shard for group in self.groups)


def no_bytes(elements: int) -> int:
    """What reducing takes where no codec does."""
    return 0


@dataclass(frozen=True, kw_only=True)
class RankSizes:
    """The sizes that the walks need.

    `compute` and `gradient` are bytes of an element in the precision of kernels, and in that in
    which gradients are accumulated. `frees_in_backward`: the last backward frees each block once
    it has run. `near_shards` is how many shards of each block a rank keeps between forward and
    backward. `owned` counts the elements whose states a rank keeps where
    the optimizer must first copy their gradients to fp32. `averaged` are the bytes that a mean
    through a codec takes, once a step or, not `averages_late`, of buckets that hold the
    gradients; `scattered` those of reducing so many elements of a shard through one.
    """

    kind: str
    chunks: Sequence[Chunk]
    compute: int
    gradient: int
    microbatches: int
    accumulates_whole: bool
    gathered_after_forward: bool
    frees_in_backward: bool = True
    near_shards: int = 0
    owned: int = 0
    averaged: int = 0
    averages_late: bool = True
    scattered: Callable[[int], int] = no_bytes

    @property
    def stays_gathered(self) -> bool:
        """Whether blocks that are freed after a forward stay gathered after a backward.

        Torch's pipeline runtime has it so, up to the reduction after the last.
        """
        several = self.accumulates_whole and self.microbatches > 1
        return several and not self.gathered_after_forward

    @cached_property
    def in_flight(self) -> int:
        """Activations of all microbatches in flight."""
        return sum(chunk.flight * chunk.held + chunk.waiting for chunk in self.chunks)

    def earlier(self, chunk: Chunk) -> int:
        """Activations in flight beside those of the microbatch that runs on the chunk."""
        return self.in_flight - min(1, chunk.flight) * chunk.held

    def near(self, groups: Sequence[GroupSize]) -> int:
        """Elements of gathered blocks that are kept between forward and backward."""
        return self.near_shards * sum(group.shard for group in groups)


def moments(sizes: RankSizes) -> Iterator[Moment]:
    """Moments of every stage of the rank, those at which most is alive among them."""
    walks = {COPIED: _copied, SHARDED: _sharded}
    for chunk in sizes.chunks:
        yield from walks.get(sizes.kind, _whole)(sizes, chunk)


def _forward(sizes: RankSizes, chunk: Chunk) -> Iterator[int]:
    """Activations at the peak of each unit's forward."""
    held = sizes.earlier(chunk)
    for unit in chunk.units:
        held += unit.holds
        yield held + unit.forward_peak


def _backward(chunk: Chunk, earlier: int) -> Iterator[tuple[int, int, int]]:
    """Last unit first: its index, activations at the peak of its backward, and after it.

    `earlier` are those of other microbatches.
    """
    held = earlier + chunk.held
    for index in reversed(range(len(chunk.units))):
        unit = chunk.units[index]
        peak = held + unit.remade + unit.backward_peak
        held -= unit.holds
        yield index, peak, held


def _copied(sizes: RankSizes, chunk: Chunk) -> Iterator[Moment]:
    """Megatron: gradients are in their buffer; one weight's gradient beside it."""
    for peak in _forward(sizes, chunk):
        yield Moment(activations=peak)
    for index, peak, after in _backward(chunk, sizes.earlier(chunk)):
        workspace = sizes.compute * chunk.groups[index].largest
        yield Moment(activations=peak, workspace=workspace)
        if index == len(chunk.units) - 1:
            # The scores are gone, and the head's gradient is there in both precisions.
            head = (sizes.compute + sizes.gradient) * chunk.root_tail
            yield Moment(activations=after + chunk.units[index].holds, workspace=head)
        if index == 0:
            yield Moment(activations=after, workspace=sizes.compute * chunk.root_head)
    yield Moment(workspace=STORED_BYTES * sizes.owned)


def _whole(sizes: RankSizes, chunk: Chunk) -> Iterator[Moment]:
    """Every rank holds all parameters: forward, backward and optimizer step, unit by unit."""
    groups = chunk.groups
    everything = STORED_BYTES * chunk.trainable_whole
    accumulated = everything if sizes.microbatches > 1 else 0
    for peak in _forward(sizes, chunk):
        yield Moment(gradients=accumulated, activations=peak)
    # The epilogue is at its largest in the loss, before its parameters' gradients are made.
    made, tail = 0, STORED_BYTES * chunk.root_tail
    for index, peak, _ in _backward(chunk, sizes.earlier(chunk)):
        made += STORED_BYTES * groups[index].trainable_whole
        gradients = max(accumulated, min(made, everything))
        yield Moment(gradients=gradients, activations=peak)
        made, tail = made + tail, 0
    if sizes.averaged:
        yield Moment(gradients=everything * sizes.averages_late, workspace=sizes.averaged)
    yield Moment(gradients=everything, workspace=_step_bytes(chunk))


def _sharded(sizes: RankSizes, chunk: Chunk) -> Iterator[Moment]:
    """fully_shard: as the module's docstring lists."""
    others = [other for other in sizes.chunks if other is not chunk]
    beside = STORED_BYTES * sum(other.trainable_shard for other in others)
    before = 0
    if sizes.microbatches > 1:
        # Under a pipeline gradients stay whole, in fp32, until the last microbatch is reduced.
        whole = sizes.accumulates_whole
        before = STORED_BYTES * (chunk.trainable_whole if whole else chunk.trainable_shard)
        if sizes.accumulates_whole:
            beside = STORED_BYTES * sum(other.trainable_whole for other in others)
    keeps = sizes.gathered_after_forward or sizes.stays_gathered
    gathered = sum(
        other.whole if keeps else other.root.whole + sizes.near(other.groups) for other in others
    )
    walk = _sharded_stage(sizes, chunk, before)
    if others:
        walk = map(Moment(gradients=beside, gathered=sizes.compute * gathered).beside, walk)
    yield from walk


def _sharded_stage(sizes: RankSizes, chunk: Chunk, before: int) -> Iterator[Moment]:
    """One stage, at its corners; `before` are gradients of earlier microbatches."""
    shards = STORED_BYTES * sum(group.trainable_shard for group in chunk.groups)
    all_shards = STORED_BYTES * chunk.trainable_shard
    yield from _sharded_forward(sizes, chunk, before)
    # The last microbatch, with which gradients are reduced, is the only one in flight.
    frees = sizes.frees_in_backward
    yield from _sharded_backward(sizes, chunk, before, 0, reduces=True, frees=frees)
    if sizes.microbatches > 1 and sizes.accumulates_whole:
        earlier = sizes.earlier(chunk)
        yield from _sharded_backward(sizes, chunk, before, earlier, reduces=False, frees=False)
    elif sizes.microbatches > 1 and sizes.gathered_after_forward:
        # Those before the last scatter gradients and keep parameters; the first adds to nothing.
        sums = before if sizes.microbatches > 2 else 0
        yield from _sharded_backward(sizes, chunk, sums, 0, reduces=True, frees=False)
    # The root's gradients are copied into the reduction's buffer; then its result is made, while
    # autograd still holds the gradient that it made last, the prologue's.
    buffer = STORED_BYTES * chunk.root.trainable_whole
    yield Moment(
        gradients=max(before, shards) + sizes.compute * chunk.root.trainable_whole,
        gathered=buffer,
    )
    yield Moment(
        gradients=max(before, all_shards) + sizes.compute * chunk.root_head,
        gathered=buffer,
        workspace=sizes.scattered(chunk.root.trainable_shard),
    )
    yield Moment(gradients=all_shards, workspace=max(sizes.averaged, _step_bytes(chunk)))


def _sharded_forward(sizes: RankSizes, chunk: Chunk, gradients: int) -> Iterator[Moment]:
    """Each unit gathered while it runs, the next one's buffer beside it."""
    compute, groups = sizes.compute, chunk.groups
    keeps = sizes.gathered_after_forward
    # What is kept for the whole step is there from the second microbatch's start.
    stays = keeps and sizes.microbatches > 1
    kept = compute * (chunk.whole if stays else chunk.root.whole)
    near, ahead = 0, sum(group.whole for group in groups)
    for index, peak in enumerate(_forward(sizes, chunk)):
        group = groups[index]
        if index in chunk.corners:
            following = groups[index + 1].whole if index + 1 < len(groups) else 0
            coming = 0 if stays else group.whole + following
            if sizes.stays_gathered:
                coming = ahead
            yield Moment(
                gradients=gradients,
                gathered=kept + compute * (coming + near),
                activations=peak,
            )
        near += sizes.near([group])
        ahead -= group.whole
        kept += compute * group.whole if keeps and not stays else 0


def _sharded_backward(
    sizes: RankSizes, chunk: Chunk, before: int, earlier: int, *, reduces: bool, frees: bool
) -> Iterator[Moment]:
    """Of each unit the moment in its kernels, and those in which it is copied and reduced.

    With `frees` what stayed gathered after the forward is freed block by block.
    """
    compute, groups, keeps = sizes.compute, chunk.groups, sizes.gathered_after_forward
    root, left = compute * chunk.root.whole, compute * chunk.whole
    sums_whole = reduces and sizes.accumulates_whole and before > 0
    # The epilogue is at its largest in the loss, before its parameters' gradients are made.
    tail, made, previous, freed = 0, 0, 0, 0
    near, behind = sizes.near(groups), 0  # of the blocks before and after the one that runs
    for index, peak, after in _backward(chunk, earlier):
        group = groups[index]
        own = compute * group.trainable_whole
        buffer = STORED_BYTES * group.trainable_whole if reduces else 0
        near -= sizes.near([group])
        remaining = left - compute * group.whole * frees
        if index in chunk.corners:
            coming = compute * (near + behind + (groups[index - 1].whole if index else 0))
            sharded = max(before, STORED_BYTES * made)
            if sums_whole:
                sharded = before - freed + STORED_BYTES * made
            running = root + compute * group.whole + coming
            yield Moment(
                gradients=sharded + tail + own,
                gathered=previous + (left if keeps else running),
                activations=peak,
            )
            coming += compute * group.whole if sizes.stays_gathered else 0
            copied = Moment(
                gradients=sharded + compute * chunk.root_tail,
                gathered=buffer + (remaining if keeps else root + coming),
                activations=after,
            )
            yield copied.beside(Moment(gradients=own))
            # Once they are copied gradients are freed, those of earlier microbatches as well.
            yield copied.beside(
                Moment(
                    gradients=STORED_BYTES * group.trainable_shard - buffer * sums_whole,
                    workspace=sizes.scattered(group.trainable_shard) if reduces else 0,
                )
            )
        tail = compute * chunk.root_tail
        made += group.trainable_shard
        behind += group.whole if sizes.stays_gathered else 0
        previous, left = buffer, remaining
        freed += buffer  # accumulated gradients, once they are copied into the reduction's input


def _step_bytes(chunk: Chunk) -> int:
    """Temporaries of one parameter's optimizer step (the denominator and its root)."""
    return 2 * STORED_BYTES * max([group.largest for group in (*chunk.groups, chunk.root)])
