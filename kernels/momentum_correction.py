"""Momentum correction and masking of Deep Gradient Compression, for sparse codecs.

Error feedback alone gives a gradient that waited for τ steps the momentum of one: sparse training
then behaves as without momentum. DGC keeps the momentum on each rank and sends from it:

    u = m·u + g,   v = v + u,   send the large of v,   u = v = 0 where it was sent

The second zero, the mask, stops an element's old momentum from pushing on after it was sent. The
optimizer that gets the mean must have no momentum of its own. Between two sendings of an element
with constant gradient g and m = 0, v is what error feedback would keep. Source: Lin et al., Deep
Gradient Compression, arXiv 1712.01887, sections 3.2 and 3.3, algorithm 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from claw_plan.kernels.codec import CodecError
from claw_plan.kernels.error_feedback import restore_unless_finite
from claw_plan.kernels.sparse import SparseCodec


@dataclass(slots=True)
class MomentumCorrection:
    """The u and v of one bucket."""

    codec: SparseCodec
    momentum: float = 0.9
    velocity: Tensor | None = None
    """u; None before the first use."""
    unsent: Tensor | None = None
    """v."""

    def encode(self, flat: Tensor) -> Tensor:
        """The codes of what is large of all that has not been sent.

        A gradient that is not finite is encoded alone and changes nothing here: such a step is
        skipped on every rank.

        Raises:
            CodecError: if the bucket has another size than before.
        """
        gradient = flat.detach().reshape(-1).float()
        if self.velocity is None or self.unsent is None:
            self.velocity, self.unsent = torch.zeros_like(gradient), torch.zeros_like(gradient)
        if self.velocity.numel() != gradient.numel():
            raise CodecError(
                f"momentum correction of {self.velocity.numel()} elements got a bucket of "
                f"{gradient.numel()}; reset it when buckets change"
            )
        velocity = self.velocity * self.momentum + gradient
        unsent = self.unsent + velocity
        codes = self.codec.encode(unsent)
        sent = self.codec.indices(codes)
        velocity.index_fill_(0, sent, 0)
        unsent.index_fill_(0, sent, 0)
        restore_unless_finite(velocity, self.velocity, gradient)
        restore_unless_finite(unsent, self.unsent, gradient)
        self.velocity, self.unsent = velocity, unsent
        return codes

    def reset(self) -> None:
        """Forgets what was not sent."""
        self.velocity = self.unsent = None

    def state_dict(self) -> dict[str, Tensor]:
        """What must be saved, on this rank, to go on exactly."""
        if self.velocity is None or self.unsent is None:
            return {}
        return {"velocity": self.velocity, "unsent": self.unsent}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes up what `state_dict` gave."""
        self.reset()
        if state:
            self.velocity, self.unsent = state["velocity"].clone(), state["unsent"].clone()
