"""A measured `Timeline`, as `claw-plan run` leaves it in runs/<id>/, becomes `RankTrace`s.

Its spans tell the pass, not the kernels within, so computation is classed by pass. Each recorded
step has its own time 0; they are laid one after the other. Beside it steps.jsonl tells how long a
step was on the clock of rank 0, what no span covers (the batch, the loop) included.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from claw_plan.executor.trace_readers.rank_trace import (
    Collective,
    RankTrace,
    Step,
    activities,
)
from claw_plan.profiles.errors import InputError
from claw_plan.profiles.units import NS_PER_MS

SPANS, STEP = "spans", "step"
WAIT = "wait for "
ACTION = re.compile(r"(\d{1,6})([FB])(\d{1,9})\Z")
"""How the executor names a stage's forward or backward of a microbatch, and waiting for it."""

TIMELINE, STEPS, RESULT = "timeline.json", "steps.jsonl", "result.json"
COMM_KINDS = ("tp_comm", "dp_comm", "pp_comm")
MAX_SPANS = 20_000_000
MAX_RANKS = 1 << 20
MAX_BYTES = 1 << 50
LAST_NS = 1 << 52
"""Two months: a step's times are small, and sums of many steps must stay in 64 bits."""

MOST_MS = LAST_NS / NS_PER_MS
MAX_STEP, MAX_STEPS = 1 << 40, 256
UNUSUAL = 0.05
"""How far recorded steps may lie from the others, by their medians, before it is said."""

RECORDED = "timeline"
"""What steps.jsonl calls the way in which a recorded step ran."""


def is_run(path: Path) -> bool:
    """Whether the path is a folder that `claw-plan run` wrote."""
    return path.is_dir() and (path / TIMELINE).is_file()


Spans = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class _Laid:
    """A recorded step: where it begins among the others, and its length where a clock tells."""

    number: int
    begin_ns: int
    lasted_ns: int


def read_timeline_members(
    members: Iterable[tuple[str, Any]], source: str, lasted_ns: Mapping[int, int] | None = None
) -> list[RankTrace]:
    """All ranks of the timeline. Raises InputError for what is no timeline.

    `lasted_ns` is the length of steps by rank 0's clock. Spans of no step are of one step, 0.
    """
    rows: dict[int, Spans] = {}
    broken = 0
    for count, (key, span) in enumerate(members):
        if key != SPANS:
            continue
        if count > MAX_SPANS:
            raise InputError(f"{source} has more than {MAX_SPANS:,} spans; record fewer steps")
        if _is_span(span):
            rows.setdefault(span["rank"], []).append(span)
        else:
            broken += 1
    if not rows:
        raise InputError(
            f"{source} holds no recorded step; a run records one when it has 3 steps or more"
        )
    said = [f"{broken} spans are broken: left out"] if broken else []
    world = max(rows) + 1
    peers = _Peers(rows)
    steps = _lay(rows, lasted_ns or {}, source)
    return [
        _rank_trace(rank, rows[rank], steps, world, source, said, peers) for rank in sorted(rows)
    ]


def _lay(rows: Mapping[int, Spans], lasted_ns: Mapping[int, int], source: str) -> list[_Laid]:
    """The steps one after the other, each as long as its last span or its clock says."""
    ends: dict[int, int] = {}
    for spans in rows.values():
        for span in spans:
            number = span.get(STEP, 0)
            ends[number] = max(ends.get(number, 1), span["end_ns"])
    if len(ends) > MAX_STEPS:
        raise InputError(f"{source} has more than {MAX_STEPS} steps; record fewer")
    laid, time_ns = [], 0
    for number in sorted(ends):
        lasted = lasted_ns.get(number, 0)
        laid.append(_Laid(number, time_ns, lasted))
        time_ns += max(ends[number], lasted)
    return laid


class _Peers:
    """Who sends to whom: the n-th rank of a stage to the n-th of the next, and back."""

    def __init__(self, rows: Mapping[int, Spans]) -> None:
        self._stage_of: dict[int, int] = {}
        self._waited = {
            span["name"].removeprefix(WAIT)
            for spans in rows.values()
            for span in spans
            if span["name"].startswith(WAIT)
        }
        for rank, spans in sorted(rows.items()):
            own = [found for span in spans if (found := ACTION.match(span["name"]))]
            if own:
                self._stage_of[rank] = int(own[0][1])
        self._ranks: dict[int, list[int]] = {}
        for rank, stage in self._stage_of.items():
            self._ranks.setdefault(stage, []).append(rank)

    def sender(self, rank: int, action: str) -> int | None:
        """The rank whose result the action waits for."""
        found = ACTION.match(action)
        return self._at(rank, -1 if found[2] == "F" else 1) if found else None

    def message(self, rank: int, action: str) -> tuple[str, int] | None:
        """The action that waits for this one's result, and its rank."""
        found = ACTION.match(action)
        if found is None:
            return None
        step = 1 if found[2] == "F" else -1
        name, peer = f"{int(found[1]) + step}{found[2]}{found[3]}", self._at(rank, step)
        return (name, peer) if name in self._waited and peer is not None else None

    def _at(self, rank: int, step: int) -> int | None:
        stage = self._stage_of.get(rank)
        if stage is None:
            return None
        place, there = self._ranks[stage].index(rank), self._ranks.get(stage + step, [])
        return there[place] if place < len(there) else None


def _is_span(span: object) -> bool:
    if not isinstance(span, dict):
        return False
    start, end, rank = (span.get(key, -1) for key in ("start_ns", "end_ns", "rank"))
    return (
        all(type(one) is int for one in (start, end, rank))
        and 0 <= rank < MAX_RANKS
        and 0 <= start <= end < LAST_NS
        and type(span.get(STEP, 0)) is int
        and 0 <= span.get(STEP, 0) < MAX_STEP
        and all(isinstance(span.get(key), str) for key in ("kind", "name", "stream"))
    )


