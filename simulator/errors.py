"""What can be wrong with a task graph."""

from __future__ import annotations

from claw_plan.profiles.errors import ClawPlanError


class SimulationError(ClawPlanError):
    """A task graph that cannot be simulated."""


class Deadlock(SimulationError):
    """Tasks that wait for each other; the message names the next task of every stuck stream."""
