"""A recording becomes Measurements, so that a trace is enough to plan from.

Kernels count under the work that operator name and shapes tell, collectives by their transfer: on
the rank that waited least, and only where all ranks of the group are recorded, for else waiting
would be taken for transfer.
"""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path

from claw_plan.executor.replay import Replay
from claw_plan.executor.replay_collectives import Matched
from claw_plan.profiles.cluster import Cluster
from claw_plan.profiles.measurement import Measurement
from claw_plan.profiles.profile import link_device
from claw_plan.profiles.work import COLLECTIVE_OPS, CollectiveWork, OpWork

MOST_SAMPLES = 256
"""Of one piece of work, over all ranks."""


def measurements_of(found: Replay, cluster: Cluster) -> list[Measurement]:
    """What the recording measured, for the devices and links of the cluster it was made on."""
    node = cluster.nodes[0]
    samples: dict[OpWork | CollectiveWork, list[int]] = defaultdict(list)
    for trace in found.traces:
        for timed in trace.works:
            samples[timed.work] += timed.samples_ns
    for m in found.matched:
        collective = _work(found, m, cluster)
        if collective is not None:
            samples[collective].append(m.transfer_ns)
    hosts = _hosts(found, cluster)
    per_host = -(-(found.world_size or len(found.traces)) // hosts)
    measured = []
    for work, times in samples.items():
        device = node.device.name
        if isinstance(work, CollectiveWork):
            device = link_device(device, (node.intra if work.nodes == 1 else node.nic).name)
        measured.append(
            Measurement(
                device=device,
                work=work,
                samples_ns=tuple(times[:MOST_SAMPLES]),
                ranks_per_host=per_host,
                provenance=_provenance(found),
            )
        )
    return measured


def _work(found: Replay, m: Matched, cluster: Cluster) -> CollectiveWork | None:
    """The collective's key; None where size, group or times are not known."""
    timed = {trace.rank for trace in found.traces if trace.has_timing}
    if not (m.is_whole and m.can_tell and m.bytes and m.group_size and m.op in COLLECTIVE_OPS):
        return None
    if not timed.issuperset(m.by_rank) or not m.transfer_ns:
        return None
    names = {trace.rank: trace.host_name for trace in found.traces}
    hosts = {names[rank] for rank in m.by_rank}
    nodes = len(hosts) if "" not in hosts else -(-m.group_size // cluster.nodes[0].device_count)
    return CollectiveWork(
        op=m.op,
        bytes=m.bytes,
        group_size=m.group_size,
        nodes=max(1, min(nodes, m.group_size)),
        backend=next(iter(m.by_rank.values())).backend,
    )


def _hosts(found: Replay, cluster: Cluster) -> int:
    names = {trace.host_name for trace in found.traces}
    if "" not in names:
        return len(names)
    return -(-(found.world_size or len(found.traces)) // cluster.nodes[0].device_count)


def _provenance(found: Replay) -> dict[str, str]:
    return {
        "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": "claw-plan replay",
        "trace": Path(found.traces[0].source.split(":")[0]).name,
    }
