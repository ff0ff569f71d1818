"""A plan file becomes an `Explanation`: what binds it, its neighbours, what hardware would buy.

With a second plan, the difference of both by part. `cli.explain_command` prints it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from claw_plan.planner.asynchronous_search import asynchronous_said
from claw_plan.planner.binding import Binding, binding_of, difference
from claw_plan.planner.neighbours import Neighbour, neighbours
from claw_plan.planner.plan_check import model_of_plan
from claw_plan.planner.planned import Planned, open_planned
from claw_plan.planner.posing import Progress
from claw_plan.planner.score import Scored
from claw_plan.planner.split.report import split_lines
from claw_plan.planner.what_if import WhatIf, what_ifs
from claw_plan.profiles.profile import Profile, load_profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """Another plan and how much longer each of its parts is; they add up to the difference."""

    name: str
    scored: Scored
    parts_ns: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a plan is what it is. `neighbours` come fastest first, those that cannot run last;
    `splits` say what tensor parallelism divides in each kind of block, `overlapping` what steps
    that overlap bring, or would.
    """

    name: str
    scored: Scored
    binding: Binding
    neighbours: tuple[Neighbour, ...]
    what_ifs: tuple[WhatIf, ...]
    against: Against | None
    splits: tuple[str, ...] = ()
    overlapping: tuple[str, ...] = ()


def explain(
    path: Path,
    *,
    against: Path | None = None,
    profile: Path | None = None,
    memory_headroom: float = 0.10,
    time_limit_s: float | None = None,
    replan: bool = True,
    progress: Progress | None = None,
) -> Explanation:
    """Explains a plan file. Raises InputError or PlanError for what is wrong in either file.

    `replan` False leaves out the searches on changed clusters; `time_limit_s` ends each of them.
    """
    say = progress or (lambda what, done: None)
    measured = load_profile(profile) if profile else None
    planned = _open(path, measured, memory_headroom, progress)
    scored = planned.scored
    say("scoring its neighbours", 0.4)
    around = neighbours(planned.scorer, planned.candidate)
    say("planning on other hardware", 0.6)
    return Explanation(
        name=path.name,
        scored=scored,
        binding=binding_of(planned.scorer, scored),
        neighbours=tuple(sorted(around, key=_order)),
        what_ifs=tuple(what_ifs(planned, measured, time_limit_s)) if replan else (),
        against=_against(scored, against, measured, memory_headroom) if against else None,
        splits=split_lines(model_of_plan(planned.plan, path), planned.problem, planned.candidate),
        overlapping=tuple(asynchronous_said(planned.scorer, scored)),
    )


def _open(
    path: Path, profile: Profile | None, headroom: float, progress: Progress | None
) -> Planned:
    return open_planned(path, memory_headroom=headroom, progress=progress).under(profile)


def _order(neighbour: Neighbour) -> tuple[bool, bool, int]:
    time_ns = neighbour.step_time_ns
    return bool(neighbour.refused), bool(neighbour.missing_bytes), time_ns or 0


def _against(scored: Scored, path: Path, profile: Profile | None, headroom: float) -> Against:
    other = _open(path, profile, headroom, None).scored
    return Against(name=path.name, scored=other, parts_ns=difference(scored, other))
