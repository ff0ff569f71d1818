"""The ways of laying one pipeline over unlike devices, and what bounds them.

A way fixes the microbatch of the pipeline and, for each kind of device, either that it is left
out or how its stages are divided: tp within a node, dp, sequence parallelism, and what dp shards.
What is left to choose, how many stages lie on which kind, in which order, cut where and which of
them recompute, is `cut`'s: of a way `chain` gives everything that depends on it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import accumulate, product
from math import prod
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from claw_plan.planner.bound import Bounds
from claw_plan.planner.candidate import Candidate
from claw_plan.planner.data_bound import DataBounds
from claw_plan.planner.members import divisors
from claw_plan.planner.mixed.cut import Arrangement, Chain, legal_starts
from claw_plan.planner.mixed.kinds import Kind
from claw_plan.planner.mixed.plan import MixedCandidate, MixedRank, Pipeline
from claw_plan.planner.mixed.score import MixedScorer
from claw_plan.planner.pinned import MOST_MICROBATCHES
from claw_plan.planner.shards import local_numel
from claw_plan.planner.space import Space
from claw_plan.simulator.task_graph import Int

RECOMPUTE = ("none", "full")
"""How a stage may recompute; each chooses for itself."""

REPLICATED, SHARDED, STATES = "replicated", "zero 3", "zero 1"
SHARING = (REPLICATED, SHARDED, STATES)
"""What dp does with a stage's parameters: copies, shards, or shards of the optimizer's alone."""

MOST_DEPTH = 64
"""Stages of one pipeline at most."""


class Division(NamedTuple):
    """How the stages on one kind of device are divided."""

    tp: int
    dp: int
    sequence_parallel: bool

    @property
    def num_devices(self) -> int:
        """Of one stage."""
        return self.tp * self.dp


@dataclass(frozen=True, slots=True, order=True)
class Way:
    """The microbatch over all dp ranks, and the division and sharing of each kind, None unused."""

    microbatch: int
    divisions: tuple[Division | None, ...]
    sharing: tuple[str, ...]


@dataclass(frozen=True)
class Rows(Sequence[tuple[int, tuple[Division | None, ...]]]):
    """Microbatch and divisions of many ways, each written out only when it is asked for.

    Of the microbatch i the ways, as the product of its `options`, are numbered from `firsts[i]`.
    """

    microbatches: Sequence[int]
    options: Sequence[tuple[tuple[Division | None, ...], ...]]
    firsts: Sequence[int]
    numbers: Int

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, index: int) -> tuple[int, tuple[Division | None, ...]]: ...
    @overload
    def __getitem__(self, index: slice) -> Rows: ...
    def __getitem__(self, index: int | slice) -> Rows | tuple[int, tuple[Division | None, ...]]:
        if isinstance(index, slice):
            return replace(self, numbers=self.numbers[index])
        number = int(self.numbers[index])
        place = bisect_right(self.firsts, number) - 1
        own, rest = self.options[place], number - self.firsts[place]
        chosen = []
        for each in reversed(own):
            rest, at = divmod(rest, len(each))
            chosen.append(each[at])
        return self.microbatches[place], tuple(reversed(chosen))


def _outer(combine: np.ufunc, parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Every combination of one entry of each part, the last varying fastest."""
    whole = parts[0]
    for part in parts[1:]:
        whole = combine.outer(whole, part).reshape(-1)
    return whole


