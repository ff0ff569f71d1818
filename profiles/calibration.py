"""`Calibration`: physics corrected by measurements of the same family of work.

The formulas of `op_cost` and `collective_cost` know how time grows with shape; measurements know
its level. A calibration maps the one to the other: a monotone line through the points (formula,
measured) in log-log, so that a larger piece of work never costs less. Between two points it
interpolates, beyond them it keeps the outermost ratio and says so.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable

from claw_plan.profiles.cost import FITTED, INTERPOLATED


class Calibration:
    """A non-decreasing map from formula times to measured ones, both in ns and above zero."""

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        logs = sorted((math.log(max(x, 1.0)), math.log(max(y, 1.0))) for x, y in points)
        if not logs:
            raise ValueError("a calibration needs at least one point")
        self._xs, self._ys = _non_decreasing(logs)

    def __call__(self, formula_ns: float) -> tuple[float, str]:
        """The corrected time and whether it lies between measurements."""
        x = math.log(max(formula_ns, 1.0))
        xs, ys = self._xs, self._ys
        if x <= xs[0]:
            return math.exp(x - xs[0] + ys[0]), INTERPOLATED if x == xs[0] else FITTED
        if x >= xs[-1]:
            return math.exp(x - xs[-1] + ys[-1]), INTERPOLATED if x == xs[-1] else FITTED
        right = bisect_right(xs, x)
        left = right - 1
        share = (x - xs[left]) / (xs[right] - xs[left])
        return math.exp(ys[left] + share * (ys[right] - ys[left])), INTERPOLATED


def _non_decreasing(points: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Least-squares non-decreasing values at the distinct x.

    Source: pool adjacent violators (Ayer et al., 1955, 'An empirical distribution function for
    sampling with incomplete information'): neighbours that fall are replaced by their mean.
    """
    xs: list[float] = []
    blocks: list[tuple[float, int, int]] = []  # mean, points, distinct x
    for x, y in points:
        if xs and x == xs[-1]:
            mean, count, width = blocks.pop()
            blocks.append(((mean * count + y) / (count + 1), count + 1, width))
        else:
            xs.append(x)
            blocks.append((y, 1, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            mean, count, width = blocks.pop()
            before, before_count, before_width = blocks.pop()
            total = count + before_count
            pooled = (mean * count + before * before_count) / total
            blocks.append((pooled, total, width + before_width))
    ys = [mean for mean, _, width in blocks for _ in range(width)]
    return xs, ys
