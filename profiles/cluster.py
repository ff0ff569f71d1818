"""`Cluster`: the devices there are and the links between them, each figure with its source.

Made by `cluster_file.load_cluster` from a cluster.yaml or a shorthand such as `2xdgx-h100`; read
by the cost models, by the space (how many devices, how many a node) and by the memory check.
Devices are numbered node by node: device d is on node `node_of(d)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator, or one share of a CPU host.

    `peak_flops_per_s` maps a dtype ('bfloat16', 'float32', …) to the dense data-sheet peak;
    `achieved` does so for what large kernels sustain, with 'attention' for flash attention in 16
    bit. `kernel_launch_ns` is the host's time to issue one kernel. `kind` is 'cuda', 'rocm' or
    'cpu'. `processors` are the units that work on one tile each (SMs, CUs; 0 means not tiled) and
    `gemm_ramp` the depth k at which a GEMM reaches half its rate: see `op_cost`. Devices without
    `peer_to_peer` reach each other through the host's memory.
    """

    name: str
    kind: str
    memory_bytes: int
    memory_bytes_per_s: float
    peak_flops_per_s: Mapping[str, float]
    achieved_flops_per_s: Mapping[str, float]
    kernel_launch_ns: int
    source: str
    processors: int = 0
    gemm_ramp: int = 0
    peer_to_peer: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A connection: `bytes_per_s` is one direction of one device's (or one NIC's) port.

    `latency_ns` is one hop of a long message's protocol, `launch_ns` what a collective costs
    before its first (None: as its library says). `achieved_bytes_per_s` maps collectives to the
    bus bandwidth they reach ('other' for those not named; empty: the whole rate), and 'nvls' to
    that of reductions in the switch, where `nvls` says that it does them. `startup_ns` is what
    one of two ranks costs before its first byte (gloo only; empty: `latency_ns` per hop).

    Where devices are joined directly, not by a switch (`peer_links` 0), the port is divided into
    `peer_links`, of which an exchange uses one per peer and a ring as much as `group_share` says
    for groups up to a size.
    """

    name: str
    bytes_per_s: float
    latency_ns: int
    source: str
    achieved_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    startup_ns: Mapping[str, int] = field(default_factory=dict)
    launch_ns: int | None = None
    nvls: bool = False
    peer_links: int = 0
    group_share: Mapping[int, float] = field(default_factory=dict)

    def rate(self, op: str) -> float:
        """The bus bandwidth, in bytes per second, that the collective `op` reaches here."""
        achieved = self.achieved_bytes_per_s
        return achieved.get(op, achieved.get("other", self.bytes_per_s))

    def port_share(self, op: str, ranks: int) -> float:
        """The part of the port that the collective `op` of a group of `ranks` reaches."""
        sizes = [size for size in self.group_share if size >= ranks]
        if sizes and op != "all_to_all":
            return self.group_share[min(sizes)]
        return min(1.0, (ranks - 1) / self.peer_links) if self.peer_links and ranks > 1 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One host: `device_count` equal devices, the link among them, and the NICs they share.

    `cores` limits how many CPU devices compute at once (0 for accelerators: no sharing).
    `shared_memory_bytes` is set when the devices draw on one memory (CPU): a plan must fit the
    sum of its ranks' peaks into it. `pairs` overrides `intra` between two devices. Hosts of one
    `machine` compute on the same cores (CPU); empty: on cores of their own. That
    makes no other kind of host. Nodes of one `profile` are one kind whatever they are, because the
    user says so; empty: equal nodes are.
    """

    type: str
    device: Device
    device_count: int
    intra: Link
    nic: Link
    nic_count: int
    host_memory_bytes: int
    host_cores: int
    cores: int = 0
    shared_memory_bytes: int = 0
    machine: str = field(default="", compare=False)
    profile: str = field(default="", compare=False)
    pairs: Mapping[tuple[int, int], Link] = field(default_factory=dict)

    @property
    def nic_bytes_per_s_per_device(self) -> float:
        """One device's share of the node's NICs."""
        return self.nic.bytes_per_s * self.nic_count / self.device_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What lies between the nodes. `oversubscription` 1.0 is non-blocking."""

    type: str = "single-switch"
    oversubscription: float = 1.0
    latency_ns: int = 0


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """All nodes, in order. `text` is the parsed cluster file, inlined into plans.

    `assumptions` are sentences about what the file left open; the report prints them.
    """

    name: str
    nodes: tuple[Node, ...]
    network: Network
    text: Mapping[str, Any]
    node_mtbf_ns: int | None = None
    price_per_node_hour_usd: float | None = None
    training: Mapping[str, Any] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()

    @cached_property
    def num_devices(self) -> int:
        """Devices of all nodes."""
        return sum(node.device_count for node in self.nodes)

    @property
    def is_uniform(self) -> bool:
        """Whether all nodes are equal."""
        return all(node == self.nodes[0] for node in self.nodes)

    def locate(self, device: int) -> tuple[int, int]:
        """The node of a device and its place in the node; raises IndexError past the last."""
        rest = device
        for index, node in enumerate(self.nodes):
            if rest < node.device_count:
                return index, rest
            rest -= node.device_count
        raise IndexError(f"the cluster has {self.num_devices} devices; there is no {device}")

    @property
    def backend(self) -> str:
        """The collective library its devices use: 'nccl', or 'gloo' for CPUs."""
        return "gloo" if self.nodes[0].device.kind == "cpu" else "nccl"
