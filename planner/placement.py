"""Where the ranks of a candidate's groups lie: on how many nodes each collective runs.

Ranks are laid over the devices in mesh order, the last axis fastest, so with the default order a
tensor-parallel group is a run of neighbours and pipeline stages are far apart. Nothing else than
what is asked here depends on the order: `outcome` puts it together, and orders of one outcome
make the same step.
"""

from __future__ import annotations

from functools import cache

from claw_plan.planner.candidate import MESH_ORDER, Candidate

EXPERT_SHARD, EXPERT_REPLICATE = "expert_shard", "expert_replicate"
"""The axes of ranks that hold the same experts: in shards, and in whole."""


def stride_of(candidate: Candidate, axis: str) -> int:
    """Devices between neighbours on the axis."""
    stride = 1
    for name in reversed(candidate.mesh_order):
        if name == axis:
            return stride
        stride *= getattr(candidate, name)
    raise ValueError(f"the mesh has the axes {candidate.mesh_order}, but got {axis=}")


def group_nodes(candidate: Candidate, axis: str, devices_per_node: int) -> int:
    """The most nodes that any group of the axis spans."""
    size = getattr(candidate, axis)
    return _nodes(candidate.num_devices, size, stride_of(candidate, axis), devices_per_node)


def tp_nodes(candidate: Candidate, devices_per_node: int) -> int:
    """The most nodes that a tensor-parallel group spans."""
    tp = candidate.tp
    if tp == 1 or (candidate.mesh_order is MESH_ORDER and devices_per_node % tp == 0):
        return 1
    return group_nodes(candidate, "tp", devices_per_node)


def shard_nodes(candidate: Candidate, devices_per_node: int) -> int:
    """The most nodes that a group of dp_shard spans, the ranks of cp among it."""
    stride = stride_of(candidate, "cp" if candidate.cp > 1 else "dp_shard")
    return _nodes(candidate.num_devices, candidate.shard_ranks, stride, devices_per_node)


def near_nodes(candidate: Candidate, devices_per_node: int) -> int:
    """The most nodes spanned by the neighbours that hold parameters between passes together."""
    stride = stride_of(candidate, "dp_shard")
    return _nodes(candidate.num_devices, candidate.reshard_ranks, stride, devices_per_node)


def replica_nodes(candidate: Candidate, devices_per_node: int) -> int:
    """The most nodes spanned by ranks with the same parameters: both kinds of dp, and cp."""
    ranks = candidate.dp * candidate.cp
    return _nodes(candidate.num_devices, ranks, stride_of(candidate, "cp"), devices_per_node)


