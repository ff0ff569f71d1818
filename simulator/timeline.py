"""`Timeline`: what happened when, simulated or measured.

One type for both, so that a prediction error is a difference of two Timelines. The simulator
makes SIMULATED ones from a TaskGraph and its finish times; the executor's recorder makes
MEASURED ones; the report and the Perfetto export read either.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

SIMULATED, MEASURED = "simulated", "measured"

SPAN_KINDS = (
    "forward",
    "backward",
    "recompute",
    "optimizer",
    "tp_comm",
    "dp_comm",
    "pp_comm",
    "other",
)


class Span(NamedTuple):
    """One task on one stream of one rank. `cost_source` says what a simulated time rests on.

    A measured collective has the `bytes` of its full buffer and the ranks of its `group`. A tuple,
    since a step has tens of thousands and a tuple is made three times as fast.
    """

    rank: int
    stream: str
    kind: str
    name: str
    start_ns: int
    end_ns: int
    cost_source: str = ""
    bytes: int = 0
    group: tuple[int, ...] = ()

    @property
    def duration_ns(self) -> int:
        """End less start."""
        return self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySample:
    """Bytes in use on a rank from `time_ns` on."""

    rank: int
    time_ns: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One training step. Time 0 is its start on every rank; spans are ordered by start."""

    origin: str
    spans: tuple[Span, ...]
    memory: tuple[MemorySample, ...] = ()

    def __post_init__(self) -> None:
        if self.origin not in (SIMULATED, MEASURED):
            raise ValueError(f"origin is {SIMULATED!r} or {MEASURED!r}, but got {self.origin=}")

    @property
    def step_time_ns(self) -> int:
        """When the last span ends."""
        return max((span.end_ns for span in self.spans), default=0)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have spans, in order."""
        return tuple(sorted({span.rank for span in self.spans}))

    def busy_ns(self, rank: int, kinds: Iterable[str]) -> int:
        """Time in which at least one span of these kinds runs on the rank."""
        chosen = set(kinds)
        intervals = sorted(
            (span.start_ns, span.end_ns)
            for span in self.spans
            if span.rank == rank and span.kind in chosen
        )
        busy = reached = 0
        for start, end in intervals:
            busy += max(0, end - max(start, reached))
            reached = max(reached, end)
        return busy

    def peak_memory_bytes(self, rank: int) -> int:
        """The largest sample of the rank; 0 when memory was not recorded."""
        return max((sample.bytes for sample in self.memory if sample.rank == rank), default=0)
