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

from claw_plan.planner.actions import BACKWARD, FORWARD, Action

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
