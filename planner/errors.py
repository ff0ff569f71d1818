"""What can be wrong with a model or a plan."""

from __future__ import annotations

from collections.abc import Mapping

from claw_plan.profiles.errors import ClawPlanError


class TraceError(ClawPlanError):
    """A model that cannot be traced, or not be trained as it stands."""


class PlanError(ClawPlanError, ValueError):
    """A plan or candidate that contradicts itself, the model or the cluster."""


class TensorParallelError(PlanError):
    """An operation that has no divided form, or a module that cannot be divided as asked."""


class PiecesNeeded(TensorParallelError):
    """A fused column output is cut into pieces that the division does not respect yet."""

    def __init__(self, message: str, *, columns: frozenset[str], pieces: int) -> None:
        super().__init__(message)
        self.columns, self.pieces = columns, pieces


class InfeasiblePlan(PlanError):
    """No candidate (or not the one asked for) fits; the message says by how much and where.

    `levers` maps each change that was tried to the bytes that are still missing after it.
    """

    def __init__(self, message: str, levers: Mapping[str, int] | None = None) -> None:
        super().__init__(message)
        self.levers = dict(levers or {})
