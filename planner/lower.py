"""From a Candidate to a TaskGraph: what every pipeline rank computes, sends and waits for.

All ranks of a stage do the same at the same time, so one stands for all of them: it has a compute
stream, streams for gathers, reductions and sends, and its port to the node's link and to the
network. Under many schedules it runs several stages. The rows of
`schedules.schedule_actions` give the order of passes; this module gives each pass its units,
`lower_data` and `lower_zero` the data-parallel traffic around them.

Where a schedule splits the backward, the first stage, which has no input to give a gradient to,
runs nothing for I and all for W; under recompute every other stage runs all for I, for it would
have to recompute twice. So does the executor.

On gloo nothing overlaps: its collectives are waited for where they are called and run on the
cores that compute, so there they are lowered onto the compute stream.

Folded: inside a pass without data-parallel traffic all kernels are one task and all
tensor-parallel exchanges another, since nothing else can meet them on their link.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from claw_plan.planner.actions import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Action,
    message_for,
    message_of,
)
from claw_plan.planner.candidate import Candidate
from claw_plan.planner.lower_data import DataParallel
from claw_plan.planner.lower_end import RankEnd, StepEnd
from claw_plan.planner.lower_zero import make_data_parallel
from claw_plan.planner.memory import HeldMemory
from claw_plan.planner.pass_time import INPUTS, WEIGHTS, PassTime, Stretch, stretch_of
from claw_plan.planner.placement import crosses_node, groups_of
from claw_plan.planner.problem import Problem, variant_of
from claw_plan.planner.schedules import rank_of_stage, schedule_actions, schedule_of
from claw_plan.planner.shards import FIRST, Place, ShardSizes
from claw_plan.planner.stage_streams import Moves, Parts, StageStreams, add_stage_streams
from claw_plan.profiles.cost import CollectiveCost
from claw_plan.simulator.task_graph import TaskGraph, TaskGraphBuilder

Cuts = tuple[tuple[int, int], ...]

NOTHING = "nothing"
"""The pass of an action whose work another one has done."""


class Lowered(NamedTuple):
    """The tasks of a step; `parts[task]` says, where known, what its time consists of in ns.

    `moved` are the collectives and messages of each pipeline rank.
    """

    graph: TaskGraph
    parts: Mapping[int, Parts]
    moved: tuple[Moves, ...]


@dataclass
class _Stage:
    """One stage while it is lowered."""

    index: int
    start: int
    stop: int
    data: DataParallel
    held: HeldMemory
    last_backward: int


@dataclass
class _Rank:
    """One pipeline rank; `pending[done]` is its next action."""

    streams: StageStreams
    pending: tuple[Action, ...]
    stages: dict[int, _Stage] = field(default_factory=dict)
    done: int = 0


class Lowering:
    """Lowers one candidate; `build` answers with the graph."""

    def __init__(
        self,
        problem: Problem,
        shards: ShardSizes,
        candidate: Candidate,
        cuts: Cuts,
        held: Sequence[HeldMemory] = (),
        num_microbatches: int = 0,
        place: Place = FIRST,
    ) -> None:
        self._problem, self._candidate = problem, candidate
        count = num_microbatches or candidate.num_microbatches(problem.training.global_batch)
        self._variant = variant_of(candidate)
        self._splits = candidate.recompute == "none"
        self._others = groups_of(candidate, problem.devices_per_node)
        self._builder = TaskGraphBuilder()
        self._sent: dict[tuple[int, str, int], int] = {}
        self._stretches: dict[tuple[int, int, str], Stretch] = {}
        self._send_costs: dict[tuple[int, str], CollectiveCost] = {}
        rows = schedule_actions(candidate.schedule, candidate.pp, count, candidate.stages_per_rank)
        ports = add_stage_streams(self._builder, problem, candidate)
        self._ranks = [
            _Rank(streams=port, pending=row) for port, row in zip(ports, rows, strict=True)
        ]
        self._num_stages = len(cuts)
        self._home = [rank_of_stage(candidate.schedule, i, candidate.pp) for i in range(len(cuts))]
        for index, (start, stop) in enumerate(cuts):
            rank = self._ranks[self._home[index]]
            rank.stages[index] = _Stage(
                index=index,
                start=start,
                stop=stop,
                data=make_data_parallel(
                    problem, shards, candidate, rank.streams, start, stop, place
                ),
                held=held[index] if held else HeldMemory(),
                last_backward=_last_backward(rank.pending, index),
            )

    def build(self) -> Lowered:
        """Adds all tasks in an order in which each needs only earlier ones."""
        progress = True
        while progress:
            progress = False
            for rank in self._ranks:
                first = rank.done
                self._lower_what_is_ready(rank)
                progress = progress or rank.done > first
        ends = [
            RankEnd(rank.streams, [stage.data for stage in rank.stages.values()])
            for rank in self._ranks
        ]
        StepEnd(self._problem, self._candidate, ends).lower()
        return Lowered(self._builder.build(), self._ranks[0].streams.parts, self._traffic())

    def _traffic(self) -> tuple[Moves, ...]:
        return tuple(tuple(rank.streams.moved) for rank in self._ranks)

    def _lower_what_is_ready(self, rank: _Rank) -> None:
        """A rank's next actions, up to one whose message has not been sent."""
        while rank.done < len(rank.pending):
            action = rank.pending[rank.done]
            needed = message_for(action, self._num_stages)
            if needed is not None:
                arrives = self._sent.get(needed)
                if arrives is None:
                    return
                rank.streams.wait_for([arrives] if arrives >= 0 else [])
            self._lower_action(rank, action)
            rank.done += 1

    def _lower_action(self, rank: _Rank, action: Action) -> None:
        stage, label = rank.stages[action.stage], str(action)
        if action.kind == FORWARD:
            self._forward(rank, stage, label)
        else:
            self._backward(rank.streams, stage, action, label)
        self._send(rank.streams, stage, action, label)

    def _forward(self, rank: _Rank, stage: _Stage, label: str) -> None:
        data, streams = stage.data, rank.streams
        streams.next_alloc_bytes = stage.held.microbatch_bytes
        if not rank.done:
            streams.next_alloc_bytes += sum(s.held.always_bytes for s in rank.stages.values())
        data.begin_forward(range(stage.start, stage.stop))
        if not data.by_unit:
            streams.run_pass("forward", label, self._stretch(stage.start, stage.stop, "forward"))
        else:
            for unit in range(stage.start, stage.stop):
                data.before_unit(unit, backward=False)
                stretch = self._stretch(unit, unit + 1, "forward")
                streams.run_pass("forward", f"{label} unit {unit}", stretch)
                data.after_forward(unit)
        data.end_forward()

    def _backward(self, streams: StageStreams, stage: _Stage, action: Action, label: str) -> None:
        """A whole backward, or what one of its parts runs."""
        kinds = self._kinds_of(action)
        if not kinds:
            return
        completes = action.kind != INPUT_GRADIENT
        ends = completes if self._splits or not stage.index else action.kind != WEIGHT_GRADIENT
        is_last = completes and action.microbatch == stage.last_backward
        data, frees = stage.data, stage.held.microbatch_bytes if ends else 0
        units = range(stage.stop - 1, stage.start - 1, -1)
        data.begin_backward(units, is_last)
        if not data.by_unit:
            streams.next_free_bytes = frees
            self._run_kinds(streams, kinds, label, stage.start, stage.stop)
        for unit in units:
            if data.by_unit and kinds != (NOTHING,):
                data.before_unit(unit, backward=True)
                streams.next_free_bytes = frees if unit == stage.start else 0
                self._run_kinds(streams, kinds, f"{label} unit {unit}", unit, unit + 1)
            data.after_backward(unit, is_last)
        if completes:
            data.end_backward(is_last)

    def _kinds_of(self, action: Action) -> tuple[str, ...]:
        """The passes over the units that a backward action runs, in order."""
        again = () if self._candidate.recompute == "none" else ("recompute",)
        whole = (*again, "backward")
        if action.kind == BACKWARD:
            return whole
        if not action.stage:
            return whole if action.kind == WEIGHT_GRADIENT else ()
        if self._splits:
            return (INPUTS if action.kind == INPUT_GRADIENT else WEIGHTS,)
        return whole if action.kind == INPUT_GRADIENT else (NOTHING,)

    def _run_kinds(
        self, streams: StageStreams, kinds: Sequence[str], label: str, start: int, stop: int
    ) -> None:
        for kind in kinds:
            if kind != NOTHING:
                shown = "recompute" if kind == "recompute" else "backward"
                streams.run_pass(shown, label, self._stretch(start, stop, kind))

    def _stretch(self, start: int, stop: int, kind: str) -> Stretch:
        """A pass over units; the same for every microbatch."""
        key = (start, stop, kind)
        if key not in self._stretches:
            one = self._recompute if kind == "recompute" else self._pass
            units = [u for u in range(start, stop) if kind != "recompute" or self._is_block(u)]
            self._stretches[key] = stretch_of([one(unit, kind) for unit in units])
        return self._stretches[key]

    def _pass(self, unit: int, kind: str) -> PassTime:
        candidate, problem = self._candidate, self._problem
        size = (self._variant, candidate.microbatch_size, candidate.tp)
        if kind in (INPUTS, WEIGHTS):
            return problem.part_time(unit, *size, kind, self._others)
        return problem.pass_time(unit, *size, kind == "backward", self._others)

    def _recompute(self, unit: int, kind: str) -> PassTime:
        candidate = self._candidate
        return self._problem.recompute_time(
            unit,
            self._variant,
            candidate.microbatch_size,
            candidate.tp,
            candidate.recompute,
            self._others,
        )

    def _is_block(self, unit: int) -> bool:
        return 0 < unit < len(self._problem.graph.units) - 1

    def _send(self, streams: StageStreams, stage: _Stage, action: Action, label: str) -> None:
        """Hidden states go on to the next stage, their gradients back to the one before."""
        message = message_of(action)
        if message is None:
            return
        peer = stage.index + (1 if action.kind == FORWARD else -1)
        if not 0 <= peer < self._num_stages:
            return
        if self._home[peer] == self._home[stage.index]:
            self._sent[message] = streams.last_task
            return
        key = (stage.index, message[1])
        cost = self._send_costs.get(key)
        if cost is None:
            cost = self._send_costs[key] = self._send_cost(stage, message[1], peer)
        self._sent[message] = streams.send(cost, f"send {label}")
        self._ranks[self._home[peer]].streams.receive(cost)

    def _send_cost(self, stage: _Stage, kind: str, peer: int) -> CollectiveCost:
        """A message from the stage to its neighbour; the same for every microbatch."""
        boundary = stage.stop if kind == FORWARD else stage.start
        size = self._problem.graph.cost(boundary, self._variant).input_bytes.at(
            self._candidate.microbatch_size, self._candidate.tp
        )
        if self._problem.trainer.scatters_sends and not self._candidate.sequence_parallel:
            size = -(-size // self._candidate.tp)
        earlier = min(stage.index, peer) % self._candidate.pp
        if schedule_of(self._candidate.schedule).places_v:
            earlier = min(self._home[stage.index], self._home[peer])
        nodes = 1 + crosses_node(self._candidate, earlier, self._problem.devices_per_node)
        return self._problem.collective("send", size, 2, nodes)


def _last_backward(row: Sequence[Action], stage: int) -> int:
    """The microbatch whose backward comes last on the stage; its gradients are reduced."""
    return next(
        action.microbatch
        for action in reversed(row)
        if action.stage == stage and action.kind in (BACKWARD, WEIGHT_GRADIENT)
    )


def lower(
    problem: Problem,
    shards: ShardSizes,
    candidate: Candidate,
    cuts: Cuts,
    held: Sequence[HeldMemory] = (),
    num_microbatches: int = 0,
    place: Place = FIRST,
) -> Lowered:
    """The tasks of one training step; with `held`, one a stage, also the memory they hold.

    `num_microbatches` stands in for the step's own number, 0 for that. `place` is the rank of
    each stage whose parts of parameters count where they are uneven.
    """
    return Lowering(problem, shards, candidate, cuts, held, num_microbatches, place).build()