@dataclass(frozen=True)
class MixedSpace:
    """All ways of one problem.

    `totals(kind, microbatch, division, recompute)` are what the units before each take in a whole
    step, gradients that add up included.
    """

    scorer: MixedScorer
    totals: Callable[[int, int, Division, str], Int] = field(init=False)
    _tables: dict[tuple[object, ...], Int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "totals", cache(self._find_totals))

    @property
    def kinds(self) -> Sequence[Kind]:
        """Of the problem."""
        return self.scorer.problem.kinds

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return self.scorer.problem.whole.training.global_batch

    @cached_property
    def bounds(self) -> tuple[Bounds, ...]:
        """Of each kind's problem."""
        return tuple(Bounds(kind.problem, self.scorer.shards) for kind in self.kinds)

    @cached_property
    def data(self) -> tuple[DataBounds, ...]:
        """Of each kind's problem."""
        return tuple(DataBounds(kind.problem, self.scorer.shards) for kind in self.kinds)

    def microbatches(self) -> list[int]:
        """Sizes of a pipeline's microbatches."""
        return [size for size in divisors(self.batch) if self.batch // size <= MOST_MICROBATCHES]

    def divisions(self, kind: int, microbatch: int) -> list[Division]:
        """How a kind may divide its stages."""
        own, graph = self.kinds[kind], self.scorer.problem.whole.graph
        found = []
        for tp in Space(own.problem, {}).tp_degrees():
            if tp > own.problem.devices_per_node:
                continue
            sequence, is_whole = [False], tp > 1 and tp not in graph.partial
            if is_whole and not graph.no_sequence_parallel and (graph.seq_len or 1) % tp == 0:
                sequence.append(True)
            found += [
                Division(tp, dp, sp)
                for dp in divisors(microbatch)
                if tp * dp <= own.num_devices
                for sp in sequence
            ]
        return found

    def sharings(self, divisions: Sequence[Division | None]) -> list[tuple[str, ...]]:
        """What dp may share, kind by kind; nothing where there is none."""
        choices = [
            SHARING if division is not None and division.dp > 1 else (REPLICATED,)
            for division in divisions
        ]
        return list(product(*choices))

    def rows(self) -> tuple[Rows, Int, Int]:
        """All ways of two kinds or more, best first, a bound of each and its number of sharings.

        The bound: the work of a step over the most stages that each kind can have, each as fast
        as its kind.
        """
        kinds, microbatches = range(len(self.kinds)), self.microbatches()
        options = [
            tuple((None, *self.divisions(kind, microbatch)) for kind in kinds)
            for microbatch in microbatches
        ]
        numbers, bounds, sizes, firsts = [], [], [], [0]
        for microbatch, own in zip(microbatches, options, strict=True):
            speeds = [
                np.array([self._speed(kind, microbatch, each) for each in own[kind]])
                for kind in kinds
            ]
            used = [np.array([each is not None for each in own[kind]], int) for kind in kinds]
            shared = [np.array([len(self.sharings((each,))) for each in o]) for o in own]
            several = np.flatnonzero(_outer(np.add, used) > 1)
            numbers.append(firsts[-1] + several)
            bounds.append(1.0 / _outer(np.add, speeds)[several])
            sizes.append(_outer(np.multiply, shared)[several])
            firsts.append(firsts[-1] + prod(len(each) for each in own))
        bound_ns = np.floor(np.concatenate(bounds)).astype(np.int64)
        order = np.argsort(bound_ns, kind="stable")
        rows = Rows(microbatches, options, firsts, np.concatenate(numbers)[order])
        return rows, bound_ns[order], np.concatenate(sizes)[order]

    def _speed(self, kind: int, microbatch: int, division: Division | None) -> float:
        """Chains per ns of all stages that the kind can have together."""
        if division is None:
            return 0.0
        total = self.totals(kind, microbatch, division, RECOMPUTE[0])[-1]
        return min(self._most(kind, division), self.num_blocks) / max(1, int(total))

    @property
    def num_blocks(self) -> int:
        """Blocks of the model: no pipeline has more stages."""
        return len(self.scorer.problem.whole.graph.blocks)

    def _most(self, kind: int, division: Division | None) -> int:
        """Stages that the kind has devices for."""
        if division is None:
            return 0
        return min(self.kinds[kind].num_devices // division.num_devices, MOST_DEPTH)

    def candidate(
        self, microbatch: int, division: Division, sharing: str, recompute: str, pp: int
    ) -> Candidate:
        """The knobs of a stage."""
        is_replicated = sharing == REPLICATED
        return Candidate(
            pp=pp,
            tp=division.tp,
            dp_replicate=division.dp if is_replicated else 1,
            dp_shard=1 if is_replicated else division.dp,
            zero=1 if sharing == STATES else Candidate().zero,
            sequence_parallel=division.sequence_parallel,
            microbatch_size=microbatch // division.dp,
            recompute=recompute,
        )

    def _find_totals(self, kind: int, microbatch: int, division: Division, recompute: str) -> Int:
        candidate = self.candidate(microbatch, division, REPLICATED, recompute, 2)
        times = self.bounds[kind].unit_times(candidate)
        count = self.batch // microbatch
        added = self._added_ns(kind, candidate)
        work = [
            count * (forward + backward) + (count - 1) * more
            for (forward, backward, _, _), more in zip(times, added, strict=True)
        ]
        return np.array([0, *accumulate(work)], np.int64)

    def _added_ns(self, kind: int, candidate: Candidate) -> list[int]:
        """At least what adding one more microbatch's gradients takes, unit by unit.

        The more elements the less each takes, so all together have the least time for one. A
        parameter that several units use counts with the first.
        """
        graph, shards = self.scorer.problem.whole.graph, self.scorer.shards
        elements = [0] * len(graph.units)
        for _, parameter in shards.stage_parameters(0, len(graph.units)):
            if parameter.trainable:
                unit = min(parameter.units, default=0)
                elements[unit] += local_numel(parameter, candidate.tp)
        whole_ns = self.data[kind].accumulate_ns(candidate, 0, len(graph.units))
        return [whole_ns * own // max(1, sum(elements)) for own in elements]

    def chain(self, way: Way, *, limited: bool = True) -> Chain:
        """What the stages of a way may be; without `limited` whatever memory there is."""
        graph = self.scorer.problem.whole.graph
        options = list(zip(range(len(self.kinds)), way.divisions, way.sharing, strict=True))
        totals = [self._totals_of(kind, way.microbatch, each) for kind, each, _ in options]
        may_start = [
            unit for unit in range(2, len(graph.units) - 1) if unit not in graph.cut_refused
        ]
        most = [self._most(kind, division) for kind, division in enumerate(way.divisions)]
        units = len(graph.units)
        if limited:
            lowest = [self._lowest_of(k, way.microbatch, each, how) for k, each, how in options]
        else:
            lowest = [np.zeros((len(RECOMPUTE), 1, units + 1), np.int64)] * len(options)
        return Chain(
            total_ns=np.stack(totals),
            lowest=np.stack(lowest),
            legal=legal_starts(units, may_start),
            most=np.array([min(each, self.num_blocks) for each in most], np.int64),
        )

    def _totals_of(self, kind: int, microbatch: int, division: Division | None) -> Int:
        """`Chain.total_ns` of a kind; nothing where no stage may lie on it."""
        if division is None:
            units = len(self.scorer.problem.whole.graph.units)
            return np.zeros((len(RECOMPUTE), units + 1), np.int64)
        return np.stack([self.totals(kind, microbatch, division, r) for r in RECOMPUTE])

    def _lowest_of(
        self, kind: int, microbatch: int, division: Division | None, sharing: str
    ) -> Int:
        """`Chain.lowest` of a kind."""
        key = (kind, microbatch, division, sharing)
        if key not in self._tables:
            if division is None:
                units, depth = len(self.scorer.problem.whole.graph.units), self._depth(microbatch)
                self._tables[key] = np.full((len(RECOMPUTE), depth, units + 1), units, np.int64)
            else:
                own = [self._lowest(kind, microbatch, division, sharing, r) for r in RECOMPUTE]
                self._tables[key] = np.stack(own)
        return self._tables[key]

    def _depth(self, microbatch: int) -> int:
        """Stages behind a stage from which on it keeps every microbatch; the last is apart."""
        return max(2, min(self.batch // microbatch, self.num_blocks, MOST_DEPTH))

    def _lowest(
        self, kind: int, microbatch: int, division: Division, sharing: str, recompute: str
    ) -> Int:
        """The first unit that fits with those up to each, by stages behind.

        With q stages behind it a stage of 1F1B keeps what the second of q + 2 stages does. The
        more units and the more stages behind, the more it keeps.
        """
        units, depth = len(self.scorer.problem.whole.graph.units), self._depth(microbatch)
        memory = self.scorer.memory_of(kind, self.batch)
        found = np.zeros((depth, units + 1), np.int64)
        found[0] = np.arange(units + 1)
        for behind in range(depth):
            candidate = self.candidate(microbatch, division, sharing, recompute, behind + 2)

            def fits(start: int, stop: int, candidate: Candidate = candidate) -> bool:
                return memory.stage(candidate, 1, start, stop).fits

            if behind == 0:  # the last stage ends where the chain does
                found[0, units] = _least(units, lambda start: fits(start, units))
            elif self._is_uniform:
                found[behind] = self._lowest_of_blocks(fits, found[behind - 1], behind == 1)
            else:
                start = 0
                for stop in range(1, units):
                    start = max(start, int(found[behind - 1, stop]) if behind > 1 else 0)
                    while start < stop and not fits(start, stop):
                        start += 1
                    found[behind, stop] = start
        return found

    def _lowest_of_blocks(
        self, fits: Callable[[int, int], bool], before: Int, is_first: bool
    ) -> Int:
        """The same where all blocks are alike: only their number counts."""
        units = len(before) - 1
        first = units - 1 if is_first else int((before[:units] == 0).sum()) - 1
        blocks = units - 2 if is_first else int((np.arange(units) - before[:units]).max())
        while first > 0 and not fits(0, first):
            first -= 1
        while blocks > 0 and not fits(1, 1 + min(blocks, units - 2)):
            blocks -= 1
        stops = np.arange(units + 1)
        lowest = np.maximum(1, stops - blocks)
        lowest[: first + 1] = 0
        lowest[units] = units
        return lowest

    @cached_property
    def _is_uniform(self) -> bool:
        """Whether all blocks are alike, in what they compute and in what they hold."""
        graph, shards = self.scorer.problem.whole.graph, self.scorer.shards
        sizes = {
            tuple(shards.groups(unit, unit + 1, 1, 1).values())
            for unit in range(1, len(graph.units) - 1)
        }
        return len({block.structure for block in graph.blocks}) == 1 and len(sizes) == 1

    def mixed(self, way: Way, arrangement: Arrangement) -> MixedCandidate:
        """The stages of an arrangement as a candidate."""
        places = [0] * len(self.kinds)
        ranks = []
        for run in arrangement:
            division = way.divisions[run.kind]
            assert division is not None
            candidate = self.candidate(
                way.microbatch,
                division,
                way.sharing[run.kind],
                RECOMPUTE[run.recompute],
                len(arrangement),
            )
            place = places[run.kind]
            ranks.append(MixedRank(kind=run.kind, place=place, candidate=candidate))
            places[run.kind] += 1
        cuts = tuple((run.start, run.stop) for run in arrangement)
        pipeline = Pipeline(batch=self.batch, ranks=tuple(ranks), cuts=cuts)
        return MixedCandidate(pipelines=(pipeline,))


def _least(most: int, holds: Callable[[int], bool]) -> int:
    """The least number from which on something holds; `most` if nowhere before."""
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low
