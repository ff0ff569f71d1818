"""The streams and ports of one pipeline stage while its tasks are added.

Streams are FIFO, so "wait for X" only marks the next task of the stream. Devices that share CPU
cores compute as flows over the cores: one nanosecond of work is one byte, a core moves 1e9 a
second (`host_links`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.host_links import host_links
from claw_plan.planner.pass_time import Stretch
from claw_plan.planner.placement import stage_hosts
from claw_plan.planner.problem import Problem
from claw_plan.profiles.cluster import Node
from claw_plan.profiles.cost import CollectiveCost
from claw_plan.profiles.units import NS_PER_S
from claw_plan.profiles.work import CollectiveWork
from claw_plan.simulator.task_graph import TaskGraphBuilder

FROM_PEER = "from a pipeline peer"
"""Stands for the axis of a message that arrives."""

Moves = Sequence[tuple[tuple[str, ...], tuple[CollectiveWork, ...]]]
"""Collectives in the order they were added, in runs of (axis of each, each)."""

Parts = tuple[Mapping[str, float], int]
"""What a task's time consists of, and what of it is lost to traffic beside it, in ns."""


class View(NamedTuple):
    """What a pipeline rank is lowered with; on mixed devices each kind has its own.

    `place` counts the ranks of the kind: it says where among its nodes the rank lies.
    """

    problem: Problem
    candidate: Candidate
    place: int


def views_of(problem: Problem, candidate: Candidate) -> list[View]:
    """Of each pipeline rank: of the nodes that its stage lies on the slowest counts."""
    if problem.is_uniform:
        return [View(problem, candidate, rank) for rank in range(candidate.pp)]
    views = []
    for rank in range(candidate.pp):
        hosts = stage_hosts(candidate, rank, problem.devices_per_node)
        views.append(View(problem.among([host for host, _ in hosts]), candidate, rank))
    return views


class Pause(NamedTuple):
    """What begins after a share of a unit's backward."""

    share: float
    begin: Callable[[], None] | None


