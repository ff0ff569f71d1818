"""`Route`: what the ranks of one group see of the hardware between them.

Made from a `Node`, the `Network` and a `CollectiveWork`; read by the cost models of the collective
libraries (`nccl_cost`, `gloo_cost`). Rates are of one rank's port, inside the node and out of it.

Source of the NICs' sharing: NCCL gives each GPU the nearest NICs; where there are fewer NICs than
GPUs, or several groups talk at once, the NICs' rate is divided among the ranks that use them.
Assumes: ranks spread evenly over the nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

from claw_plan.profiles.cluster import Link, Network, Node
from claw_plan.profiles.work import CollectiveWork


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """`ranks` on `nodes` hosts, `local` of them on each.

    `network_ns` is what the switches between the nodes add to a hop. `port_share` is the part of
    the intra link's port that a group of this size reaches, `nics` how many NICs (or what part
    of one) carry one rank's traffic.
    """

    ranks: int
    nodes: int
    local: int
    intra: Link
    nic: Link
    network_ns: float
    port_share: float
    nics: float

    @property
    def intra_hop_ns(self) -> float:
        """One hop inside the node."""
        return self.intra.latency_ns

    @property
    def inter_hop_ns(self) -> float:
        """One hop between nodes."""
        return self.nic.latency_ns + self.network_ns

    def intra_rate(self, what: str) -> float:
        """Bytes per second of a rank's port inside the node, for a collective or 'nvls'."""
        return self.intra.rate(what) * self.port_share

    def inter_rate(self, what: str) -> float:
        """Bytes per second of a rank's part of the NICs."""
        return self.nic.rate(what) * self.nics


def route(node: Node, network: Network, work: CollectiveWork) -> Route:
    """The way of a group on nodes like `node`."""
    local = max(1, work.group_size // work.nodes)
    return Route(
        ranks=work.group_size,
        nodes=work.nodes,
        local=local,
        intra=node.intra,
        nic=node.nic,
        network_ns=network.latency_ns,
        port_share=node.intra.port_share(work.op, local),
        nics=_nics(node, local, work.concurrent) / network.oversubscription,
    )


def _nics(node: Node, local: int, concurrent: int) -> float:
    """NICs per rank: all devices of the node talk, or only `concurrent` groups of `local`."""
    share = node.nic_count / node.device_count
    if not concurrent:
        return share
    talking = min(node.device_count, concurrent * local)
    return min(max(1.0, share), node.nic_count / talking)
