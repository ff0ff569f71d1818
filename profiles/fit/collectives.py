"""collectives.yaml to `tables/collectives.yaml`: constants of libraries and of links.

All rows that can be expressed are fitted together, by their relative errors. A group (one source,
GPU and collective) left out is then predicted by the constants of the others: these errors are
written beside the constants, and are the spread that `CollectiveCost` states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from claw_plan.profiles.collective_constants import TABLE
from claw_plan.profiles.fit.collective_priors import FILLS, Prior, prior_of
from claw_plan.profiles.fit.collective_terms import CollectiveTiming, Terms, terms_of, times_ns
from claw_plan.profiles.fit.least_squares import fit_parameters
from claw_plan.profiles.fit.registry import DataFile, Fitter
from claw_plan.profiles.nccl_cost import PROTOCOLS, SMALL_BYTES
from claw_plan.profiles.published_collectives import is_collectives, read_collectives
from claw_plan.profiles.published_rows import CollectiveRow

COMMAND = "python -m claw_plan.profiles.fit"

NOISE = 0.05
"""Errors of long messages below it are noise; of short ones (latency) thrice as much."""

_SMALL_WEIGHT = 1 / 3
_ROUNDS, _ROUNDS_NEAR = 40, 8
_TWO_THIRDS = 66.7

Array = npt.NDArray[np.float64]


class Model:
    """The rows' times as a function of a vector: deviations of constants, then their means."""

    def __init__(self, timings: Sequence[CollectiveTiming]) -> None:
        self.terms: Terms = terms_of(timings)
        self.priors = [prior_of(name) for name in self.terms.names if name != "one"]
        self.names = [name for name in self.terms.names if name != "one"]
        by_mean = {prior.mean: prior for prior in self.priors}
        self.means = sorted(by_mean)
        self._mean_of = np.array([self.means.index(prior.mean) for prior in self.priors])
        self._is_share = np.array([prior.is_share for prior in self.priors])
        self._place = np.array([self.terms.names.index(name) for name in self.names])
        centres = [_start(by_mean[mean]) for mean in self.means]
        self.prior: Array = np.array([0.0] * len(self.names) + centres)
        deviations = [prior.deviation for prior in self.priors]
        self.spread: Array = np.array(deviations + [by_mean[mean].spread for mean in self.means])

    def constants(self, at: Array) -> Array:
        """The constants, in the order of `terms.names`."""
        moved = at[: len(self.names)] + at[len(self.names) :][self._mean_of]
        found = np.ones(len(self.terms.names))
        found[self._place] = _value(moved, self._is_share)
        return found

    def mean(self, name: str, at: Array) -> float:
        """A constant that no row uses: what its kind shows, or else its prior."""
        prior = prior_of(name)
        if prior.mean not in self.means:
            return prior.value
        centre = at[len(self.names) + self.means.index(prior.mean)]
        return float(_value(np.array([centre]), np.array([prior.is_share]))[0])

    def times_ns(self, at: Array) -> Array:
        """Predictions of all rows."""
        return times_ns(self.terms, self.constants(at))


def _start(prior: Prior) -> float:
    odds = prior.value / (1 - prior.value) if prior.is_share else prior.value
    return float(np.log(odds))


def _value(moved: Array, is_share: npt.NDArray[np.bool_]) -> Array:
    grown = np.exp(moved)
    return np.where(is_share, grown / (1 + grown), grown)


def timing_of(row: CollectiveRow) -> CollectiveTiming:
    """A published row as the fit wants it."""
    node = row.cluster.nodes[0]
    return CollectiveTiming(
        node=node,
        network=row.cluster.network,
        work=row.work,
        library="rccl" if node.device.kind == "rocm" else "nccl",
        measured_ns=row.measured_ns / row.time_share,
        group=f"{row.source}|{row.device_name}|{row.work.op}",
    )


def fit(
    model: Model,
    timings: Sequence[CollectiveTiming],
    rows: npt.NDArray[np.bool_],
    near: Array | None = None,
) -> Array:
    """The vector that fits the chosen rows; `near` is one that fits most of them."""
    measured = np.array([timing.measured_ns for timing in timings])
    small = np.array([timing.work.bytes < SMALL_BYTES for timing in timings])
    weight = np.where(small, _SMALL_WEIGHT, 1.0)

    def residuals(at: Array) -> Array:
        errors: Array = ((model.times_ns(at) / measured - 1) * weight)[rows]
        return errors

    return fit_parameters(
        residuals,
        model.prior if near is None else near,
        prior=model.prior,
        spread=model.spread,
        noise=NOISE,
        rounds=_ROUNDS if near is None else _ROUNDS_NEAR,
    )


def left_out_errors(
    model: Model, timings: Sequence[CollectiveTiming], near: Array | None = None
) -> Array:
    """Relative errors, each group predicted by the constants of all others."""
    groups = np.array([timing.group for timing in timings])
    measured = np.array([timing.measured_ns for timing in timings])
    predicted = np.zeros(len(timings))
    for group in sorted(set(groups)):
        out = groups == group
        predicted[out] = model.times_ns(fit(model, timings, ~out, near))[out]
    errors: Array = predicted / measured - 1
    return errors


