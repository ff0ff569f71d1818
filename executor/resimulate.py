"""The typical step of a recording becomes a TaskGraph, and with it a prediction on other hardware.

Each rank is a stream of computation, and a stream for each of its communication streams. What is
inferred, since recordings do not tell it:

- a collective waits for the computation before its start, on every rank that recorded it;
- computation waits for a collective where it resumes when that one ends;
- the optimizer waits for all collectives before it;
- idle time that follows neither is the host's, and stays.

The unchanged graph plays the step as it was; `Change` says what shall be different.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from claw_plan.executor.replay import Replay
from claw_plan.executor.replay_collectives import Matched
from claw_plan.executor.resimulate_rank import HOST, RankTask, rank_tasks
from claw_plan.executor.resimulate_transfer import Change, Transfers
from claw_plan.executor.trace_readers.rank_trace import Step
from claw_plan.profiles.errors import InputError
from claw_plan.simulator.critical_path import critical_path
from claw_plan.simulator.engine import finish_times_ns
from claw_plan.simulator.simulate import simulate
from claw_plan.simulator.task_graph import TaskGraph, TaskGraphBuilder
from claw_plan.simulator.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class Resimulation:
    """A predicted step beside the recorded one, and what the prediction could not regard."""

    step_time_ns: int
    unchanged_ns: int
    recorded_ns: int
    timeline: Timeline
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CriticalPart:
    """Time that one kind of task of one rank has on the critical path.

    Beside span kinds `host` is a pause, and `computation` what no pass is told of.
    """

    rank: int
    kind: str
    ns: int


def resimulate(found: Replay, change: Change) -> Resimulation:
    """Predicts the typical step under the change. Raises InputError where it has no times."""
    unchanged = simulate(task_graph(found, Change()))
    timeline = simulate(task_graph(found, change))
    said = []
    if change.ranks is not None:
        said.append(
            "more ranks do the same work each (the global batch grows with them); groups of all "
            "ranks grow, others stay"
        )
    if found.world_size is not None and len(found.traces) < found.world_size:
        said.append("ranks are missing: what the recorded ones waited for them counts as transfer")
    return Resimulation(
        step_time_ns=timeline.step_time_ns,
        unchanged_ns=unchanged.step_time_ns,
        recorded_ns=_recorded_ns(found),
        timeline=timeline,
        warnings=tuple(said),
    )


def _recorded_ns(found: Replay) -> int:
    """From the first rank's start of the step to the last one's end, which the graph plays."""
    steps = [step for trace in found.traces if (step := found.typical_step(trace))]
    return max(step.end_ns for step in steps) - min(step.start_ns for step in steps)


def critical_parts(found: Replay) -> tuple[CriticalPart, ...]:
    """What the chain of tasks that the step's duration consists of is made of, longest first."""
    graph = task_graph(found, Change())
    start, finish = finish_times_ns(graph)
    total: dict[tuple[int, str], int] = defaultdict(int)
    for task in critical_path(graph, start, finish):
        kind = graph.kind[task]
        if kind == "other":
            kind = HOST if graph.name[task] == HOST else "computation"
        key = (graph.ranks[graph.stream[task]], kind)
        total[key] += int(finish[task] - start[task])
    parts = [CriticalPart(rank, kind, ns) for (rank, kind), ns in total.items() if ns]
    return tuple(sorted(parts, key=lambda part: -part.ns))


@dataclass(kw_only=True)
class _Node:
    """A task before it has its place in the order."""

    rank: int
    stream: str
    kind: str
    name: str
    delay_ns: int
    needs: list[int] = field(default_factory=list)


def task_graph(found: Replay, change: Change) -> TaskGraph:
    """The tasks of the typical step of all recorded ranks."""
    if not found.parts_ns:
        raise InputError("the recording has no times: there is nothing to simulate again")
    steps = {
        t.rank: s for t in found.traces if (s := found.typical_step(t)) and t.rank is not None
    }
    begin = min(step.start_ns for step in steps.values())
    matched = [m for m in found.matched if _in_steps(m, steps)]
    measured = [m for m in found.matched if m.step is not None]
    transfers = Transfers(measured, change, found.world_size)
    nodes: list[_Node] = []
    comm_nodes: dict[tuple[int, int], int] = {}
    place: dict[tuple[int, int], int] = {}
    own_tasks = {
        trace.rank: rank_tasks(trace, matched, steps[trace.rank], begin)
        for trace in found.traces
        if trace.rank is not None
    }
    for rank, tasks in own_tasks.items():
        for index, task in enumerate(tasks):
            place[rank, index] = len(nodes)
            end_ns = steps[rank].end_ns
            nodes.append(_node(rank, task, matched, transfers, change, end_ns))
            if task.collective is not None:
                comm_nodes[rank, task.collective] = len(nodes) - 1
    for rank, tasks in own_tasks.items():
        _connect(rank, tasks, nodes, place, comm_nodes)
    _join(matched, own_tasks, nodes, place, comm_nodes)
    return _build(nodes)


