"""`ClusterCostModel`: how long work takes on one cluster, from the best knowledge there is.

Asked with an `OpWork` or a `CollectiveWork` it answers with the measurement of exactly that work;
else with physics corrected by measurements of the same family (`calibration`); else with physics
alone. Every answer says which. Answers are remembered: the planner asks for the same work over
and over.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from claw_plan.profiles.calibration import Calibration
from claw_plan.profiles.cluster import Cluster, Device, Node
from claw_plan.profiles.collective_cost import analytic_collective
from claw_plan.profiles.cost import MEASURED, CollectiveCost, OpCost
from claw_plan.profiles.measurement import Measurement
from claw_plan.profiles.op_cost import kernel_time, roofline_ns
from claw_plan.profiles.profile import Profile, link_device
from claw_plan.profiles.work import CollectiveWork, OpWork

GPU_STEP_OVERHEAD_NS = 5_600_000
"""Host time of a step beside its kernels: `h0` of a fit to 426 published training steps."""

CPU_STEP_OVERHEAD_NS = 1_000_000
"""The same on CPUs, before `fit` has seen a run: the order of size of a Python training loop."""


class ClusterCostModel:
    """Times on one cluster. Of several kinds of devices or nodes the slowest counts; `among` asks
    of some of the nodes.

    `assumptions` are sentences for the report. `with_launches=False` leaves out what launching a
    kernel costs the host, for callers that count launches themselves.
    """

    def __init__(
        self, cluster: Cluster, profile: Profile | None = None, *, with_launches: bool = True
    ) -> None:
        self.cluster = cluster
        self.profile = profile or Profile(name="data sheets")
        self.assumptions: tuple[str, ...] = ()
        self._kinds = _distinct_nodes(cluster)
        devices = {node.device.name: node for node in self._kinds}
        self._devices = [
            _DeviceTimes(node, self.profile, with_launches) for node in devices.values()
        ]
        self._links = [_NodeCollectives(node, cluster, self.profile) for node in self._kinds]
        if len(self._devices) > 1:
            names = ", ".join(sorted(devices))
            self.assumptions = (f"devices differ ({names}): every rank is as slow as the slowest",)
        self._counts: Callable[..., Any] = max
        self._views: dict[Hashable, ClusterCostModel] = {}
        self._ops: dict[OpWork, OpCost] = {}
        self._collectives: dict[CollectiveWork, CollectiveCost] = {}

    def among(self, nodes: Sequence[Node]) -> ClusterCostModel:
        """The times on these nodes alone; the same answer to the same kinds of nodes."""
        places = tuple(
            place
            for place, kind in enumerate(self._kinds)
            if any(node is kind or node == kind for node in nodes)
        )
        if len(places) == len(self._kinds):
            return self
        return self._views.setdefault(places, self._view(places, max))

    def quickest(self) -> ClusterCostModel:
        """Each piece of work on the kind of node that has it done soonest."""
        if len(self._kinds) == 1:
            return self
        return self._views.setdefault("quickest", self._view(range(len(self._kinds)), min))

    def _view(self, places: Sequence[int], counts: Callable[..., Any]) -> ClusterCostModel:
        view = copy.copy(self)
        view._kinds = [self._kinds[place] for place in places]
        view._links = [self._links[place] for place in places]
        names = {kind.device.name for kind in view._kinds}
        view._devices = [times for times in self._devices if times.device.name in names]
        view._counts = counts
        view._views, view._ops, view._collectives = {}, {}, {}
        return view

    def op(self, work: OpWork) -> OpCost:
        """Time of one kernel on the cluster's slowest device."""
        cost = self._ops.get(work)
        if cost is None:
            costs = [device.op(work) for device in self._devices]
            cost = self._ops[work] = self._counts(costs, key=lambda each: each.ns)
        return cost

    def collective(self, work: CollectiveWork) -> CollectiveCost:
        """Time of one collective, with all other devices of the nodes doing the same."""
        cost = self._collectives.get(work)
        if cost is None:
            costs = [links.collective(work) for links in self._links]
            cost = self._collectives[work] = self._counts(costs, key=lambda each: each.alone_ns)
        return cost

    def step_overhead_ns(self) -> int:
        """What a step costs beside its kernels and collectives (data, loop, logging)."""
        return int(self._counts(times.step_overhead_ns() for times in self._devices))


