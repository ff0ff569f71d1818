"""Several works at once, each but the first in a copy of this process.

A plan of a large model waits for a few independent works that hold Python's lock: steps recorded
under one variant and another, times of layouts, runners-up simulated in full. Copies made by
fork share what was traced and read so far, and send back what they found.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Generic, NoReturn, TypeVar

S = TypeVar("S")
T = TypeVar("T")


def side_by_side(works: Sequence[Callable[[], T]]) -> list[T]:
    """The results of `works`, in their order; the first is done here.

    A work that raises in its copy, or whose copy is ended for lack of memory, is done again here
    when its turn comes, so that errors are those of one process. On a single core all are done
    here. What works change is seen here for those alone that are.
    """
    if len(works) < 2 or len(os.sched_getaffinity(0)) < 2:
        return one_by_one(works)
    copies = [_Copy.of(work) for work in works[1:]]
    try:
        return [works[0](), *(copy.result() for copy in copies)]
    finally:
        for copy in copies:
            copy.end()


def one_by_one(works: Sequence[Callable[[], T]]) -> list[T]:
    """The same, for works too short for a process, which takes some 20 ms."""
    return [work() for work in works]


def in_halves(
    work: Callable[[Sequence[S]], list[T]], items: Sequence[S], *, takes_long: bool
) -> list[T]:
    """What `work` makes of each item, each half by a process of its own where it takes long."""
    half = len(items) // 2 if takes_long else len(items)
    parts = [part for part in (items[:half], items[half:]) if part]
    return [*chain.from_iterable(side_by_side([partial(work, part) for part in parts]))]


@dataclass
class _Copy(Generic[T]):
    """A copy of this process; `reader` is where its answer comes from."""

    work: Callable[[], T]
    process: int
    reader: int

    @classmethod
    def of(cls, work: Callable[[], T]) -> _Copy[T]:
        reader, writer = os.pipe()
        process = os.fork()
        if process == 0:
            os.close(reader)
            _answer(work, writer)
        os.close(writer)
        return cls(work, process, reader)

    def result(self) -> T:
        with os.fdopen(self.reader, "rb", closefd=False) as stream:
            answer = stream.read()
        if not answer:
            return self.work()
        result: T = pickle.loads(answer)
        return result

    def end(self) -> None:
        """Leaves nothing behind, whether the answer was wanted or not."""
        os.close(self.reader)
        os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)


def _answer(work: Callable[[], Any], writer: int) -> NoReturn:
    """In the copy: writes the result, or nothing where the work raises, and ends."""
    # Cycles made so far are no business of the copy: looking at them would copy their pages.
    gc.freeze()
    # The threads of this process are not in the copy, and OpenMP would wait for them for ever.
    import torch

    torch.set_num_threads(1)
    try:
        answer = pickle.dumps(work())
        with os.fdopen(writer, "wb") as stream:
            stream.write(answer)
    finally:
        os._exit(0)
