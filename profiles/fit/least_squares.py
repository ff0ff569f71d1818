"""Residual functions to the parameters that make them small: a few constants, robustly.

Levenberg-Marquardt with a numeric Jacobian. Residuals are errors of logarithms; those beyond
`noise` count less and less (soft L1). Every parameter has a prior, so that one the data say
nothing about stays where it is. Source: J. More, 'The Levenberg-Marquardt algorithm', 1978.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

_STEP = 1e-5
_ROUNDS = 60


def fit_parameters(
    residuals: Callable[[Array], Array],
    start: Array,
    *,
    prior: Array,
    spread: Array,
    noise: float = 0.06,
    rounds: int = _ROUNDS,
) -> Array:
    """The parameters of least cost.

    Args:
        residuals: Errors, one a row, at given parameters.
        start: Where to begin.
        prior: What the parameters are when nothing is measured.
        spread: How far from the prior they lie, as a rule.
        noise: Errors below it are counted by their squares, above it linearly.
        rounds: When to stop at the latest.
    """

    def cost(at: Array) -> float:
        scaled = residuals(at) / noise
        loss = 2 * np.sum(np.sqrt(1 + scaled**2) - 1)
        return float(loss + np.sum(((at - prior) / spread) ** 2))

    found, lowest, damping = start.copy(), cost(start), 1e-2
    for _ in range(rounds):
        errors = residuals(found)
        weight = 1 / np.sqrt(1 + (errors / noise) ** 2) / noise**2
        slopes = _slopes(residuals, found)
        normal = slopes.T @ (slopes * weight[:, None]) + np.diag(1 / spread**2)
        gradient = slopes.T @ (weight * errors) + (found - prior) / spread**2
        for _ in range(10):
            damped = normal + damping * np.diag(np.diag(normal))
            tried = found - np.linalg.solve(damped, gradient)
            reached = cost(tried)
            if reached < lowest:
                break
            damping *= 4
        else:
            return found
        gained, found, lowest = lowest - reached, tried, reached
        if gained < 1e-9 * lowest:
            return found
        damping /= 3
    return found


def _slopes(residuals: Callable[[Array], Array], at: Array) -> Array:
    columns = []
    for index in range(len(at)):
        step = np.zeros_like(at)
        step[index] = _STEP
        columns.append((residuals(at + step) - residuals(at - step)) / (2 * _STEP))
    return np.stack(columns, axis=1)