@dataclass
class StageStreams:
    """Adds tasks of one stage. `last_task` is the newest on its compute stream, -1 at first.

    `next_alloc_bytes` and `next_free_bytes` are memory that the next kernels take and give back,
    `pauses` what begins inside the next backward of a unit, in order.
    `parts[task]` says what a task's time consists of, and what of it is lost to traffic beside
    it, in ns; `overlap_loss` is the trainer's. `moved` are the collectives so far, for
    `planner.traffic`, which counts them. `links` are the ports and what hosts share, `cores` those
    of its hosts, none where each rank has its own. Without `overlaps` messages to and from each
    peer have streams of their own.
    """

    builder: TaskGraphBuilder
    compute: int
    gather: int
    reduce: int
    sends: int
    links: Mapping[str, Sequence[int]]
    cores: Sequence[int]
    overlaps: bool
    overlap_loss: float = 0.0
    name: str = ""
    rank: int = 0
    parts: dict[int, Parts] = field(default_factory=dict)
    moved: list[tuple[tuple[str, ...], tuple[CollectiveWork, ...]]] = field(default_factory=list)
    last_task: int = -1
    next_alloc_bytes: int = 0
    next_free_bytes: int = 0
    pauses: list[Pause] = field(default_factory=list)
    _peers: dict[str, int] = field(default_factory=dict)
    _waits: list[int] = field(default_factory=list)
    _beside_ns: int = 0

    def wait_for(self, tasks: Sequence[int]) -> None:
        """The next task on the compute stream starts after these."""
        self._waits.extend(tasks)

    def run(self, kind: str, name: str, duration_ns: int, source: str = "") -> int:
        """Kernels on the compute stream."""
        on_cores = bool(self.cores) and duration_ns > 0
        self.last_task = self.builder.add(
            self.compute,
            0 if on_cores else duration_ns,
            self._take_waits(),
            kind=kind,
            name=name,
            cost_source=source,
            work_bytes=duration_ns if on_cores else 0,
            rate_cap_bytes_per_s=float(NS_PER_S),
            links=self.cores,
            alloc_bytes=self.next_alloc_bytes,
            free_bytes=self.next_free_bytes,
        )
        self.next_alloc_bytes = self.next_free_bytes = 0
        return self.last_task

    def exchange(
        self, kind: str, name: str, cost: CollectiveCost, copy_ns: int = 0, *, axis: str = ""
    ) -> int:
        """A collective on the compute stream: everything after it waits.

        `axis` is the mesh axis whose group it is of.
        """
        self.moved.append(((axis,) * len(cost.moves), cost.moves))
        self.last_task = self._flow(self.compute, kind, name, cost, self._take_waits(), copy_ns)
        return self.last_task

    def background(
        self, stream: int, kind: str, name: str, cost: CollectiveCost, copy_ns: int,
        needs: Sequence[int], *, axis: str = "",
    ) -> int:  # fmt: skip
        """A collective on a stream of its own; on gloo it stops the compute stream instead."""
        if not self.overlaps:
            self.wait_for([need for need in needs if need >= 0])
            return self.exchange(kind, name, cost, copy_ns, axis=axis)
        return self.beside(stream, kind, name, cost, copy_ns, needs, axis=axis)

    def beside(
        self, stream: int, kind: str, name: str, cost: CollectiveCost, copy_ns: int,
        needs: Sequence[int], *, axis: str = "",
    ) -> int:  # fmt: skip
        """A collective on a stream of its own; what is copied before it takes the cores."""
        needs = [need for need in needs if need >= 0]
        self.moved.append(((axis,) * len(cost.moves), cost.moves))
        if copy_ns and self.cores:
            copied = self.builder.add(
                stream, 0, needs, kind=kind, name=name, work_bytes=copy_ns,
                rate_cap_bytes_per_s=float(NS_PER_S), links=self.cores,
            )  # fmt: skip
            needs, copy_ns = [copied], 0
        self._beside_ns += cost.alone_ns
        return self._flow(stream, kind, name, cost, needs, copy_ns)

    def send(self, cost: CollectiveCost, name: str) -> int:
        """A message to another stage, after the newest computation."""
        needs = [self.last_task] if self.last_task >= 0 else []
        self.moved.append((("pp",), cost.moves))
        return self._flow(self.sends, "pp_comm", name, cost, needs, 0)

    def answer(
        self, cost: CollectiveCost, name: str, made: int, asked: int, peer: StageStreams
    ) -> int:
        """On gloo: the message that task `made` made goes to a peer once it was asked for."""
        needs = [task for task in (made, asked) if task >= 0]
        return self._flow(self._with(peer, "send to"), "pp_comm", name, cost, needs, 0)

    def ask(self, cost: CollectiveCost, name: str, after: int, peer: StageStreams) -> int:
        """On gloo: tells a peer that this rank, behind the task, waits for its message."""
        return self.builder.add(
            self._with(peer, "ask"),
            cost.latency_ns,
            [after] if after >= 0 else [],
            kind="pp_comm",
            name=name,
            cost_source=cost.source,
        )

    def _with(self, peer: StageStreams, what: str) -> int:
        """The stream of what goes to one peer."""
        name = f"{self.name} {what} {peer.rank}"
        if name not in self._peers:
            self._peers[name] = self.builder.stream(name, self.rank)
        return self._peers[name]

    def receive(self, cost: CollectiveCost) -> None:
        """A message that another stage sends takes no time here, but is counted."""
        self.moved.append(((FROM_PEER,), cost.moves))

    def run_pass(self, kind: str, name: str, stretch: Stretch) -> None:
        """The kernels of some units as one task, their exchanges as another."""
        pauses = []
        if kind == "backward":
            pauses, self.pauses = self.pauses, []
        self._run_kernels(kind, name, stretch, pauses)
        if stretch.exchange is not None:
            self.moved.append((stretch.axes, stretch.exchange.moves))
            self.last_task = task = self._flow(
                self.compute, "tp_comm", name, stretch.exchange, self._take_waits(), 0
            )
            self.parts[task] = (stretch.exchange_parts_ns, 0)

    def _run_kernels(
        self, kind: str, name: str, stretch: Stretch, pauses: Sequence[Pause]
    ) -> None:
        """In pieces where something else begins in between."""
        done_ns = 0
        for pause in (*pauses, Pause(1.0, None)):
            piece_ns = round(pause.share * stretch.compute_ns) - done_ns
            if piece_ns > 0:
                done_ns += piece_ns
                lost_ns = self._lost_beside(piece_ns)
                task = self.run(kind, name, piece_ns + lost_ns, stretch.source)
                part = piece_ns / stretch.compute_ns
                own = {what: part * ns for what, ns in stretch.parts_ns.items()}
                self.parts[task] = (own, lost_ns)
            if pause.begin is not None:
                pause.begin()

    def _lost_beside(self, compute_ns: int) -> int:
        """What computation loses to traffic that runs beside it, and the traffic to it."""
        both = min(compute_ns, self._beside_ns)
        self._beside_ns -= both
        return round(self.overlap_loss * both)

    def _take_waits(self) -> list[int]:
        waits, self._waits = self._waits, []
        return sorted(set(waits)) if len(waits) > 1 else waits

    def _flow(
        self, stream: int, kind: str, name: str, cost: CollectiveCost, needs: Sequence[int],
        copy_ns: int,
    ) -> int:  # fmt: skip
        return self.builder.add(
            stream,
            cost.latency_ns + copy_ns,
            needs,
            kind=kind,
            name=name,
            cost_source=cost.source,
            work_bytes=cost.bytes,
            rate_cap_bytes_per_s=cost.rate_cap_bytes_per_s,
            links=self.links[cost.link],
        )


