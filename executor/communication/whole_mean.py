"""Means of whole gradients, by one algorithm or by those a selector chooses, checked or not.

`WholeMean` is the `Mean` of replicas that send gradients as they are; `checked` adds checks of the
results to any other. `docs/collectives.md` says how a run asks for them.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from claw_plan.executor.communication.bucket_checks import BucketChecks
from claw_plan.executor.communication.group import CollectiveGroup
from claw_plan.executor.communication.hooks import Mean
from claw_plan.executor.communication.selector import Selector


class WholeMean:
    """The mean over `group`, by its strategy or what `selector` says; `checks` sees all of it."""

    def __init__(
        self,
        group: CollectiveGroup,
        *,
        selector: Selector | None = None,
        checks: BucketChecks | None = None,
    ) -> None:
        self._group, self._selector, self._checks = group, selector, checks

    def __call__(self, index: int, flat: Tensor) -> Tensor:
        """In place, as DistributedDataParallel's arithmetic: divided, then summed."""
        flat.mul_(1.0 / self._group.process_group.size())
        carry = None if self._checks is None else self._checks.exchange(index)
        if self._selector is None:
            self._group.all_reduce(flat, carry)
        else:
            self._selector.all_reduce(flat, carry)
        if self._checks is not None:
            self._checks.arrived(index, flat)
        return flat

    def rank_state(self) -> dict[str, Tensor]:
        """Nothing is left out of what is sent, and a selector begins anew in every run."""
        return {}

    def load_rank_state(self, state: Mapping[str, Tensor]) -> None:
        """There is nothing to take up."""


def checked(mean: Mean, checks: BucketChecks) -> Mean:
    """The same mean, its results compared between ranks."""

    def arrived(index: int, flat: Tensor) -> Tensor:
        found = mean(index, flat)
        checks.arrived(index, found)
        return found

    return arrived
