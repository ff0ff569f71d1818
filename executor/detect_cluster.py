"""Machines that look at themselves at once, and at the network between them, to one cluster file.

One process a host calls `detect_together`, started by srun or torchrun, or by `detect_hosts`. Each
describes its own machine; then the first ones measure the network, every direction and every
clock is timed, and the first process joins all into one cluster.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from claw_plan.executor.benchmark_group import measure_directions, measure_group
from claw_plan.executor.benchmark_rates import Samples, gigabytes_per_s, link_figures
from claw_plan.executor.clock_offset import ClockOffset, measure_offsets
from claw_plan.executor.ranks import Rank
from claw_plan.executor.rendezvous import DEFAULT_PORT
from claw_plan.profiles.measured_rate import TOLERANCE, difference, differs
from claw_plan.profiles.measurement import Measurement
from claw_plan.profiles.units import format_ns, parse_bytes_per_s

HOST_VARIABLE = "CLAW_PLAN_HOST"
"""The name by which `detect_hosts` calls this host."""

_TIMEOUT = timedelta(minutes=10)

Describe = Callable[[], tuple[Mapping[str, Any], list[Measurement]]]


@dataclass
class Detected:
    """Content of a cluster file, measurements for its profile, and sentences for people."""

    content: dict[str, Any]
    measurements: list[Measurement] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def node_place(rank: Rank, environment: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """This host's number and how many hosts there are; None for a host's further processes."""
    if rank.local_rank != 0:
        return None
    if "SLURM_NODEID" in environment and "RANK" not in environment:
        return int(environment["SLURM_NODEID"]), int(environment.get("SLURM_NNODES", "1"))
    return rank.rank // rank.local_world_size, rank.world_size // rank.local_world_size


def detect_together(place: int, hosts: int, describe: Describe) -> Detected | None:
    """The whole cluster, at the first host; None at the others.

    `describe` tells of this machine alone.
    """
    environment = os.environ
    if "MASTER_ADDR" not in environment:
        environment["MASTER_ADDR"] = environment.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1")
    environment.setdefault("MASTER_PORT", str(DEFAULT_PORT))
    store = f"tcp://{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
    dist.init_process_group(
        "gloo", init_method=store, rank=place, world_size=hosts, timeout=_TIMEOUT
    )
    try:
        content, measurements = describe()
        name = environment.get(HOST_VARIABLE) or platform.node() or f"host {place}"
        told: list[Any] = [None] * hosts
        dist.all_gather_object(told, (name, content["nodes"], measurements))
        offsets = measure_offsets(place, hosts)
        directions = measure_directions(place, hosts)
        pair = dist.new_group([0, 1])
        samples: Samples = {}
        if place < 2:
            samples = measure_group([0, 1], torch.device("cpu"), nodes=2, group=pair)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    if place != 0:
        return None
    return joined(told, offsets, directions, samples)


def joined(
    told: Sequence[tuple[str, Sequence[Mapping[str, Any]], list[Measurement]]],
    offsets: Sequence[ClockOffset],
    directions: Mapping[tuple[int, int], float],
    samples: Samples,
) -> Detected:
    """One cluster of what the hosts told of themselves and measured between them."""
    names = [name for name, _, _ in told]
    found = Detected({"name": "-".join(names[:2]), "nodes": []})
    for name, nodes, measurements in told:
        found.measurements += measurements
        for node in nodes:
            _add(found, name, dict(node))
    nics, notes = _between(names, directions, samples)
    for entry in found.content["nodes"]:
        own = entry.get("nics")
        if own is None or entry["devices"]["type"] == "cpu":
            entry["nics"] = nics
        elif differs(float(nics_rate(nics)), float(nics_rate(own))):
            notes.append(
                difference(
                    "TCP between hosts",
                    nics_rate(nics),
                    nics_rate(own),
                    "gloo; RDMA may be faster",
                )
            )
    found.notes += notes
    for name, offset in zip(names[1:], offsets, strict=False):
        found.notes.append(
            f"clock of {name}: {offset.offset_ns / 1e6:+.3f} ms from {names[0]}'s "
            f"(± {format_ns(offset.error_ns)})"
        )
    return found


def nics_rate(nics: Mapping[str, Any]) -> float:
    """Bytes per second of a `nics:` that gives its bandwidth."""
    return parse_bytes_per_s(nics["bandwidth"]) if "bandwidth" in nics else 0.0


def _shape(node: Mapping[str, Any]) -> tuple[Any, ...]:
    devices = node["devices"]
    intra = node["intra"]
    return (
        devices["type"],
        devices["count"],
        devices.get("cores"),
        intra.get("type"),
        str(intra.get("pairs")),
    )


def _add(found: Detected, name: str, node: dict[str, Any]) -> None:
    """Counts the node with the last one of its shape; of two, the slower one's figures stand."""
    nodes = found.content["nodes"]
    if not nodes or _shape(nodes[-1]) != _shape(node):
        nodes.append(node)
        return
    count = nodes[-1]["count"] + node["count"]
    slower = _speed(node) < _speed(nodes[-1])
    ratio = _speed(node) / _speed(nodes[-1]) if _speed(nodes[-1]) else 1.0
    if abs(ratio - 1) > TOLERANCE:
        found.notes.append(
            f"{name} computes at {ratio:.0%} of the hosts before it: a straggler, or busy now"
        )
    nodes[-1] = (node if slower else nodes[-1]) | {"count": count}


def _speed(node: Mapping[str, Any]) -> float:
    achieved = node["devices"].get("achieved", {})
    return float(str(achieved.get("float32", achieved.get("bfloat16", "0"))).split()[0])


def _between(
    names: Sequence[str], directions: Mapping[tuple[int, int], float], samples: Samples
) -> tuple[dict[str, Any], list[str]]:
    """`nics:` as measured between the first two hosts, no faster than the slowest direction."""
    notes = []
    figures = link_figures(samples, f"gloo between {names[0]} and {names[1]}")
    slowest = min(directions.values())
    fastest = max(directions.values())
    for (source, target), rate in sorted(directions.items()):
        if rate < (1 - TOLERANCE) * fastest:
            notes.append(
                f"{names[source]} to {names[target]} carries {gigabytes_per_s(rate)}, the fastest "
                f"direction {gigabytes_per_s(fastest)}: the slower one binds"
            )
    if slowest < (1 - TOLERANCE) * fastest:
        achieved = {
            op: gigabytes_per_s(min(parse_bytes_per_s(rate), slowest))
            for op, rate in figures["achieved"].items()
        }
        figures |= {"achieved": achieved}
    return {"name": "measured-network", "count": 1} | figures, notes
