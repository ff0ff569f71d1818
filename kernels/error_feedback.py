"""Error feedback: what a codec did not send is added to what it gets next.

    c_t = C(x_t + e_t),   e_{t+1} = x_t + e_t - c_t,   so   Σ c_t = Σ x_t + e_0 - e_T.

With it the sum of all that was sent stays within one residual of the sum of all that should have
been; without it 1-bit and sparse codecs do not train. One object per bucket and place where
encoding happens: each worker has one, and so has each server of a two-phase reduction. Source:
Karimireddy et al., Error Feedback Fixes SignSGD, arXiv 1901.09847.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from claw_plan.kernels.codec import Codec, CodecError


def largest_magnitude(flat: Tensor) -> Tensor:
    """Of the elements, 0 of none; not finite where one of them is not."""
    if not flat.numel():
        return flat.new_zeros(())
    # One pass where abs() and isfinite() write all elements, or a mask of them, to be read again.
    least, most = torch.aminmax(flat)
    return torch.maximum(-least, most)


def restore_unless_finite(state: Tensor, before: Tensor, judged: Tensor) -> None:
    """Writes `before` over `state` unless all of `judged` is finite."""
    if not judged.numel():
        return
    finite = largest_magnitude(judged).isfinite()
    if state.device.type != "cpu":
        # Without asking the device, which would wait for it.
        torch.where(finite, state, before, out=state)
    elif not finite:
        state.copy_(before)


@dataclass(slots=True)
class ErrorFeedback:
    """A codec with the residual of one bucket; the residual starts at zero."""

    codec: Codec
    residual: Tensor | None = None
    """As long as the bucket, fp64 for fp64 buckets and else fp32; None before the first use."""
    _spare: Tensor | None = field(default=None, repr=False)
    """On the CPU takes turns with the residual: memory that is new at every step is slow there."""

    def encode(self, flat: Tensor) -> Tensor:
        """The codes of flat + residual; keeps what they leave out."""
        return self.encode_chunks(flat, [flat.numel()])[0]

    def encode_chunks(self, flat: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """The same, each of the consecutive chunks encoded by itself.

        A chunk in which something is not finite keeps the residual that it had: such a step is
        skipped on every rank, and infinity would stay in the residual for ever.

        Raises:
            CodecError: if the sizes do not add up to the bucket, or it has another than before.
        """
        if sum(sizes) != flat.numel():
            raise CodecError(
                f"chunks of {list(sizes)} elements are not a bucket of {flat.numel()}"
            )
        residual = self._residual_for(flat)
        total = self._spare
        if total is None or (total.shape, total.dtype) != (residual.shape, residual.dtype):
            total = torch.empty_like(residual)
        chunks = (one.split(list(sizes)) for one in (flat.detach().reshape(-1), residual, total))
        codes = [self._encode(*chunk) for chunk in zip(*chunks, strict=True)]
        self.residual = total
        self._spare = residual if total.device.type == "cpu" else None
        return codes

    def _encode(self, chunk: Tensor, before: Tensor, rest: Tensor) -> Tensor:
        """The codes of chunk + before; fills in what they leave out."""
        fused = self.codec.encode_fused(chunk, before, rest)
        if fused is not None:
            codes, is_finite = fused
            if not is_finite:
                rest.copy_(before)
            return codes
        codes = self.codec.encode(torch.add(before, chunk, out=rest))
        self.codec.subtract_sent(rest, codes)
        restore_unless_finite(rest, before, rest)
        return codes

    def reset(self) -> None:
        """Forgets what was not sent, as when the ranks or the meaning of the buckets change."""
        self.residual = None

    def state_dict(self) -> dict[str, Tensor]:
        """What must be saved, on this rank, to go on exactly."""
        return {} if self.residual is None else {"residual": self.residual.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes up what `state_dict` gave."""
        residual = state.get("residual")
        self.residual = None if residual is None else residual.clone()

    def _residual_for(self, flat: Tensor) -> Tensor:
        if self.residual is None:
            dtype = torch.float64 if flat.dtype == torch.float64 else torch.float32
            return torch.zeros(flat.numel(), dtype=dtype, device=flat.device)
        if self.residual.numel() != flat.numel():
            raise CodecError(
                f"error feedback of {self.residual.numel()} elements got a bucket of "
                f"{flat.numel()}; reset it when buckets change"
            )
        return self.residual
