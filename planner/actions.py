"""`Action`: one computation of a pipeline rank, in PyTorch's text, and what it waits for.

`2F0` is the forward of microbatch 0 on stage 2, `2B0` its whole backward; schedules that split
the backward have `2I0` (the gradient of the stage's input, which the stage before waits for) and,
some time later, `2W0` (the gradients of its weights, which nobody waits for).
"""

from __future__ import annotations

import re
from typing import NamedTuple

from claw_plan.planner.errors import PlanError

KINDS = FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = "F", "B", "I", "W"
"""In the order in which arrays of actions number them."""

_CELL = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")


class Action(NamedTuple):
    """One computation of a pipeline rank; `str` gives PyTorch's text."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Rows = tuple[tuple[Action, ...], ...]
"""The actions of rank 0, 1, … in the order they run."""


def parse_action(text: str) -> Action:
    """'2F0' to an action; blanks around it are no matter. Raises PlanError for anything else."""
    match = _CELL.fullmatch(text.strip())
    if match is None:
        raise PlanError(
            f"an action is <stage>F<microbatch> (forward), B (backward), or I and W (gradients "
            f"of the input and of the weights), as in 2F0, and nothing more; got {text!r}"
        )
    return Action(int(match[1]), match[2], int(match[3]))


def message_for(action: Action, num_stages: int) -> tuple[int, str, int] | None:
    """(stage, 'F' or 'B', microbatch) of the neighbour's result that the action takes, if any.

    A gradient comes from the neighbour's whole backward or from its I, whichever it runs.
    """
    stage, kind, index = action
    if kind == FORWARD:
        return (stage - 1, FORWARD, index) if stage else None
    if kind == WEIGHT_GRADIENT or stage + 1 == num_stages:
        return None
    return (stage + 1, BACKWARD, index)


def message_of(action: Action) -> tuple[int, str, int] | None:
    """What the action's result is called by those that wait for it; None when none does."""
    if action.kind == WEIGHT_GRADIENT:
        return None
    return (action.stage, FORWARD if action.kind == FORWARD else BACKWARD, action.microbatch)


def own_before(action: Action) -> tuple[int, str, int] | None:
    """(stage, kind, microbatch) of what its own stage has run before; None for a forward."""
    if action.kind == FORWARD:
        return None
    kind = INPUT_GRADIENT if action.kind == WEIGHT_GRADIENT else FORWARD
    return (action.stage, kind, action.microbatch)
