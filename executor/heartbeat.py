"""Signs of life: every rank tells the others where it is, and all end when one is gone.

A thread of each rank writes a `Beat` into the shared store several times a second and looks
whether a reason to end stands there. Rank 0 watches all others, they watch rank 0, and whoever
sees one silent for the timeout writes that reason; so all end, also where no launcher of ours
watches. A rank that loses its connection first asks the beats whose fault it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch
from torch.distributed import DistError, Store  # type: ignore[attr-defined]

from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.job import Note, Progress
from claw_plan.executor.rendezvous import ranks_text

BEAT_S = 0.2
"""So often a rank tells where it is, and when a step begins."""

_SHORTEST_BEAT_S = 0.02

SEARCH_S = 0.6
"""So long a rank looks for whose fault its lost connection is: whoever misses two beats."""

LEAVE_TIMEOUT = timedelta(seconds=10)

REASON = "reason"
"""The store's key of why all end."""

STOPPED = "stopped"
"""The store's key of the signal for which the ranks ended early, all together."""

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


@dataclass(frozen=True, kw_only=True)
class Beat:
    """Where a rank is. `where` is the line of somebody's code that it executes: the model's, the
    data's; empty inside torch, where it may wait for others, and in this package.
    """

    rank: int
    step: int
    phase: str
    where: str

    @property
    def when(self) -> str:
        """'at step 7', or 'while building the model' before the first step."""
        return f"at step {self.step}" if self.step else f"while {self.phase}"


def _key(rank: int) -> str:
    return f"beat/{rank}"


class Watcher:
    """Watches the beats of some ranks. `look` is called again and again."""

    def __init__(self, store: Store, ranks: Iterable[int]) -> None:
        self._store, self._unheard = store, list(ranks)
        self._last: dict[int, tuple[bytes, float]] = {}
        self.beats: dict[int, Beat] = {}

    def look(self) -> None:
        """Notes which beats are new."""
        new = [rank for rank in self._unheard if self._store.check([_key(rank)])]
        if new:
            self._unheard = [rank for rank in self._unheard if rank not in new]
        heard = [*self._last, *new]
        values = self._store.multi_get([_key(rank) for rank in heard]) if heard else []
        now = time.monotonic()
        for rank, value in zip(heard, values, strict=True):
            if self._last.get(rank, (b"", 0.0))[0] != value:
                self._last[rank] = (value, now)
                _, step, phase, where = json.loads(value)
                self.beats[rank] = Beat(rank=rank, step=step, phase=phase, where=where)

    def silent(self, seconds: float) -> list[int]:
        """Ranks that once told a beat, then none for so long, and did not take their leave."""
        limit = time.monotonic() - seconds
        late = [rank for rank, (_, seen) in self._last.items() if seen < limit]
        return [rank for rank in late if not self._store.check([f"bye/{rank}"])]


def give_reason(store: Store, note: Note) -> Note:
    """Writes why all end, unless a reason stands there already; answers with the one that does."""
    mine = note.text()
    return Note.parse(bytes(store.compare_set(REASON, "", mine)).decode())


def reason_in(store: Store) -> Note | None:
    """Why all end; None while nothing is wrong."""
    return Note.parse(store.get(REASON).decode()) if store.check([REASON]) else None


def lost_connection(error: BaseException) -> bool:
    """Whether the error only says that some other rank is gone or late.

    An interrupt too: torchrun ends the others so when one has died.
    """
    text = str(error)
    return isinstance(error, DistError | KeyboardInterrupt) or (
        isinstance(error, RuntimeError) and any(name in text for name in ("gloo", "NCCL"))
    )


def guilty(
    beats: Mapping[int, Beat], silent: Iterable[int], timed_out: bool
) -> tuple[list[int], str]:
    """Who keeps the others waiting, and how that is known; nobody when the beats do not tell."""
    gone = sorted(silent)
    if gone:
        return gone, "is gone or stopped" if len(gone) == 1 else "are gone or stopped"
    if not timed_out:
        return [], ""
    busy = [beat for beat in beats.values() if beat.where]
    if busy:
        slowest = min(busy, key=lambda beat: beat.step)
        return [slowest.rank], f"is stuck in {slowest.where}"
    first = min((beat.step for beat in beats.values()), default=0)
    behind = [rank for rank, beat in beats.items() if beat.step == first]
    if 0 < len(behind) < len(beats):
        return behind, "did not get as far as the others"
    return [], ""