def fit_collectives(files: Sequence[DataFile]) -> dict[str, str]:
    """The table's text, made from all rows of the files together."""
    rows = [row for file in files for row in read_collectives(file.path, file.data).collectives]
    timings = [timing_of(row) for row in rows]
    model = Model(timings)
    found = fit(model, timings, np.ones(len(timings), dtype=bool))
    errors = left_out_errors(model, timings, found)
    content = {
        "made_by": COMMAND,
        "from": [file.provenance for file in files],
        "rows": len(rows),
        "left_out": _summaries(timings, errors),
        "libraries": _libraries(model, found, timings, errors),
        "links": _links(model, found),
    }
    return {TABLE.name: yaml.safe_dump(content, sort_keys=False, width=99)}


def _summaries(timings: Sequence[CollectiveTiming], errors: Array) -> dict[str, Any]:
    small = np.array([timing.work.bytes < SMALL_BYTES for timing in timings])
    families = np.array([f"{t.work.op} {t.node.device.name}" for t in timings])
    by_family = {
        str(name): _summaries_of(errors[families == name], small[families == name])
        for name in sorted(set(families))
    }
    return {**_summaries_of(errors, small), "families": by_family}


def _summaries_of(errors: Array, small: npt.NDArray[np.bool_]) -> dict[str, Any]:
    parts = {"from_1_mib": errors[~small], "below_1_mib": errors[small]}
    return {name: _summary(part) for name, part in parts.items() if len(part)}


def _summary(errors: Array) -> dict[str, float]:
    """In percent."""
    absolute = 100 * np.abs(errors)
    return {
        "rows": len(errors),
        "mape": round(float(np.mean(absolute)), 1),
        "median": round(float(np.median(absolute)), 1),
        "p90": round(float(np.percentile(absolute, 90)), 1),
        "bias": round(100 * float(np.mean(errors)), 1),
    }


def _libraries(
    model: Model, found: Array, timings: Sequence[CollectiveTiming], errors: Array
) -> dict[str, Any]:
    return {
        name: _library(name, model, found, _spreads(name, timings, errors))
        for name in sorted({timing.library for timing in timings})
    }


def _spreads(
    library: str, timings: Sequence[CollectiveTiming], errors: Array
) -> Mapping[str, float]:
    own = np.array([timing.library == library for timing in timings])
    small = np.array([timing.work.bytes < SMALL_BYTES for timing in timings])
    parts = {"spread_small": own & small, "spread_large": own & ~small}
    return {
        name: round(float(np.percentile(np.abs(errors[part]), _TWO_THIRDS)), 3)
        for name, part in parts.items()
    }


def _library(
    name: str, model: Model, found: Array, spreads: Mapping[str, float]
) -> dict[str, Any]:
    constants = dict(zip(model.terms.names, model.constants(found), strict=True))

    def own(rest: str) -> float:
        key = f"{name} {rest}"
        return _rounded(constants.get(key, model.mean(key, found)))

    shares = ("hop", "network_hop", "rate", "network_rate")
    protocols: dict[str, dict[str, float]] = {
        protocol: {share: own(f"{protocol} {share}") for share in shares}
        for protocol in PROTOCOLS
        if protocol != "simple"
    }
    usual = "infinity-fabric" if name == "rccl" else "nvswitch"
    return {
        "launch_ns": _rounded(model.mean(f"launch {usual}", found)),
        "piece_ns": own("piece") if name == "rccl" else 0.0,
        "drain": own("drain"),
        "exchange_ns": own("exchange"),
        "fill": {fill: own(f"fill {fill}") for fill in FILLS},
        "protocols": protocols | {"simple": {}, "nvls": {"hop": own("nvls hop")}},
        **spreads,
    }


def _links(model: Model, found: Array) -> dict[str, Any]:
    links: dict[str, dict[str, Any]] = {}
    for name, value in zip(model.terms.names, model.constants(found), strict=True):
        what, _, rest = name.partition(" ")
        if what == "hop":
            links.setdefault(rest, {})["hop_ns"] = round(float(value))
        elif what == "launch":
            links.setdefault(rest, {})["launch_ns"] = round(float(value))
        elif what == "rate":
            family, _, op = rest.partition(" ")
            links.setdefault(family, {}).setdefault("share", {})[op] = _rounded(value)
    return {name: _whole(name, links[name], model, found) for name in sorted(links)}


def _whole(family: str, link: dict[str, Any], model: Model, found: Array) -> dict[str, Any]:
    """The link with what its kind shows where its own rows do not."""
    link.setdefault("hop_ns", round(model.mean(f"hop {family}", found)))
    shares = link.setdefault("share", {})
    for what in ("other", "all_reduce", "all_to_all"):
        shares.setdefault(what, _rounded(model.mean(f"rate {family} {what}", found)))
    link["share"] = {what: shares[what] for what in sorted(shares)}
    return {key: link[key] for key in sorted(link)}


def _rounded(value: float) -> float:
    """Four digits: the rest is noise, and differs between machines."""
    return float(f"{float(value):.4g}")


FITTER = Fitter(
    kind="collectives",
    recognises=lambda file: is_collectives(file.data),
    fit=fit_collectives,
    folder=Path(TABLE).parent,
)
