"""Measured bandwidths into an entry of `nodes:`: they override nominal ones, and say so.

Topology alone is no proof: links that trained may run ten times slower while the fabric manager
is not ready, and PCIe peers may be slower than host memory. What was measured wins.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from claw_plan.profiles import catalogue
from claw_plan.profiles.cluster_schema import IntraSpec, NicsSpec
from claw_plan.profiles.measured_rate import difference, differs
from claw_plan.profiles.topology.reading import Rate
from claw_plan.profiles.work import COLLECTIVE_OPS

_BUS_SHARE = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
"""Of n ranks each sends (n - 1) / n of the buffer so often (nccl-tests, doc/PERFORMANCE.md); of
other operations both bandwidths are the same."""


def apply(entry: dict[str, Any], rates: Sequence[Rate]) -> list[str]:
    """Writes the plateau of each collective into `entry`; returns warnings.

    Rates within a node go to `intra`, rates between nodes to `nics`, divided by their number.
    Bus bandwidths count; of an algorithm bandwidth the number of ranks tells the bus bandwidth.
    """
    gpus, warnings = entry["devices"]["count"], []
    usable = [bus for rate in rates if (bus := _as_bus(rate)) is not None]
    inside = [rate for rate in usable if _is_inside(rate, gpus)]
    between = [rate for rate in usable if (rate.nodes or 1) > 1]
    inside = inside if gpus > 1 and "intra" in entry else []
    between = between if "nics" in entry else []
    if inside:
        warnings += _override(entry, "intra", inside, 1)
    if between:
        warnings += _override(entry, "nics", between, entry["nics"].get("count", 1))
    if rates and not inside and not between:
        first = rates[0]
        warnings.append(
            f"measured {first.op}, {first.bytes_per_s / 1e9:.4g} GB/s ({first.where}), is not "
            f"used: nothing tells whether it is within a node of {gpus} GPUs or between nodes"
        )
    return warnings


def _as_bus(rate: Rate) -> Rate | None:
    """The rate as bus bandwidth; None where the number of ranks would be needed."""
    if rate.op not in COLLECTIVE_OPS:
        return None
    if rate.kind == "bus" or rate.op not in _BUS_SHARE:
        return rate
    if rate.ranks is None or rate.ranks < 2:
        return None
    factor = _BUS_SHARE[rate.op] * (rate.ranks - 1) / rate.ranks
    return dataclasses.replace(rate, kind="bus", bytes_per_s=factor * rate.bytes_per_s)


def _is_inside(rate: Rate, gpus: int) -> bool:
    if rate.nodes is not None:
        return rate.nodes == 1
    return rate.kind == "bus" and rate.ranks is not None and rate.ranks <= gpus


def _override(entry: dict[str, Any], part: str, rates: Sequence[Rate], ports: int) -> list[str]:
    spec = entry[part]
    target = spec.get("default", spec)
    best: dict[str, Rate] = {}
    for rate in rates:
        if rate.op not in best or rate.bytes_per_s > best[rate.op].bytes_per_s:
            best[rate.op] = rate
    figures = {key: value for key, value in target.items() if key not in ("pairs", "default")}
    model = NicsSpec if part == "nics" else IntraSpec
    link = catalogue.link(target.get("type"), model.model_validate(figures))
    target["achieved"] = {
        op: f"{rate.bytes_per_s / ports / 1e9:.4g} GB/s" for op, rate in sorted(best.items())
    }
    fastest = max(rate.bytes_per_s for rate in best.values()) / ports
    if fastest > link.bytes_per_s:  # no link is slower than what went over it
        target["bandwidth"] = f"{fastest / 1e9:.4g} GB/s"
    target["achieved_source"] = "measured: " + ", ".join(
        f"{op} {rate.where}" for op, rate in sorted(best.items())
    )
    return [
        difference(
            f"{part} {link.name}, {op}", rate.bytes_per_s / ports, link.bytes_per_s, rate.where
        )
        for op, rate in sorted(best.items())
        if differs(rate.bytes_per_s / ports, link.bytes_per_s)
    ]
