"""Looks at one training step of this rank: what ran when, and how long each piece of work took.

A `StepRecorder` is on for single steps only; the others run untouched. It sees every operator and
every collective through torch's dispatcher:

- always: spans of forward, backward, optimizer and collectives, for the measured Timeline;
- with `times_work`: each kernel's and collective's duration under the key of `profiles.work`
  that the planner asks for. Collectives then start after a barrier, so that waiting for a slower
  rank is not taken for communication. Such a step is slower than others and does not count.

Collectives are waited for where they start, as gloo's are anyway. On a CPU a kernel's duration is
the processor time of its thread, which neither other ranks on the core nor other programs change.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from claw_plan.executor.mesh import NEAR, REPLICATED, SHARDED
from claw_plan.executor.op_keys import collective_of, op_works
from claw_plan.executor.torch_private import TorchDispatchMode
from claw_plan.profiles.work import CollectiveWork, OpWork
from claw_plan.simulator.timeline import Span

COMPUTE, COMMUNICATION = "compute", "communication"

KIND_OF_AXIS = {
    "dp_replicate": "dp_comm", "dp_shard": "dp_comm", NEAR: "dp_comm",
    SHARDED: "dp_comm", REPLICATED: "dp_comm", "tp": "tp_comm", "cp": "tp_comm", "pp": "pp_comm",
}  # fmt: skip
"""Span kinds by the mesh axis whose group communicates."""

MOST_SAMPLES = 32
"""Samples kept of one work on one rank: a step runs some kernels hundreds of times."""


class StepRecorder(TorchDispatchMode):
    """Spans and durations of one step. `axis_of_group` names the mesh axis of each group.

    `meets` are ranks that make the same collectives in the same order, None: a collective's own
    group. They start each together: groups that take turns on a link do not show what they cost
    in a step, where they share it.
    """

    def __init__(
        self,
        rank: int,
        device: torch.device,
        axis_of_group: Mapping[str, str],
        nodes_of_axis: Mapping[str, int],
        *,
        times_work: bool,
        meets: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rank = rank
        self._cuda = device.type == "cuda"
        self._axis_of_group = axis_of_group
        self._nodes_of_axis = nodes_of_axis
        self._times_work = times_work
        self._meets = meets
        self._start_ns = self._now()
        self._open: tuple[str, str, int] | None = None
        self._idle_since_ns = 0
        self.spans: list[Span] = []
        self.samples: dict[OpWork | CollectiveWork, list[int]] = defaultdict(list)

    def _now(self) -> int:
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter_ns()

    def _work_now(self) -> int:
        """The clock of kernels: on a CPU, where a rank has one thread, that thread's own."""
        return self._now() if self._cuda else time.thread_time_ns()

    def now_ns(self) -> int:
        """Time since the step began."""
        return self._now() - self._start_ns

    @contextmanager
    def span(self, kind: str, name: str, *, awaits_peer: bool = False) -> Iterator[None]:
        """A computation; `awaits_peer` when the time since the last one was spent waiting."""
        start = self.now_ns()
        if awaits_peer:
            self._add(COMMUNICATION, "pp_comm", f"wait for {name}", self._idle_since_ns, start)
        self._open = (kind, name, start)
        try:
            yield
        finally:
            self._close()
            self._idle_since_ns = self.now_ns()

    @contextmanager
    def optimizer(self, work: OpWork) -> Iterator[None]:
        """The whole optimizer step, one piece of work. The recorder must not be active."""
        start, work_start = self.now_ns(), self._work_now()
        yield
        end, work_end = self.now_ns(), self._work_now()
        self._add(COMPUTE, "optimizer", work.target, start, end)
        if self._times_work:
            self.samples[work].append(work_end - work_start)

    def _close(self) -> None:
        if self._open is not None:
            kind, name, start = self._open
            self._add(COMPUTE, kind, name, start, self.now_ns())
            self._open = None

    def _add(
        self, stream: str, kind: str, name: str, start_ns: int, end_ns: int, **of_collective: Any
    ) -> None:
        if end_ns > start_ns:
            self.spans.append(
                Span(
                    rank=self._rank,
                    stream=stream,
                    kind=kind,
                    name=name,
                    start_ns=start_ns,
                    end_ns=end_ns,
                    **of_collective,
                )
            )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            return self._collective(func, args, kwargs)
        if not self._times_work or self._open is None:
            return func(*args, **kwargs)
        start = self._work_now()
        out = func(*args, **kwargs)
        duration_ns = self._work_now() - start
        self._sample(op_works(func, args, kwargs, out, self._open[0]), duration_ns)
        return out

    def _sample(self, works: list[OpWork], duration_ns: int) -> None:
        """One call's time; of a call with several kernels each gets its share of the flops."""
        total = sum(work.flops for work in works)
        for work in works:
            share = work.flops / total if total else 1 / len(works)
            kept = self.samples[work]
            if len(kept) < MOST_SAMPLES:
                kept.append(round(duration_ns * share))

    def _collective(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        found = collective_of(func, args)
        axis = self._axis_of_group.get(found.group.group_name) if found else None
        if found is None or axis is None:
            return func(*args, **kwargs)
        interrupted = self._open
        self._close()
        if self._times_work:
            if self._meets is not None:
                dist.barrier(self._meets)
            dist.barrier(found.group)  # ranks of several hosts leave the one before at odds
        start = self.now_ns()
        out = func(*args, **kwargs)
        dist.Work.unbox(out[-1]).wait()
        end = self.now_ns()
        self._add(
            COMMUNICATION,
            KIND_OF_AXIS[axis],
            found.op,
            start,
            end,
            bytes=found.bytes,
            group=tuple(dist.get_process_group_ranks(found.group)),
        )
        if self._times_work:
            self.samples[found.work(self._nodes_of_axis[axis])].append(end - start)
        if interrupted is not None:
            self._open = (*interrupted[:2], end)
        return out
