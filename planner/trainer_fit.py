"""Published runs to the constants of devices and trainers that predict them best.

Every run is simulated through the planner's own path. The critical path says what its time
consists of (`step_time`), and so how it would change with each constant, to first order:

    log(predicted) ~ log(simulated) + sum over constants of slope * change of log(constant)

Constants are found by Levenberg-Marquardt on log errors with a robust loss and priors
(`profiles.fit.least_squares` says the same of data that need no simulation); each round simulates
all runs again. A trainer's constants are drawn to the default's, a device's rate to the same share
of its peak that others sustain, so that what the runs do not tell stays where it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from claw_plan.planner.published_run import pose
from claw_plan.planner.validation import predict_step
from claw_plan.profiles.cluster import Cluster, Device
from claw_plan.profiles.cost_model import ClusterCostModel
from claw_plan.profiles.trainer import CONSTANTS, SHARED, Trainer
from claw_plan.profiles.trainers import DEFAULT
from claw_plan.profiles.training_row import TrainingRow

Array = npt.NDArray[np.float64]

Name = tuple[str, str, str]
"""A constant: ('rate', device, kind), ('trainer', name, constant) or ('shared', '', constant)."""

NOISE = 0.06
"""Log errors beyond it count linearly: two clusters with the same configuration differ so much."""

SPREAD = {"rate": 0.15, "default": 0.5, "trainer": 0.5, "shared": 0.5}
"""Prior standard deviations of log constants: a device's rate about the share that others sustain,
the default's constants about where they began, a trainer's about the default's."""

RATE_OF_PART = {
    "bfloat16": "half",
    "float16": "half",
    "float32": "float32",
    "float64": "float32",
    "float8": "float8",
    "float4": "float4",
}
"""Which of a device's rates a matrix product of that dtype takes."""

DTYPES_OF_RATE = {
    "half": ("bfloat16", "float16"),
    "float32": ("float32",),
    "float8": ("float8",),
    "float4": ("float4",),
    "attention": ("attention",),
}

CONSTANT_OF_PART = {
    "memory": ("memory_scale",),
    "attention": ("attention_scale",),
    "tp": ("tp_scale",),
    "cp": ("tp_scale", "cp_scale"),
    "ep": ("tp_scale", "ep_scale"),
    "dp": ("dp_scale",),
    "overlap": ("overlap_loss",),
    "host": ("host_ns",),
    "zero": ("zero_rank_ns",),
    "other": ("step_ns",),
}

Values = Mapping[Name, float]
"""Constants by name; rates as factors on the catalogue's."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """One run under some constants: log of its time over the measured one, and slopes."""

    error: float
    slopes: Mapping[Name, float]


def constants_of(trainers: Mapping[str, Trainer], rows: Iterable[TrainingRow]) -> dict[Name, float]:
    """All constants that the rows can tell something of, at their present values."""
    found: dict[Name, float] = {}
    default = trainers[DEFAULT]
    for key in SHARED:
        found["shared", "", key] = getattr(default, key)
    for key in CONSTANTS:
        found["trainer", DEFAULT, key] = getattr(default, key)
    for row in rows:
        trainer = trainers.get(row.trainer, default)
        for key in trainer.fitted:
            found["trainer", trainer.name, key] = getattr(trainer, key)
        for rate in DTYPES_OF_RATE:
            found["rate", row.device_name, rate] = 1.0
    return dict(sorted(found.items()))


def trainer_under(values: Values, trainer: Trainer) -> Trainer:
    """The trainer with the constants of `values`; what it has none of comes from the default."""
    own = {
        key: values.get(("trainer", trainer.name, key), values["trainer", DEFAULT, key])
        for key in CONSTANTS
    }
    shared = {key: values["shared", "", key] for key in SHARED}
    return replace(trainer, **own, **shared)


class Costs:
    """The cost models of clusters under some constants, kept while those are in force."""

    def __init__(self, values: Values) -> None:
        self.values = values
        self._known: dict[str, tuple[Cluster, ClusterCostModel]] = {}

    def of(self, row: TrainingRow) -> ClusterCostModel:
        """The cost model of the row's cluster."""
        known = self._known.get(row.cluster.name)
        if known is None or known[0] != row.cluster:
            factors = {
                rate: self.values.get(("rate", row.device_name, rate), 1.0)
                for rate in DTYPES_OF_RATE
            }
            known = row.cluster, ClusterCostModel(with_rates(row.cluster, factors))
            self._known[row.cluster.name] = known
        return known[1]


def simulate_row(row: TrainingRow, trainer: Trainer, costs: Costs) -> Simulated:
    """The row's prediction under the constants, and how it changes with them."""
    assert row.step_time_ns is not None
    values = costs.values
    run = pose(row, trainer_under(values, trainer), lambda cluster: costs.of(row))
    found = predict_step(run)
    slopes: dict[Name, float] = {}
    for part, ns in found.parts_ns.items():
        for name, sign in _names_of(part, row.device_name, trainer, values):
            slopes[name] = slopes.get(name, 0.0) + sign * ns / found.ns
    return Simulated(error=math.log(found.ns / row.step_time_ns), slopes=slopes)


def _names_of(
    part: str, device: str, trainer: Trainer, values: Values
) -> Iterable[tuple[Name, float]]:
    kind, _, dtype = part.partition(":")
    if kind in ("gemm", "grouped"):
        yield ("rate", device, RATE_OF_PART[dtype]), -1.0
        if kind == "grouped":
            yield ("shared", "", "grouped_scale"), 1.0
    if kind == "attention":
        yield ("rate", device, "attention"), -1.0
    for key in CONSTANT_OF_PART.get(kind, ()):
        if key in SHARED:
            yield ("shared", "", key), 1.0
        else:
            own: Name = ("trainer", trainer.name, key)
            yield (own if own in values else ("trainer", DEFAULT, key)), 1.0