def _rank_trace(
    rank: int,
    spans: Spans,
    laid: Sequence[_Laid],
    world: int,
    source: str,
    said: list[str],
    peers: _Peers,
) -> RankTrace:
    by_step: dict[int, Spans] = {}
    for span in spans:
        by_step.setdefault(span.get(STEP, 0), []).append(span)
    names: dict[str, int] = {}
    rows: list[tuple[int, int, str, str, int]] = []
    messages: list[Collective] = []
    steps = []
    for step in laid:
        own = [_moved(span, step.begin_ns) for span in by_step.get(step.number, [])]
        rows += _computation(own, names)
        messages += _messages(own, rank, peers)
        end_ns = max((span["end_ns"] for span in own), default=0)
        end_ns = max(end_ns, step.begin_ns + max(1, step.lasted_ns))
        steps.append(Step(number=step.number, start_ns=step.begin_ns, end_ns=end_ns))
    return RankTrace(
        source=source,
        rank=rank,
        world_size=world,
        device="",
        is_gpu=False,
        has_timing=True,
        activities=activities(rows, tuple(names)),
        collectives=tuple(sorted(messages, key=lambda one: one.start_ns)),
        steps=tuple(steps),
        warnings=tuple(said),
    )


def _moved(span: dict[str, Any], by_ns: int) -> dict[str, Any]:
    return span | {"start_ns": span["start_ns"] + by_ns, "end_ns": span["end_ns"] + by_ns}


def _computation(spans: Spans, names: dict[str, int]) -> Iterator[tuple[int, int, str, str, int]]:
    for span in spans:
        if span["kind"] not in COMM_KINDS:
            kind, phase = _kind_and_phase(span["kind"])
            name = names.setdefault(span["name"], len(names))
            yield span["start_ns"], span["end_ns"], kind, phase, name


def _messages(spans: Spans, rank: int, peers: _Peers) -> Iterator[Collective]:
    for span in spans:
        if span["kind"] in COMM_KINDS:
            yield _collective(span, peers, rank)
        if sent := peers.message(rank, span["name"]):
            yield _sent(span["end_ns"], *sent)


def _kind_and_phase(kind: str) -> tuple[str, str]:
    if kind in ("forward", "backward"):
        return kind, kind
    if kind == "recompute":
        return "recompute", "backward"
    return ("optimizer", "optimizer") if kind == "optimizer" else ("host", "other")


def _collective(span: dict[str, Any], peers: _Peers, rank: int) -> Collective:
    size, group = span.get("bytes"), span.get("group")
    ranks = group if isinstance(group, list) and all(type(r) is int for r in group) else []
    action = span["name"].removeprefix(WAIT) if span["name"].startswith(WAIT) else ""
    return Collective(
        op="recv" if action else span["name"],
        bytes=size if type(size) is int and 0 < size < MAX_BYTES else None,
        group_size=2 if action else len(ranks) or None,
        ranks=tuple(ranks),
        group=action,
        start_ns=span["start_ns"],
        end_ns=span["end_ns"],
        issue_ns=span["start_ns"],
        stream=span["stream"],
        backend="gloo",
        peer=peers.sender(rank, action) if action else None,
    )


def _sent(time_ns: int, action: str, peer: int) -> Collective:
    """What a stage sends on when it has computed; the sender does not wait for it."""
    return Collective(
        op="send",
        bytes=None,
        group_size=2,
        ranks=(),
        group=action,
        start_ns=time_ns,
        end_ns=time_ns,
        issue_ns=time_ns,
        stream="send",
        backend="gloo",
        peer=peer,
    )


def recorded_steps_ns(folder: Path) -> dict[int, int]:
    """How long a run's recorded steps took by rank 0's clock; empty where nothing tells."""
    try:
        lines = (folder / STEPS).read_text(encoding="utf-8").splitlines()[:100_000]
    except (OSError, UnicodeDecodeError):
        return {}
    found = {}
    for line in lines:
        try:
            step = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(step, dict) and step.get("way") == RECORDED and _is_ms(step):
            found[step[STEP]] = round(step["step_time_ms"] * NS_PER_MS)
    return found


def _is_ms(step: dict[str, Any]) -> bool:
    time = step.get("step_time_ms")
    is_time = isinstance(time, int | float) and math.isfinite(time) and 0 < time < MOST_MS
    return is_time and type(step.get(STEP)) is int


def usual_step_ns(folder: Path) -> int | None:
    """The median of the run's other steps; None where nothing tells."""
    try:
        result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
        time = result["step_time_ms"]["median"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    is_time = isinstance(time, int | float) and math.isfinite(time) and 0 < time < MOST_MS
    return round(time * NS_PER_MS) if is_time else None


def unusual(recorded_ns: Iterable[int], usual_ns: int | None) -> tuple[str, ...]:
    """A sentence if the recorded steps do not stand for the others."""
    times = list(recorded_ns)
    if usual_ns is None or not times:
        return ()
    typical_ns = statistics.median_low(times)
    if abs(typical_ns / usual_ns - 1) <= UNUSUAL:
        return ()
    which = (
        "the recorded step" if len(times) == 1 else f"the median of {len(times)} recorded steps"
    )
    return (
        f"{which} took {typical_ns / NS_PER_MS:.4g} ms, but the run's median step "
        f"{usual_ns / NS_PER_MS:.4g} ms: the machine was disturbed, or recording was",
    )
