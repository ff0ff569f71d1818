"""Every way of splitting the training that may be offered, in groups that share a computation.

A `Group` fixes devices, pp, tp, dp, microbatch, recompute and sequence parallelism; its members
differ in how data parallelism is done and in the schedule. The search bounds whole groups and
opens only those that may hold the best. Knobs that cannot act are at one value (no schedule to
choose without a pipeline, nothing for `zero` to shard), so every candidate counted is distinct.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.errors import PlanError
from claw_plan.planner.problem import Problem
from claw_plan.planner.schedules import INTERLEAVED, SCHEDULES, schedule_refusal
from claw_plan.planner.supported import OFFLOAD, RECOMPUTE, can_grow_from, knob_refusal, refusal
from claw_plan.profiles.cluster import Cluster

MOST_MICROBATCHES = 4096
"""A step of more is not offered: it is simulated task by task, and nobody accumulates so many."""

CANNOT_ACT = (
    "a schedule is chosen only where pp is above 1 and a step has two microbatches or more, one "
    "that splits backwards together with recompute only where it is pinned, "
    "sequence_parallel only where tp is above 1 and divides the sequence, and a step has at most "
    f"{MOST_MICROBATCHES} microbatches"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Candidates that compute alike. `base` carries the shared knobs, dp as dp_replicate.

    Its schedule stands for those that bound alike: 1F1B for GPipe too.
    """

    base: Candidate
    microbatches: int
    size: int


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


