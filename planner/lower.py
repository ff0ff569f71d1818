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
cores that compute, so there they are lowered onto the compute stream. Its messages wait for the
receiver to ask (`receives`).

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
from claw_plan.planner.receives import Message, receive_places
from claw_plan.planner.schedules import rank_of_stage, schedule_actions, schedule_of
from claw_plan.planner.shards import FIRST, Place, ShardSizes
from claw_plan.planner.stage_streams import (
    Moves,
    Parts,
    StageStreams,
    View,
    add_stage_streams,
    views_of,
)
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
    view: View
    start: int
    stop: int
    data: DataParallel
    held: HeldMemory
    last_backward: int

    @property
    def recomputes(self) -> bool:
        """Whether something of its forwards runs again before their backwards."""
        return self.view.candidate.recompute != "none"

    @property
    def again(self) -> range:
        """The units whose forwards these are."""
        return self.view.problem.recomputed_units(self.view.candidate, self.start, self.stop)


@dataclass
class LoweredRank:
    """One pipeline rank; `pending[done]` is its next action."""

    view: View
    streams: StageStreams
    pending: tuple[Action, ...]
    stages: dict[int, _Stage] = field(default_factory=dict)
    done: int = 0
    ends: list[int] = field(default_factory=lambda: [-1])
    """Its newest task after so many actions."""


class _Made(NamedTuple):
    """A message on gloo that nobody has asked for yet."""

    streams: StageStreams
    task: int
    cost: CollectiveCost
    label: str


