"""How many elements of each unit's parameters one rank holds, whole and sharded.

FSDP groups: every block is one, or a run of a stage's blocks (`runs_of`), and all that lies
outside the blocks is the root's. A parameter that several units use belongs to the first group
that a stage meets, and to the root if any of its units is outside the blocks (a tied embedding and
head). What has no dimension to cut (CLIP's logit_scale) stays whole on every rank, in a group of
its own. So are the experts of a block where ranks share them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import NamedTuple

from claw_plan.planner.graph import ModelGraph, Parameter

ROOT = -1
"""The group of everything outside the blocks."""

SCALARS = -2
"""The group of parameters without dimensions, which fully_shard leaves alone."""

EXPERTS = -3
"""EXPERTS - unit is the group of a unit's experts that ranks share: fewer ranks shard them."""


def said_of(group: int) -> str:
    """A group of parameters in words."""
    if group <= EXPERTS:
        return f"experts of unit {EXPERTS - group}"
    return "root" if group == ROOT else f"unit {group}"


class Place(NamedTuple):
    """A rank's index on the axes whose ranks may hold parts of different sizes."""

    dp_shard: int = 0
    tp: int = 0


FIRST = Place()
"""The rank that holds the most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSize:
    """Elements of one FSDP group on one rank.

    `whole` after tensor parallelism and before sharding, `shard` after both with FSDP's padding
    of dimension 0, `largest` the largest shard of one parameter; `trainable` parts hold
    gradients and optimizer states, `count` counts the trainable tensors.
    """

    whole: int = 0
    shard: int = 0
    trainable_whole: int = 0
    trainable_shard: int = 0
    largest: int = 0
    count: int = 0

    def beside(self, other: GroupSize) -> GroupSize:
        """Both as one group."""
        return GroupSize(
            whole=self.whole + other.whole,
            shard=self.shard + other.shard,
            trainable_whole=self.trainable_whole + other.trainable_whole,
            trainable_shard=self.trainable_shard + other.trainable_shard,
            largest=max(self.largest, other.largest),
            count=self.count + other.count,
        )

    def plus(
        self, parameter: Parameter, tp: int, dp_shard: int, place: Place = FIRST
    ) -> GroupSize:
        """With one more parameter."""
        whole = local_numel(parameter, tp, place)
        shard = shard_numel(parameter, tp, dp_shard, place._replace(dp_shard=0))
        trainable = int(parameter.trainable)
        return GroupSize(
            whole=self.whole + whole,
            shard=self.shard + shard,
            trainable_whole=self.trainable_whole + whole * trainable,
            trainable_shard=self.trainable_shard + shard * trainable,
            largest=max(self.largest, shard * trainable),
            count=self.count + trainable,
        )


def _part(size: int, parts: int, index: int) -> int:
    """How many of `size` rows part `index` has when they are cut as torch.chunk cuts them."""
    each = -(-size // parts)
    return max(0, min(each, size - index * each))


def local_numel(parameter: Parameter, tp: int, place: Place = FIRST) -> int:
    """Elements a tensor-parallel rank holds."""
    dim = parameter.dim_at(tp)
    if dim is None:
        return parameter.numel
    size = parameter.shape[dim]
    return parameter.numel // size * _part(size, tp, place.tp)


def shard_numel(parameter: Parameter, tp: int, dp_shard: int, place: Place = FIRST) -> int:
    """Elements of a shard: fully_shard cuts dimension 0. All are padded to the first for
    messages.
    """
    if not parameter.shape:
        return 1
    rows, shared_by = parameter.shape[0], parameter.shared_by
    if parameter.dim_at(tp) == 0:
        rows = _part(rows, tp, place.tp)
    own = _part(rows, max(1, dp_shard // shared_by), place.dp_shard // shared_by)
    return local_numel(parameter, tp, place) // max(1, rows) * own


def runs_of(start: int, stop: int, last: int, blocks: int) -> list[range]:
    """A stage's units [start, stop) in runs that are gathered together.

    They are so many blocks, its last run perhaps fewer; what lies outside the blocks, units 0 and
    `last`, is by itself.
    """
    first, end = max(start, 1), min(stop, last)
    runs = [range(at, min(at + blocks, end)) for at in range(first, end, blocks)]
    return [run for run in (range(start, first), *runs, range(end, stop)) if run]


def joined(sizes: Mapping[int, GroupSize], runs: Iterable[range]) -> dict[int, GroupSize]:
    """Groups of single blocks as those of runs, each under its first unit."""
    found = dict(sizes)
    for run in runs:
        members = [found.pop(unit) for unit in run if unit in found]
        if members:
            found[run.start] = reduce(GroupSize.beside, members)
    return found


def of_unit(sizes: Mapping[int, GroupSize], unit: int) -> GroupSize:
    """A unit's group and that of its experts together."""
    own, experts = sizes.get(unit, GroupSize()), sizes.get(EXPERTS - unit)
    return own if experts is None else own.beside(experts)


