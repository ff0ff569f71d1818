"""What can be wrong with a model or a plan."""

from __future__ import annotations

from claw_plan.profiles.errors import ClawPlanError


class TraceError(ClawPlanError):
    """A model that cannot be traced, or not be trained as it stands."""


class PlanError(ClawPlanError, ValueError):
    """A plan or candidate that contradicts itself, the model or the cluster."""


class InfeasiblePlan(PlanError):
    """No candidate (or not the one asked for) fits; the message says by how much and where."""
