"""From a block's data flow to a `SplitProgram`: the ways of each operator and what they take.

Every operator can run whole. With a summed gradient (`shared`) it can too, for derivatives are
linear in it. Along an axis (`axes`), or as a view (`views`), it runs divided. What
enters the block is made by steps of their own: parameters are stored whole or cut, at no cost but
memory; the hidden state comes whole, or along the sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from claw_plan.planner.split.axes import KEEP, SUM, Axis, axes_of, is_sum
from claw_plan.planner.split.costs import SplitCosts
from claw_plan.planner.split.graph import FlowOp, SplitGraph
from claw_plan.planner.split.program import SplitProgram, Step, Way
from claw_plan.planner.split.states import (
    PARTIAL,
    SHARED,
    WHOLE,
    State,
    change_of,
    cut,
    fits,
)
from claw_plan.planner.split.views import (
    JOINS,
    MOST_PIECES,
    is_view,
    join_of,
    pieces_of,
    short_name,
    view_of,
)

STATE_BYTES = 16
"""Bytes held for each parameter element: fp32 weight, gradient and AdamW's two moments."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is asked: the degree, the samples in a microbatch, and how activations lie between
    blocks (`sequence`: along the sequence).

    With `runnable_only` changes of state are those that the executor makes: a region is entered
    with a summed gradient and left with a sum.
    """

    degree: int
    batch: int = 1
    sequence: bool = False
    runnable_only: bool = True


def split_program(graph: SplitGraph, setting: Setting, costs: SplitCosts) -> SplitProgram:
    """The choices there are for the block, priced."""
    maker = _Maker(graph, setting, costs)
    sources = [maker.source(number) for number in graph.sources()]
    ops = [maker.step(op) for op in graph.ops]
    return SplitProgram(steps=tuple(_in_order([*sources], [*ops, maker.end()])), price=maker.price)


def _in_order(sources: list[Step], steps: list[Step]) -> Iterator[Step]:
    """Sources just before their first use: the fewer tensors are alive, the faster it is."""
    waiting = {step.outputs[0]: step for step in sources}
    for step in steps:
        for tensor in dict.fromkeys(step.inputs):
            if tensor in waiting:
                yield waiting.pop(tensor)
        yield step


class _Maker:
    def __init__(self, graph: SplitGraph, setting: Setting, costs: SplitCosts) -> None:
        self._graph, self._setting, self._costs = graph, setting, costs
        found = {n for op in graph.ops for n in pieces_of(op, graph)}
        self._pieces = sorted({1, *(n for n in found if n <= MOST_PIECES)})
        self._rows = _row_counts(graph, setting.batch)
        self._prices: dict[tuple[int, State, State], int | None] = {}

    # Sources and the end.

    def source(self, number: int) -> Step:
        """The step that brings a tensor into the block."""
        tensor = self._graph.tensors[number]
        states = [WHOLE]
        if tensor.parameter:
            states += self._cuts(number)
        elif number == self._graph.hidden and self._setting.sequence:
            states = [self._hidden_state(number)]
        held = tensor.num_bytes // 2 * STATE_BYTES if tensor.parameter else 0
        return Step(
            name=tensor.parameter or f"input {number}",
            inputs=(),
            outputs=(number,),
            ways=tuple(
                Way(
                    label=str(state),
                    needs=(),
                    gives=(state,),
                    time_ns=0,
                    held_bytes=held // (self._setting.degree if state.kind == "cut" else 1),
                )
                for state in states
            ),
        )

    def end(self) -> Step:
        """The step that takes the hidden state out of the block as it came in."""
        number = self._graph.result
        state = self._hidden_state(number) if self._setting.sequence else WHOLE
        way = Way(label="end", needs=(state,), gives=(), time_ns=0)
        return Step(name="end", inputs=(number,), outputs=(), ways=(way,))

    def _hidden_state(self, number: int) -> State:
        return cut(1) if len(self._graph.tensors[number].shape) > 2 else cut(0)

    # Operators.

    def step(self, op: FlowOp) -> Step:
        """An operator with all its ways, each of distinct states once and at its least."""
        ways: dict[tuple[tuple[State, ...], tuple[State, ...]], Way] = {}
        for way in self._ways(op):
            key = way.needs, way.gives
            if key not in ways or way.time_ns < ways[key].time_ns:
                ways[key] = way
        name = next((self._graph.tensors[n].parameter for n in op.inputs), "") or op.name
        return Step(name=name, inputs=op.inputs, outputs=op.outputs, ways=tuple(ways.values()))

    def _ways(self, op: FlowOp) -> Iterator[Way]:
        whole = (WHOLE,) * len(op.inputs), (WHOLE,) * len(op.outputs)
        yield self._way(op, "whole", *whole)
        if not any(self._trains(n) or self._graph.tensors[n].of_hidden for n in op.outputs):
            return  # masks and angles: every rank makes the whole, and takes what it needs
        if any(self._trains(number) for number in op.outputs):
            needs = tuple(self._summed(number) for number in op.inputs)
            yield self._way(op, "shared", needs, tuple(map(self._summed, op.outputs)))
        if is_view(op):
            yield from self._view_ways(op)
        elif short_name(op) in JOINS:
            yield from self._join_ways(op)
        else:
            for axis in axes_of(op, self._graph):
                yield from self._axis_ways(op, axis)
            if is_sum(op) and len({self._graph.tensors[n].shape for n in op.inputs}) == 1:
                summands = (PARTIAL,) * 2, (PARTIAL,)
                yield self._way(op, "summands", *summands)

    def _view_ways(self, op: FlowOp) -> Iterator[Way]:
        yield self._way(op, "summand", (PARTIAL,), (PARTIAL,) * len(op.outputs))
        for state in self._cuts(op.inputs[0]):
            gives = view_of(op, self._graph, state, self._setting.degree)
            if gives is not None and self._allowed(op.outputs, gives):
                yield self._way(op, str(state), (state,), gives)

    def _join_ways(self, op: FlowOp) -> Iterator[Way]:
        choices = [self._cuts(number) for number in op.inputs]
        for dim in range(len(self._graph.tensors[op.inputs[0]].shape)):
            same = [[state for state in some if state.dim == dim] for some in choices]
            for needs in product(*same):
                state = join_of(op, self._graph, needs)
                shape = self._graph.tensors[op.outputs[0]].shape
                if state is not None and fits(shape, state, self._setting.degree):
                    if self._allowed(op.outputs, (state,)):
                        yield self._way(op, str(state), needs, (state,))

    def _axis_ways(self, op: FlowOp, axis: Axis) -> Iterator[Way]:
        degree, tensors = self._setting.degree, self._graph.tensors
        if axis.size % degree:
            return
        for parts in self._parts(op, axis):
            needs = tuple(
                self._state(number, take, parts)
                for number, take in zip(op.inputs, axis.takes, strict=True)
            )
            gives = tuple(
                self._state(number, give, parts)
                for number, give in zip(op.outputs, axis.gives, strict=True)
            )
            pairs = [*zip(op.inputs, needs, strict=True), *zip(op.outputs, gives, strict=True)]
            if all(fits(tensors[number].shape, state, degree) for number, state in pairs):
                if self._allowed((*op.inputs, *op.outputs), (*needs, *gives)):
                    yield self._way(op, axis.label, needs, gives, axis)

    def _parts(self, op: FlowOp, axis: Axis) -> list[int]:
        """Pieces that the axis may lie in: rows of several samples are one a sample."""
        along = [
            *zip(op.inputs, axis.takes, strict=True),
            *zip(op.outputs, axis.gives, strict=True),
        ]
        rows = {self._rows[number] for number, dim in along if dim == 0 and number in self._rows}
        return sorted({*self._pieces, *rows})

    def _state(self, number: int, dim: int, parts: int) -> State:
        if dim >= 0:
            return cut(dim, parts)
        if dim == SUM:
            return PARTIAL
        return WHOLE if dim == KEEP else self._summed(number)

    def _summed(self, number: int) -> State:
        return SHARED if self._trains(number) else WHOLE

    def _trains(self, number: int) -> bool:
        return self._graph.tensors[number].needs_grad

    def _way(
        self,
        op: FlowOp,
        label: str,
        needs: tuple[State, ...],
        gives: tuple[State, ...],
        axis: Axis | None = None,
    ) -> Way:
        degree = self._setting.degree
        held = sum(
            self._graph.tensors[number].num_bytes // (degree if state.kind == "cut" else 1)
            for number, state in zip(op.outputs, gives, strict=True)
            if op.works and self._trains(number)
        )
        time_ns = self._costs.way_ns(op, self._graph, needs, gives, axis, degree)
        return Way(label=label, needs=needs, gives=gives, time_ns=time_ns, held_bytes=held)

    # States.

    def _cuts(self, number: int) -> list[State]:
        shape = self._graph.tensors[number].shape
        rows = self._rows.get(number)
        found = []
        for dim in range(len(shape)):
            for parts in {*self._pieces, *((rows,) if rows and dim == 0 else ())}:
                state = cut(dim, parts)
                if fits(shape, state, self._setting.degree) and self._allowed((number,), (state,)):
                    found.append(state)
        return sorted(found)

    def _allowed(self, numbers: tuple[int, ...], states: tuple[State, ...]) -> bool:
        """Samples are divided by data parallelism, not here."""
        for number, state in zip(numbers, states, strict=True):
            tensor = self._graph.tensors[number]
            if state.kind != "cut" or state.dim != 0 or tensor.parameter:
                continue
            if number in self._rows and state.parts % self._rows[number]:
                return False
            if number not in self._rows and self._setting.batch > 1:
                if tensor.shape[0] == self._setting.batch:
                    return False
        return True

    def price(self, number: int, origin: State, target: State) -> int | None:
        """Nanoseconds of both passes to bring the tensor there."""
        key = number, origin, target
        if key not in self._prices:
            self._prices[key] = self._priced(*key)
        return self._prices[key]

    def _priced(self, number: int, origin: State, target: State) -> int | None:
        tensor = self._graph.tensors[number]
        if not fits(tensor.shape, target, self._setting.degree):
            return None
        if not self._allowed((number,), (target,)):
            return None
        if self._setting.runnable_only and not self._runs(number, origin, target):
            return None
        if tensor.parameter and (origin, target) != (WHOLE, SHARED):
            return None  # stored in another way than it is used: that is sharding's work
        change = change_of(origin, target, tensor.needs_grad)
        if change is None:
            return None
        return self._costs.change_ns(change, tensor, self._setting.degree)

    def _runs(self, number: int, origin: State, target: State) -> bool:
        """Whether the executor makes this change."""
        tensor = self._graph.tensors[number]
        kinds = origin.kind, target.kind
        if kinds in (("whole", "shared"), ("partial", "whole")):
            return True
        if kinds[1] == "cut" and kinds[0] in ("whole", "shared"):
            return not (tensor.needs_grad and tensor.of_hidden) and not tensor.parameter
        along = self._setting.sequence and state_of_sequence(tensor.shape, self._rows.get(number))
        return bool(along) and (
            (kinds == ("partial", "cut") and target == along)
            or (kinds == ("cut", "shared") and origin == along)
        )


def state_of_sequence(shape: tuple[int, ...], rows: int | None) -> State | None:
    """How a hidden state lies when the sequence is divided."""
    if len(shape) == 3:
        return cut(1)
    return cut(0, rows) if len(shape) == 2 and rows else None


def _row_counts(graph: SplitGraph, batch: int) -> dict[int, int]:
    """Activations whose first dimension is samples times positions, with the number of samples."""
    hidden = graph.tensors[graph.hidden].shape
    if len(hidden) < 3:
        return {}
    rows = hidden[0] * hidden[1]
    return {
        number: batch
        for number, tensor in enumerate(graph.tensors)
        if len(tensor.shape) == 2 and tensor.shape[0] == rows and not tensor.parameter
    }