def _in_steps(m: Matched, steps: Mapping[int, Step]) -> bool:
    """Whether the collective begins within the step of some rank."""
    return any(
        steps[rank].start_ns <= one.start_ns < steps[rank].end_ns
        for rank, one in m.by_rank.items()
    )


def _node(
    rank: int,
    task: RankTask,
    matched: Sequence[Matched],
    transfers: Transfers,
    change: Change,
    step_end_ns: int,
) -> _Node:
    """The task's duration under the change."""
    delay = task.duration_ns
    if task.collective is not None:
        m = matched[task.collective]
        own = m.by_rank[rank]
        # From the last arrival on, as this rank saw the end. What outlives the step by the
        # host's clock runs beside the next one, as the last step's does beside this one.
        end = min(own.end_ns, step_end_ns)
        measured = max(0, end - m.met_ns(rank))
        delay = transfers.ns(m, measured)
    elif task.is_host:
        delay = round(delay / change.host)
    else:
        delay = round(delay / change.compute / _ratio(task, change))
    return _Node(rank=rank, stream=task.stream, kind=task.kind, name=task.name, delay_ns=delay)


def _ratio(task: RankTask, change: Change) -> float:
    """How much faster this mix of kernels runs: each class's time by its own factor."""
    if not change.compute_by_kind or not task.mix:
        return 1.0
    whole = sum(task.mix.values())
    changed = sum(ns / change.compute_by_kind.get(kind, 1.0) for kind, ns in task.mix.items())
    return whole / changed if changed else 1.0


def _connect(
    rank: int,
    tasks: Sequence[RankTask],
    nodes: list[_Node],
    place: dict[tuple[int, int], int],
    comm_nodes: dict[tuple[int, int], int],
) -> None:
    """Needs within a rank: the order of its streams, and what waits for a collective."""
    last: dict[str, int] = {}
    for index, task in enumerate(tasks):
        node = place[rank, index]
        if task.stream in last:
            nodes[node].needs.append(last[task.stream])
        last[task.stream] = node
        nodes[node].needs += [comm_nodes[rank, one] for one in task.after]


def _join(
    matched: Sequence[Matched],
    own_tasks: dict[int, list[RankTask]],
    nodes: list[_Node],
    place: dict[tuple[int, int], int],
    comm_nodes: dict[tuple[int, int], int],
) -> None:
    """A collective begins when all its ranks have come: each one needs what each did before."""
    arrival: dict[tuple[int, int], list[int]] = {}
    for rank, tasks in own_tasks.items():
        for task in tasks:
            if task.collective is not None:
                before = [place[rank, task.after_task]] if task.after_task is not None else []
                before += [comm_nodes[rank, one] for one in task.after]
                arrival[rank, task.collective] = before
    for index, m in enumerate(matched):
        ranks = [rank for rank in m.by_rank if (rank, index) in comm_nodes]
        for rank in ranks:
            sources = [source for source in m.sources(rank) if source in ranks]
            needs = [need for source in sources for need in arrival[source, index]]
            nodes[comm_nodes[rank, index]].needs += needs


def _build(nodes: Sequence[_Node]) -> TaskGraph:
    """The graph in an order in which every task comes after what it needs."""
    followers: list[list[int]] = [[] for _ in nodes]
    missing = [0] * len(nodes)
    for index, node in enumerate(nodes):
        node.needs = sorted(set(node.needs))
        missing[index] = len(node.needs)
        for need in node.needs:
            followers[need].append(index)
    ready = [index for index, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    builder = TaskGraphBuilder()
    streams: dict[tuple[int, str], int] = {}
    ids: dict[int, int] = {}
    while ready:
        index = heapq.heappop(ready)
        node = nodes[index]
        key = (node.rank, node.stream)
        if key not in streams:
            streams[key] = builder.stream(f"rank {node.rank} {node.stream}", node.rank)
        ids[index] = builder.add(
            streams[key],
            node.delay_ns,
            [ids[need] for need in node.needs],
            kind=node.kind,
            name=node.name,
            cost_source="measured",
        )
        for follower in followers[index]:
            missing[follower] -= 1
            if not missing[follower]:
                heapq.heappush(ready, follower)
    if len(ids) < len(nodes):
        raise InputError(
            "the ranks' collectives contradict each other's order: these are not recordings of "
            "the same steps of one run"
        )
    return builder.build()
