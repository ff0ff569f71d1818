"""Peak memory of each pipeline stage under a candidate, part by part.

The program order of a rank is known, so its peak is found without times: the moments at which
something large is alive are listed for every unit of the stage and the largest is taken. What is
alive when (FSDP2 of torch 2.11 and later, read off its storages with torch's own FSDPMemTracker;
tests/validation/test_memory_tracker.py compares):

- stored parameters and optimizer states (fp32) always; gradients from the first backward on;
- activations of every microbatch in flight; of a recomputed block only its input;
- sharded: the root group gathered all the time; each block gathered while it runs, the next
  block's gather buffer beside it; in backward its gradients, and the previous block's
  reduce-scatter input in fp32;
- at the end of backward the root's gradients and their reduce-scatter input.

Not modelled: fragmentation (the headroom is for that) and workspaces of libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.problem import (
    OPTIMIZER_STATES,
    STORED_BYTES,
    Problem,
    variant_of,
)
from claw_plan.planner.schedules import in_flight
from claw_plan.planner.shards import ROOT, GroupSize, ShardSizes

CONTEXT_BYTES = 1_800_000_000
"""What an accelerator holds beside tensors (context, kernels, NCCL buffers). Fitted by the
difference of nvidia-smi readings and allocated tensors on the BigScience runs."""

Parts = dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """The peak of one rank of a stage and what it consists of."""

    stage: int
    peak_bytes: int
    capacity_bytes: int
    parts: Mapping[str, int]

    @property
    def fits(self) -> bool:
        """Whether the peak stays within the capacity (headroom already taken off)."""
        return self.peak_bytes <= self.capacity_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldMemory:
    """What a rank holds all the time, and for each microbatch in flight."""

    always_bytes: int = 0
    microbatch_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """The sizes one stage's walk needs. Lists are over the stage's units."""

    is_sharded: bool
    compute: int
    mixed: bool
    holds: list[int]
    remade: list[int]
    forward_peak: list[int]
    backward_peak: list[int]
    groups: list[GroupSize]
    root: GroupSize
    root_head: int
    root_tail: int
    flight: int
    microbatches: int
    accumulates_whole: bool
    gathered_after_forward: bool


@dataclass(frozen=True)
class MemoryModel:
    """Memory of candidates of one problem."""

    problem: Problem
    shards: ShardSizes
    _peaks: dict[tuple[object, ...], Parts] = field(default_factory=dict)

    def stages(
        self, candidate: Candidate, cuts: tuple[tuple[int, int], ...]
    ) -> tuple[StageMemory, ...]:
        """Memory of every stage; `cuts` are the units [start, stop) of each."""
        return tuple(
            self.stage(candidate, index, start, stop) for index, (start, stop) in enumerate(cuts)
        )

    def stage(self, candidate: Candidate, stage: int, start: int, stop: int) -> StageMemory:
        """Memory of one stage."""
        microbatches = candidate.num_microbatches(self.problem.training.global_batch)
        flight = in_flight(candidate.schedule, stage, candidate.pp, microbatches)
        key = (
            start, stop, flight, microbatches > 1, candidate.pp > 1, candidate.dp_replicate > 1,
            candidate.dp_shard, candidate.tp, candidate.sequence_parallel,
            candidate.microbatch_size, candidate.recompute, candidate.reshard_after_forward,
        )  # fmt: skip
        parts = self._peaks.get(key)
        if parts is None:
            sizes = self._sizes(candidate, start, stop, flight, microbatches)
            static = self._static(candidate, start, stop, sizes)
            moments = _sharded_moments if sizes.is_sharded else _whole_moments
            parts = max(moments(sizes, static), key=lambda moment: sum(moment.values()))
            self._peaks[key] = parts
        return StageMemory(
            stage=stage,
            peak_bytes=sum(parts.values()),
            capacity_bytes=self.capacity_bytes(candidate),
            parts=parts,
        )

    def held(self, candidate: Candidate, start: int, stop: int) -> HeldMemory:
        """States and activations of a stage, for its memory over time."""
        sizes = self._sizes(candidate, start, stop, 1, 1)
        static = self._static(candidate, start, stop, sizes)
        return HeldMemory(always_bytes=sum(static.values()), microbatch_bytes=sum(sizes.holds))

    def capacity_bytes(self, candidate: Candidate) -> int:
        """What one rank may use: the device less the headroom, or its share of a CPU host."""
        usable = 1.0 - self.problem.training.memory_headroom
        node = min(self.problem.cluster.nodes, key=lambda n: n.device.memory_bytes)
        if node.shared_memory_bytes:
            ranks = min(candidate.num_devices, node.device_count)
            return int(node.shared_memory_bytes * usable) // ranks
        return int(node.device.memory_bytes * usable)

    def _sizes(
        self, candidate: Candidate, start: int, stop: int, flight: int, microbatches: int
    ) -> _Stage:
        graph, training = self.problem.graph, self.problem.training
        variant, batch, tp = variant_of(candidate), candidate.microbatch_size, candidate.tp
        units = range(start, stop)
        costs = [graph.cost(unit, variant) for unit in units]
        last = len(graph.units) - 1
        groups = self.shards.groups(start, stop, tp, candidate.dp_shard)
        redone = [candidate.recompute == "full" and 0 < unit < last for unit in units]
        inputs = [cost.input_bytes.at(batch, tp) for cost in costs]
        saved = [cost.saved_bytes.at(batch, tp) for cost in costs]
        return _Stage(
            is_sharded=candidate.dp_shard > 1 or training.is_mixed,
            compute=training.compute_bytes,
            mixed=training.is_mixed,
            holds=[i + (0 if r else s) for i, s, r in zip(inputs, saved, redone, strict=True)],
            remade=[s if r else 0 for s, r in zip(saved, redone, strict=True)],
            forward_peak=[cost.forward_peak_bytes.at(batch, tp) for cost in costs],
            backward_peak=[cost.backward_peak_bytes.at(batch, tp) for cost in costs],
            groups=[groups.get(unit, GroupSize()) for unit in units],
            root=groups[ROOT],
            root_head=self.shards.unit_whole(0, tp) if start == 0 else 0,
            root_tail=self.shards.unit_whole(last, tp) if stop == last + 1 else 0,
            flight=flight,
            microbatches=microbatches,
            accumulates_whole=candidate.pp > 1,
            gathered_after_forward=not candidate.reshard_after_forward,
        )

    def _static(self, candidate: Candidate, start: int, stop: int, sizes: _Stage) -> Parts:
        shard = sum(group.shard for group in sizes.groups) + sizes.root.shard
        trainable = sum(g.trainable_shard for g in sizes.groups) + sizes.root.trainable_shard
        states = OPTIMIZER_STATES[self.problem.training.optimizer]
        bucketed = not sizes.is_sharded and candidate.dp_replicate > 1 and candidate.pp == 1
        return {
            "parameters": STORED_BYTES * shard,
            "optimizer": STORED_BYTES * states * trainable,
            # DistributedDataParallel copies gradients into its buckets.
            "workspace": STORED_BYTES * trainable if bucketed else 0,
            "buffers": self.problem.graph.buffer_bytes,
            "context": 0 if self.problem.device.kind == "cpu" else CONTEXT_BYTES,
        }


def _moment(static: Parts, **more: int) -> Parts:
    parts = dict(static)
    for name, size in more.items():
        parts[name] = parts.get(name, 0) + size
    return parts


def _earlier(sizes: _Stage) -> int:
    """Activations of the microbatches in flight before the one that runs."""
    return (sizes.flight - 1) * sum(sizes.holds)


def _whole_moments(sizes: _Stage, static: Parts) -> Iterator[Parts]:
    """Every rank holds all parameters: forward, backward and optimizer step, unit by unit."""
    groups = [*sizes.groups]
    everything = STORED_BYTES * (
        sum(group.trainable_whole for group in groups) + sizes.root.trainable_whole
    )
    held = _earlier(sizes)
    accumulated = everything if sizes.microbatches > 1 else 0
    for index, hold in enumerate(sizes.holds):
        held += hold
        peak = held + sizes.forward_peak[index]
        yield _moment(static, gradients=accumulated, activations=peak)
    # The epilogue is at its largest in the loss, before its parameters' gradients are made.
    made, tail = 0, STORED_BYTES * sizes.root_tail
    for index in reversed(range(len(groups))):
        made += STORED_BYTES * groups[index].trainable_whole
        gradients = max(accumulated, min(made, everything))
        peak = held + sizes.remade[index] + sizes.backward_peak[index]
        yield _moment(static, gradients=gradients, activations=peak)
        held -= sizes.holds[index]
        made, tail = made + tail, 0
    yield _moment(static, gradients=everything, workspace=_step_bytes(sizes))


def _sharded_moments(sizes: _Stage, static: Parts) -> Iterator[Parts]:
    """fully_shard: as the module's docstring lists."""
    groups, root = sizes.groups, sizes.root
    shards = STORED_BYTES * sum(group.trainable_shard for group in groups)
    all_shards = shards + STORED_BYTES * root.trainable_shard
    before = 0
    if sizes.microbatches > 1:
        # Under a pipeline gradients stay whole, in fp32, until the last microbatch is reduced.
        whole = sum(group.trainable_whole for group in groups) + root.trainable_whole
        before = STORED_BYTES * whole if sizes.accumulates_whole else all_shards
    yield from _sharded_forward(sizes, static, before)
    yield from _sharded_backward(sizes, static, before)
    # The root's gradients are copied into the reduction's buffer; then its result is made, while
    # autograd still holds the gradient that it made last, the prologue's.
    buffer = STORED_BYTES * root.trainable_whole
    yield _moment(
        static,
        gradients=max(before, shards) + sizes.compute * root.trainable_whole,
        gathered=buffer,
        activations=_earlier(sizes),
    )
    yield _moment(
        static,
        gradients=max(before, all_shards) + sizes.compute * sizes.root_head,
        gathered=buffer,
        activations=_earlier(sizes),
    )
    yield _moment(static, gradients=all_shards, workspace=_step_bytes(sizes))