def expert_groups(candidate: Candidate, devices_per_node: int) -> tuple[tuple[int, int], ...]:
    """(ranks, nodes) of the ep group, and of the ranks that hold the same experts.

    Experts lie on neighbours: over the tensor-parallel ranks first where they do not divide the
    experts themselves, then over those of cp and dp (Megatron-Core's order tp-cp-ep-dp-pp).
    """
    ranks = candidate.num_devices // candidate.pp
    each = candidate.ep * candidate.etp
    stride = candidate.etp
    replicas = max(1, ranks // each)
    return (
        (candidate.ep, _nodes(candidate.num_devices, candidate.ep, stride, devices_per_node)),
        (replicas, _nodes(candidate.num_devices, replicas, each, devices_per_node)),
    )


def expert_shards(candidate: Candidate, devices_per_node: int) -> tuple[tuple[int, int], ...]:
    """(ranks, nodes) of those that shard the same experts, and of those that replicate the shards.

    Where ep is at most dp_shard, all of an ep group's ranks lie on dp_shard, and what is left of
    it shards.
    """
    shards = max(1, candidate.dp_shard // candidate.ep)
    stride = candidate.ep * candidate.etp
    replicas = max(1, candidate.dp // (candidate.ep * shards))
    devices = candidate.num_devices
    return (
        (shards, _nodes(devices, shards, stride, devices_per_node)),
        (replicas, _nodes(devices, replicas, stride * shards, devices_per_node)),
    )


def groups_of(candidate: Candidate, devices_per_node: int) -> tuple[tuple[str, int, int], ...]:
    """(axis, ranks, nodes) of the groups a pass exchanges over, beside tp's.

    Of tp's too where they span more nodes than they must.
    """
    found, nodes = [], tp_nodes(candidate, devices_per_node)
    if nodes > -(-candidate.tp // devices_per_node):
        found.append(("tp", candidate.tp, nodes))
    if candidate.cp > 1:
        found.append(("cp", candidate.cp, group_nodes(candidate, "cp", devices_per_node)))
    if candidate.ep > 1:
        # Of a cluster without end: the candidates of a space whose groups lie alike take alike.
        every = candidate.ep * candidate.etp * devices_per_node
        nodes = _nodes(every, candidate.ep, candidate.etp, devices_per_node)
        found.append(("ep", candidate.ep, nodes))
    return tuple(found)


@cache
def _nodes(num_devices: int, size: int, stride: int, devices_per_node: int) -> int:
    """The most nodes of a group: one that starts latest in its node reaches furthest."""
    if stride >= devices_per_node:
        return size  # neighbours on the axis lie on different nodes
    block = size * stride  # so many devices hold `stride` groups, which start at its front
    last = min(num_devices, block * devices_per_node)  # then their places repeat
    latest = max(
        start % devices_per_node
        for front in range(0, last, block)
        for start in range(front, min(front + stride, last))
    )
    return (latest + (size - 1) * stride) // devices_per_node + 1


def crosses_node(candidate: Candidate, stage: int, devices_per_node: int) -> bool:
    """Whether some rank of the stage sends to its peer of the next stage over the network.

    The last stage's next is the first, as under an interleaved schedule.
    """
    stride = stride_of(candidate, "pp")
    return _crosses(candidate.num_devices, candidate.pp, stride, stage, devices_per_node)


@cache
def _crosses(num_devices: int, pp: int, stride: int, stage: int, devices_per_node: int) -> bool:
    if stride >= devices_per_node:
        return pp > 1
    # Where pp is not the slowest axis, pipelines lie one behind the other.
    return any(
        rank // devices_per_node != _peer(rank, pp, stride) // devices_per_node
        for start in range(stage * stride, num_devices, pp * stride)
        for rank in range(start, start + stride)
    )


def _peer(rank: int, pp: int, stride: int) -> int:
    """The rank of the next stage, of the first one after the last."""
    place = rank // stride % pp
    return rank + ((place + 1) % pp - place) * stride


def stage_hosts(
    candidate: Candidate, stage: int, devices_per_node: int
) -> tuple[tuple[int, int], ...]:
    """(host, how many of its ranks) of all hosts that a pipeline stage lies on, in order."""
    return _stage_hosts(
        candidate.num_devices, candidate.pp, stride_of(candidate, "pp"), stage, devices_per_node
    )


@cache
def _stage_hosts(
    num_devices: int, pp: int, stride: int, stage: int, devices_per_node: int
) -> tuple[tuple[int, int], ...]:
    counts: dict[int, int] = {}
    for start in range(stage * stride, num_devices, pp * stride):
        for rank in range(start, start + stride):
            host = rank // devices_per_node
            counts[host] = counts.get(host, 0) + 1
    return tuple(counts.items())


def outcome(candidate: Candidate, devices_per_node: int, *, by_host: bool) -> tuple[object, ...]:
    """All that the order of the mesh's axes decides: orders of one outcome make the same step.

    `by_host` asks on which host each rank of a stage lies, too: hosts differ, or share cores and
    a way out among their ranks.
    """
    per_node, stages = devices_per_node, range(candidate.pp)
    hosts = (stage_hosts(candidate, stage, per_node) for stage in stages)
    return (
        tp_nodes(candidate, per_node),
        group_nodes(candidate, "dp_replicate", per_node),
        shard_nodes(candidate, per_node),
        near_nodes(candidate, per_node) if candidate.reshard_ranks else 0,
        tuple(crosses_node(candidate, stage, per_node) for stage in stages),
        tuple(hosts) if by_host else (),
    )


def device_names(candidate: Candidate, devices_per_node: list[int]) -> list[str]:
    """node:device of rank 0, 1, …, filling the nodes in order."""
    names = [
        f"{node}:{local}" for node, count in enumerate(devices_per_node) for local in range(count)
    ]
    return names[: candidate.num_devices]
