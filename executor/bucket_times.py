"""Steps of a model that train nothing become the ready times of its gradients, and what follows.

`planner.bucket_plan` and `bucket_order` cut and order buckets by them. A run of `claw-plan`
records them at its end, beside the traffic of its own buckets; the profile that learns from it
keeps them for planning (`planner.gradient_times`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn as nn

from claw_plan.executor.errors import ExecutionError
from claw_plan.planner.bucket_order import NextStep
from claw_plan.planner.bucket_plan import Gradients

if TYPE_CHECKING:
    from claw_plan.executor.parallel_model import ParallelModel

REPEATS = 3
"""Steps of a run's end whose median counts."""

Backward = Callable[[], object]
"""Forward and backward of the module without any synchronisation of gradients."""


def record_ready(
    module: nn.Module, backward: Backward, repeats: int, group: dist.ProcessGroup | None = None
) -> Gradients:
    """When each gradient is complete after a call begins, last parameter to first; medians.

    Of several ranks the latest counts, because a bucket meets all of them; all ranks of `group`
    call this. Gradients are left cleared. Raises ExecutionError when one never comes.
    """
    trained = [(n, p) for n, p in module.named_parameters() if p.requires_grad][::-1]
    seen: dict[int, list[int]] = {id(parameter): [] for _, parameter in trained}
    start_ns = 0

    def note(parameter: torch.Tensor) -> None:
        seen[id(parameter)].append(time.perf_counter_ns() - start_ns)

    handles = [p.register_post_accumulate_grad_hook(note) for _, p in trained]
    try:
        for _ in range(repeats):
            module.zero_grad()
            start_ns = time.perf_counter_ns()
            backward()
    finally:
        module.zero_grad()
        for handle in handles:
            handle.remove()
    missing = next((name for name, p in trained if not seen[id(p)]), None)
    if missing is not None:
        raise ExecutionError(f"no backward reached {missing}, so it is never ready")
    ready = [int(statistics.median(seen[id(parameter)])) for _, parameter in trained]
    return Gradients(
        ready_ns=tuple(_latest(ready, group)), numels=tuple(p.numel() for _, p in trained)
    )


def _latest(ready_ns: Sequence[int], group: dist.ProcessGroup | None) -> list[int]:
    if group is None:
        return [*ready_ns]
    latest = torch.tensor(ready_ns, dtype=torch.int64)
    dist.all_reduce(latest, op=dist.ReduceOp.MAX, group=group)
    return [int(value) for value in latest.tolist()]


def record_next(
    module: nn.Module,
    backward: Backward,
    update: Callable[[], object],
    repeats: int,
    group: dist.ProcessGroup | None = None,
) -> NextStep:
    """When a forward needs each parameter, last to first, and what an optimizer's step takes.

    A parameter is needed where the first module that holds it is entered; `update` is shared out
    by elements. Medians, of several ranks the latest; gradients are left cleared.
    """
    trained = [p for p in module.parameters() if p.requires_grad][::-1]
    entered: dict[int, list[int]] = {id(parameter): [] for parameter in trained}
    forwards, updates, start_ns, count = list[int](), list[int](), 0, 0

    def enter(held: nn.Module, *_: object) -> None:
        for parameter in held.parameters(recurse=False):
            times = entered.get(id(parameter), [])
            if len(times) == count:
                times.append(time.perf_counter_ns() - start_ns)

    def leave(*_: object) -> None:
        forwards.append(time.perf_counter_ns() - start_ns)

    handles = [held.register_forward_pre_hook(enter) for held in module.modules()]
    handles.append(module.register_forward_hook(leave))
    try:
        for count in range(repeats):  # noqa: B007 (read by `enter`)
            module.zero_grad()
            start_ns = time.perf_counter_ns()
            backward()
            began_ns = time.perf_counter_ns()
            update()
            updates.append(time.perf_counter_ns() - began_ns)
    finally:
        module.zero_grad()
        for handle in handles:
            handle.remove()
    needed = [int(statistics.median(entered[id(p)] or [0])) for p in trained]
    *told, forward_ns, update_ns = _latest(
        [*needed, int(statistics.median(forwards)), int(statistics.median(updates))], group
    )
    total = sum(p.numel() for p in trained)
    return NextStep(
        needed_ns=tuple(told),
        update_ns=tuple(update_ns * p.numel() // total for p in trained),
        forward_ns=forward_ns,
    )


def record_gradients(
    compiled: ParallelModel, microbatch: Mapping[str, torch.Tensor]
) -> dict[str, int]:
    """When each trained parameter's gradient is complete, by its name, as replicas meet.

    Nothing where something else than whole replicas' gradients meets in backward, or where it may
    miss some. Gradients are left cleared; call it when all is trained and saved.
    """
    knobs, module = compiled.knobs, compiled.module
    is_plain = knobs.reduces_in_backward and knobs.num_devices == knobs.dp_replicate
    is_plain = is_plain and compiled.exchange is None and compiled.overlap is None
    if not is_plain or compiled.unreached or knobs.recompute != "none":
        return {}
    if compiled.plan.training.precision != "float32":
        return {}

    def step() -> None:
        compiled.share_of_loss(module(**microbatch), 1).backward()

    ahead = compiled.next_forward
    with nullcontext() if ahead is None else ahead.step(defers=False):
        found = record_ready(module, step, REPEATS, compiled.mesh.group("dp_replicate"))
    names = {id(parameter): name for name, parameter in compiled.parameters.items()}
    trained = [p for p in module.parameters() if p.requires_grad][::-1]
    return {names[id(p)]: ns for p, ns in zip(trained, found.ready_ns, strict=True)}
