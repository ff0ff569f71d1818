"""Means over the ranks of a group: whole by any algorithm, or through a codec that keeps errors.

What codecs leave out is added to the next vector of the same key, so a key stands for the same
elements in the same order at every call. Errors are a rank's own: they are saved for each rank,
and nothing else takes their place when the number of ranks changes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from claw_plan.executor.communication.algorithms import NATIVE, all_reduce
from claw_plan.executor.communication.compressed import TwoPhaseFeedback, compressed_mean
from claw_plan.executor.communication.momentum_feedback import with_momentum
from claw_plan.executor.communication.selector import Selector
from claw_plan.kernels.codec import Codec
from claw_plan.profiles.collective_schedules import Nodes


def bucket_key(index: int) -> str:
    """What the bucket of that number is called among errors."""
    return f"bucket{index}"


class GroupMean:
    """Means over `group`. `nodes` are its ranks by node, None: all on one.

    With `keeps_errors` off what a codec leaves out is forgotten, as it always is of codecs that
    train without. `momentum` is that of Deep Gradient Compression, for gradients through sparse
    codecs under SGD without momentum.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        codec: Codec,
        *,
        algorithm: str = NATIVE,
        nodes: Nodes | None = None,
        keeps_errors: bool = True,
        momentum: float = 0.0,
    ) -> None:
        self.group, self.codec = group, codec
        self.algorithm, self.nodes = algorithm, nodes
        self._keeps_errors, self._momentum = keeps_errors, momentum
        self.feedback: dict[str, TwoPhaseFeedback] = {}
        self.selector: Selector | None = None
        """Chooses by which of the algorithms codes travel that leave every bit as it is."""

    @property
    def sends_whole(self) -> bool:
        """Whether there is nothing to compress."""
        return self.codec.name == "none"

    def whole(self, flat: torch.Tensor) -> torch.Tensor:
        """The mean, in place, in the vector's own precision: what DistributedDataParallel does."""
        flat.mul_(1.0 / self.group.size())
        all_reduce(flat, self.group, self.algorithm, self.nodes)
        return flat

    def compressed(self, key: str, flat: torch.Tensor) -> torch.Tensor:
        """The mean through the codec; `flat` is kept."""
        feedback = None
        if self._keeps_errors and self.codec.needs_error_feedback:
            feedback = self.feedback.get(key) or self.feedback.setdefault(key, self._empty())
        return self._mean(flat, feedback)

    def _mean(self, flat: torch.Tensor, feedback: TwoPhaseFeedback | None) -> torch.Tensor:
        def by(algorithm: str) -> torch.Tensor:
            return compressed_mean(flat, self.codec, feedback, self.group, algorithm, self.nodes)

        return by(self.algorithm) if self.selector is None else self.selector.timed(flat, by)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """This rank's errors; names are `<key>.` and what `TwoPhaseFeedback` calls them."""
        return {
            f"{key}.{name}": error
            for key, feedback in self.feedback.items()
            for name, error in feedback.state_dict().items()
        }

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Takes up what the same rank of as many saved; what is not there begins at zero."""
        by_key: dict[str, dict[str, torch.Tensor]] = {}
        for full, error in state.items():
            key, *name = full.rsplit(".", 2)
            by_key.setdefault(key, {})[".".join(name)] = error
        self.feedback = {key: self._empty() for key in by_key}
        for key, own in by_key.items():
            self.feedback[key].load_state_dict(own)

    def _empty(self) -> TwoPhaseFeedback:
        if self._momentum:
            return with_momentum(self.codec, self._momentum)
        return TwoPhaseFeedback(self.codec)