def _sharded_forward(sizes: _Stage, static: Parts, gradients: int) -> Iterator[Parts]:
    """Each unit gathered while it runs, the next one's buffer beside it."""
    compute, groups = sizes.compute, sizes.groups
    held, kept = _earlier(sizes), compute * sizes.root.whole
    for index, group in enumerate(groups):
        following = groups[index + 1].whole if index + 1 < len(groups) else 0
        held += sizes.holds[index]
        yield _moment(
            static,
            gradients=gradients,
            gathered=kept + compute * (group.whole + following),
            activations=held + sizes.forward_peak[index],
        )
        kept += compute * group.whole if sizes.gathered_after_forward else 0


def _sharded_backward(sizes: _Stage, static: Parts, before: int) -> Iterator[Parts]:
    """Of each unit the moment in its kernels, and the one in which it is reduced."""
    compute, groups, keeps = sizes.compute, sizes.groups, sizes.gathered_after_forward
    root = compute * sizes.root.whole
    everything = root + compute * sum(group.whole for group in groups)
    held = _earlier(sizes) + sum(sizes.holds)
    # The epilogue is at its largest in the loss, before its parameters' gradients are made.
    tail, made, previous = 0, 0, 0
    for index in reversed(range(len(groups))):
        group = groups[index]
        own = compute * group.trainable_whole
        buffer = STORED_BYTES * group.trainable_whole
        coming = compute * groups[index - 1].whole if index else 0
        sharded = max(before, STORED_BYTES * made)
        yield _moment(
            static,
            gradients=sharded + tail + own,
            gathered=previous + (everything if keeps else root + compute * group.whole + coming),
            activations=held + sizes.remade[index] + sizes.backward_peak[index],
        )
        tail = compute * sizes.root_tail
        held -= sizes.holds[index]
        yield _moment(
            static,
            gradients=sharded + tail + max(own, STORED_BYTES * group.trainable_shard),
            gathered=buffer + (everything if keeps else root + coming),
            activations=held,
        )
        made += group.trainable_shard
        previous = buffer


def _step_bytes(sizes: _Stage) -> int:
    """Temporaries of one parameter's optimizer step (the denominator and its root)."""
    largest = max([group.largest for group in sizes.groups] + [sizes.root.largest])
    return 2 * STORED_BYTES * largest


def make_fits(memory: MemoryModel, candidate: Candidate) -> Callable[[int, int, int], bool]:
    """The test `stage_cut.cut_chain` takes: whether units [start, stop) fit as that stage."""
    return lru_cache(maxsize=None)(
        lambda stage, start, stop: memory.stage(candidate, stage, start, stop).fits
    )
