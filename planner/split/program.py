"""The exact choice of a way for every operator of a data flow, and of a state for every tensor.

A `SplitProgram` is a list of steps in execution order. Each step has several ways; a way needs its
inputs in certain states and gives its outputs in others. A tensor that is needed in a state it is
not in is brought there once, from the cheapest state it is in, however many steps need it so.
`solve` walks the steps and keeps, for every distinct situation of the tensors that are still
needed, the cheapest way to have got there: dynamic programming over the frontier of the graph (a
path decomposition of it in execution order). Exact for any graph; fast where few tensors are
alive at once, as in the blocks of models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from claw_plan.planner.errors import TensorParallelError
from claw_plan.planner.split.states import State

Price = Callable[[int, State, State], int | None]
"""(tensor, from, to) to nanoseconds of both passes, None where there is no such change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way of running a step: states in and out, time of both passes, memory that it keeps."""

    label: str
    needs: tuple[State, ...]
    gives: tuple[State, ...]
    time_ns: int
    held_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An operator: numbers of the tensors it takes and makes."""

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    ways: tuple[Way, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitProgram:
    """Steps in execution order; what comes in is made by steps without inputs, what goes out is
    taken by steps without outputs. No price is above that of two changes one after the other.
    """

    steps: tuple[Step, ...]
    price: Price


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The cheapest choice: its time and memory, and the way of every step.

    `is_proven` is False where too many situations were alive at once to look at all.
    """

    time_ns: int
    held_bytes: int
    ways: tuple[Way, ...]
    is_proven: bool = True


class _Label:
    """How one situation was reached; a chain back through all steps."""

    __slots__ = ("before", "held_bytes", "time_ns", "way")

    def __init__(self, time_ns: int, held_bytes: int, way: Way | None, before: _Label | None):
        self.time_ns, self.held_bytes = time_ns, held_bytes
        self.way, self.before = way, before


Held = frozenset[State]
"""The states a live tensor is in: that it was made in, and those it was brought to."""

Frontier = tuple[Held, ...]


MOST_SITUATIONS = 3000
"""Of one step. With more the answer is the first walk's, not proven; chosen by judgement. Llama's
block is solved in a fifth of a second where only what the executor runs is asked for."""

BEAM = 48
"""Situations that the first walk keeps a step; its answer bounds the exact one."""

WIDE_BEAM = 1000
"""As many where none of those came to an end."""


def solve(program: SplitProgram, *, limit_bytes: int | None = None) -> Choice | None:
    """The choice of least time, of least memory among those of equal time.

    With `limit_bytes` the fastest that holds at most so much. None if there is no choice at all.

    A first walk keeps the cheapest few situations; the second, exact one drops what cannot become
    cheaper than its answer even if every step that follows took its least.
    """
    quick = _walk(program, limit_bytes, BEAM, None)
    if quick is None:  # all of the few may have led nowhere
        quick = _walk(program, limit_bytes, WIDE_BEAM, None)
    try:
        return _walk(program, limit_bytes, None, None if quick is None else quick.time_ns)
    except _TooManyError as error:
        if quick is None:
            raise TensorParallelError(f"no division was found: {error}") from error
        return replace(quick, is_proven=False)


class _TooManyError(Exception):
    """More situations than are looked at."""


def _walk(
    program: SplitProgram, limit_bytes: int | None, beam: int | None, bound_ns: int | None
) -> Choice | None:
    last_use = _last_uses(program.steps)
    rest_ns = sum(_least_ns(step) for step in program.steps)
    live: list[int] = []
    table: dict[Frontier, list[_Label]] = {(): [_Label(0, 0, None, None)]}
    for place, step in enumerate(program.steps):
        after = [t for t in live if last_use[t] > place]
        after += [t for t in step.outputs if last_use.get(t, -1) > place]
        advance = _Advance(program, step, live, after)
        rest_ns -= _least_ns(step)
        most_ns = None if bound_ns is None else bound_ns - rest_ns
        following: dict[Frontier, list[_Label]] = {}
        for frontier, labels in table.items():
            for added_ns, way, key in advance.of(frontier):
                for label in labels:
                    held = label.held_bytes + way.held_bytes
                    time_ns = label.time_ns + added_ns
                    if most_ns is not None and time_ns > most_ns:
                        continue
                    if limit_bytes is None or held <= limit_bytes:
                        known = following.setdefault(key, [])
                        _keep(known, time_ns, held, way, label, limit_bytes is not None)
        table, live = _undominated(program, after, following), after
        if beam is not None:
            table = {key: table[key] for key in list(table)[:beam]}
        elif len(table) > MOST_SITUATIONS:
            raise _TooManyError(f"{step.name}: over {MOST_SITUATIONS} situations to look at")
        if not table:
            return None
    ends = [label for labels in table.values() for label in labels]
    return _choice(min(ends, key=lambda label: (label.time_ns, label.held_bytes)))


RIVALS = 24
"""Each situation is compared with so many cheaper ones; more drop hardly more."""


def _undominated(
    program: SplitProgram, live: Sequence[int], table: dict[Frontier, list[_Label]]
) -> dict[Frontier, list[_Label]]:
    """The situations that no cheaper one covers, in order.

    From more states nothing costs more, so what follows is never dearer either.
    """
    order = sorted(
        table, key=lambda key: min((label.time_ns, label.held_bytes) for label in table[key])
    )
    kept: dict[Frontier, list[_Label]] = {}
    known: dict[tuple[int, Held, Held], bool] = {}
    for key in order:
        left = table[key]
        for other, labels in list(kept.items())[:RIVALS]:
            if _covers(program, live, other, key, known):
                left = [
                    x
                    for x in left
                    if not any(
                        y.time_ns <= x.time_ns and y.held_bytes <= x.held_bytes for y in labels
                    )
                ]
            if not left:
                break
        else:
            kept[key] = left
    return kept


def _covers(
    program: SplitProgram,
    live: Sequence[int],
    origin: Frontier,
    target: Frontier,
    known: dict[tuple[int, Held, Held], bool],
) -> bool:
    """Whether every tensor is in all states of `target`, or brought there for nothing.

    What has its price does not count: it may pay for several later changes, and those who hold
    less would pay it for each.
    """
    for tensor, ours, theirs in zip(live, origin, target, strict=True):
        if theirs <= ours:
            continue
        key = tensor, ours, theirs
        if key not in known:
            known[key] = all(_brought(program, tensor, ours, s) == 0 for s in theirs - ours)
        if not known[key]:
            return False
    return True


def _brought(program: SplitProgram, tensor: int, held: Held, needed: State) -> int | None:
    """The price from the cheapest of the states that the tensor is in."""
    if needed in held:
        return 0
    prices = [program.price(tensor, state, needed) for state in held]
    return min((price for price in prices if price is not None), default=None)


def _least_ns(step: Step) -> int:
    return min((way.time_ns for way in step.ways), default=0)


def _last_uses(steps: Sequence[Step]) -> dict[int, int]:
    return {tensor: place for place, step in enumerate(steps) for tensor in step.inputs}


def _keep(
    labels: list[_Label], time_ns: int, held: int, way: Way, before: _Label, keeps_pareto: bool
) -> None:
    """Adds a label unless one as good is known; without a limit only the best is kept."""
    if not keeps_pareto:
        if not labels:
            labels.append(_Label(time_ns, held, way, before))
        elif (time_ns, held) < (labels[0].time_ns, labels[0].held_bytes):
            labels[0] = _Label(time_ns, held, way, before)
        return
    if any(label.time_ns <= time_ns and label.held_bytes <= held for label in labels):
        return
    labels[:] = [x for x in labels if x.time_ns < time_ns or x.held_bytes < held]
    labels.append(_Label(time_ns, held, way, before))


def _choice(end: _Label) -> Choice:
    ways: list[Way] = []
    label: _Label | None = end
    while label is not None and label.way is not None:
        ways.append(label.way)
        label = label.before
    return Choice(time_ns=end.time_ns, held_bytes=end.held_bytes, ways=tuple(reversed(ways)))


@dataclass
class _Advance:
    """One step over the frontier; what it makes of its inputs' situations is worked out once."""

    program: SplitProgram
    step: Step
    live: Sequence[int]
    after: Sequence[int]
    known: dict[tuple[Held, ...], list[tuple[int, Way, dict[int, Held]]]] = field(
        default_factory=dict
    )

    def of(self, frontier: Frontier) -> list[tuple[int, Way, Frontier]]:
        """(time added, way, new frontier) for each way that this situation allows."""
        situation = dict(zip(self.live, frontier, strict=True))
        taken = tuple(situation[tensor] for tensor in self.step.inputs)
        if taken not in self.known:
            self.known[taken] = self._moves(taken)
        return [
            (
                added,
                way,
                tuple(
                    changed[tensor] if tensor in changed else situation[tensor]
                    for tensor in self.after
                ),
            )
            for added, way, changed in self.known[taken]
        ]

    def _moves(self, taken: tuple[Held, ...]) -> list[tuple[int, Way, dict[int, Held]]]:
        moves = []
        for way in self.step.ways:
            added = way.time_ns
            changed: dict[int, Held] = {}
            for tensor, known, needed in zip(self.step.inputs, taken, way.needs, strict=True):
                held = changed.setdefault(tensor, known)
                price = _brought(self.program, tensor, held, needed)
                if price is None:
                    break
                added += price
                if price:  # what is free may as well be done again
                    changed[tensor] = held | {needed}
            else:
                gives = zip(self.step.outputs, way.gives, strict=True)
                changed |= {tensor: frozenset((state,)) for tensor, state in gives}
                moves.append((added, way, changed))
        return moves


def cost_of(program: SplitProgram, ways: Sequence[Way]) -> int | None:
    """Time of a given way for every step, None if some tensor cannot be brought where it must."""
    held: dict[int, Held] = {}
    total = 0
    for step, way in zip(program.steps, ways, strict=True):
        total += way.time_ns
        for tensor, needed in zip(step.inputs, way.needs, strict=True):
            price = _brought(program, tensor, held[tensor], needed)
            if price is None:
                return None
            total += price
            if price:  # what is free may as well be done again
                held[tensor] |= {needed}
        held |= {t: frozenset((s,)) for t, s in zip(step.outputs, way.gives, strict=True)}
    return total
