"""Published runs to the constants of devices and trainers that predict them best.

Every run is simulated through the planner's own path. The critical path says what its time
consists of (`step_time`), and each part scales with known powers of the constants, so that as long
as the path stays the same

    predicted = sum over parts of part * product of (constant / its value now) ^ power

Constants are found by Gauss-Newton steps on log errors with a robust loss and priors, for which
this is enough; then all runs are simulated again. A trainer's constants are drawn to those of
the trainer it is like, a device's rates to those of the part it is like, else to what is usual, so
that what the runs do not tell stays where it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from claw_plan.planner.published_run import pose
from claw_plan.planner.validation import predict_step
from claw_plan.profiles import catalogue
from claw_plan.profiles.cluster import Cluster
from claw_plan.profiles.cost_model import ClusterCostModel
from claw_plan.profiles.rates import RATES
from claw_plan.profiles.trainer import CONSTANTS, SHARED, Trainer
from claw_plan.profiles.trainers import DEFAULT
from claw_plan.profiles.training_row import TrainingRow

Array = npt.NDArray[np.float64]

Name = tuple[str, str, str]
"""A constant: ('rate', device, kind), ('trainer', name, constant) or ('shared', '', constant)."""

NOISE = 0.06
"""Log errors beyond it count linearly: two clusters with the same configuration differ so much."""

SPREAD = {"rate": 0.15, "trainer": 0.5, "shared": 0.5}
"""Prior standard deviations of log constants: about where they began, or about what they are drawn
to. Chosen with those below by the errors of groups left out."""

SPREAD_OF_CONSTANT = {"host_ns": 0.2, "tp_scale": 0.35, "dp_scale": 0.4, "overlap_loss": 0.35}
"""The same for trainers' constants that stand in for each other where a run is all of one kind:
a host that is slow, traffic that is exposed."""

RATE_OF_PART = {
    "bfloat16": "half",
    "float16": "half",
    "float32": "float32",
    "float64": "float32",
    "float8": "float8",
    "float4": "float4",
}
"""Which of a device's rates a matrix product of that dtype takes."""

CONSTANT_OF_PART = {
    "memory": ("memory_scale",),
    "attention": ("attention_scale",),
    "tp": ("tp_scale",),
    "cp": ("cp_scale",),
    "ep": ("ep_scale",),
    "dp": ("dp_scale",),
    "overlap": ("overlap_loss",),
    "host": ("host_ns",),
    "zero": ("zero_rank_ns",),
    "other": ("step_ns",),
}

Values = Mapping[Name, float]
"""Constants by name; rates in FLOP/s."""


Powers = tuple[tuple[Name, float], ...]
"""How a part of a step scales: with which constants, to which power."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """One run under some constants: log of its time over the measured one, and its parts.

    `shares` are of the step, by how they scale.
    """

    error: float
    shares: Mapping[Powers, float]


def constants_of(
    trainers: Mapping[str, Trainer], rows: Iterable[TrainingRow]
) -> dict[Name, float]:
    """All constants that the rows can tell something of, at their present values."""
    found: dict[Name, float] = {}
    default = trainers[DEFAULT]
    for key in SHARED:
        found["shared", "", key] = getattr(default, key)
    for key in default.fitted:
        found["trainer", DEFAULT, key] = getattr(default, key)
    for row in rows:
        trainer = trainers.get(row.trainer, default)
        for key in trainer.fitted:
            found["trainer", trainer.name, key] = getattr(trainer, key)
        plain = catalogue.device(row.device_name, with_fitted=False).achieved_flops_per_s
        for rate, dtypes in RATES.items():
            if dtypes[-1] in plain:
                found["rate", row.device_name, rate] = plain[dtypes[-1]]
    return dict(sorted(found.items()))


def trainer_under(values: Values, trainer: Trainer) -> Trainer:
    """The trainer with the constants of `values`; what it has none of comes from the default."""
    own: dict[str, Any] = {
        key: values.get(_holder(trainer, key, values), getattr(trainer, key)) for key in CONSTANTS
    }
    shared: dict[str, Any] = {key: values["shared", "", key] for key in SHARED}
    return replace(trainer, **own, **shared)


def _holder(trainer: Trainer, key: str, values: Values) -> Name:
    """Whose constant a trainer takes: its own, its parent's, or the default's."""
    for name in (trainer.name, trainer.parent):
        if ("trainer", name, key) in values:
            return "trainer", name, key
    return "trainer", DEFAULT, key


class Costs:
    """The cost models of clusters under some constants, kept while those are in force."""

    def __init__(self, values: Values) -> None:
        self.values = values
        self._known: dict[str, tuple[Cluster, ClusterCostModel]] = {}

    def of(self, row: TrainingRow) -> ClusterCostModel:
        """The cost model of the row's cluster."""
        known = self._known.get(row.cluster.name)
        if known is None or known[0] != row.cluster:
            rates = {
                rate: self.values["rate", row.device_name, rate]
                for rate in RATES
                if ("rate", row.device_name, rate) in self.values
            }
            known = (
                row.cluster,
                ClusterCostModel(with_rates(row.cluster, rates), with_launches=False),
            )
            self._known[row.cluster.name] = known
        return known[1]


