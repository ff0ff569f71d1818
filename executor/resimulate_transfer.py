"""How long a recorded collective's transfer takes on other hardware.

A transfer is a start-up, which bandwidth does not change, and bytes at a rate:

    T(S) = a + b S        fitted to the transfers of one operation and group in the recording

With links k times as fast T becomes a + (T - a)/k; over n' ranks instead of n the start-up grows
with the hops of a ring, (n'-1)/(n-1), and the bytes with n/(n-1) (n'-1)/n' (Thakur et al. 2005,
'Optimization of Collective Communication Operations in MPICH'). On another cluster T is scaled by
the ratio of what the cost model says of both, or replaced by it when the first is not known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from claw_plan.executor.replay_collectives import Matched
from claw_plan.profiles.cost import CostModel
from claw_plan.profiles.work import COLLECTIVE_OPS, CollectiveWork

SMALL_BYTES = 16 << 10
"""Messages up to this size are all start-up: a thousandth of a second's traffic at 100 Mb/s."""

Family = tuple[str, int | None]


@dataclass(frozen=True, kw_only=True)
class Change:
    """What shall be different. A factor of 2 is twice as fast; `ranks` None as recorded."""

    link: float = 1.0
    compute: float = 1.0
    host: float = 1.0
    ranks: int | None = None
    compute_by_kind: Mapping[str, float] = field(default_factory=dict)
    recorded_on: CostModel | None = None
    moved_to: CostModel | None = None


class Transfers:
    """Transfer times under a change."""

    def __init__(self, matched: Sequence[Matched], change: Change, world_size: int | None) -> None:
        self._change = change
        self._world = world_size
        self._startup = _startups(matched)

    def ns(self, m: Matched, measured_ns: int) -> int:
        """The changed time of a transfer that took `measured_ns`."""
        startup = min(self._startup.get((m.op, m.group_size), 0.0), float(measured_ns))
        rest = measured_ns - startup
        old, new = m.group_size, self._new_size(m)
        if self._change.moved_to is not None:
            moved = self._moved(m, measured_ns, new)
            startup, rest = (0.0, float(moved)) if moved is not None else (startup, rest)
        elif old and new and old > 1 and new != old:
            startup *= (new - 1) / (old - 1)
            rest *= (new - 1) / new * old / (old - 1)
        return round(startup + rest / self._change.link)

    def _new_size(self, m: Matched) -> int | None:
        """Groups of all ranks grow with the job; others (tensor, pipeline) stay as they are."""
        whole = m.group_size is not None and m.group_size == self._world
        return self._change.ranks if whole and self._change.ranks else m.group_size

    def _moved(self, m: Matched, measured_ns: int, size: int | None) -> int | None:
        """By the cost model of the other cluster; None where bytes or group are not known."""
        there, here = self._change.moved_to, self._change.recorded_on
        assert there is not None
        work = _work(m, size, there)
        if work is None:
            return None
        ns = there.collective(work).alone_ns
        before = _work(m, m.group_size, here) if here is not None else None
        if here is not None and before is not None and here.collective(before).alone_ns:
            return round(measured_ns * ns / here.collective(before).alone_ns)
        return ns


def _work(m: Matched, size: int | None, cost: CostModel) -> CollectiveWork | None:
    op = "send" if m.op == "recv" else m.op
    if op not in COLLECTIVE_OPS or not m.bytes or not size:
        return None
    per_node = cost.cluster.nodes[0].device_count
    nodes = min(len(cost.cluster.nodes), -(-size // per_node), size)
    return CollectiveWork(
        op=op, bytes=m.bytes, group_size=size, nodes=nodes, backend=cost.cluster.backend
    )


def _startups(matched: Sequence[Matched]) -> dict[Family, float]:
    """`a` of each operation and group; of those with one size only, that of small messages."""
    points: dict[Family, list[tuple[int, int]]] = defaultdict(list)
    for m in matched:
        if m.bytes and m.op not in ("send", "recv"):
            points[m.op, m.group_size].append((m.bytes, m.transfer_ns))
    small = [ns for some in points.values() for size, ns in some if size <= SMALL_BYTES]
    found = {}
    for family, some in points.items():
        fastest = min(ns for _, ns in some)
        if len({size for size, _ in some}) > 1:
            sizes, times = np.array(some, dtype=float).T
            # Weighted by 1/T, so that small messages, which tell the start-up, count as much.
            intercept = float(np.polyfit(sizes, times, 1, w=1 / np.maximum(times, 1.0))[1])
        else:
            intercept = float(min(small, default=0))
        found[family] = min(max(0.0, intercept), float(fastest))
    return found