def _distinct_nodes(cluster: Cluster) -> list[Node]:
    """One node of each kind, in order."""
    kinds: list[Node] = []
    for node in cluster.nodes:
        # Equal nodes are mostly the same object; comparing all their fields is slow.
        if not any(node is kind or node == kind for kind in kinds[-8:]):
            kinds.append(node)
    return kinds


class _DeviceTimes:
    """Kernel times on one kind of device."""

    def __init__(self, node: Node, profile: Profile, with_launches: bool) -> None:
        self.device: Device = node.device
        self._launch_ns = float(node.device.kernel_launch_ns) if with_launches else 0.0
        self._profile = profile
        self._scale = profile.constant(node.device.name, "op_scale", 1.0)
        self._op_overhead_ns = profile.constant(node.device.name, "op_overhead_ns", 0.0)
        chosen = _chosen(profile.of_device(node.device.name), node.cores)
        same: dict[Hashable, list[float]] = defaultdict(list)
        points: dict[Hashable, list[tuple[float, float]]] = defaultdict(list)
        for work, ns in chosen.items():
            assert isinstance(work, OpWork)
            same[_identity(work)].append(ns)
            for family in _families(work):
                points[family].append((roofline_ns(self.device, work), ns))
        self._measured = {key: statistics.median(times) for key, times in same.items()}
        self._calibrations = {family: Calibration(some) for family, some in points.items()}

    def op(self, work: OpWork) -> OpCost:
        ns, source, spread = self._alone(work)
        ns = math.ceil(ns * self._scale + self._op_overhead_ns)
        return OpCost(ns=ns, source=source, spread=spread)

    def _alone(self, work: OpWork) -> tuple[float, str, float]:
        """The kernel's time when it is timed by itself, what that rests on, and its spread."""
        measured_ns = self._measured.get(_identity(work))
        if measured_ns is not None:
            return measured_ns, MEASURED, 0.0
        for family in _families(work):
            calibration = self._calibrations.get(family)
            if calibration is not None:
                return *calibration(roofline_ns(self.device, work)), 0.0
        time = kernel_time(self.device, work)
        return max(time.ns, self._launch_ns), time.source, time.spread

    def step_overhead_ns(self) -> int:
        is_cpu = self.device.kind == "cpu"
        default = CPU_STEP_OVERHEAD_NS if is_cpu else GPU_STEP_OVERHEAD_NS
        return round(self._profile.constant(self.device.name, "step_overhead_ns", default))


def _identity(work: OpWork) -> Hashable:
    """What makes two kernels the same: the shape where it is known, else flops and bytes."""
    size = () if work.dims else (work.flops, work.bytes)
    return (work.kind, work.dims, work.dtype, work.phase, work.target, *size)


def _families(work: OpWork) -> tuple[Hashable, ...]:
    """Groups of alike work, the closest first.

    A product's rate hangs on its shape, which the formula knows; an element-wise kernel's on what
    it computes, which only its name tells.
    """
    if work.kind == "gemm":
        return (
            ("gemm", work.dtype, work.target),
            ("gemm", work.dtype),
        )
    return (
        (work.kind, work.dtype, work.phase, work.target),
        (work.kind, work.dtype, work.phase),
        (work.kind, work.dtype),
    )