def simulate_row(row: TrainingRow, trainer: Trainer, costs: Costs) -> Simulated:
    """The row's prediction under the constants, and how it changes with them."""
    assert row.step_time_ns is not None
    values = costs.values
    run = pose(row, trainer_under(values, trainer), lambda cluster: costs.of(row))
    found = predict_step(run)
    shares: dict[Powers, float] = {}
    for part, ns in found.parts_ns.items():
        powers = tuple(_powers_of(part, row.device_name, trainer, values))
        shares[powers] = shares.get(powers, 0.0) + ns / found.ns
    return Simulated(error=math.log(found.ns / row.step_time_ns), shares=shares)


def _powers_of(
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
            yield _holder(trainer, key, values), 1.0


def with_rates(cluster: Cluster, rates: Mapping[str, float]) -> Cluster:
    """The cluster with other sustained rates, by the names of `rates.RATES`."""
    node = cluster.nodes[0]
    by_dtype = {dtype: value for rate, value in rates.items() for dtype in RATES[rate]}
    achieved = {
        dtype: by_dtype.get(dtype, value)
        for dtype, value in node.device.achieved_flops_per_s.items()
    }
    device = replace(node.device, achieved_flops_per_s=achieved)
    return replace(cluster, nodes=(replace(node, device=device),) * len(cluster.nodes))


ROUNDS, STEP = 40, 0.5
"""Of Gauss-Newton: at most so many, and none changes a constant by more than this logarithm."""

SETTLED, PATIENCE = 0.003, 3
"""Rounds end when so many in a row lower the cost by less than this share."""

Simulate = Callable[[Sequence[Values]], Sequence[Simulated]]
"""Simulates all rows: under one set of constants, or each under its own."""


@dataclass(frozen=True, kw_only=True)
class Composed:
    """All runs as sums of parts, about the constants they were simulated under.

    `shares` is [runs, parts], `powers` [parts, constants]; logarithms throughout.
    """

    names: tuple[Name, ...]
    start: Array
    prior: Array
    parents: tuple[int, ...]
    spread: Array
    errors: Array
    shares: Array
    powers: Array
    weights: Array

    def errors_at(self, logs: Array) -> Array:
        """Log errors of all runs under other constants."""
        return self._at(logs)[0]

    def _at(self, logs: Array) -> tuple[Array, Array]:
        """Log errors, and their derivatives by log constants."""
        parts = self.shares * np.exp(self.powers @ (logs - self.start))
        total = parts.sum(axis=1)
        return self.errors + np.log(total), (parts / total[:, None]) @ self.powers

    def solve(self, keep: npt.NDArray[np.bool_] | None = None) -> Array:
        """Log constants of least cost over the rows kept, by reweighted least squares."""
        rows = np.ones(len(self.errors), bool) if keep is None else keep
        at = self.start.copy()
        pull, drawn = self._priors()
        for _ in range(ROUNDS):
            errors, slopes = self._at(at)
            errors, slopes = errors[rows], slopes[rows]
            weight = self.weights[rows] / np.sqrt(1 + (errors / NOISE) ** 2) / NOISE**2
            normal = slopes.T @ (slopes * weight[:, None]) + pull
            goal = slopes.T @ (weight * (slopes @ at - errors)) + drawn
            step = np.clip(np.linalg.solve(normal, goal) - at, -STEP, STEP)
            at = at + step
            if np.abs(step).max() < 1e-5:
                break
        return at

    def _priors(self) -> tuple[Array, Array]:
        """The precision of the priors, and that times their mean.

        A constant lies about its parent's, whatever that is found to be.
        """
        size = len(self.names)
        pull, drawn = np.zeros((size, size)), np.zeros(size)
        for index, parent in enumerate(self.parents):
            precision = 1 / self.spread[index] ** 2
            pull[index, index] += precision
            drawn[index] += precision * self.prior[index]
            if parent >= 0:
                pull[parent, parent] += precision
                pull[index, parent] -= precision
                pull[parent, index] -= precision
                drawn[parent] -= precision * self.prior[index]
        return pull, drawn


def fit(
    rows: Sequence[TrainingRow],
    weights: Sequence[float],
    trainers: Mapping[str, Trainer],
    simulate: Simulate,
    rounds: int = 16,
    start: Values | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> tuple[Values, Composed]:
    """The constants of least cost, and the runs to first order about them."""
    values: Values = constants_of(trainers, rows)
    prior = prior_of(values, trainers)
    values = {**values, **{name: value for name, value in (start or {}).items() if name in values}}
    runs = composed(values, prior, trainers, simulate([values]), weights)
    cost, share, idle = _cost(runs), 1.0, 0
    tell(f"cost {cost:.1f} at the start")
    for number in range(1, rounds + 1):
        # Simulated paths change on the way: a step that does not help is shortened.
        tried = values_at(runs.names, runs.start + share * (runs.solve() - runs.start))
        there = composed(tried, prior, trainers, simulate([tried]), weights)
        reached = _cost(there)
        tell(f"cost {reached:.1f} in round {number}")
        gained = cost - reached
        if gained > 0:
            values, runs, cost = tried, there, reached
        idle = idle + 1 if gained < SETTLED * cost else 0
        if idle == PATIENCE:
            break
        share = min(1.0, 2 * share) if gained > 0 else share / 3
    return values, runs


def _cost(runs: Composed) -> float:
    loss = 2 * (np.sqrt(1 + (runs.errors / NOISE) ** 2) - 1)
    return float(runs.weights @ loss)


def prior_of(values: Values, trainers: Mapping[str, Trainer]) -> dict[Name, float]:
    """The logarithm each constant is drawn to; where it has a parent, beside that one's."""
    found = {}
    for name, value in values.items():
        parent = _parent(name, trainers, values)
        about = value
        if parent is not None:
            # Rates begin at what is usual, so that their ratio is that of peaks and powers.
            about = value / values[parent] if name[0] == "rate" else 1.0
        relative = trainers[name[1]].relative.get(name[2], 1.0) if name[0] == "trainer" else 1.0
        found[name] = math.log(about * relative)
    return found


def values_at(names: Sequence[Name], logs: Array) -> dict[Name, float]:
    """Constants from their logarithms."""
    return {name: math.exp(log) for name, log in zip(names, logs.tolist(), strict=True)}


def composed(
    values: Values,
    prior: Mapping[Name, float],
    trainers: Mapping[str, Trainer],
    found: Sequence[Simulated],
    weights: Sequence[float],
) -> Composed:
    """The simulated runs as sums of parts."""
    names = tuple(values)
    place = {name: index for index, name in enumerate(names)}
    parts = sorted({powers for one in found for powers in one.shares})
    column = {powers: index for index, powers in enumerate(parts)}
    shares = np.zeros((len(found), len(parts)))
    for row, one in enumerate(found):
        for powers, share in one.shares.items():
            shares[row, column[powers]] = share
    scales = np.zeros((len(parts), len(names)))
    for index, powers in enumerate(parts):
        for name, power in powers:
            if name in place:
                scales[index, place[name]] += power
    return Composed(
        names=names,
        start=np.array([math.log(max(value, 1e-12)) for value in values.values()]),
        prior=np.array([prior[name] for name in names]),
        parents=tuple(
            place[parent] if (parent := _parent(name, trainers, values)) else -1 for name in names
        ),
        spread=np.array([_spread_of(name) for name in names]),
        errors=np.array([one.error for one in found]),
        shares=shares,
        powers=scales,
        weights=np.array(weights, dtype=np.float64),
    )


def _parent(name: Name, trainers: Mapping[str, Trainer], values: Values) -> Name | None:
    """The constant that another is drawn to: of the trainer or the part that it is like."""
    group, owner, key = name
    if group == "rate":
        like = catalogue.like_of(owner)
        while like and ("rate", like, key) not in values:
            like = catalogue.like_of(like)
        return ("rate", like, key) if like else None
    if group != "trainer" or owner == DEFAULT:
        return None
    found = _holder(trainers[trainers[owner].parent], key, values)
    return found if found in values else None


def _spread_of(name: Name) -> float:
    group, _, key = name
    return SPREAD_OF_CONSTANT.get(key, SPREAD[group]) if group == "trainer" else SPREAD[group]
