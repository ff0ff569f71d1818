"""Paths of recordings become `RankTrace`s; the reader is chosen by what a file holds.

A path is a file, a tar of ranks, a folder of files, or a folder that `claw-plan run` wrote. Every
rank must be known and occur once: what a trace does not tell is taken from its file's name, or
asked for.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from claw_plan.executor.trace_readers.chakra import NODES, read_execution_trace
from claw_plan.executor.trace_readers.json_stream import EMPTY, stream_members
from claw_plan.executor.trace_readers.kineto import read_kineto
from claw_plan.executor.trace_readers.nsight import SQLITE_MAGIC, read_nsight
from claw_plan.executor.trace_readers.rank_trace import RankTrace
from claw_plan.executor.trace_readers.run_timeline import (
    SPANS,
    TIMELINE,
    is_run,
    read_timeline_members,
    recorded_steps_ns,
    unusual,
    usual_step_ns,
)
from claw_plan.executor.trace_readers.source import Recording, open_recordings
from claw_plan.profiles.errors import InputError

EVENTS = "traceEvents"
RANK_IN_NAME = re.compile(r"(?:rank|worker|trainer)[-_.]?(\d{1,6})(?!\d)", re.IGNORECASE)
MAX_HEAD = 10_000
"""Members of a trace before its events; the largest known has twelve."""


def read_traces(paths: Sequence[Path], ranks: Sequence[int] = ()) -> tuple[RankTrace, ...]:
    """All recordings, in order of rank. `ranks` are for those that do not tell theirs, in order.

    Raises InputError for a file that cannot be read, a rank that nothing tells, or one that two
    recordings claim.
    """
    given = iter(ranks)
    found: dict[int, RankTrace] = {}
    single: list[RankTrace] = [trace for path in paths for trace in _of_path(path)]
    for trace in single:
        known = _believable(_with_rank(trace, given, alone=len(single) == 1))
        assert known.rank is not None
        if known.rank in found:
            raise InputError(
                f"{known.source} and {found[known.rank].source} both are rank {known.rank}; name "
                "the recordings of one run, one a rank"
            )
        found[known.rank] = known
    left = len(list(given))
    if left:
        raise InputError(
            f"--rank is given {len(ranks)} times, but only {len(ranks) - left} of the recordings "
            "lack theirs; leave it out where the trace tells it"
        )
    if not found:
        raise InputError("no recording was named; name trace files or a folder of them")
    return tuple(found[rank] for rank in sorted(found))


def _with_rank(trace: RankTrace, given: Iterator[int], *, alone: bool) -> RankTrace:
    if trace.rank is not None:
        return trace
    own = next(given, None)
    if own is None and (in_name := RANK_IN_NAME.search(trace.source.rsplit("/", 1)[-1])):
        own = int(in_name[1])
    if own is not None:
        return replace(trace, rank=own)
    if alone and not trace.collectives:
        said = "it does not tell its rank and has no collectives: taken as the only process"
        return replace(trace, rank=0, world_size=1, warnings=(*trace.warnings, said))
    raise InputError(
        f"{trace.source} does not say which rank it is (no distributedInfo in it); say it with "
        "--rank N, or put it into the file's name, as in rank3.json"
    )


def _believable(trace: RankTrace) -> RankTrace:
    """The trace without a world size that its own rank contradicts."""
    if trace.world_size is None or trace.rank is None or trace.rank < trace.world_size:
        return trace
    said = f"it calls itself rank {trace.rank} of {trace.world_size}: their number is not believed"
    return replace(trace, world_size=None, warnings=(*trace.warnings, said))


def _of_path(path: Path) -> Iterator[RankTrace]:
    if is_run(path):
        yield from _of_run(path)
        return
    for recording in open_recordings(path):
        yield from _of_recording(recording)


def _of_run(folder: Path) -> Iterator[RankTrace]:
    """The recorded steps, as long as the run's own clock says."""
    lasted_ns = recorded_steps_ns(folder)
    said = unusual(lasted_ns.values(), usual_step_ns(folder))
    for recording in open_recordings(folder / TIMELINE):
        named = recording._replace(name=str(folder / TIMELINE))
        for trace in _of_recording(named, lasted_ns):
            yield replace(trace, warnings=(*trace.warnings, *said))


def _of_recording(
    recording: Recording, lasted_ns: Mapping[int, int] | None = None
) -> list[RankTrace]:
    name = recording.name
    head = recording.file.peek(16)[:16] if hasattr(recording.file, "peek") else b""
    if head.startswith(SQLITE_MAGIC):
        if recording.path is None:
            raise InputError(f"{name} is a database inside an archive; unpack it first")
        return read_nsight(recording.path, name)
    if name.endswith((".nsys-rep", ".qdrep")):
        raise InputError(
            f"{name} is Nsight Systems' own format; export it with nsys export --type sqlite"
        )
    if name.endswith(".et"):
        raise InputError(
            f"{name} is a Chakra trace in protobuf; name the JSON it was converted from"
        )
    members = stream_members(recording.file, name, (EVENTS, NODES, SPANS))
    head_members: list[tuple[str, Any]] = []
    for key, value in members:
        head_members.append((key, value))
        if key in (EVENTS, NODES, SPANS) or len(head_members) > MAX_HEAD:
            break
    items = itertools.chain(head_members, members)
    everything = ((name, value) for name, value in items if value is not EMPTY)
    key = head_members[-1][0] if head_members else ""
    if key == EVENTS:
        return [read_kineto(everything, name)]
    if key == NODES:
        return [read_execution_trace(everything, name)]
    if key == SPANS:
        return read_timeline_members(everything, name, lasted_ns)
    raise InputError(
        f"{name} has neither traceEvents (PyTorch profiler), nodes (execution trace) nor spans "
        "(claw-plan run); name a recording of a training run"
    )
