"""Measured products to a `GemmShape`: its constants, its residual, and how far to trust it.

First the constants are fitted, then what they leave over, on a grid whose smoothness is the one
that predicts shapes left out best. `leave_out` is also what the accuracy report states: whole
shapes are left out, five ways, everything is fitted to the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from claw_plan.profiles.cluster import Device
from claw_plan.profiles.fit.least_squares import Array, fit_parameters
from claw_plan.profiles.gemm_cost import BLEND, TILES, GemmShape, Residual, operand_bytes

FOLDS = 5
NOISE = 0.06
"""Errors of logarithms beyond which a row is thought disturbed."""

SMOOTHNESS = (0.03, 0.1, 1.0, 10.0, 100.0)
"""Weights of the residual's curvature that are tried."""

_STEEPEST = 0.95
"""Of the slope at which the residual would cancel the growth of the constants' part."""

_PRIOR = {
    "ramp": (math.log(150.0), 1.0),
    "partial_wave": (0.4, 1.0),
    "square": (3.0, 1.0),
    "narrow": (1.5, 1.0),
    "small": (0.5, 1.0),
    "overhead_s": (math.log(3e-6), 1.0),
    "memory_share": (math.log(0.9), 0.1),
    "extra_share": (0.0, 1.0),
}
"""Mean and spread, of logarithms, and of logits for shares and efficiencies: the hand-made
constants before this fit (wave .6, tiles .95, .82, .6, depth 110 to 200)."""

