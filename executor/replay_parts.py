"""Where one rank's time went in one step: each instant counts once, so the parts add up.

Computation counts first, by class; then communication that no computation hides, as transfer or
as waiting for other ranks; then the data loader; what is left is idle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from claw_plan.executor.replay_collectives import Matched
from claw_plan.executor.trace_readers.intervals import (
    Intervals,
    clip,
    intervals,
    overlap_ns,
    subtract,
    union,
)
from claw_plan.executor.trace_readers.rank_trace import KINDS, Activities, RankTrace

INPUT = KINDS.index("input")
TRANSFER, WAITING, EXPOSED, LOADER, IDLE = (
    "transfer_exposed",
    "waiting",
    "communication_exposed",
    "input",
    "idle",
)
"""`communication_exposed` is what cannot be told apart, for want of other ranks' recordings."""


def computing(work: Activities, low: int, high: int) -> Intervals:
    """When the rank computes, between two times."""
    own = work.kind != INPUT
    return clip(union(work.start_ns[own], work.end_ns[own]), low, high)


def loading(work: Activities, low: int, high: int) -> Intervals:
    """When its data loader runs."""
    own = work.kind == INPUT
    return clip(union(work.start_ns[own], work.end_ns[own]), low, high)


def communicating(trace: RankTrace, low: int, high: int) -> Intervals:
    """When a collective of the rank is under way; never where its times are not recorded."""
    pairs = [(one.start_ns, one.end_ns) for one in trace.collectives] if trace.has_timing else []
    return clip(union(*intervals(pairs)), low, high)


def parts_ns(trace: RankTrace, matched: Sequence[Matched], low: int, high: int) -> dict[str, int]:
    """Time by part from `low` to `high`; parts without any are left out, except idle."""
    busy = computing(trace.activities, low, high)
    parts = _by_kind(trace.activities, busy.length, low, high)
    comm = communicating(trace, low, high)
    exposed = subtract(comm, busy)
    parts |= _exposed(trace, matched, exposed, low, high)
    loader = subtract(subtract(loading(trace.activities, low, high), busy), comm)
    parts[LOADER] = loader.length
    parts = {name: ns for name, ns in parts.items() if ns}
    parts[IDLE] = high - low - sum(parts.values())
    return parts


def _by_kind(work: Activities, busy_ns: int, low: int, high: int) -> dict[str, int]:
    """The busy time by class; of kernels that run at once each gets its share."""
    start, end = np.maximum(work.start_ns, low), np.minimum(work.end_ns, high)
    lasting = np.where((end > start) & (work.kind != INPUT), end - start, 0)
    total = np.bincount(work.kind, weights=lasting, minlength=len(KINDS)) if len(work) else None
    if total is None or not total.sum():
        return {}
    shares = np.floor(total * (busy_ns / total.sum())).astype(np.int64)
    shares[int(np.argmax(shares))] += busy_ns - int(shares.sum())
    return {kind: int(ns) for kind, ns in zip(KINDS, shares, strict=True)}


def _exposed(
    trace: RankTrace, matched: Sequence[Matched], exposed: Intervals, low: int, high: int
) -> Mapping[str, int]:
    assert trace.rank is not None
    told, waits = [], []
    for m in matched:
        own = m.by_rank.get(trace.rank)
        if own is not None and m.can_tell:
            told.append((own.start_ns, own.end_ns))
            waits.append((own.start_ns, own.start_ns + m.waiting_ns(trace.rank)))
    waiting = overlap_ns(exposed, clip(union(*intervals(waits)), low, high))
    known = overlap_ns(exposed, clip(union(*intervals(told)), low, high))
    return {WAITING: waiting, TRANSFER: known - waiting, EXPOSED: exposed.length - known}
