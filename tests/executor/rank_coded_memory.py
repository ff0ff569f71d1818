"""The most memory of rank 0 of 4 in a step whose gradients travel as codes.

Started by tests as `python rank_coded_memory.py OUT PLAN...`; writes a JSON list: of each plan the
most bytes of tensors that were alive at once in its third step, and what error feedback keeps.

torch's fake process group makes every collective return at once, so that one process is enough.
It leaves alone what it should receive into, so what fully_shard gathers is whatever lay in memory:
a rank receives its own codes here, and the optimizer steps also where gradients are no numbers.
"""

from __future__ import annotations

import gc
import json
import sys
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from claw_plan.executor.batches import ExampleSource, own_slice
from claw_plan.executor.communication import reducer
from claw_plan.executor.opened_plan import open_plan
from claw_plan.executor.parallel_model import compile_plan
from claw_plan.executor.reference import without_dropout
from claw_plan.executor.replica_exchange import Exchange

WARM = 2
"""Steps until the optimizer and error feedback have made all that they keep."""


class LivePeak(TorchDispatchMode):
    """The most bytes of storages that were alive after any operator, those of `before` left out.

    Storages are asked for their size each time, for fully_shard gives memory back by resizing.
    """

    def __init__(self, before: weakref.WeakSet[torch.UntypedStorage]) -> None:
        super().__init__()
        self._before = before
        self._alive: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self.peak_bytes = 0
        self._add(existing())

    def _add(self, tensors: Iterable[object]) -> bool:
        """Whether some are new."""
        count = len(self._alive)
        for storage in storages(tensors):
            if storage not in self._before:
                self._alive.add(storage)
        return len(self._alive) > count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if self._add(tree_leaves(found)):
            self.peak_bytes = max(self.peak_bytes, sum(s.nbytes() for s in self._alive))
        return found


def storages(tensors: Iterable[object]) -> Iterable[torch.UntypedStorage]:
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            inner = getattr(tensor, "_local_tensor", tensor)
            try:
                yield inner.untyped_storage()
            except (NotImplementedError, RuntimeError):  # a wrapper without memory of its own
                continue


def existing() -> list[torch.Tensor]:
    gc.collect()
    # Not isinstance: some objects of torch warn when they are asked for their class.
    return [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]


def found_of(path: Path) -> dict[str, Any]:
    before: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
    for storage in storages(existing()):
        before.add(storage)
    plan, loaded = open_plan(path)
    compiled = compile_plan(plan, without_dropout(loaded), torch.device("cpu"))
    source = ExampleSource(plan, loaded)
    rows = compiled.mesh.data_index, compiled.knobs.dp
    for step in range(WARM):
        compiled.train_step(own_slice(source.global_batch(step), *rows))
    peak, batch = LivePeak(before), own_slice(source.global_batch(WARM), *rows)
    with peak:
        compiled.train_step(batch)
    state = compiled.exchange.state.rank_state() if compiled.exchange is not None else {}
    residuals = sum(value.nbytes for name, value in state.items() if "residual" in name)
    return {"peak_bytes": peak.peak_bytes, "residual_bytes": residuals}


def exchanged(
    came: torch.Tensor, sent: torch.Tensor, *sizes: object, group: dist.ProcessGroup
) -> None:
    """In place of all_to_all_single."""
    came.copy_(sent[: came.numel()])


def gathered(
    whole: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup, *, async_op: bool = False
) -> None:
    """In place of all_gather_single."""
    if own.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
        whole.view(-1, own.numel()).copy_(own.view(1, -1))


class AtOnce:
    """In place of the thread in which replicas take means: a dispatch mode sees its own alone."""

    def __init__(self, *about: object) -> None:
        pass

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(call(*args))
        return done


def main(out: Path, plans: list[Path]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    dist.all_to_all_single, dist.all_gather_single = exchanged, gathered
    reducer.ThreadPoolExecutor = AtOnce  # type: ignore[misc,assignment]
    Exchange.takes_step = lambda exchange: True  # type: ignore[method-assign]
    out.write_text(json.dumps([found_of(path) for path in plans]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [*map(Path, sys.argv[2:])])
