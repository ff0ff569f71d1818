"""Peak memory of each pipeline rank under a candidate, part by part.

The program order of a rank is known, so its peak is found without times: the moments at which
something large is alive (`memory_moments`) are made of what each unit keeps (`memory_units`) and
of what is there all the time (`memory_states`), and the largest is taken. `allocator` says what
a device shows of it, and how far such predictions were off.

Not modelled: workspaces of libraries. Fragmentation is `allocator`'s; the headroom is for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial, reduce
from sys import maxsize
from typing import Any

from claw_plan.planner.allocator import Shown, needed, shown, shown_by_host
from claw_plan.planner.averaging import scatters_codes
from claw_plan.planner.candidate import Candidate
from claw_plan.planner.encoding_memory import (
    carries_codes,
    largest_bucket,
    mean_bytes,
    scattered_bytes,
)
from claw_plan.planner.memory_moments import Chunk, RankSizes, moments
from claw_plan.planner.memory_states import (
    COPIED,
    SHARDED,
    Parts,
    Spans,
    held_parts,
    kept_gradient_bytes,
    kind_of,
    owned_elements,
)
from claw_plan.planner.memory_units import UnitMemory, together, unit_memory
from claw_plan.planner.placement import group_nodes
from claw_plan.planner.problem import STORED_BYTES, Problem
from claw_plan.planner.schedules import ASYNCHRONOUS, Held, held_by_rank, stages_of_rank
from claw_plan.planner.shards import ROOT, GroupSize, ShardSizes, of_unit, runs_of
from claw_plan.profiles.cluster import Node


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """The peak of one rank of a stage and what it consists of.

    `stage` is the rank of the pipeline, which under an interleaved schedule holds several stages.
    `capacity_bytes` is what a plan may use of the `device_bytes` there are.
    """

    stage: int
    peak_bytes: int
    capacity_bytes: int
    device_bytes: int
    parts: Mapping[str, int]

    @property
    def fits(self) -> bool:
        """Whether the peak stays within the capacity (headroom already taken off)."""
        return self.peak_bytes <= self.capacity_bytes

    @property
    def shown(self) -> Shown:
        """What the device's own tools will show, or of a CPU's process the operating system."""
        outside = self.parts.get("context", 0)
        return shown(self.peak_bytes - outside) if outside else shown_by_host(self.peak_bytes)

    @property
    def spread(self) -> float:
        """The standard deviation of the log error of `shown`."""
        return self.shown.spread

    @property
    def out_of_memory_probability(self) -> float:
        """The probability that the rank needs more than the whole device has."""
        outside = self.parts.get("context", 0)
        need = needed(self.peak_bytes - outside) if outside else self.shown
        return need.probability_above(self.device_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldMemory:
    """What a rank holds all the time, and for each microbatch in flight."""

    always_bytes: int = 0
    microbatch_bytes: int = 0


Cuts = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class MemoryModel:
    """Memory of candidates of one problem."""

    problem: Problem
    shards: ShardSizes
    _peaks: dict[tuple[object, ...], Parts] = field(default_factory=dict)
    _units: dict[tuple[object, ...], UnitMemory] = field(default_factory=dict)
    _floors: dict[tuple[Candidate, Cuts], bool] = field(default_factory=dict)

    def stages(self, candidate: Candidate, cuts: Cuts) -> tuple[StageMemory, ...]:
        """Memory of every pipeline rank; `cuts` are the units [start, stop) of each stage."""
        return tuple(
            self.rank(candidate, rank, cuts) for rank in range(min(candidate.pp, len(cuts)))
        )

    def rank(self, candidate: Candidate, rank: int, cuts: Cuts) -> StageMemory:
        """Memory of one pipeline rank."""
        return self._rank(candidate, rank, spans_of_rank(candidate, cuts, rank))

    def fits(self, candidate: Candidate, cuts: Cuts) -> bool:
        """Whether every pipeline rank fits; asks no further than to the first that does not."""
        return self._may_fit(candidate, cuts) and all(
            self._rank(candidate, rank, spans_of_rank(candidate, cuts, rank)).fits
            for rank in range(min(candidate.pp, len(cuts)))
        )

    def _may_fit(self, candidate: Candidate, cuts: Cuts) -> bool:
        """Whether no floor is above what a rank may use; kept for all ways of gathering."""
        alike = replace(candidate, reshard_ranks=0, blocks_per_group=1)
        if (alike, cuts) not in self._floors:
            capacity_bytes = self.capacity_bytes(candidate)
            self._floors[alike, cuts] = all(
                self._floor_bytes(alike, rank, spans_of_rank(alike, cuts, rank)) <= capacity_bytes
                for rank in range(min(candidate.pp, len(cuts)))
            )
        return self._floors[alike, cuts]

    def _floor_bytes(self, candidate: Candidate, rank: int, spans: Spans) -> int:
        """What every walk finds alive at the end of the last forward, without the walk."""
        sizes = self._sizes(candidate, rank, spans)
        static = held_parts(self.problem, self.shards, candidate, spans)
        floor = sum(static.values()) + sizes.in_flight
        if sizes.kind == SHARDED and sizes.accumulates_whole and sizes.microbatches > 1:
            floor += STORED_BYTES * sum(chunk.trainable_whole for chunk in sizes.chunks)
        return floor

    def stage(self, candidate: Candidate, stage: int, start: int, stop: int) -> StageMemory:
        """Memory of a rank with one stage."""
        return self._rank(candidate, stage, ((start, stop),))

    def held(self, candidate: Candidate, start: int, stop: int) -> HeldMemory:
        """States and activations of a stage, for its memory over time."""
        static = held_parts(self.problem, self.shards, candidate, ((start, stop),))
        chunk = self._chunk(candidate, start, stop, 1)
        return HeldMemory(always_bytes=sum(static.values()), microbatch_bytes=chunk.held)

    def in_flight_bytes(self, candidate: Candidate, cuts: Cuts) -> int:
        """Activations kept from forward to backward, of the rank that keeps most."""
        return max(
            self._sizes(candidate, rank, spans_of_rank(candidate, cuts, rank)).in_flight
            for rank in range(candidate.pp)
        )

    def layer_states_bytes(self, candidate: Candidate, cuts: Cuts) -> int:
        """Parameters, gradients and optimizer states of the layers alone, of the fullest rank."""
        last, most = len(self.problem.graph.units) - 1, 0
        for rank in range(candidate.pp):
            spans = tuple(
                (max(start, 1), min(stop, last))
                for start, stop in spans_of_rank(candidate, cuts, rank)
            )
            parts = held_parts(self.problem, self.shards, candidate, spans)
            names = ("parameters", "gradients", "optimizer")
            most = max(most, sum(parts.get(name, 0) for name in names))
        return most

    def shown(self, candidate: Candidate, cuts: Cuts, kind: str) -> Shown:
        """What a reading of that kind says of the fullest rank; kinds are `allocator`'s."""
        if kind == "activations":
            return shown(self.in_flight_bytes(candidate, cuts), kind)
        if kind == "states":
            return shown(self.layer_states_bytes(candidate, cuts), kind)
        return shown(self.allocated_bytes(candidate, cuts), kind)

    def allocated_bytes(self, candidate: Candidate, cuts: Cuts) -> int:
        """The tensors of the fullest rank at their peak."""
        return max(s.peak_bytes - s.parts["context"] for s in self.stages(candidate, cuts))

    def capacity_bytes(self, candidate: Candidate) -> int:
        """What one rank may use: the device less the headroom, or its share of a CPU host."""
        return self._device_bytes(candidate, 1.0 - self.problem.training.memory_headroom)

    @cached_property
    def _smallest(self) -> Node:
        """The node whose devices have the least memory: every rank is taken to be on it."""
        return min(self.problem.cluster.nodes, key=lambda node: node.device.memory_bytes)

    def _device_bytes(self, candidate: Candidate, usable: float) -> int:
        node = self._smallest
        if node.shared_memory_bytes:
            ranks = min(candidate.num_devices, node.device_count)
            return int(node.shared_memory_bytes * usable) // ranks
        return int(node.device.memory_bytes * usable)

    def _rank(self, candidate: Candidate, rank: int, spans: Spans) -> StageMemory:
        microbatches = candidate.num_microbatches(self.problem.training.global_batch)
        key = (
            tuple(spans), self._held(candidate, rank, len(spans)), min(microbatches, 3),
            candidate.pp > 1, candidate.dp_replicate > 1, candidate.dp_shard, candidate.cp,
            candidate.tp, candidate.ep, candidate.etp, candidate.zero,
            candidate.sequence_parallel, candidate.microbatch_size, candidate.recompute,
            candidate.recompute_blocks, candidate.reshard_ranks, candidate.blocks_per_group,
            candidate.offload, candidate.codec, candidate.schedule in ASYNCHRONOUS,
            self._meeting(candidate) if candidate.codec != "none" else (),
        )  # fmt: skip
        parts = self._peaks.get(key)
        if parts is None:
            sizes = self._sizes(candidate, rank, spans)
            static = held_parts(self.problem, self.shards, candidate, spans)
            parts = max(moments(sizes), key=sum).added_to(static)
            self._peaks[key] = parts
        return StageMemory(
            stage=rank,
            peak_bytes=sum(parts.values()),
            capacity_bytes=self.capacity_bytes(candidate),
            device_bytes=self._device_bytes(candidate, 1.0),
            parts=parts,
        )

    def _meeting(self, candidate: Candidate) -> tuple[object, ...]:
        """What decides how much a codec keeps of what it encodes, and takes at once."""
        nodes = group_nodes(candidate, "dp_replicate", self.problem.devices_per_node)
        return candidate.dp_replicate, candidate.collective, nodes, candidate.bucket_bytes

    def _held(self, candidate: Candidate, rank: int, stages: int) -> Held:
        """Microbatches on each of a rank's stages when most are."""
        microbatches = candidate.num_microbatches(self.problem.training.global_batch)
        return held_by_rank(
            candidate.schedule, rank, candidate.pp, microbatches, stages,
            recomputes=candidate.recompute != "none",
        )  # fmt: skip

    def _sizes(self, candidate: Candidate, rank: int, spans: Spans) -> RankSizes:
        training = self.problem.training
        held = self._held(candidate, rank, len(spans))
        chunks = [
            self._chunk(candidate, start, stop, flight, late)
            for (start, stop), flight, late in zip(spans, held.flights, held.late, strict=True)
        ]
        kind = kind_of(self.problem, candidate)
        kept = kept_gradient_bytes(self.problem, candidate)
        copies = kind == COPIED and kept < STORED_BYTES
        return RankSizes(
            kind=kind,
            chunks=chunks,
            compute=training.compute_bytes,
            gradient=kept,
            microbatches=candidate.num_microbatches(training.global_batch),
            accumulates_whole=candidate.pp > 1 or candidate.zero == 1,
            gathered_after_forward=candidate.zero < 3,
            frees_in_backward=candidate.pp == 1,  # torch's pipelines reduce after all backwards
            near_shards=candidate.shard_ranks // (candidate.reshard_ranks or maxsize),
            owned=owned_elements(self.problem, self.shards, candidate, spans) if copies else 0,
            **self._encoding(candidate, chunks, kind),
        )

    def _encoding(
        self, candidate: Candidate, chunks: Sequence[Chunk], kind: str
    ) -> dict[str, Any]:
        """What sending codes takes for a moment, as `RankSizes` has it."""
        if kind == COPIED or not carries_codes(candidate):
            return {}
        if scatters_codes(candidate):
            return {"scattered": partial(scattered_bytes, self.problem, candidate)}
        groups = [group for chunk in chunks for group in (*chunk.groups, chunk.root)]
        elements, late = largest_bucket(candidate, groups), kind == SHARDED or candidate.pp > 1
        # Made one vector first, where nothing laid gradients out as buckets.
        flat = STORED_BYTES * elements * late
        taken = flat + mean_bytes(self.problem, candidate, elements)
        return {"averaged": taken, "averages_late": late}

    def _chunk(
        self, candidate: Candidate, start: int, stop: int, flight: int, late: int = 0
    ) -> Chunk:
        tp, last = candidate.tp, len(self.problem.graph.units) - 1
        degree = 1 if kind_of(self.problem, candidate) == COPIED else candidate.shard_ranks
        groups = self.shards.groups(start, stop, tp, degree)
        units = self.units(candidate, start, stop)
        sizes = [of_unit(groups, unit) for unit in range(start, stop)]
        if candidate.blocks_per_group > 1:
            units, sizes = self._in_runs(candidate, start, stop, units, sizes)
        return Chunk(
            units=units,
            groups=sizes,
            root=groups[ROOT],
            root_head=self.shards.unit_whole(0, tp) if start == 0 else 0,
            root_tail=self.shards.unit_whole(last, tp) if stop == last + 1 else 0,
            flight=flight,
            late=late,
        )

    def _in_runs(
        self, candidate: Candidate, start: int, stop: int, units: list[UnitMemory],
        sizes: list[GroupSize],
    ) -> tuple[list[UnitMemory], list[GroupSize]]:  # fmt: skip
        """Units and groups of a stage with each run of blocks as one."""
        last, compute = len(self.problem.graph.units) - 1, self.problem.training.compute_bytes
        runs = runs_of(start, stop, last, candidate.blocks_per_group)
        cuts = [slice(run.start - start, run.stop - start) for run in runs]
        made = [compute * size.trainable_whole for size in sizes]
        return (
            [together(units[cut], made[cut]) for cut in cuts],
            [reduce(GroupSize.beside, sizes[cut]) for cut in cuts],
        )

    def units(self, candidate: Candidate, start: int, stop: int) -> list[UnitMemory]:
        """What each unit of a stage keeps; worked out once for all blocks of one structure."""
        units = self.problem.graph.units
        of_candidate = (
            candidate.tp, candidate.cp, candidate.sequence_parallel, candidate.microbatch_size,
        )  # fmt: skip
        again = self.problem.recomputed_units(candidate, start, stop)
        whole = replace(candidate, recompute="none") if again else candidate
        found = []
        for unit in range(start, stop):
            is_block = 0 < unit < len(units) - 1
            as_run = candidate if unit in again else whole
            structure = units[unit].structure if is_block else -1 - unit
            key = (structure, as_run.recompute, *of_candidate)
            if key not in self._units:
                self._units[key] = unit_memory(self.problem, as_run, unit)
            found.append(self._units[key])
        return found


def spans_of_rank(candidate: Candidate, cuts: Cuts, rank: int) -> Spans:
    """The units of each of a rank's stages."""
    held = stages_of_rank(candidate.schedule, rank, candidate.pp, len(cuts) // candidate.pp)
    return tuple(cuts[stage] for stage in held)


def make_fits(memory: MemoryModel, candidate: Candidate) -> Callable[[int, int, int], bool]:
    """The test `stage_cut.cut_chain` takes: whether units [start, stop) fit as that stage."""
    return lru_cache(maxsize=None)(
        lambda stage, start, stop: memory.stage(candidate, stage, start, stop).fits
    )