class Lowering:
    """Lowers one pipeline, whose ranks are seen as `views` say, into a graph that is being built.

    The views agree in schedule and number of ranks, stages and microbatches.
    """

    def __init__(
        self,
        builder: TaskGraphBuilder,
        views: Sequence[View],
        shards: ShardSizes,
        cuts: Cuts,
        held: Sequence[HeldMemory] = (),
        num_microbatches: int = 0,
        place: Place = FIRST,
        first_rank: int = 0,
    ) -> None:
        problem, candidate, _ = views[0]
        count = num_microbatches or candidate.num_microbatches(problem.training.global_batch)
        self._schedule = candidate.schedule
        self._sent: dict[Message, int] = {}
        self._made: dict[Message, _Made] = {}
        self._stretches: dict[tuple[int, int, str], Stretch] = {}
        self._send_costs: dict[tuple[int, str], CollectiveCost] = {}
        rows = schedule_actions(candidate.schedule, candidate.pp, count, candidate.stages_per_rank)
        ports = add_stage_streams(builder, views, first_rank)
        self._ranks = [
            LoweredRank(view=view, streams=port, pending=row)
            for view, port, row in zip(views, ports, rows, strict=True)
        ]
        self._num_stages = len(cuts)
        self._home = [rank_of_stage(candidate.schedule, i, candidate.pp) for i in range(len(cuts))]
        self._places = {} if ports[0].overlaps else receive_places(rows, self._home)
        for index, (start, stop) in enumerate(cuts):
            rank = self._ranks[self._home[index]]
            view = rank.view
            rank.stages[index] = _Stage(
                index=index,
                view=view,
                start=start,
                stop=stop,
                data=make_data_parallel(
                    view.problem, shards, view.candidate, rank.streams, start, stop, place
                ),
                held=held[index] if held else HeldMemory(),
                last_backward=_last_backward(rank.pending, index),
            )

    def run(self) -> list[RankEnd]:
        """Adds all passes in an order in which each needs only earlier ones."""
        progress = True
        while progress:
            progress = False
            for rank in self._ranks:
                first = rank.done
                self._lower_what_is_ready(rank)
                progress = progress or rank.done > first
        return [self._end_of(rank) for rank in self._ranks]

    def begin_with_last_backward(self) -> list[RankEnd]:
        """Adds that alone: the first of a step that repeats from there on (`lower_ordered`)."""
        (rank,) = self._ranks
        rank.pending = (rank.pending[-1], *rank.pending[:-1])
        held = rank.stages[0].held
        rank.streams.next_alloc_bytes = held.always_bytes + held.microbatch_bytes
        self._lower_action(rank, rank.pending[0])
        rank.done = 1
        return [self._end_of(rank)]

    def _end_of(self, rank: LoweredRank) -> RankEnd:
        return RankEnd(rank.view, rank.streams, [stage.data for stage in rank.stages.values()])

    def _lower_what_is_ready(self, rank: LoweredRank) -> None:
        """A rank's next actions, up to one whose message has not been sent."""
        while rank.done < len(rank.pending):
            action = rank.pending[rank.done]
            needed = message_for(action, self._num_stages)
            if needed is not None:
                arrives = self._arrives(rank, needed)
                if arrives is None:
                    return
                rank.streams.wait_for([arrives] if arrives >= 0 else [])
            self._lower_action(rank, action)
            rank.done += 1
            rank.ends.append(rank.streams.last_task)

    def _arrives(self, rank: LoweredRank, message: Message) -> int | None:
        """The task at whose end a rank has a message; None while that is not made."""
        made = self._made.get(message)
        if made is None:
            return self._sent.get(message)
        streams, task, cost, label = made
        asked_after = rank.ends[self._places[message]]
        asked = rank.streams.ask(cost, f"ask {label}", asked_after, streams)
        return streams.answer(cost, f"send {label}", task, asked, rank.streams)

    def _lower_action(self, rank: LoweredRank, action: Action) -> None:
        stage, label = rank.stages[action.stage], str(action)
        if action.kind == FORWARD:
            self._forward(rank, stage, label)
        else:
            self._backward(rank.streams, stage, action, label)
        self._send(rank.streams, stage, action, label)

    def _forward(self, rank: LoweredRank, stage: _Stage, label: str) -> None:
        data, streams = stage.data, rank.streams
        streams.next_alloc_bytes = stage.held.microbatch_bytes
        if not rank.done:
            streams.next_alloc_bytes += sum(s.held.always_bytes for s in rank.stages.values())
        data.begin_forward(range(stage.start, stage.stop))
        if not data.by_unit:
            stretch = self._stretch(stage, stage.start, stage.stop, "forward")
            streams.run_pass("forward", label, stretch)
        else:
            for unit in range(stage.start, stage.stop):
                data.before_unit(unit, backward=False)
                stretch = self._stretch(stage, unit, unit + 1, "forward")
                streams.run_pass("forward", f"{label} unit {unit}", stretch)
                data.after_forward(unit)
        data.end_forward()

    def _backward(self, streams: StageStreams, stage: _Stage, action: Action, label: str) -> None:
        """A whole backward, or what one of its parts runs."""
        kinds = _kinds_of(action, recomputes=stage.recomputes)
        if not kinds:
            return
        completes = action.kind != INPUT_GRADIENT
        splits = not stage.recomputes or not stage.index
        ends = completes if splits else action.kind != WEIGHT_GRADIENT
        is_last = completes and action.microbatch == stage.last_backward
        data, frees = stage.data, stage.held.microbatch_bytes if ends else 0
        units = range(stage.stop - 1, stage.start - 1, -1)
        data.begin_backward(units, is_last)
        if not data.by_unit:
            streams.next_free_bytes = frees
            self._run_kinds(stage, streams, kinds, label, range(stage.start, stage.stop))
        for unit in units:
            if data.by_unit and kinds != (NOTHING,):
                data.before_unit(unit, backward=True)
                streams.next_free_bytes = frees if unit == stage.start else 0
                at = range(unit, unit + 1)
                self._run_kinds(stage, streams, kinds, f"{label} unit {unit}", at)
            data.after_backward(unit, is_last)
        if completes:
            data.end_backward(is_last)

    def _run_kinds(
        self, stage: _Stage, streams: StageStreams, kinds: Sequence[str], label: str, units: range
    ) -> None:
        for kind in kinds:
            if kind != NOTHING:
                shown = "recompute" if kind == "recompute" else "backward"
                stretch = self._stretch(stage, units.start, units.stop, kind)
                streams.run_pass(shown, label, stretch)

    def _stretch(self, stage: _Stage, start: int, stop: int, kind: str) -> Stretch:
        """A pass over units of a stage; the same for every microbatch."""
        key = (start, stop, kind)
        if key not in self._stretches:
            again = range(start, stop) if kind != "recompute" else stage.again
            units = [unit for unit in range(start, stop) if unit in again]
            passes = [pass_of(stage.view, unit, kind) for unit in units]
            self._stretches[key] = stretch_of(passes)
        return self._stretches[key]

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
        if message in self._places:
            self._made[message] = _Made(streams, streams.last_task, cost, label)
            streams.moved.append((("pp",), cost.moves))
        else:
            self._sent[message] = streams.send(cost, f"send {label}")
        self._ranks[self._home[peer]].streams.receive(cost)

    def _send_cost(self, stage: _Stage, kind: str, peer: int) -> CollectiveCost:
        """A message from the stage to its neighbour; the same for every microbatch."""
        boundary = stage.stop if kind == FORWARD else stage.start
        own, other = stage.view, self._ranks[self._home[peer]].view
        views = [own] if own.problem is other.problem else [own, other]
        nodes = 2  # different clusters have no node in common
        if own.problem.cluster is other.problem.cluster:
            earlier = min(stage.index, peer) % own.candidate.pp
            if schedule_of(self._schedule).places_v:
                earlier = min(self._home[stage.index], self._home[peer])
            place = earlier + own.place - self._home[stage.index]
            nodes += crosses_node(own.candidate, place, own.problem.devices_per_node) - 1
        ports = [send_cost(view, boundary, nodes) for view in views]
        return max(ports, key=lambda cost: cost.alone_ns)


