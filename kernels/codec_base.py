"""What every codec is: a flat floating tensor to bytes for the wire, and those back to a tensor.

A codec keeps nothing between calls; what it could not send is `ErrorFeedback`'s. What one rank
encodes any other decodes, alone from the bytes, the number of elements and the codec.

Values that are not finite never disappear and never turn into numbers: whoever decodes finds NaN
or infinity there, so that the check on overflow that mixed precision makes anyway sees them on
every rank. Codecs whose elements share a scale (one_bit a buffer, int8, int4 and fp8 a block)
then decode all that share it to NaN.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from claw_plan.profiles.codecs import ALIGNMENT_BYTES, CodecError


class Codec(ABC):
    """A way to send fewer bytes. Implementations are frozen dataclasses, so they hash."""

    name: ClassVar[str]
    has_fixed_size: ClassVar[bool] = True
    """Whether `wire_bytes` is what `encode` returns; else the most it returns."""
    needs_error_feedback: ClassVar[bool] = True
    """Whether training goes wrong unless what was not sent is added to the next gradient."""

    def encode(self, flat: Tensor) -> Tensor:
        """The codes of all elements, one uint8 tensor on the same device.

        Raises:
            CodecError: if the elements are no floating-point numbers.
        """
        if not flat.is_floating_point():
            raise CodecError(f"codec {self.name} takes floating-point tensors, got {flat.dtype}")
        x = flat.detach().reshape(-1).to(self.working_dtype).contiguous()
        if not x.numel():
            return torch.empty(0, dtype=torch.uint8, device=x.device)
        return self._encode(x)

    def decode(self, codes: Tensor, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """What `numel` elements became.

        Raises:
            CodecError: if so many elements do not have these codes.
        """
        return self.decode_into(codes, torch.empty(numel, dtype=dtype, device=codes.device))

    def decode_into(self, codes: Tensor, out: Tensor) -> Tensor:
        """The same, written into a contiguous flat tensor and converted to its dtype.

        Memory that is there is faster than new: of large pieces the system may have to clear
        each page first.

        Raises:
            CodecError: if so many elements do not have these codes.
        """
        self._check(codes, out.numel())
        if not out.numel():
            return out
        if out.dtype == self.working_dtype:
            self._decode(codes.contiguous(), out)
            return out
        decoded = torch.empty(out.numel(), dtype=self.working_dtype, device=codes.device)
        self._decode(codes.contiguous(), decoded)
        return out.copy_(decoded)

    def subtract_sent(self, total: Tensor, codes: Tensor) -> Tensor:
        """Takes from `total`, in place, what its codes say: what was not sent remains."""
        return total.sub_(self.decode(codes, total.numel(), total.dtype))

    def encode_fused(self, x: Tensor, before: Tensor, rest: Tensor) -> tuple[Tensor, bool] | None:
        """The codes of x + before, `rest` being what they leave out, and whether all is finite.

        The same bits as adding, `encode` and `subtract_sent`, in fewer passes over memory; None
        where nothing does that. `rest` is undefined where something is not finite.
        """
        return None

    def wire_bytes(self, numel: int) -> int:
        """Bytes of the codes of so many elements, a multiple of four; 0 for none."""
        return aligned(self._payload_bytes(numel)) if numel else 0

    @property
    @abstractmethod
    def contraction(self) -> float | None:
        """The c of |x - decode(encode(x))|² <= c |x|² for all finite x; None without c < 1.

        Blocks whose largest magnitude is near the smallest fp32 number lose up to all of it: for
        them c is 1.
        """

    @property
    def working_dtype(self) -> torch.dtype:
        """What elements are converted to before anything else."""
        return torch.float32

    def _check(self, codes: Tensor, numel: int) -> None:
        due = self.wire_bytes(numel)
        if codes.dtype != torch.uint8 or codes.numel() != due:
            raise CodecError(
                f"codec {self.name}: {numel} elements have {due} bytes of codes, "
                f"got {codes.numel()} of {codes.dtype}"
            )

    @abstractmethod
    def _payload_bytes(self, numel: int) -> int: ...

    @abstractmethod
    def _encode(self, x: Tensor) -> Tensor:
        """Of a contiguous, non-empty tensor in the working dtype."""

    @abstractmethod
    def _decode(self, codes: Tensor, out: Tensor) -> None:
        """Into a contiguous, non-empty tensor of the working dtype."""

    def _buffer(self, x: Tensor) -> Tensor:
        """Room for the codes of x; what fills up to the alignment is zero."""
        codes = torch.empty(self.wire_bytes(x.numel()), dtype=torch.uint8, device=x.device)
        codes[self._payload_bytes(x.numel()) :] = 0
        return codes


def aligned(size_bytes: int) -> int:
    """The next multiple of the alignment."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def lie_in_cpu_floats(*tensors: Tensor) -> bool:
    """Whether what is compiled for the CPU can take them as they are."""
    return all(
        one.device.type == "cpu" and one.dtype == torch.float32 and one.is_contiguous()
        for one in tensors
    )


def typed(part: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes read as numbers; a copy where they do not lie on a multiple of the number's size."""
    if part.storage_offset() % dtype.itemsize:
        part = part.clone()
    return part.view(dtype)