def add_stage_streams(
    builder: TaskGraphBuilder, views: Sequence[View], first: int = 0
) -> list[StageStreams]:
    """Streams and ports of every rank, numbered from `first`."""
    parts: dict[int, Parts] = {}
    shared = host_links(builder, views) if views[0].problem.cluster.backend == "gloo" else []
    stages = []
    for index, view in enumerate(views):
        name = f"stage {first + index}"
        streams = _streams(builder, view, name, first + index, parts)
        if shared:
            streams.cores, network = shared[index]
            streams.links = {**streams.links, "inter": network}
        stages.append(streams)
    return stages


def _streams(
    builder: TaskGraphBuilder, view: View, name: str, rank: int, parts: dict[int, Parts]
) -> StageStreams:
    problem = view.problem
    nodes = _nodes_of(view)
    overlaps = problem.cluster.backend != "gloo"
    streams = StageStreams(
        builder=builder,
        compute=builder.stream(f"{name} compute", rank),
        gather=builder.stream(f"{name} gather", rank),
        reduce=builder.stream(f"{name} reduce", rank),
        sends=builder.stream(f"{name} send", rank),
        links={
            "intra": (builder.link(f"{name} node link", min(n.intra.bytes_per_s for n in nodes)),)
        },
        cores=(),
        overlaps=overlaps,
        overlap_loss=problem.trainer.overlap_loss,
        name=name,
        rank=rank,
        parts=parts,
    )
    if overlaps:
        slowest = min(node.nic_bytes_per_s_per_device for node in nodes)
        streams.links = {**streams.links, "inter": (builder.link(f"{name} network", slowest),)}
    return streams


def _nodes_of(view: View) -> Sequence[Node]:
    """The nodes that the rank's stage lies on; of equal ones the first."""
    problem = view.problem
    if problem.is_uniform:
        return problem.cluster.nodes[:1]
    hosts = stage_hosts(view.candidate, view.place, problem.devices_per_node)
    return [problem.hosts[host] for host, _ in hosts]