def _chosen(
    measurements: Iterable[Measurement], cores: int
) -> dict[OpWork | CollectiveWork, float]:
    """The time of each piece of work on a core of its own: the median sample.

    Most ranks train beside others, so what was measured with most ranks on the host, up to one a
    core, counts. Where more ranks shared the cores, a kernel was sometimes interrupted for longer
    than it lasts, and only the lower quartile tells its own time. So too of gloo's collectives:
    ranks begin them apart, for they leave a barrier one after the other.
    """
    by_work: dict[OpWork | CollectiveWork, list[Measurement]] = defaultdict(list)
    for measurement in measurements:
        by_work[measurement.work].append(measurement)
    limit = cores or 1 << 30
    times: dict[OpWork | CollectiveWork, float] = {}
    for work, several in by_work.items():
        alone = [m.ranks_per_host for m in several if m.ranks_per_host <= limit]
        ranks = max(alone) if alone else min(m.ranks_per_host for m in several)
        samples = [ns for m in several if m.ranks_per_host == ranks for ns in m.samples_ns]
        is_longer = ranks > limit if isinstance(work, OpWork) else work.backend == "gloo"
        middle = sorted(samples)[len(samples) // 4] if is_longer else statistics.median(samples)
        times[work] = float(middle)
    return times


class _NodeCollectives:
    """Collective times on one kind of node."""

    def __init__(self, node: Node, cluster: Cluster, profile: Profile) -> None:
        self._node = node
        self._network = cluster.network
        self._measured: dict[CollectiveWork, float] = {}
        for link, several in ((node.intra, False), (node.nic, True)):
            chosen = _chosen(profile.of_device(link_device(node.device.name, link.name)), 0)
            for work, ns in chosen.items():
                if isinstance(work, CollectiveWork) and (work.nodes > 1) == several:
                    self._measured[work] = ns
        points: dict[Hashable, list[tuple[float, float]]] = defaultdict(list)
        for work, ns in self._measured.items():
            for family in _collective_families(work):
                points[family].append((self._analytic(work).alone_ns, ns))
        self._calibrations = {family: Calibration(some) for family, some in points.items()}
        overhead_ns = profile.constant(node.device.name, "collective_overhead_ns", 0.0)
        self._overhead_ns = round(overhead_ns)
        self._scale = profile.constant(node.device.name, "collective_scale", 1.0)

    def _analytic(self, work: CollectiveWork) -> CollectiveCost:
        return analytic_collective(self._node, self._network, work)

    def collective(self, work: CollectiveWork) -> CollectiveCost:
        cost = self._alone(work)
        if work.group_size == 1 or work.bytes == 0:
            return cost
        if self._scale != 1.0:
            cost = _lasting(cost, self._scale * cost.alone_ns, cost.source)
        return dataclasses.replace(cost, latency_ns=cost.latency_ns + self._overhead_ns)

    def _alone(self, work: CollectiveWork) -> CollectiveCost:
        """What the call itself takes when all ranks meet at it."""
        cost = self._analytic(work)
        measured_ns = self._measured.get(work)
        if measured_ns is not None:
            return _lasting(cost, measured_ns, MEASURED)
        if work.group_size == 1 or work.bytes == 0:
            return cost
        for family in _collective_families(work):
            calibration = self._calibrations.get(family)
            if calibration is not None:
                return _lasting(cost, *calibration(cost.alone_ns))
        return cost


def _collective_families(work: CollectiveWork) -> tuple[Hashable, ...]:
    """Groups of alike collectives, the closest first.

    On gloo all operations are rings by the same threads on the same cores, so what one of them
    tells of a link holds for another that nobody has measured.
    """
    kind = (work.op, work.backend, work.algorithm)
    families: tuple[Hashable, ...] = (
        (*kind, work.group_size, work.nodes),
        (*kind, work.nodes > 1),
    )
    if work.backend == "gloo" and work.op != "send":
        families += (("gloo", work.nodes > 1),)
    return families


def _lasting(cost: CollectiveCost, ns: float, source: str) -> CollectiveCost:
    """The same bytes over the same link, start and rate both scaled to last `ns` alone."""
    latency_ns = math.floor(cost.latency_ns * ns / max(1, cost.alone_ns))
    flow_ns = max(1.0, ns - latency_ns)
    return dataclasses.replace(
        cost,
        latency_ns=latency_ns,
        rate_cap_bytes_per_s=max(1.0, cost.bytes * 1e9 / flow_ns),
        source=source,
    )
