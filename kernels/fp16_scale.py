"""The power of two that all ranks multiply gradients by before fp16, and how it moves.

fp16 holds 2^-24 to 65504. Gradients lie far below, so they are sent as fp16(g · 2^k). All ranks
must use one k: it is not sent. `Fp16Scale` is a state machine that gives the same k wherever it is
fed the same facts, which the caller agrees on (an all-reduced MAX of one flag and one magnitude):

    overflow on any rank        k falls by one; every rank skips the step
    `growth_interval` clean     k rises by one, but never above what the largest magnitude allows

That is torch.amp.GradScaler's machine for growth_factor 2 and backoff_factor 0.5, with a ceiling:
the largest magnitude seen, which falls slowly, may be summed over the ranks without overflow,

    k_max = floor(log2(65504 / (ranks · margin · amax))).

Source: GradScaler, torch/amp/grad_scaler.py and amp_update_scale_; the ceiling by algebra.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from claw_plan.kernels.plain import Half
from claw_plan.profiles.codecs import LARGEST_EXPONENT

LARGEST_FP16 = 65504.0


def highest_exponent(amax: float, ranks: int, margin: float) -> int:
    """The largest k at which a sum over the ranks of magnitudes up to amax · margin is finite."""
    if not amax > 0:
        return LARGEST_EXPONENT
    # Exact, where a logarithm rounds: frexp gives x = f · 2^e with f in [0.5, 1).
    _, exponent = math.frexp(LARGEST_FP16 / (ranks * margin * amax))
    return max(-LARGEST_EXPONENT, min(exponent - 1, LARGEST_EXPONENT))


@dataclass(slots=True, kw_only=True)
class Fp16Scale:
    """k, and for how many steps nothing has overflowed."""

    ranks: int = 1
    """How many are summed before dividing; 1 where each divides by their number first."""
    exponent: int = 12
    growth_interval: int = 2000
    margin: float = 2.0
    """Room for magnitudes to grow within a step."""
    memory: float = 0.999
    """What remains, from step to step, of the largest magnitude seen."""
    amax: float = 0.0
    clean_steps: int = 0

    @property
    def codec(self) -> Half:
        """To encode this step with."""
        return Half(exponent=self.exponent)

    def update(self, *, overflow: bool, amax: float | None = None) -> None:
        """After a step, with what all ranks agreed on: was anything infinite, and the largest.

        `amax`, of the gradients before scaling, is None where it was not measured, and ignored
        where it is not finite.
        """
        if amax is not None and math.isfinite(amax):
            self.amax = max(amax, self.memory * self.amax)
        ceiling = highest_exponent(self.amax, self.ranks, self.margin)
        if overflow:
            self.exponent, self.clean_steps = self.exponent - 1, 0
        else:
            self.clean_steps += 1
            if self.clean_steps == self.growth_interval:
                self.exponent, self.clean_steps = self.exponent + 1, 0
        self.exponent = max(-LARGEST_EXPONENT, min(self.exponent, ceiling))

    def state_dict(self) -> dict[str, float | int]:
        """What must be saved to go on exactly."""
        return {"exponent": self.exponent, "clean_steps": self.clean_steps, "amax": self.amax}

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Takes up what `state_dict` gave."""
        self.exponent, self.clean_steps = int(state["exponent"]), int(state["clean_steps"])
        self.amax = float(state["amax"])