class Space:
    """The candidates of a problem that agree with the pinned knobs `fix`."""

    def __init__(self, problem: Problem, fix: Mapping[str, Any]) -> None:
        self._problem, self._fix = problem, dict(fix)
        self._check_fix()
        self._members = cache(self._count_members)

    def _check_fix(self) -> None:
        """Pinned values that no candidate can have are refused with the values that can."""
        problem = self._problem
        graph, pinned = problem.graph, pinned_candidate(self._fix)
        check_pinned(self._fix, problem.cluster)
        if pinned.tp > 1 and graph.tp_divides % pinned.tp:
            valid = ", ".join(str(d) for d in self.tp_degrees())
            reason = f" ({graph.no_tensor_parallel})" if graph.no_tensor_parallel else ""
            raise PlanError(
                f"--fix tp={pinned.tp}: the model's heads divide by {valid} only{reason}; pin one "
                "of these, or split the model by pp instead"
            )
        if pinned.pp * pinned.stages_per_rank > self.most_stages():
            refused = next(iter(graph.cut_refused.values()), "")
            each = f",stages_per_rank={pinned.stages_per_rank}" * (pinned.stages_per_rank > 1)
            raise PlanError(
                f"--fix pp={pinned.pp}{each}: the model's {len(graph.blocks)} blocks make at most "
                f"{self.most_stages()} stages{f' ({refused})' if refused else ''}"
            )

    def tp_degrees(self) -> list[int]:
        """Degrees that divide every head count of the model."""
        graph = self._problem.graph
        if graph.no_tensor_parallel:
            return [1]
        return divisors(graph.tp_divides)

    def most_stages(self) -> int:
        """Pipeline stages the chain can be cut into: one more than there are legal cuts."""
        graph = self._problem.graph
        return 1 + sum(unit not in graph.cut_refused for unit in range(2, len(graph.blocks) + 1))

    def device_counts(self) -> list[int]:
        """Numbers of devices a plan may use: any part of one node, or whole nodes."""
        cluster, per_node = self._problem.cluster, self._problem.devices_per_node
        counts = set(range(1, min(per_node, cluster.num_devices) + 1))
        counts |= set(range(per_node, cluster.num_devices + 1, per_node))
        counts.add(cluster.num_devices)
        return sorted(counts, reverse=True)

    def groups(self) -> Iterator[Group]:
        """All groups, larger device counts first."""
        batch = self._problem.training.global_batch
        for count in self.device_counts():
            for pp, tp, dp in self._degrees(count):
                if batch % dp:
                    continue
                for size in divisors(batch // dp):
                    if batch // (dp * size) > MOST_MICROBATCHES:
                        continue
                    if self._pinned("microbatch_size", size):
                        yield from self._variants(pp, tp, dp, size, batch // (dp * size))

    def _degrees(self, count: int) -> Iterator[tuple[int, int, int]]:
        stages = self.most_stages()
        for tp in self.tp_degrees():
            if count % tp or not self._pinned("tp", tp):
                continue
            for pp in divisors(count // tp):
                if pp <= stages and self._pinned("pp", pp):
                    yield pp, tp, count // (tp * pp)

    def _variants(
        self, pp: int, tp: int, dp: int, size: int, microbatches: int
    ) -> Iterator[Group]:
        bucket_bytes = self._fix.get("bucket_bytes", Candidate().bucket_bytes)
        recomputes = [mode for mode in RECOMPUTE if self._pinned("recompute", mode)]
        for schedule, stages in self._layouts(pp, microbatches):
            members = self._members(pp, tp, dp, min(microbatches, 2), schedule)
            splits = SCHEDULES[schedule].splits_backward and "schedule" not in self._fix
            for recompute, sequence_parallel in product(recomputes, self._sequence_choices(tp)):
                if not members or (splits and recompute != "none"):
                    continue
                base = Candidate(
                    pp=pp,
                    tp=tp,
                    dp_replicate=dp,
                    microbatch_size=size,
                    schedule=schedule,
                    stages_per_rank=stages,
                    recompute=recompute,
                    sequence_parallel=sequence_parallel,
                    bucket_bytes=bucket_bytes,
                )
                yield Group(base=base, microbatches=microbatches, size=members)

    def _layouts(self, pp: int, microbatches: int) -> Iterator[tuple[str, int]]:
        """Schedules with the stages a rank holds; one for those that are bound alike."""
        if pp == 1 or microbatches == 1:  # every schedule is the same
            if self._pinned("stages_per_rank", 1):
                yield "1F1B", 1
            return
        for name, schedule in SCHEDULES.items():
            if name == "GPipe":
                continue
            most = min(self.most_stages() // pp, schedule.most_stages or self.most_stages())
            for stages in range(schedule.fewest_stages, most + 1):
                # Of many stages a rank only equal ones are worth their messages; others by --fix.
                uneven = stages > 2 and len(self._problem.graph.blocks) % (pp * stages)
                if uneven and "stages_per_rank" not in self._fix:
                    continue
                if self._pinned("stages_per_rank", stages) and not schedule_refusal(
                    name, pp, microbatches, stages
                ):
                    yield name, stages

    def _sequence_choices(self, tp: int) -> list[bool]:
        graph, choices = self._problem.graph, [False]
        if tp > 1 and not graph.no_sequence_parallel and (graph.seq_len or 1) % tp == 0:
            choices.append(True)
        return [value for value in choices if self._pinned("sequence_parallel", value)]

    def _count_members(self, pp: int, tp: int, dp: int, microbatches: int, schedule: str) -> int:
        stages = SCHEDULES[schedule].fewest_stages
        base = Candidate(pp=pp, tp=tp, dp_replicate=dp, schedule=schedule, stages_per_rank=stages)
        return len(self.members(Group(base=base, microbatches=microbatches, size=0)))

    def members(self, group: Group) -> list[Candidate]:
        """The candidates of a group, in order."""
        base = group.base
        is_plain = base.schedule == "1F1B" and base.pp > 1 and group.microbatches > 1
        schedules = ("1F1B", "GPipe") if is_plain else (base.schedule,)
        found = []
        for shard in divisors(base.dp):
            if not self._pinned("dp_shard", shard):
                continue
            if not self._pinned("dp_replicate", base.dp // shard):
                continue
            for schedule in (s for s in schedules if self._pinned("schedule", s)):
                for zero, offload in product(
                    self._zero_choices(base.pp, shard, group.microbatches),
                    self._offload_choices(),
                ):
                    candidate = replace(
                        base,
                        dp_shard=shard,
                        dp_replicate=base.dp // shard,
                        schedule=schedule,
                        zero=zero,
                        offload=offload,
                    )
                    if not refusal(candidate):
                        found.append(candidate)
        return found

    def _zero_choices(self, pp: int, shard: int, microbatches: int) -> list[int]:
        """What dp_shard may shard: zero=1 differs from 2 only where microbatches add up."""
        if shard == 1:
            return [Candidate().zero]
        if pp > 1:
            choices = [3, 1]
        else:
            choices = [3, 2, 1] if microbatches > 1 else [3, 2]
        return [zero for zero in choices if self._pinned("zero", zero)]

    def _offload_choices(self) -> list[str]:
        """On CPUs the host's memory is the device's: nothing to gain, but it may be pinned."""
        pinned = self._fix.get("offload")
        if pinned is not None:
            return [pinned]
        return [Candidate().offload] if self._problem.device.kind == "cpu" else list(OFFLOAD)

    def _pinned(self, knob: str, value: Any) -> bool:
        return knob not in self._fix or self._fix[knob] == value

    def explain_empty(self) -> str:
        """Why there is no candidate at all: nearly always a batch that nothing divides."""
        batch = self._problem.training.global_batch
        pinned = ",".join(f"{knob}={value}" for knob, value in self._fix.items())
        why = batch_refusal(self._fix, batch) or self._schedule_refusal(batch)
        return why or (
            f"no candidate agrees with --fix {pinned} on "
            f"{self._problem.cluster.num_devices} devices with a "
            f"global batch of {batch}: {CANNOT_ACT}"
        )

    def _schedule_refusal(self, batch: int) -> str:
        """Why the pinned schedule cannot run the pinned microbatches; or ''."""
        pinned = pinned_candidate(self._fix)
        if not {"schedule", "pp", "microbatch_size"} <= self._fix.keys():
            return ""
        return schedule_refusal(
            pinned.schedule, pinned.pp, pinned.num_microbatches(batch), pinned.stages_per_rank
        )


def pinned_candidate(fix: Mapping[str, Any]) -> Candidate:
    """The pinned knobs, with a schedule that has the stages or stages that the schedule has."""
    chosen = dict(fix)
    if "stages_per_rank" not in fix and fix.get("schedule") in SCHEDULES:
        chosen["stages_per_rank"] = SCHEDULES[fix["schedule"]].fewest_stages
    elif fix.get("stages_per_rank", 1) > 1:
        chosen.setdefault("schedule", INTERLEAVED)
    return Candidate(**chosen)


def check_pinned(fix: Mapping[str, Any], cluster: Cluster) -> None:
    """Refuses pinned knobs that no model could have on the cluster, before one is traced."""
    pinned = pinned_candidate(fix)
    why = knob_refusal(pinned)
    if not why and not can_grow_from(pinned):
        why = refusal(pinned)
    if why:
        raise PlanError(f"--fix {why}")
    if pinned.sequence_parallel and fix.get("tp") == 1:
        raise PlanError("--fix sequence_parallel=true acts with tp above 1 only; pin tp=2 or more")
    if pinned.num_devices > cluster.num_devices:
        raise PlanError(
            f"--fix asks for {pinned.num_devices} devices (pp x dp x tp); "
            f"the cluster {cluster.name!r} has {cluster.num_devices}"
        )


def batch_refusal(fix: Mapping[str, Any], batch: int) -> str:
    """Why the pinned knobs cannot share out the batch, with the nearest that they can; or ''."""
    pinned = Candidate(**fix)
    unit = pinned.dp * fix.get("microbatch_size", 1)
    if batch % unit == 0:
        return ""
    below, above = batch // unit * unit, -(-batch // unit) * unit
    near = f"{below} or {above}" if below else f"{above}"
    return (
        f"a global batch of {batch} is not a multiple of dp={pinned.dp} x "
        f"microbatch_size={fix.get('microbatch_size', 1)} = {unit}; nearest: {near}"
    )
