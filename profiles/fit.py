"""Measured steps to the few constants that single kernels do not show.

Timing kernels one by one misses what lies between them (the loop, the allocator, cold caches) and
what they do to each other. `fit_constants` compares whole steps with their predictions and finds,
for each device,

    measured - other  =  op_scale * compute + step_overhead

`compute` predicted kernel time on the critical rank, `other` the rest of the predicted step (waits
for collectives, bubbles), both without the constants fitted here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

SCALE_PRIOR_SPREAD = 0.3
"""Kernels in a row take between .75 and 1.3 of the sum of their single times, as a rule: fitted by
eye from steps of a 10M-parameter GPT on two cores (measured 168-230 ms for the same work)."""

OVERHEAD_PRIOR_SHARE = 0.03
"""A step's fixed part is a few milliseconds in a hundred, as a rule: one run alone shall not turn
what slowed its kernels into a fixed time."""

STEP_NOISE = 0.03
"""Medians of equal runs differ by so much (two cores, gloo)."""

_LIMITS = (0.3, 3.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """One run's median step beside its prediction.

    `compute_ns` is the predicted kernel time of the critical rank, `other_ns` the rest of the
    predicted step, both before `op_scale` and `step_overhead_ns`.
    """

    device: str
    measured_ns: int
    compute_ns: int
    other_ns: int

    def __post_init__(self) -> None:
        if min(self.measured_ns, self.compute_ns) <= 0 or self.other_ns < 0:
            raise ValueError(
                f"not a step: {self.measured_ns=} {self.compute_ns=} {self.other_ns=}"
            )


def fit_constants(steps: Iterable[StepTime]) -> Mapping[str, Mapping[str, float]]:
    """`op_scale` and `step_overhead_ns` of every device that has steps."""
    by_device: dict[str, list[StepTime]] = defaultdict(list)
    for step in steps:
        by_device[step.device].append(step)
    return {device: _fit(some) for device, some in by_device.items()}


def _fit(steps: list[StepTime]) -> dict[str, float]:
    """Ridge regression on relative errors, redone without steps far off (Huber's weights).

    Source: P. J. Huber, 'Robust Estimation of a Location Parameter', 1964. One step cannot tell
    the two constants apart; the priors divide the difference between them.
    """
    measured = np.array([step.measured_ns for step in steps], dtype=np.float64)
    compute = np.array([step.compute_ns for step in steps], dtype=np.float64)
    other = np.array([step.other_ns for step in steps], dtype=np.float64)
    unit = float(np.median(measured))
    rows = np.stack([compute / measured, unit / measured], axis=1)
    goal = 1.0 - other / measured
    prior = np.diag([STEP_NOISE / SCALE_PRIOR_SPREAD, STEP_NOISE / OVERHEAD_PRIOR_SHARE])
    weight = np.ones(len(steps))
    for _ in range(20):
        left = np.concatenate([rows * weight[:, None], prior])
        right = np.concatenate([goal * weight, prior @ np.array([1.0, 0.0])])
        scale, overhead = np.linalg.lstsq(left, right, rcond=None)[0]
        if overhead < 0:
            overhead = 0.0
            column = left[:, 0]
            scale = float(column @ right / (column @ column))
        error = np.abs(rows @ np.array([scale, overhead]) - goal)
        weight = np.sqrt(np.minimum(1.0, 2 * STEP_NOISE / np.maximum(error, 1e-12)))
    return {
        "op_scale": float(np.clip(scale, *_LIMITS)),
        "step_overhead_ns": float(overhead * unit),
    }