class Heart(threading.Thread):
    """The thread. `end` is called with the reason once there is one; it ends the process."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        progress: Progress,
        timeout_s: float,
        end: Callable[[Note], None],
    ) -> None:
        super().__init__(name="claw-plan-heart", daemon=True)
        # One client answers one question at a time, and torch's own may wait long.
        self._store = store.clone()  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=timeout_s))
        self._rank, self._progress, self._end = rank, progress, end
        self._timeout_s, self._world_size = timeout_s, world_size
        watched = range(1, world_size) if rank == 0 else [0]
        self._watcher = Watcher(self._store, watched)
        self._main = threading.main_thread().ident
        self._count = 0
        self._over, self._wake = threading.Event(), threading.Event()
        progress.on_step = self._wake.set
        progress.explain = self.explain

    def run(self) -> None:
        """Beats until stopped; then the process ends, or the work is done."""
        try:
            while not self._over.wait(_SHORTEST_BEAT_S):
                self._beat()
                self._watcher.look()
                if silent := self._watcher.silent(self._timeout_s):
                    give_reason(self._store, self._silence(silent))
                if reason := reason_in(self._store):
                    self._end(reason)
                    return
                self._wake.wait(BEAT_S - _SHORTEST_BEAT_S)
                self._wake.clear()
        except DistError:
            if not self._over.is_set():
                self._end(self._lost_store())

    def stop(self) -> None:
        """The work is done."""
        self._over.set()
        self._wake.set()
        self.join(BEAT_S * 10)

    def explain(self, note: Note, error: BaseException) -> Note:
        """Of an error of this rank: the reason for all, with who is at fault where beats tell."""
        if not lost_connection(error):
            return give_reason(self._store, note)
        watcher = Watcher(self._store, range(self._world_size))
        deadline = time.monotonic() + SEARCH_S
        while time.monotonic() < deadline:
            watcher.look()
            if reason := reason_in(self._store):
                return reason
            time.sleep(BEAT_S / 4)
        silent = watcher.silent(2 * BEAT_S)
        others = {rank: beat for rank, beat in watcher.beats.items() if rank != self._rank}
        ranks, why = guilty(others, silent, "imed out" in note.error)
        if ranks:
            beat = watcher.beats[ranks[0]]
            text = f"{ranks_text(ranks)} {why} {beat.when}; rank {self._rank} says: {note.error}"
            note = dataclasses.replace(
                note, rank=ranks[0], step=beat.step, error=text, is_ours=True
            )
        return give_reason(self._store, note)

    def _silence(self, ranks: Sequence[int]) -> Note:
        beat = self._watcher.beats[ranks[0]]
        text = f"{ranks_text(ranks)} gave no sign of life for {self._timeout_s:g} s {beat.when}"
        return Note.of(ExecutionError(text), ranks[0], beat.step)

    def _lost_store(self) -> Note:
        step = self._progress.step
        text = (
            "what held the ranks together is gone (rank 0, torchrun, or the launcher); rank "
            f"{self._rank} was at step {step}"
        )
        return Note.of(ExecutionError(text), self._rank, step)

    def _beat(self) -> None:
        self._count += 1
        frame = sys._current_frames().get(self._main or 0)
        progress = self._progress
        value = [self._count, progress.step, progress.phase, foreign_line(frame)]
        self._store.set(_key(self._rank), json.dumps(value))


def foreign_line(frame: FrameType | None) -> str:
    """'data.py:31 (load)' when the innermost Python frame is neither torch's nor ours."""
    if frame is None or frame.f_code.co_filename.startswith(_LIBRARIES):
        return ""
    code = frame.f_code
    return f"{Path(code.co_filename).name}:{frame.f_lineno} ({code.co_name})"


@contextmanager
def beating(
    store: Store,
    rank: int,
    world_size: int,
    progress: Progress,
    timeout_s: float,
    end: Callable[[Note], None],
) -> Iterator[None]:
    """A Heart that beats meanwhile; after work that ended well the others do not miss it."""
    if world_size == 1:
        yield
        return
    heart = Heart(store, rank, world_size, progress, timeout_s, end)
    heart.start()
    yield
    heart.stop()
    _take_leave(store, rank, world_size)


def _take_leave(store: Store, rank: int, world_size: int) -> None:
    """Says that this rank's work is done; rank 0, which may hold the store, is the last to go."""
    with contextlib.suppress(DistError):
        store.set(f"bye/{rank}", "")
        if rank == 0:
            store.wait([f"bye/{other}" for other in range(world_size)], LEAVE_TIMEOUT)


def end_process(note: Note) -> None:
    """What a rank does that learns why all end."""
    print(f"claw-plan: {note.error}", file=sys.stderr, flush=True)
    os._exit(2)
