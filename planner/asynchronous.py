"""Rows without a flush: what each rank of an asynchronous pipeline runs, step after step.

PipeDream-2BW (Narayanan et al. 2021, arXiv 2006.09503, section 3.1) runs 1F1B over all
microbatches of a run as if they were those of one step. A stage changes its weights when the last
backward of a step has run there, while later microbatches are on their way, so two versions are
alive and all microbatches of a step use the older:

    W(t + 1) = W(t) - lr * grad f(W(t - 1)),   W(-1) = W(0)

Rows number microbatches through the whole run. A step's row ends with the step's last forward, so
that no rank needs the next step's batch; what is left in flight is drained where a run stops.
"""

from __future__ import annotations

from collections.abc import Sequence

from claw_plan.planner.actions import BACKWARD, FORWARD, Action, message_for

DELAY = 1
"""Steps by which the weights that gradients are found at lie behind, on every stage alike."""


def in_flight(rank: int, num_ranks: int) -> int:
    """Microbatches between their forward and their backward on a rank, while steps go on."""
    return num_ranks - rank


def step_row(
    rank: int, num_ranks: int, num_microbatches: int, step: int, *, fills: bool
) -> tuple[Action, ...]:
    """A rank's actions of step `step`, the first of which `fills` an empty pipeline."""
    ahead, actions = in_flight(rank, num_ranks), list[Action]()
    first = step * num_microbatches
    for index in range(first, first + num_microbatches):
        before = index - ahead
        if before >= (first if fills else 0):
            actions.append(Action(rank, BACKWARD, before))
        actions.append(Action(rank, FORWARD, index))
    return tuple(actions)


def drain_row(rank: int, num_ranks: int, num_microbatches: int, step: int) -> tuple[Action, ...]:
    """The backwards that are left in flight behind step `step`."""
    end = (step + 1) * num_microbatches
    return tuple(
        Action(rank, BACKWARD, index) for index in range(end - in_flight(rank, num_ranks), end)
    )


def version_of(step: int) -> int:
    """After how many updates the weights are as all microbatches of a step use them."""
    return max(0, step - DELAY)


def ask_places(
    rows: Sequence[Sequence[Action]], num_microbatches: int
) -> dict[tuple[int, str, int], int]:
    """How many actions a message's receiver has run when it asks for it, as in `receives`.

    A rank asks one message ahead each way, once it is certain to come: when it takes the one
    before, but for none of a step that it has not begun, and for no gradient of what it has not
    sent on.
    """
    places: dict[tuple[int, str, int], int] = {}
    for row in rows:
        newest = {FORWARD: 0, BACKWARD: 0}
        place_of = {action: place for place, action in enumerate(row)}
        begins = 0
        for place, action in enumerate(row):
            stage, kind, index = action
            if kind == FORWARD and index % num_microbatches == 0:
                begins = place - 1 if place and row[place - 1].kind == BACKWARD else place
            earliest = begins
            if kind == BACKWARD:
                earliest = place_of[Action(stage, FORWARD, index)] + 1
            message = message_for(action, len(rows))
            if message is not None:
                places[message] = max(newest[kind], earliest)
            newest[kind] = place
    return places
