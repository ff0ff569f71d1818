"""`MixedCandidate`: one way of splitting the training over unlike devices.

It stands where `Candidate` stands for equal devices: the mixed search makes it, `lower`
turns it into tasks. It has one pipeline or more. The stages of a pipeline may lie on different
kinds of devices, each divided in its own way; its microbatches are of one size for all stages.
Several pipelines share the step's batch as their speeds are, and their gradients are summed, each
weighted by its samples (sum of b_i / B times g_i, not the mean over ranks).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.errors import PlanError

Cuts = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class MixedRank:
    """One rank of a pipeline: dp x tp devices of one kind.

    `kind` indexes the kinds of the problem. The `candidate` says how the devices divide the
    rank's stages; its `pp` is the number of ranks of the pipeline. They are the kind's devices
    from number `place` x dp x tp on.
    """

    kind: int
    place: int
    candidate: Candidate

    @property
    def num_devices(self) -> int:
        """Devices of the rank."""
        return self.candidate.dp * self.candidate.tp


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Pipeline:
    """Ranks in order, and the units of each stage; `batch` are its samples of every step."""

    batch: int
    ranks: tuple[MixedRank, ...]
    cuts: Cuts

    def __post_init__(self) -> None:
        if not self.ranks:
            raise PlanError("a pipeline has one rank or more")
        first = self.ranks[0].candidate
        if len(self.cuts) != len(self.ranks) * first.stages_per_rank:
            raise PlanError(
                f"{len(self.ranks)} ranks of {first.stages_per_rank} stages each do not hold "
                f"{len(self.cuts)} stages"
            )
        for rank in self.ranks:
            own = rank.candidate
            if (own.pp, own.schedule, own.stages_per_rank) != (
                len(self.ranks),
                first.schedule,
                first.stages_per_rank,
            ):
                raise PlanError(
                    f"all ranks run one schedule of {len(self.ranks)} ranks, but got "
                    f"pp={own.pp} and schedule={own.schedule}"
                )
            if own.dp * own.microbatch_size != self.microbatch:
                raise PlanError(
                    f"all ranks work on microbatches of one size, but got "
                    f"{own.dp * own.microbatch_size} and {self.microbatch}"
                )
        first.num_microbatches(self.batch)

    @property
    def microbatch(self) -> int:
        """Samples of one microbatch over all its data-parallel ranks."""
        return self.ranks[0].candidate.dp * self.ranks[0].candidate.microbatch_size


def pipeline_on(kind: int, candidate: Candidate, cuts: Cuts, batch: int) -> Pipeline:
    """A plan for devices of one kind as a pipeline."""
    ranks = tuple(
        MixedRank(kind=kind, place=place, candidate=candidate) for place in range(candidate.pp)
    )
    return Pipeline(batch=batch, ranks=ranks, cuts=cuts)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class MixedCandidate:
    """The pipelines; together they take the whole batch."""

    pipelines: tuple[Pipeline, ...]

    @property
    def ranks(self) -> tuple[MixedRank, ...]:
        """Those of all pipelines."""
        return tuple(rank for pipeline in self.pipelines for rank in pipeline.ranks)

    @property
    def num_devices(self) -> int:
        """Devices used."""
        return sum(rank.num_devices for rank in self.ranks)

    def devices_of(self, kind: int) -> int:
        """Devices used of one kind."""
        return sum(rank.num_devices for rank in self.ranks if rank.kind == kind)

    def short(self, names: Sequence[str]) -> str:
        """In one line for people; `names` are those of the kinds."""
        parts = []
        for pipeline in self.pipelines:
            runs = [
                (names[kind], [rank.candidate for rank in ranks])
                for kind, ranks in groupby(pipeline.ranks, key=lambda rank: rank.kind)
            ]
            text = " then ".join(_run_text(name, run) for name, run in runs)
            share = f"{pipeline.batch} samples: " if len(self.pipelines) > 1 else ""
            parts.append(f"{share}{text}")
        return "; ".join(parts)


def _run_text(name: str, run: Sequence[Candidate]) -> str:
    """Ranks on one kind of device that follow each other."""
    first = run[0]
    knobs = [f"pp={len(run)}"] if len(run) > 1 else []
    if first.schedule != "1F1B" and first.pp > 1:
        knobs.append(first.schedule)
    if first.dp > 1:
        knobs.append(f"dp={first.dp}")
    if first.tp > 1:
        knobs.append(f"tp={first.tp}")
    if first.dp_shard > 1:
        knobs.append(f"zero {first.zero}")
    if first.sequence_parallel:
        knobs.append("sequence parallel")
    again = Counter(candidate.recompute for candidate in run if candidate.recompute != "none")
    knobs += [f"recompute {mode}" for mode in sorted(again)]
    knobs.append(f"microbatch {first.microbatch_size}")
    return f"{name} ({', '.join(knobs)})"
