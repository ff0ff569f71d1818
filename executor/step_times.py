"""How each step of a run runs, and what a step of its plan took.

Step 1 warms up. Of a run long enough, three steps are recorded as Timelines, for one alone may
be disturbed, and two for the Measurements; their times do not count. All other steps run without
any looking, and stand for the plan where they do what it says.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.zero_one import is_zero_one, longest_away, mean_ns

PLAIN, TIMELINE, WORK = "plain", "timeline", "work"
"""How a step runs: untouched, with spans, with every piece of work timed."""

STEADY, WARM_UP, MET, APART, FRESH = "steady", "warm-up", "met", "apart", "fresh"
"""What a step did: the same as all later ones; a codec's warm-up; of 0/1 Adam, whether replicas
met; nothing, of what the step before it leaves where the next forward waits for its buckets."""

_WHY_NOT = {
    WARM_UP: "all its steps were the codec's warm-up (training.codec_warmup_steps); train longer",
    MET: "replicas met in all its steps, which a plan's do once in `longest_away`; train longer",
    APART: "replicas met in none of its steps; train longer",
    FRESH: "no step followed another that nothing disturbed; train for two steps or more",
}


def ways_of(steps: int, *, waits: bool = False) -> list[str]:
    """How each of the steps runs. Short runs are all plain; the first step always is.

    Plain steps lie between the recorded ones: what disturbs a machine lasts for some steps. Where
    the next forward `waits` for buckets they come in pairs, as the first of them waits for none.
    """
    ways = [PLAIN] * steps
    if steps >= 3:
        ways[2] = TIMELINE
    if steps >= 6:
        ways[3] = ways[4] = WORK
    for index in (7, 10) if waits else (6, 8):
        if steps >= 9 and index < steps:
            ways[index] = TIMELINE
    return ways


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """The steps that stand for a run, by index from 0, and the typical one.

    `unlike_plan` says why they are not what the plan predicts; '' where they are.
    """

    indices: Sequence[int]
    steps_ns: Sequence[int]
    typical_ns: int
    unlike_plan: str = ""


def counted(ways: Sequence[str], phases: Sequence[str]) -> list[int]:
    """Indices of the steps that stand for the run, from 0.

    Plain ones after the first that did what the plan says; else all plain ones, or all there are.
    """
    plain = [index for index, way in enumerate(ways) if way == PLAIN and index > 0]
    steady = [index for index in plain if phases[index] in (STEADY, MET, APART)]
    return steady or plain or list(range(len(ways)))


def step_times(
    knobs: Candidate, ways: Sequence[str], phases: Sequence[str], walls_ns: Sequence[int]
) -> StepTimes:
    """Of a run whose steps took so long on the slowest rank.

    The typical step is the median; with 0/1 Adam the mean of both kinds of steps, each at its
    median, over those from one meeting to the next at their longest distance, as planning has it.
    """
    indices = counted(ways, phases)
    found: dict[str, list[int]] = {}
    for index in indices:
        found.setdefault(phases[index], []).append(walls_ns[index])
    middle = {phase: round(statistics.median(times)) for phase, times in found.items()}
    steps_ns = [walls_ns[index] for index in indices]
    typical_ns = round(statistics.median(steps_ns))
    if is_zero_one(knobs) and MET in middle and APART in middle:
        typical_ns = mean_ns(knobs, middle[MET], middle[APART])
    return StepTimes(
        indices=indices,
        steps_ns=steps_ns,
        typical_ns=typical_ns,
        unlike_plan=_unlike_plan(knobs, middle),
    )


def _unlike_plan(knobs: Candidate, found: Mapping[str, int]) -> str:
    """Why the counted steps are not what the plan predicts."""
    if is_zero_one(knobs) and longest_away(knobs) == 1:
        expected = {MET}
    else:
        expected = {MET, APART} if is_zero_one(knobs) else {STEADY}
    if found.keys() == expected:
        return ""
    return next((why for phase, why in _WHY_NOT.items() if phase in found), "")