def pass_of(view: View, unit: int, kind: str) -> PassTime:
    """A pass of a unit for one microbatch: 'forward', 'backward', a part of it, or 'recompute'."""
    problem, candidate, _ = view
    size = (variant_of(candidate), candidate.microbatch_size, candidate.tp)
    others = groups_of(candidate, problem.devices_per_node)
    if kind == "recompute":
        return problem.recompute_time(unit, *size, candidate.recompute, others)
    if kind in (INPUTS, WEIGHTS):
        return problem.part_time(unit, *size, kind, others)
    return problem.pass_time(unit, *size, kind == "backward", others)


def send_cost(view: View, boundary: int, nodes: int) -> CollectiveCost:
    """What one rank's port gives or takes of the hidden state that enters unit `boundary`."""
    problem, candidate, _ = view
    size = problem.graph.cost(boundary, variant_of(candidate)).input_bytes.at(
        candidate.microbatch_size, candidate.tp
    )
    if problem.trainer.scatters_sends and not candidate.sequence_parallel:
        size = -(-size // candidate.tp)
    return problem.message(size, nodes)


def _kinds_of(action: Action, *, recomputes: bool) -> tuple[str, ...]:
    """The passes over the units that a backward action runs, in order."""
    whole = ("recompute", "backward") if recomputes else ("backward",)
    if action.kind == BACKWARD:
        return whole
    if not action.stage:
        return whole if action.kind == WEIGHT_GRADIENT else ()
    if not recomputes:
        return (INPUTS if action.kind == INPUT_GRADIENT else WEIGHTS,)
    return whole if action.kind == INPUT_GRADIENT else (NOTHING,)


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
    builder = TaskGraphBuilder()
    views = views_of(problem, candidate)
    lowering = Lowering(builder, views, shards, cuts, held, num_microbatches, place)
    hosts = -(-candidate.num_devices // problem.devices_per_node)
    if candidate.bucket_order:
        ends = lowering.begin_with_last_backward()
        return lowered(builder, StepEnd(problem, ends, candidate.num_devices, hosts), lowering)
    return lowered(builder, StepEnd(problem, lowering.run(), candidate.num_devices, hosts))


def lowered(builder: TaskGraphBuilder, end: StepEnd, then: Lowering | None = None) -> Lowered:
    """The graph of passes that are lowered, with the end of their step, and what comes after."""
    end.lower()
    if then is not None:
        then.run()
    moved = tuple(tuple(rank.streams.moved) for rank in end.ranks)
    return Lowered(builder.build(), end.ranks[0].streams.parts, moved)
