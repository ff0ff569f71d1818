"""The compiled engine: a `TaskGraph` becomes the start and finish of every task.

The semantics stand in `task_graph`; `reference` says the same in SimPy and tests hold the two
equal. This one scores candidates, so it is built to touch only what an event changes:

- A tournament tree holds, for each stream, when its current task comes to its next turn (the end
  of the delay, then the end of the flow). Its root is the next event.
- A task counts the needs that are left and begins when the count is zero and it heads its stream.
- When a flow begins or ends, the links it crosses are marked. Before time moves on, every flow
  that is connected to a marked link, over any chain of flows, is shared anew; other flows keep
  their rates. That is exact: max-min sharing decides each connected part by itself.

Work left and rates are integers, so booking the same work in two halves or at once is the same.

A graph whose needs all point backward cannot deadlock: of the tasks not finished, the one with
the lowest id heads its stream, and its needs, all of lower ids, have finished.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

from claw_plan.simulator.errors import SimulationError
from claw_plan.simulator.task_graph import WORK_UNITS_PER_BYTE, Int, TaskGraph, deadlock

NEVER = int(np.iinfo(np.int64).max)
IDLE, DELAYED, FLOWING = 0, 1, 2
UNSHARED = -1

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """Compiles with numba; keeps the machine code on disk where a folder for it is writable.

    It runs without Python's lock.
    """
    return _compile(function)


def _compiled_part(function: Function) -> Function:
    """The same for what only compiled code calls: without Python's entry, in half the time."""
    return _compile(function, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def _compile(function: Function, **options: bool) -> Function:
    njit: Any = numba.njit  # its types leave out these options
    try:
        return cast(Function, njit(cache=True, nogil=True, **options)(function))
    except RuntimeError:  # numba found no folder it may write to
        return cast(Function, njit(nogil=True, **options)(function))


class _State(NamedTuple):
    """The graph and everything that changes; arrays only, so that numba knows it as one value."""

    # Per task.
    stream: Int
    delay_ns: Int
    cap: Int
    link_start: Int
    next_task: Int  # the next one on its stream, or -1
    waits: Int  # needs that have not finished
    first_user: Int  # its first edge among those that need it, or -1
    start_ns: Int
    finish_ns: Int
    left: Int  # units of work still to move
    rate: Int
    settled_ns: Int  # when `left` was true
    # Per need (an edge between two tasks).
    next_user: Int
    user: Int
    # Per stream.
    head: Int
    phase: Int
    tree: Int
    flows: Int  # the flows to be shared anew
    # Per link.
    capacity: Int
    free: Int
    users: Int
    share: Int
    marked: NDArray[np.bool_]
    queue: Int  # the marked links
    first_cross: Int  # its first crossing, or -1
    # Per crossing (a flow over a link).
    link: Int
    next_cross: Int
    prev_cross: Int
    owner: Int


def finish_times_ns(graph: TaskGraph) -> tuple[Int, Int]:
    """When each task takes its stream and when it finishes.

    Raises Deadlock when tasks wait for each other, SimulationError when time leaves the range of
    64-bit nanoseconds.
    """
    state = _prepare(graph)
    finished = _run(state)
    if finished < len(graph):
        if not state.phase.any():
            raise deadlock(graph, state.finish_ns)
        task = int(state.head[np.flatnonzero(state.phase)[0]])
        raise SimulationError(
            f"a step lasts at most {NEVER} ns, but {graph.name[task]!r} (task {task}) ends later; "
            f"it has delay_ns={graph.delay_ns[task]} and work_bytes={graph.work_bytes[task]}"
        )
    return state.start_ns, state.finish_ns


def _prepare(graph: TaskGraph) -> _State:
    tasks, streams, links = len(graph), len(graph.streams), len(graph.links)
    leaves = 1
    while leaves < streams:
        leaves *= 2
    state = _State(
        stream=graph.stream,
        delay_ns=graph.delay_ns,
        cap=graph.rate_cap,
        link_start=graph.link_start,
        next_task=np.full(tasks, -1),
        waits=np.diff(graph.need_start),
        first_user=np.full(tasks, -1),
        start_ns=np.full(tasks, -1),
        finish_ns=np.full(tasks, -1),
        left=graph.work_bytes * WORK_UNITS_PER_BYTE,
        rate=np.zeros(tasks, np.int64),
        settled_ns=np.zeros(tasks, np.int64),
        next_user=np.full(len(graph.need), -1),
        user=np.repeat(np.arange(tasks), np.diff(graph.need_start)),
        head=np.full(streams, -1),
        phase=np.zeros(streams, np.int64),
        tree=np.full(2 * leaves, NEVER),
        flows=np.zeros(streams, np.int64),
        capacity=graph.capacity,
        free=np.zeros(links, np.int64),
        users=np.zeros(links, np.int64),
        share=np.zeros(links, np.int64),
        marked=np.zeros(links, np.bool_),
        queue=np.zeros(links, np.int64),
        first_cross=np.full(links, -1),
        link=graph.link,
        next_cross=np.full(len(graph.link), -1),
        prev_cross=np.full(len(graph.link), -1),
        owner=np.repeat(np.arange(tasks), np.diff(graph.link_start)),
    )
    _chain(state, graph.need)
    return state


@compiled
def _chain(state: _State, need: Int) -> None:
    """Links each stream's tasks in order of id, and each task's users."""
    for task in range(state.stream.size - 1, -1, -1):
        state.next_task[task] = state.head[state.stream[task]]
        state.head[state.stream[task]] = task
    for edge in range(need.size - 1, -1, -1):
        state.next_user[edge] = state.first_user[need[edge]]
        state.first_user[need[edge]] = edge


@_compiled_part
def _set_turn(tree: Int, stream: int, time_ns: int) -> None:
    node = stream + tree.size // 2
    tree[node] = time_ns
    node //= 2
    while node:
        earliest = min(tree[2 * node], tree[2 * node + 1])
        if tree[node] == earliest:
            return
        tree[node] = earliest
        node //= 2


@_compiled_part
def _next_stream(tree: Int) -> int:
    node = 1
    while node < tree.size // 2:
        node = 2 * node if tree[2 * node] == tree[node] else 2 * node + 1
    return node - tree.size // 2


@compiled
def _run(state: _State) -> int:
    """Plays all events; answers with the number of tasks that finished."""
    now = finished = marked = 0
    for stream in range(state.head.size):
        task = state.head[stream]
        if task >= 0 and state.waits[task] == 0:
            _begin(state, task, now)
    while True:
        if marked and state.tree[1] > now:
            _share_anew(state, marked, now)
            marked = 0
        if state.tree[1] == NEVER:
            return finished
        now = state.tree[1]
        stream = _next_stream(state.tree)
        task = state.head[stream]
        if state.phase[stream] == DELAYED and state.left[task] > 0:
            state.phase[stream] = FLOWING
            state.settled_ns[task] = now
            marked = _mark(state, task, marked, True)
            _set_turn(state.tree, stream, NEVER)  # until it has a rate
        else:
            if state.phase[stream] == FLOWING:
                marked = _mark(state, task, marked, False)
            _finish(state, task, now)
            finished += 1


@_compiled_part
def _begin(state: _State, task: int, now: int) -> None:
    stream = state.stream[task]
    state.start_ns[task] = now
    state.phase[stream] = DELAYED
    delay = state.delay_ns[task]
    _set_turn(state.tree, stream, now + delay if delay < NEVER - now else NEVER)


@_compiled_part
def _finish(state: _State, task: int, now: int) -> None:
    """Frees the stream and begins what waited for this task."""
    stream = state.stream[task]
    state.finish_ns[task] = now
    state.phase[stream] = IDLE
    following = state.next_task[task]
    state.head[stream] = following
    if following >= 0 and state.waits[following] == 0:
        _begin(state, following, now)
    edge = state.first_user[task]
    while edge >= 0:
        user = state.user[edge]
        state.waits[user] -= 1
        if state.waits[user] == 0 and state.head[state.stream[user]] == user:
            _begin(state, user, now)
        edge = state.next_user[edge]
    if state.phase[stream] == IDLE:
        _set_turn(state.tree, stream, NEVER)


@_compiled_part
def _mark(state: _State, task: int, marked: int, enters: bool) -> int:
    """Puts a flow on its links or takes it off them, and marks these links."""
    for cross in range(state.link_start[task], state.link_start[task + 1]):
        link = state.link[cross]
        first = state.first_cross[link]
        if enters:
            state.next_cross[cross], state.prev_cross[cross] = first, -1
            if first >= 0:
                state.prev_cross[first] = cross
            state.first_cross[link] = cross
        else:
            before, after = state.prev_cross[cross], state.next_cross[cross]
            if before >= 0:
                state.next_cross[before] = after
            else:
                state.first_cross[link] = after
            if after >= 0:
                state.prev_cross[after] = before
        if not state.marked[link]:
            state.marked[link] = True
            state.queue[marked] = link
            marked += 1
    return marked


@_compiled_part
def _share_anew(state: _State, marked: int, now: int) -> None:
    """Gives all flows connected to the marked links their rates, and their streams a new turn."""
    links, flows = _connected(state, marked, now)
    _fill(state, links, flows)
    for index in range(links):
        state.marked[state.queue[index]] = False
    for index in range(flows):
        task = state.flows[index]
        wait = -(-state.left[task] // state.rate[task])
        end = now + wait if wait < NEVER - now else NEVER
        _set_turn(state.tree, state.stream[task], end)


@_compiled_part
def _connected(state: _State, links: int, now: int) -> tuple[int, int]:
    """Collects in `queue` and `flows` what hangs together with the marked links.

    Books the work that each of these flows has done, and takes its rate away.
    """
    flows = index = 0
    while index < links:
        link = state.queue[index]
        index += 1
        state.free[link] = state.capacity[link]
        state.users[link] = 0
        cross = state.first_cross[link]
        while cross >= 0:
            state.users[link] += 1
            task = state.owner[cross]
            if state.rate[task] != UNSHARED:
                state.left[task] -= state.rate[task] * (now - state.settled_ns[task])
                state.settled_ns[task] = now
                state.rate[task] = UNSHARED
                state.flows[flows] = task
                flows += 1
                for other in range(state.link_start[task], state.link_start[task + 1]):
                    if not state.marked[state.link[other]]:
                        state.marked[state.link[other]] = True
                        state.queue[links] = state.link[other]
                        links += 1
            cross = state.next_cross[cross]
        if state.users[link]:
            state.share[link] = max(state.free[link] // state.users[link], 1)
    return links, flows


@_compiled_part
def _fill(state: _State, links: int, flows: int) -> None:
    """Max-min: the level rises to the scarcest link or the next caps, whose flows then stop."""
    least_cap = 0  # no flow that still rises has a lower one
    while True:
        level, scarce = NEVER, -1
        still = 0
        for index in range(links):  # moves the links that flows still rise on to the front
            link = state.queue[index]
            if state.users[link]:
                state.queue[index], state.queue[still] = state.queue[still], link
                still += 1
                share = state.share[link]
                if share < level or (share == level and link < scarce):
                    level, scarce = share, link
        links = still
        if not links:
            return
        capped = False
        if level >= least_cap:
            least_cap = NEVER
            still = 0
            for index in range(flows):
                task = state.flows[index]
                if state.rate[task] == UNSHARED:
                    state.flows[index], state.flows[still] = state.flows[still], task
                    still += 1
                    if state.cap[task] <= level:
                        _fix(state, task, state.cap[task])
                        capped = True
                    else:
                        least_cap = min(least_cap, state.cap[task])
            flows = still
        if not capped:  # no cap in the way: the scarcest link is full
            cross = state.first_cross[scarce]
            while cross >= 0:
                if state.rate[state.owner[cross]] == UNSHARED:
                    _fix(state, state.owner[cross], level)
                cross = state.next_cross[cross]


@_compiled_part
def _fix(state: _State, task: int, rate: int) -> None:
    """Sets a flow's rate and takes it from its links."""
    state.rate[task] = rate
    for cross in range(state.link_start[task], state.link_start[task + 1]):
        link = state.link[cross]
        state.free[link] -= rate
        state.users[link] -= 1
        if state.users[link]:
            state.share[link] = max(state.free[link] // state.users[link], 1)
