"""`AttentionShape`: how the time of flash attention grows with sequence, heads and head size.

    columns = keys + p, or where causal (keys + 128)/2 + p        what a row of queries pays for
    rate    = share of the phase * RA / ((1 + e/d)/(1 + e/128))   for head sizes d below 128
    time    = F (samples * heads * queries * columns + t * 128 * (keys + p) * processors) / rate

F = 4 d, in the backward pass 10 d. A processor takes 128 queries and walks along the keys; p is
what it pays before the first, 128 the edge of a tile that a causal mask cuts in half. Rows of a
causal mask differ in length and the last to finish is waited for: the second term, a share t of
the longest row. Exponentials cost the same for every head size, hence e. Kernels come for the
head sizes in `KERNEL_SIZES` only. RA is the rate of forward and backward together, in FLOP/s of
the causal half; shares and t are fitted to SimuMax's tables by `fit.attention`.
"""

from __future__ import annotations

from dataclasses import dataclass

ROW_TILE = 128
"""Queries a processor takes at once."""

KERNEL_SIZES = (32, 64, 96, 128, 192, 256)
"""Head sizes that FlashAttention-2 is compiled for (github Dao-AILab/flash-attention,
csrc/flash_attn); others run in the next larger, and so does the smaller of q's and v's."""

PROLOGUE = {"forward": 100, "backward": 250}
"""p: from 512 to 16k tokens without mask, FlashAttention-2 and -3 on H100 go as 1/(1 + p/s) with
60 to 200 forward and 220 to 390 backward; with the mask as 1/(1 + 300/s), which 128 + 2 p gives.
Source: Shah et al. 2024, 'FlashAttention-3' (arXiv 2407.08608), figures 5 and 6."""

BACKWARD_FLOPS = 2.5
"""Of the forward's: five products instead of two (Dao 2022, arXiv 2205.14135)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Constants of one generation of devices and their kernels.

    `forward` and `backward` are the rates of the phases relative to RA, `forward_tail` and
    `backward_tail` the t of the formula, `exponentials` its e. `flops_per_s` is the table's RA,
    the floors what its host takes for a call, which kernels in a row do not show.
    """

    table: str
    flops_per_s: float
    forward: float
    backward: float
    forward_tail: float
    backward_tail: float
    exponentials: float
    forward_floor_s: float = 0.0
    backward_floor_s: float = 0.0
    spread: float = 0.0
    source: str = ""

    def seconds(
        self,
        processors: int,
        dims: tuple[int, ...],
        *,
        phase: str,
        flops_per_s: float,
        flops: int,
    ) -> float:
        """Time of one call.

        Args:
            processors: Of the device.
            dims: (batch, heads, kv_heads, queries, keys, head size, causal 0|1).
            phase: 'forward' or 'backward'.
            flops_per_s: RA.
            flops: Of the whole square, by which a value size other than the head size, and a
                window narrower than the sequence, are known.
        """
        batch, heads, _, queries, keys, size, causal = dims
        is_backward = phase == "backward"
        factor = BACKWARD_FLOPS if is_backward else 1.0
        share = self.backward if is_backward else self.forward
        tail = self.backward_tail if is_backward else self.forward_tail
        prologue = PROLOGUE["backward" if is_backward else "forward"]
        counted = flops / (4.0 * factor * batch * heads * queries * keys * size)
        padded, seen = _head_size(size, counted)
        longest = seen * keys + prologue
        columns = (seen * keys + ROW_TILE) / 2 + prologue if causal else longest
        pairs = batch * heads * queries * columns + tail * ROW_TILE * longest * processors
        rate = share * flops_per_s
        if padded < 128:
            rate *= (1 + self.exponentials / 128) / (1 + self.exponentials / padded)
        return 4.0 * factor * padded * pairs / rate


def _head_size(size: int, counted: float) -> tuple[int, float]:
    """The size of the kernel, and the share of the keys that a query sees.

    `counted` is flops relative to values as wide as q and no window. Values between half and
    twice as wide (latent attention: 128 of 192) run padded; fewer flops than that are a window.
    """
    value = (2 * counted - 1) * size
    if value < 0.49 * size:
        return kernel_size(size), min(1.0, counted)
    return kernel_size(max(size, round(value))), 1.0


def kernel_size(size: int) -> int:
    """The head size of the kernel that serves this one."""
    for each in KERNEL_SIZES:
        if size <= each:
            return each
    return -(-size // 64) * 64