_LOGITS = {"partial_wave", "square", "narrow", "small", "extra_share"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmRow:
    """One timed product. `extra_bytes` are those beyond factors and result in their dtype."""

    dims: tuple[int, int, int, int]
    seconds: float
    extra_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """What leaving shapes out shows: each row's error (predicted / measured - 1), in order."""

    errors: tuple[float, ...]

    @property
    def median(self) -> float:
        """Of the absolute errors."""
        return float(np.median(np.abs(self.errors)))

    @property
    def mape(self) -> float:
        """Mean of the absolute errors."""
        return float(np.mean(np.abs(self.errors)))

    @property
    def two_thirds(self) -> float:
        """Two in three absolute errors stay below it."""
        return float(np.quantile(np.abs(self.errors), 2 / 3))


class _Data:
    """The rows of a table as arrays."""

    def __init__(self, rows: Sequence[GemmRow], device: Device, element_bytes: float) -> None:
        self.dims = np.array([row.dims for row in rows], dtype=np.float64)
        self.operands = operand_bytes(element_bytes, *self.dims.T)
        self.extra = np.array([row.extra_bytes for row in rows], dtype=np.float64)
        self.logs = np.log(np.array([row.seconds for row in rows], dtype=np.float64))
        self.rates = 2 * self.dims.prod(axis=1) / np.exp(self.logs)
        self.processors = device.processors
        self.bandwidth = device.memory_bytes_per_s

    def area(self, p: dict[str, float]) -> Array:
        batch, m, n, _ = self.dims.T
        best = np.full(len(m), np.inf)
        wave, processors = p["partial_wave"], self.processors
        for rows, columns, name in TILES:
            tiles = batch * np.ceil(m / rows) * np.ceil(n / columns)
            paid = wave * np.ceil(tiles / processors) * processors
            paid += (1 - wave) * np.maximum(tiles, processors)
            best = np.minimum(best, paid * rows * columns / p.get(name, 1.0))
        return best

    def place(self, p: dict[str, float]) -> tuple[Array, Array]:
        return np.log2(self.area(p) / self.processors), np.log2(self.dims[:, 3])

    def predict(self, p: dict[str, float], residual: Array | float = 0.0) -> Array:
        """Logarithms of the seconds."""
        compute = 2 * self.area(p) * (self.dims[:, 3] + p["ramp"]) / p["flops_per_s"]
        compute = compute * np.exp(residual)
        memory = self.operands / (p["memory_share"] * self.bandwidth)
        main = (compute**BLEND + memory**BLEND) ** (1 / BLEND)
        seconds = p["overhead_s"] + main + p["extra_share"] * self.extra / self.bandwidth
        return np.asarray(np.log(seconds))


def fit_shape(
    rows: Sequence[GemmRow], device: Device, element_bytes: float, *, table: str, source: str
) -> tuple[GemmShape, LeftOut]:
    """The shape of one table, and the errors at shapes left out of it."""
    data = _Data(rows, device, element_bytes)
    everything = np.ones(len(rows), dtype=bool)
    constants = _constants(data, everything)
    found = {weight: _leave_out(data, rows, constants, weight) for weight in SMOOTHNESS}
    smoothness = min(SMOOTHNESS, key=lambda weight: (found[weight].median, weight))
    grid = _residual(data, everything, constants, smoothness)
    x, y = data.place(constants)
    shape = GemmShape(
        table=table,
        **{name: _rounded(value) for name, value in constants.items()},
        residual=grid,
        domain=tuple(round(float(v), 2) for v in (x.min(), x.max(), y.min(), y.max())),  # type: ignore[arg-type]
        spread=_rounded(found[smoothness].two_thirds),
        spread_per_octave=_rounded(_growth(data, smoothness)),
        source=source,
    )
    return shape, found[smoothness]


def fold_of_shapes(rows: Sequence[GemmRow]) -> npt.NDArray[np.int64]:
    """The fold of each row; rows of one shape are in one fold."""
    shapes = sorted({row.dims for row in rows})
    order = np.random.default_rng(0).permutation(len(shapes))
    fold = {shapes[place]: index % FOLDS for index, place in enumerate(order)}
    return np.array([fold[row.dims] for row in rows])


def _leave_out(
    data: _Data, rows: Sequence[GemmRow], start: dict[str, float], smoothness: float
) -> LeftOut:
    folds = fold_of_shapes(rows)
    errors = np.zeros(len(rows))
    for fold in range(FOLDS):
        kept = folds != fold
        predicted = _refitted(data, kept, start, smoothness)
        errors[~kept] = np.exp(predicted - data.logs)[~kept] - 1
    return LeftOut(errors=tuple(errors))


def _refitted(data: _Data, kept: Array, start: dict[str, float], smoothness: float) -> Array:
    """Predictions for all rows by a fit to those kept."""
    constants = _constants(data, kept, start)
    grid = _residual(data, kept, constants, smoothness)
    places = zip(*data.place(constants), strict=True)
    return data.predict(constants, np.array([grid(x, y) for x, y in places]))


def _growth(data: _Data, smoothness: float) -> float:
    """Error per octave beyond the data: the largest quarter predicted from the rest."""
    work = np.log2(data.dims.prod(axis=1))
    kept = work <= np.quantile(work, 0.75)
    if kept.all():
        return 0.0
    error = np.abs(_refitted(data, kept, _constants(data, kept), smoothness) - data.logs)[~kept]
    octaves = (work - work[kept].max())[~kept]
    return float(np.median(error) / max(1.0, np.median(octaves)))


def _constants(
    data: _Data, kept: Array, start: dict[str, float] | None = None
) -> dict[str, float]:
    names = ["flops_per_s", *_PRIOR]
    top = float(np.log(np.quantile(data.rates[kept], 0.9)))
    prior = np.array([top, *(mean for mean, _ in _PRIOR.values())])
    spread = np.array([0.5, *(width for _, width in _PRIOR.values())])

    def named(values: Array) -> dict[str, float]:
        return {
            name: float(1 / (1 + np.exp(-value)) if name in _LOGITS else np.exp(value))
            for name, value in zip(names, values, strict=True)
        }

    def residuals(values: Array) -> Array:
        return np.asarray((data.predict(named(values)) - data.logs)[kept])

    first = prior
    if start is not None:
        first = np.array([_unnamed(name, start[name]) for name in names])
    return named(fit_parameters(residuals, first, prior=prior, spread=spread, noise=NOISE))


def _unnamed(name: str, value: float) -> float:
    value = min(max(value, 1e-6), 1 - 1e-6) if name in _LOGITS else value
    return math.log(value / (1 - value)) if name in _LOGITS else math.log(value)


def _residual(
    data: _Data, kept: Array, constants: dict[str, float], smoothness: float
) -> Residual:
    """What the constants leave over, by ridge regression on the grid's corners."""
    x, y = data.place(constants)
    x0, y0 = math.floor(x.min()), math.floor(y.min())
    shape = (math.ceil(x.max()) - x0 + 1, math.ceil(y.max()) - y0 + 1)
    design = _bilinear(x - x0, y - y0, shape)[kept]
    goal = (data.logs - data.predict(constants))[kept]
    rough = _roughness(shape)
    weight = np.ones(len(goal))
    for _ in range(6):
        normal = design.T @ (design * weight[:, None]) + smoothness * rough
        corners = np.linalg.solve(normal, design.T @ (weight * goal))
        weight = 1 / np.sqrt(1 + ((design @ corners - goal) / NOISE) ** 2)
    return _monotone(corners.reshape(shape), x0, y0, constants["ramp"])


def _bilinear(x: Array, y: Array, shape: tuple[int, int]) -> Array:
    """Weights of the grid's corners at each place."""
    i = np.minimum(x.astype(int), shape[0] - 2) if shape[0] > 1 else np.zeros(len(x), int)
    j = np.minimum(y.astype(int), shape[1] - 2) if shape[1] > 1 else np.zeros(len(y), int)
    u, v = x - i, y - j
    design = np.zeros((len(x), shape[0] * shape[1]))
    rows = np.arange(len(x))
    for di, across in ((0, 1 - u), (1, u)):
        for dj, along in ((0, 1 - v), (1, v)):
            column = np.minimum(i + di, shape[0] - 1) * shape[1] + np.minimum(j + dj, shape[1] - 1)
            np.add.at(design, (rows, column), across * along)
    return design


def _roughness(shape: tuple[int, int]) -> Array:
    """Quadratic form of curvature, a little slope, and less size, over both axes."""

    def along(count: int) -> Array:
        eye = np.eye(count)
        bend, slope = np.diff(eye, n=2, axis=0), np.diff(eye, axis=0)
        return np.asarray(bend.T @ bend + 0.09 * slope.T @ slope + 0.005 * eye)

    first, second = (along(count) for count in shape)
    return np.kron(first, np.eye(shape[1])) + np.kron(np.eye(shape[0]), second)


def _monotone(corners: Array, x0: int, y0: int, ramp: float) -> Residual:
    """Raised where it falls as fast as the constants' part grows, so that time never falls."""
    lowest = _STEEPEST * math.log(2)
    depths = [2.0 ** (y0 + j) for j in range(corners.shape[1])]
    for i in range(corners.shape[0]):
        for j in range(corners.shape[1]):
            if i:
                corners[i, j] = max(corners[i, j], corners[i - 1, j] - lowest)
            if j:
                fall = lowest * depths[j - 1] / (depths[j - 1] + ramp)
                corners[i, j] = max(corners[i, j], corners[i, j - 1] - fall)
    rows = tuple(tuple(round(float(value), 3) + 0.0 for value in row) for row in corners)
    return Residual(x0=x0, y0=y0, rows=rows)


def _rounded(value: float) -> float:
    """Four digits: more than the data know, few enough to be the same on every machine."""
    return float(f"{value:.4g}")
