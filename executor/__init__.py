"""Plan to training on torch.distributed; what runs measure; `parallelize` for trainers of others.

`parallelize` and `Adam` are imported when asked for: most of this room is needed by commands
alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from claw_plan.executor.optimizers.adam import Adam
    from claw_plan.executor.planned_model import PlannedModel, parallelize

__all__ = ["Adam", "PlannedModel", "parallelize"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from claw_plan.executor import planned_model
    from claw_plan.executor.optimizers import adam

    return getattr(adam if name == "Adam" else planned_model, name)
