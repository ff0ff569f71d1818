"""What can go wrong while a plan runs."""

from __future__ import annotations

from claw_plan.profiles.errors import ClawPlanError


class ExecutionError(ClawPlanError):
    """A run that failed: which rank, at which step, and why."""
