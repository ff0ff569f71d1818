"""Plans that nothing beats in time, memory and cost together, and the least memory that will do.

Each point is a search of its own under a limit of memory, for the shortest step and for the least
cost, so it is proven under that limit; between the limits there may be others. Whether anything
fits is monotone in the limit, so the least one is found by halving.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from claw_plan.planner.errors import InfeasiblePlan
from claw_plan.planner.objective import Cost
from claw_plan.planner.problem import Problem
from claw_plan.planner.score import Scored, Scorer
from claw_plan.planner.search_space import Searched, search_space
from claw_plan.planner.space import Space

LIMITS = (1.0, 0.7, 0.5, 0.35, 0.25, 0.18, 0.12)
"""Parts of the usable memory under which plans are sought."""

PRECISION = 0.01
"""Of the usable memory: how exactly the least that will do is found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A plan of the front: `nodes` are those it takes, whole ones."""

    scored: Scored
    nodes: int

    @property
    def peak_bytes(self) -> int:
        """Memory of the fullest device."""
        return max(stage.peak_bytes for stage in self.scored.memory)

    @property
    def figures(self) -> tuple[int, int, int]:
        """Step time, peak memory and node-nanoseconds: less is better."""
        step_ns = self.scored.step_time_ns
        return step_ns, self.peak_bytes, step_ns * self.nodes


def limited(problem: Problem, part: float) -> Problem:
    """The problem with only a part of the usable memory."""
    usable = (1 - problem.training.memory_headroom) * part
    return replace(problem, training=replace(problem.training, memory_headroom=1 - usable))


def front(problem: Problem, fix: Mapping[str, Any]) -> tuple[Point, ...]:
    """The plans that no other found one beats or equals in all three, fastest first."""
    scorer, points = Scorer(problem), {}
    cost = Cost(devices_per_node=problem.devices_per_node)
    for part in LIMITS:
        under = limited(problem, part)
        fits = False
        for objective in (None, cost):
            found = search_space(Scorer(under), Space(under, fix), objective=objective)
            if found.ranked:
                fits = True
                scored = scorer.score(*found.ranked[0])
                nodes = cost.nodes(scored.candidate.num_devices)
                points[found.ranked[0]] = Point(scored=scored, nodes=nodes)
        if not fits:
            break
    return undominated(list(points.values()))


def undominated(points: Sequence[Point]) -> tuple[Point, ...]:
    """Those that no other beats in one figure while losing in none."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda each: each.figures):
        if not any(_beats(other.figures, point.figures) for other in kept):
            kept.append(point)
    return tuple(kept)


def _beats(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return all(a <= b for a, b in zip(one, other, strict=True))


def least_memory(problem: Problem, fix: Mapping[str, Any]) -> Problem:
    """The problem with the least usable memory in which something fits, to PRECISION of it.

    Raises InfeasiblePlan where nothing fits in all of it.
    """
    low, high = 0.0, 1.0
    if not _found(problem, fix).ranked:
        raise InfeasiblePlan("no plan fits in the memory there is; the least cannot be sought")
    while high - low > PRECISION:
        middle = (low + high) / 2
        if _found(limited(problem, middle), fix).ranked:
            high = middle
        else:
            low = middle
    return limited(problem, high)


def _found(problem: Problem, fix: Mapping[str, Any]) -> Searched:
    return search_space(Scorer(problem), Space(problem, fix))
