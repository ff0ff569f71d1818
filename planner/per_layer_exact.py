"""The best `LayerChoices`, exactly: dynamic programming over the blocks, last first.

A label stands for the choices of the units done so far: when the next unit's backward may start,
when reductions end, and what those units need beyond what earlier units hold. A label that is no
better than another in all three is dropped, and so is one that cannot become better than the best
known answer. How good it can become is bounded by the Lagrangian: for a price of memory, the
cheapest choices of the units left, each paying for what it holds,

    backward >= now + min(sum of time + price * held) - price * (capacity - need)

which holds for every price >= 0 (Everett 1963, Operations Research 11(3)). The price is the one
at which the cheapest choices just fit; those choices also make the first known answer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from claw_plan.planner.choices import Assignment, rank
from claw_plan.planner.per_layer import LayerChoices, LayerTable
from claw_plan.simulator.engine import compiled
from claw_plan.simulator.task_graph import Int

Float = NDArray[np.float64]

MOST_LABELS = 400_000
"""Of one unit; beyond, the labels with the best bounds are kept and the answer is the best known,
no longer proven. No problem of docs/samplers.md comes near."""

BISECTIONS = 60
"""Halvings of the price of memory, from one at which no byte is worth its time."""

UNKNOWN_NS = 1 << 60
"""Above every time."""

PRICES = (0.8, 0.95, 1.0, 1.05, 1.25)
"""Of that which just fits: those at which labels are bounded."""


class Solved(NamedTuple):
    """The best assignment, whether that is proven, and the most labels that a unit had."""

    assignment: Assignment
    is_proven: bool
    most_labels: int


def best_layers(choices: LayerChoices) -> Assignment | None:
    """The fastest assignment that fits; None where none does."""
    solved = solve_layers(choices)
    return None if solved is None else solved.assignment


def solve_layers(choices: LayerChoices) -> Solved | None:
    """The same with what is known of it."""
    known, price = _priced_answers(choices)
    scores = choices.scores(known)
    order = rank(scores)
    first = int(order[0])
    best, best_ns = tuple(known[first].tolist()), int(scores.time_ns[first])
    # Which of the cheapest choices fit is not certain: a gathered unit needs no buffer later.
    is_known = scores.excess_bytes[first] == 0
    return _Labels(choices, best, best_ns if is_known else UNKNOWN_NS, price).run()


def _priced_answers(choices: LayerChoices) -> tuple[Int, float]:
    """The cheapest choices at many prices, and the least price at which they fit."""
    answers = [np.zeros(choices.num_blocks, np.int64), _cheapest(choices, 0.0)]
    if not choices.scores(answers[-1][None]).excess_bytes[0]:
        return np.stack(answers), 0.0
    table = choices.table
    low, high = 0.0, float(table.compute_ns.max() + table.gather_ns.max()) * len(table.reduce_ns)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        answers.append(_cheapest(choices, middle))
        fits = not choices.scores(answers[-1][None]).excess_bytes[0]
        low, high = (low, middle) if fits else (middle, high)
    return np.unique(np.stack(answers), axis=0), high


def _cheapest(choices: LayerChoices, price: float) -> Int:
    """The choices of least time + price * held bytes."""
    costs = _costs_below(choices.table, price)
    found = np.zeros(choices.num_blocks, np.int64)
    _follow(choices.table, price, costs, found)
    return found


@compiled
def _costs_below(table: LayerTable, price: float) -> Float:
    """[unit, option]: least time + price * held of the units below, its own time with it."""
    units, options = table.compute_ns.shape
    costs = np.zeros((units, options))
    costs[0] = table.compute_ns[0]
    for unit in range(1, units):
        for option in range(options):
            least = np.inf
            for below in range(options):
                slot = max(table.compute_ns[unit, option], table.gather_ns[unit - 1, below])
                paid = price * table.held_bytes[unit - 1, below]
                least = min(least, slot + paid + costs[unit - 1, below])
            costs[unit, option] = least
    return costs


@compiled
def _follow(table: LayerTable, price: float, costs: Float, found: Int) -> None:
    """Writes the choices that make `costs`, last unit first."""
    units, options = table.compute_ns.shape
    option = 0
    for unit in range(units - 1, 1, -1):
        least, chosen = np.inf, 0
        for below in range(options):
            slot = max(table.compute_ns[unit, option], table.gather_ns[unit - 1, below])
            cost = slot + price * table.held_bytes[unit - 1, below] + costs[unit - 1, below]
            if cost < least:
                least, chosen = cost, below
        option = found[unit - 2] = chosen


class _Front(NamedTuple):
    """Labels of one unit, its own option chosen: three figures, the option, and whence it came."""

    now_ns: Int
    reduced_ns: Int
    need_bytes: Int
    option: Int
    origin: Int


class _Labels:
    """Makes and drops labels, unit by unit."""

    def __init__(self, choices: LayerChoices, known: Assignment, known_ns: int, price: float):
        self._choices, self._table = choices, choices.table
        self._known, self._known_ns = known, known_ns
        self._room = choices.capacity_bytes - choices.ends.always_bytes
        self._prices = [price * factor for factor in PRICES] if price else [0.0]
        self._below = [_costs_below(self._table, price) for price in self._prices]

    def run(self) -> Solved | None:
        """The best assignment; None where nothing fits."""
        zero = np.zeros(1, np.int64)
        fronts = [_Front(zero, zero, zero, zero, zero)]
        units = len(self._table.reduce_ns)
        for unit in range(units - 1, 0, -1):
            front = self._next(fronts[-1], unit)
            if len(front.now_ns) > MOST_LABELS:
                is_known = self._known_ns < UNKNOWN_NS
                return Solved(self._known, False, len(front.now_ns)) if is_known else None
            fronts.append(front)
        most = max(len(front.now_ns) for front in fronts)
        best = self._finish(fronts)
        return None if best is None else Solved(best, True, most)

    def _next(self, front: _Front, unit: int) -> _Front:
        """Labels of the unit before, from those of the unit."""
        below = unit - 1
        options = range(len(self._choices.options)) if below else range(1)
        parts = [self._chosen(front, unit, option) for option in options]
        return _Front(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    def _chosen(self, front: _Front, unit: int, option: int) -> _Front:
        """The labels that give the unit before this option."""
        table, own = self._table, front.option
        compute, below = table.compute_ns[unit, own], unit - 1
        end = front.now_ns + compute
        reduces = table.reduce_ns[unit]
        reduced = np.maximum(front.reduced_ns, end) + reduces if reduces else front.reduced_ns
        now = front.now_ns + np.maximum(compute, table.gather_ns[below, option])
        coming = table.coming_bytes[below, option]
        need = np.maximum(
            table.held_bytes[unit, own] + front.need_bytes, table.forward_bytes[unit, own]
        )
        need = np.maximum(need, table.kernel_bytes[unit, own] + coming)
        need = np.maximum(need, table.reduced_bytes[unit] + coming)
        # A later end of computation hides what reductions are behind.
        label = _Front(
            now, np.maximum(reduced, now), need, np.full_like(now, option), np.arange(len(now))
        )
        may_win = self._may_win(label, below, option)
        label = _Front(*(column[may_win] for column in label))
        kept = _undominated(label)
        return _Front(*(column[kept] for column in label))

    def _may_win(self, label: _Front, unit: int, option: int) -> NDArray[np.bool_]:
        """Whether labels may still lead to a better answer than the best known."""
        needs = label.need_bytes + self._table.held_bytes[unit, option]
        bound = np.zeros(len(needs))
        for price, costs in zip(self._prices, self._below, strict=True):
            priced = costs[unit, option] + price * (needs - self._room)
            bound = np.maximum(bound, label.now_ns + priced)
        # Rounded down, and a nanosecond below, for what sums of floats may be off.
        backward = np.floor(bound - 1).astype(np.int64)
        reduced = np.maximum(label.reduced_ns, backward) + self._choices.ends.root_reduce_ns
        step = self._choices.ends.step_ns(backward, reduced)
        wins: NDArray[np.bool_] = (step < self._known_ns) & (needs <= self._room)
        return wins

    def _finish(self, fronts: list[_Front]) -> Assignment | None:
        """The best of the last labels, followed back; else the one that was known."""
        last = range(len(fronts[-1].now_ns))
        answers = [self._trace_back(fronts, index) for index in last]
        if self._known_ns < UNKNOWN_NS:
            answers.append(self._known)
        if not answers:
            return None
        scores = self._choices.scores(np.array(answers, np.int64))
        first = int(rank(scores)[0])
        return None if scores.excess_bytes[first] else answers[first]

    @staticmethod
    def _trace_back(fronts: list[_Front], index: int) -> Assignment:
        chosen = []
        for front in reversed(fronts[1:]):
            chosen.append(int(front.option[index]))
            index = int(front.origin[index])
        return tuple(chosen[1:])  # the first is the prologue's


def _undominated(label: _Front) -> Int:
    """Labels that no other is at least as good as in all three figures."""
    order = np.lexsort((label.reduced_ns, label.need_bytes, label.now_ns))
    kept = np.zeros(len(order), np.int64)
    count = _scan(order, label.need_bytes, label.reduced_ns, kept)
    return np.sort(kept[:count])


@compiled
def _scan(order: Int, need: Int, reduced: Int, kept: Int) -> int:
    """Of labels in the order of their times: those that no earlier one is as good as."""
    count = 0
    for index in order:
        is_dominated = False
        for place in range(count - 1, -1, -1):
            other = kept[place]
            if need[other] <= need[index] and reduced[other] <= reduced[index]:
                is_dominated = True
                break
        if not is_dominated:
            kept[count] = index
            count += 1
    return count