class ShardSizes:
    """Group sizes of one model, kept for every stage asked about."""

    def __init__(self, graph: ModelGraph) -> None:
        self._graph = graph
        self._last = len(graph.units) - 1
        self._of_unit: dict[int, list[Parameter]] = {u: [] for u in range(len(graph.units))}
        for parameter in graph.parameters:
            # A parameter no unit uses is still stored; every stage keeps what the root holds.
            for unit in parameter.units or (0,):
                self._of_unit[unit].append(parameter)
        self._alike = dict(self._find_alike())
        self.groups = lru_cache(maxsize=None)(self._groups)
        self._block = lru_cache(maxsize=None)(self._block_size)

    def _find_alike(self) -> Iterator[tuple[int, int]]:
        """Of each block that shares no parameter: the first whose parameters are of its shapes."""
        first: dict[tuple[object, ...], int] = {}
        for unit in range(1, self._last):
            own = self._of_unit[unit]
            if own and all(parameter.units == (unit,) and parameter.shape for parameter in own):
                shapes = tuple(
                    (p.shape, p.tp_dim, p.partial_dims, p.trainable, p.shared_by) for p in own
                )
                yield unit, first.setdefault(shapes, unit)

    def _block_size(
        self, unit: int, tp: int, dp_shard: int, place: Place
    ) -> tuple[GroupSize, GroupSize]:
        """What is not shared, and the experts that are."""
        sizes = [GroupSize(), GroupSize()]
        for parameter in self._of_unit[unit]:
            shared = parameter.shared_by > 1
            sizes[shared] = sizes[shared].plus(parameter, tp, dp_shard, place)
        return sizes[0], sizes[1]

    def group_of(self, parameter: Parameter, unit: int) -> int:
        """The group that holds the parameter when a stage meets it at `unit`."""
        if not parameter.shape:
            return SCALARS
        if parameter.shared_by > 1:
            return EXPERTS - unit
        outside = {0, self._last}.intersection(parameter.units or (0,))
        return ROOT if outside else unit

    def stage_parameters(self, start: int, stop: int) -> Iterator[tuple[int, Parameter]]:
        """(group, parameter) of a stage, each parameter once."""
        seen: set[str] = set()
        for unit in range(start, stop):
            for parameter in self._of_unit[unit]:
                if parameter.name not in seen:
                    seen.add(parameter.name)
                    yield self.group_of(parameter, unit), parameter

    def _groups(
        self, start: int, stop: int, tp: int, dp_shard: int, place: Place = FIRST
    ) -> dict[int, GroupSize]:
        sizes: dict[int, GroupSize] = {ROOT: GroupSize()}
        seen: set[str] = set()
        for unit in range(start, stop):
            if unit in self._alike:
                sizes[unit], experts = self._block(self._alike[unit], tp, dp_shard, place)
                if experts.whole:
                    sizes[EXPERTS - unit] = experts
                continue
            for parameter in self._of_unit[unit]:
                if parameter.name in seen:
                    continue
                seen.add(parameter.name)
                group = self.group_of(parameter, unit)
                size = sizes.get(group, GroupSize())
                sizes[group] = size.plus(parameter, tp, dp_shard, place)
        return sizes

    def unit_whole(self, unit: int, tp: int) -> int:
        """Elements of all parameters a unit uses, on one tensor-parallel rank."""
        return sum(local_numel(parameter, tp) for parameter in self._of_unit[unit])
