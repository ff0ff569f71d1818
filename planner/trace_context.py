"""The graph of one of `cp` ranks that hold a part of every sequence.

The model is traced once more with its sequence divided and stand-ins for the collectives, so that
its operators, saved tensors and exchanges are those of a rank; every degree has a graph of its
own. In the trace causal attention of balanced chunks is one kernel of the same work.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch.nn as nn

from claw_plan.planner.context_parallel import divide_context
from claw_plan.planner.context_parallel_ranks import ContextStandIn
from claw_plan.planner.errors import PlanError, TraceError
from claw_plan.planner.graph import ModelGraph
from claw_plan.planner.model_source import LoadedModel
from claw_plan.planner.subject import Around, Exchanged, Subject
from claw_plan.planner.trace import Progress, trace


def trace_context(
    model: LoadedModel,
    *,
    seq_len: int | None,
    dtype: str,
    cp: int,
    kind: str,
    progress: Progress | None = None,
) -> ModelGraph:
    """The graph of a rank; raises PlanError where the model's sequence cannot be divided so."""
    graph = partial(trace, model, seq_len=seq_len, dtype=dtype, progress=progress)
    if cp == 1:
        return graph()
    try:
        divided = graph(around=partial(_around, cp, kind))
    except (PlanError, TraceError) as error:
        raise PlanError(f"no context parallelism in this model at cp={cp}: {error}") from error
    return replace(divided, cp=cp, cp_comm_type=kind)


def _around(cp: int, kind: str, subject: Subject) -> Around:
    @contextmanager
    def around(module: nn.Module, exchanged: Exchanged) -> Iterator[None]:
        ranks = ContextStandIn(cp, exchange=lambda op, size: exchanged(op, size, "", "cp"))
        divided = divide_context(module, subject.blocks, kind, ranks, is_planned=True)
        try:
            yield
        finally:
            divided.remove()

    return around
