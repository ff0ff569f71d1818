"""The hardware a recording was made on, as far as it tells, and what changes on another.

A folder of `claw-plan run` holds its cluster. A trace tells the name of its GPU, which the
catalogue of devices knows, and mostly not the links; then the usual ones of that GPU stand in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from claw_plan.executor.replay import Replay
from claw_plan.executor.resimulate_transfer import Change
from claw_plan.executor.run_files import PLAN
from claw_plan.planner.plan import load_plan
from claw_plan.profiles.cluster import Cluster, Device
from claw_plan.profiles.cluster_file import cluster_from_mapping, load_cluster
from claw_plan.profiles.cost_model import ClusterCostModel
from claw_plan.profiles.errors import InputError
from claw_plan.profiles.hardware_text import device_of, hardware_of
from claw_plan.profiles.rates import sustained_flops_per_s

BY_FLOPS = ("gemm", "attention", "conv", "forward", "backward", "recompute")
BY_BYTES = ("memory", "optimizer", "copy")
USUAL_NODE = 8
"""Accelerators of a host where a trace does not tell: as HGX and MI300X boards are built."""


def recorded_cluster(found: Replay, paths: Sequence[Path]) -> Cluster | None:
    """The cluster of the recording; None where nothing tells it."""
    for path in paths:
        if path.is_dir() and (path / PLAN).is_file():
            return cluster_from_mapping(load_plan(path / PLAN).cluster, str(path / PLAN))
    trace = found.traces[0]
    count = found.world_size or len(found.traces)
    if not trace.is_gpu:
        return load_cluster("cpu") if len(trace.activities) and not trace.device else None
    try:
        return hardware_of(trace.device, count, min(count, USUAL_NODE)).cluster
    except InputError:
        return None


def change_to(
    found: Replay,
    recorded: Cluster | None,
    cluster: Cluster | None,
    factors: Mapping[str, float],
    ranks: int | None,
) -> tuple[Change, tuple[str, ...]]:
    """The change, and sentences about what stands in for what is not known.

    Raises InputError when kernels cannot be brought to the other cluster's devices, because those
    of the recording are not known.
    """
    if ranks is not None and found.world_size is None:
        raise InputError("--ranks needs recordings that tell how many ranks there were")
    plain = Change(
        link=factors.get("link", 1.0),
        compute=factors.get("compute", 1.0),
        host=factors.get("host", 1.0),
        ranks=ranks,
    )
    if cluster is None:
        return plain, ()
    if cluster.num_devices < (ranks or found.world_size or 1):
        raise InputError(
            f"{cluster.name} has {cluster.num_devices} devices, but the run has "
            f"{ranks or found.world_size} ranks; name a larger --cluster, or fewer --ranks"
        )
    known = _device(found, recorded)
    said = ["computation is scaled by the devices' rates, collectives by the cost model's times"]
    if recorded is None:
        said.append("links of the recording are not known: transfers are the cost model's own")
    target = cluster.nodes[0].device
    return (
        replace(
            plain,
            compute_by_kind=_ratios(known, target),
            recorded_on=ClusterCostModel(recorded) if recorded is not None else None,
            moved_to=ClusterCostModel(cluster),
        ),
        tuple(said),
    )


def _device(found: Replay, recorded: Cluster | None) -> Device:
    if recorded is not None:
        return recorded.nodes[0].device
    name = found.traces[0].device
    if name:
        device_of(name)  # says that the catalogue does not hold it
    raise InputError(
        f"{found.traces[0].source} does not tell its device, so --cluster cannot bring its "
        "computation to another; use --scale compute=2x link=2x instead"
    )


def _ratios(here: Device, there: Device) -> dict[str, float]:
    """How many times faster each class of computation is on the other device."""
    half = "float32" if here.kind == "cpu" else "bfloat16"
    flops = sustained_flops_per_s(there, half) / sustained_flops_per_s(here, half)
    by_bytes = there.memory_bytes_per_s / here.memory_bytes_per_s
    ratios = {**dict.fromkeys(BY_FLOPS, flops), **dict.fromkeys(BY_BYTES, by_bytes)}
    return {kind: ratio for kind, ratio in ratios.items() if math.isfinite(ratio) and ratio > 0}