def with_rates(cluster: Cluster, factors: Mapping[str, float]) -> Cluster:
    """The cluster with the sustained rates of its devices multiplied."""
    nodes = tuple(
        replace(node, device=_faster(node.device, factors)) for node in cluster.nodes[:1]
    ) * len(cluster.nodes)
    return replace(cluster, nodes=nodes)


def _faster(device: Device, factors: Mapping[str, float]) -> Device:
    by_dtype = {
        dtype: factor for rate, factor in factors.items() for dtype in DTYPES_OF_RATE[rate]
    }
    rates = {
        dtype: rate * by_dtype.get(dtype, 1.0)
        for dtype, rate in device.achieved_flops_per_s.items()
    }
    return replace(device, achieved_flops_per_s=rates)


SimulateAll = Callable[[Sequence[int], Values], Sequence[Simulated]]
"""Simulates the rows of these indices under the constants."""


@dataclass(frozen=True, kw_only=True)
class Linear:
    """All runs to first order about some constants: what a fit works on."""

    names: tuple[Name, ...]
    start: Array
    prior: Array
    spread: Array
    errors: Array
    slopes: Array
    weights: Array

    def solve(self, keep: npt.NDArray[np.bool_] | None = None) -> Array:
        """Log constants of least cost over the rows kept, by reweighted least squares."""
        rows = np.ones(len(self.errors), bool) if keep is None else keep
        slopes, errors, weights = self.slopes[rows], self.errors[rows], self.weights[rows]
        at = self.start.copy()
        pull, drawn = self._priors()
        for _ in range(30):
            left = errors + slopes @ (at - self.start)
            weight = weights / np.sqrt(1 + (left / NOISE) ** 2) / NOISE**2
            normal = slopes.T @ (slopes * weight[:, None]) + pull
            goal = slopes.T @ (weight * (slopes @ self.start - errors)) + drawn
            found = np.linalg.solve(normal, goal)
            if np.abs(found - at).max() < 1e-6:
                return found
            at = found
        return at

    def _priors(self) -> tuple[Array, Array]:
        """The precision of the priors, and that times their mean.

        A trainer's constant lies about the default's, whatever that is found to be.
        """
        size = len(self.names)
        pull, drawn = np.zeros((size, size)), np.zeros(size)
        place = {name: index for index, name in enumerate(self.names)}
        for index, (group, owner, key) in enumerate(self.names):
            precision = 1 / self.spread[index] ** 2
            pull[index, index] += precision
            if group == "trainer" and owner != DEFAULT:
                other = place["trainer", DEFAULT, key]
                pull[other, other] += precision
                pull[index, other] -= precision
                pull[other, index] -= precision
            else:
                drawn[index] += precision * self.prior[index]
        return pull, drawn


def fit(
    rows: Sequence[TrainingRow],
    weights: Sequence[float],
    trainers: Mapping[str, Trainer],
    simulate_all: SimulateAll,
    rounds: int = 5,
    tell: Callable[[str], None] = lambda text: None,
) -> tuple[Values, Linear]:
    """The constants of least cost, and the runs to first order about them."""
    values: Values = constants_of(trainers, rows)
    prior = _prior_of(values)
    best: tuple[float, Values, Linear] | None = None
    for number in range(rounds):
        found = simulate_all(range(len(rows)), values)
        linear = linearised(values, prior, found, weights)
        cost = _cost(linear)
        tell(f"round {number + 1}: cost {cost:.1f}")
        if best is not None and cost > best[0] * 0.999:
            values = best[1] if cost > best[0] else values
            break
        best = (cost, values, linear)
        solved = linear.solve()
        change = np.clip(solved - linear.start, -1.0, 1.0)
        values = values_at(linear.names, linear.start + change)
    assert best is not None
    return best[1], best[2]


def _cost(linear: Linear) -> float:
    loss = 2 * (np.sqrt(1 + (linear.errors / NOISE) ** 2) - 1)
    return float(linear.weights @ loss)


def _prior_of(values: Values) -> dict[Name, float]:
    """Where each constant is drawn: where it began; a trainer's is measured from the default's."""
    return {
        name: 0.0 if name[0] == "trainer" and name[1] != DEFAULT else math.log(value)
        for name, value in values.items()
    }


def values_at(names: Sequence[Name], logs: Array) -> dict[Name, float]:
    """Constants from their logarithms."""
    return {name: math.exp(log) for name, log in zip(names, logs.tolist(), strict=True)}


def linearised(
    values: Values,
    prior: Mapping[Name, float],
    found: Sequence[Simulated],
    weights: Sequence[float],
) -> Linear:
    """The simulated runs as a linear model."""
    names = tuple(values)
    place = {name: index for index, name in enumerate(names)}
    slopes = np.zeros((len(found), len(names)))
    for row, one in enumerate(found):
        for name, slope in one.slopes.items():
            if name in place:
                slopes[row, place[name]] = slope
    return Linear(
        names=names,
        start=np.array([math.log(max(value, 1e-12)) for value in values.values()]),
        prior=np.array([prior[name] for name in names]),
        spread=np.array([SPREAD[_spread_of(name)] for name in names]),
        errors=np.array([one.error for one in found]),
        slopes=slopes,
        weights=np.array(weights, dtype=np.float64),
    )


def _spread_of(name: Name) -> str:
    group, owner, _ = name
    return "default" if group == "trainer" and owner == DEFAULT else group
