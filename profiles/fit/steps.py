"""Measured steps to the few constants that single kernels do not show.

Timing kernels one by one misses what lies between them (modules, autograd, the allocator, the
loop) and what they do to each other. `fit_constants` compares whole steps with their predictions
and finds, for each device,

    measured - predicted  =  sum over constants of (constant - its neutral value) * slope

`predicted` the step with all constants neutral, `slope` how the prediction changes with a constant
(for `op_overhead_ns` that is the number of kernels on the critical path).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

NEUTRAL = {
    "op_scale": 1.0,
    "collective_scale": 1.0,
    "op_overhead_ns": 0.0,
    "collective_overhead_ns": 0.0,
    "step_overhead_ns": 0.0,
}
"""The constants at which a prediction is the plain sum of single kernels and collectives."""

PRIOR_SPREAD = {
    "op_scale": 0.3,
    "collective_scale": 0.1,
    "op_overhead_ns": 20_000.0,
    "collective_overhead_ns": 500_000.0,
    "step_overhead_ns": 0.03,
}
"""How far from neutral the constants lie, as a rule; `step_overhead_ns` as a share of a step.

Kernels in a row take between .75 and 1.3 of the sum of their single times, and a step's fixed part
is a few milliseconds in a hundred (steps of a 10M-parameter GPT on two cores). Python and autograd
cost some ten microseconds a kernel, the hooks around a collective some hundred (same steps, whose
processor time exceeded their kernels' by 0.9 ms a block). `collective_scale` is
chosen about as wide as the 3 to 9 % by which gloo's all-reduces outlast their bytes between shaped
hosts (docs/shaped_compression.md); without it steps that are mostly traffic made kernels slow."""

SCALES = frozenset({"op_scale", "collective_scale"})
"""What may lie below its neutral value; an overhead is not negative."""

STEP_NOISE = 0.03
"""Medians of equal runs differ by so much (two cores, gloo)."""

_SCALE_LIMITS = (0.3, 3.0)

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """One run's median step beside its prediction with neutral constants.

    `slopes` say how the prediction changes with each constant; one left out has no effect.
    """

    device: str
    measured_ns: int
    predicted_ns: int
    slopes: Mapping[str, float]

    def __post_init__(self) -> None:
        if min(self.measured_ns, self.predicted_ns) <= 0 or min(self.slopes.values()) < 0:
            raise ValueError(f"not a step: {self}")


def fit_constants(steps: Iterable[StepTime]) -> Mapping[str, Mapping[str, float]]:
    """The constants of every device that has steps."""
    by_device: dict[str, list[StepTime]] = defaultdict(list)
    for step in steps:
        by_device[step.device].append(step)
    return {device: _fit(some) for device, some in by_device.items()}


def _fit(steps: list[StepTime]) -> dict[str, float]:
    """Ridge regression on relative errors, redone without steps far off (Huber's weights).

    Source: P. J. Huber, 'Robust Estimation of a Location Parameter', 1964. One step cannot tell
    the constants apart; the priors divide the difference between them.
    """
    measured = np.array([step.measured_ns for step in steps], dtype=np.float64)
    predicted = np.array([step.predicted_ns for step in steps], dtype=np.float64)
    spreads = PRIOR_SPREAD | {
        "step_overhead_ns": PRIOR_SPREAD["step_overhead_ns"] * float(np.median(measured))
    }
    # Unknowns in units of their priors' spread, so that each prior is one row of the same weight.
    columns = [
        np.array([step.slopes.get(name, 0.0) for step in steps]) * spreads[name] / measured
        for name in NEUTRAL
    ]
    rows, goal = np.stack(columns, axis=1), 1.0 - predicted / measured
    weight = np.ones(len(steps))
    for _ in range(20):
        found = _ridge(rows * weight[:, None], goal * weight)
        error = np.abs(rows @ found - goal)
        weight = np.sqrt(np.minimum(1.0, 2 * STEP_NOISE / np.maximum(error, 1e-12)))
    constants = {
        name: NEUTRAL[name] + spreads[name] * float(value)
        for name, value in zip(NEUTRAL, found, strict=True)
    }
    return constants | {
        name: float(np.clip(constants[name], *_SCALE_LIMITS)) for name in sorted(SCALES)
    }


def _ridge(rows: Array, goal: Array) -> Array:
    """Least squares drawn to zero; all but the scales are not negative.

    The most negative is held at zero and the rest solved again, until none is.
    """
    count = rows.shape[1]
    free = list(range(count))
    bounded = [name not in SCALES for name in NEUTRAL]
    while True:
        left = np.concatenate([rows[:, free], STEP_NOISE * np.eye(len(free))])
        right = np.concatenate([goal, np.zeros(len(free))])
        solved = np.linalg.lstsq(left, right, rcond=None)[0]
        lowest = min(range(len(free)), key=lambda i: solved[i] if bounded[free[i]] else 0.0)
        if not bounded[free[lowest]] or solved[lowest] >= 0:
            break
        del free[lowest]
    found = np.zeros(count)
    found[free] = solved
    return found
