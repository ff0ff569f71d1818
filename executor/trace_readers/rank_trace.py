"""`RankTrace`: what one rank did while it was recorded, whatever tool recorded it.

Computation is kept in columns, for a trace has millions of kernels; collectives, far fewer, are
objects. Times are nanoseconds of one clock, which other ranks need not share.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from claw_plan.profiles.work import OpWork

Int = NDArray[np.int64]

KINDS = ("gemm", "attention", "conv", "memory", "optimizer", "copy", "host", "forward",
         "backward", "recompute", "input")  # fmt: skip
"""Classes of computation. `memory` is all that is bound by bytes (element-wise, norms, reductions,
embeddings), `copy` moves between host and device, `host` is a CPU's bookkeeping, `input` is the
data loader. Of a recording that tells only the pass, that is the class."""

PHASES = ("forward", "backward", "optimizer", "other")

_KIND_PATTERNS = (
    ("host", r"^autograd::engine|accumulategrad$|backward0$"),
    ("copy", r"^memcpy|^memset|copydevicetohost|aten::pin_memory"),
    ("input", r"dataloader|^aten::_?pin"),
    ("attention", r"flash|fmha|scaled_dot_product|attention|sdpa|attn"),
    ("optimizer", r"multi_tensor_apply|fused_?adam|adamw?_|lamb_|_foreach_addc|optimizer"),
    ("conv", r"conv(?!ert)|fprop|dgrad|wgrad|winograd|miopen"),
    (
        "gemm",
        r"gemm|gemv|cijk_|nvjet|cutlass|wgmma|mmatmul|splitkreduce|aten::(add|b|badd|add_)?mm\b"
        r"|aten::(_scaled_)?mm|aten::baddbmm|aten::addmm|aten::bmm|matmul|addmv|aten::linear$",
    ),
)
_KIND_OF = re.compile("|".join(f"(?P<{kind}>{pattern})" for kind, pattern in _KIND_PATTERNS))


def kind_of(name: str) -> str:
    """The class of a kernel or operator, by what kernel libraries call theirs."""
    found = _KIND_OF.search(name.lower())
    return found.lastgroup or "memory" if found else "memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Activities:
    """Computation in order of start. `kind` and `phase` index KINDS and PHASES, `name` `names`."""

    start_ns: Int
    end_ns: Int
    kind: Int
    phase: Int
    name: Int
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.start_ns)


def activities(
    rows: Iterable[tuple[int, int, str, str, int]] | Int, names: tuple[str, ...]
) -> Activities:
    """From rows of (start, end, kind, phase, name), or of their numbers, in any order."""
    if not isinstance(rows, np.ndarray):
        coded = [(s, e, KINDS.index(k), PHASES.index(p), n) for s, e, k, p, n in rows]
        rows = np.array(coded, dtype=np.int64).reshape(-1, 5)
    rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
    columns = (np.ascontiguousarray(rows[:, index]) for index in range(5))
    start, end, kind, phase, name = columns
    return Activities(start_ns=start, end_ns=end, kind=kind, phase=phase, name=name, names=names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective or message, as this rank saw it.

    `start_ns` is when the rank arrived at it, `end_ns` when it was through. `bytes` is the full
    buffer, as in `CollectiveWork`; None where the trace does not say. `group_size` likewise;
    `ranks` is empty where they are not named. `group` is the recording's own name of the group.
    `issue_ns` is when the host asked for it. `peer` is the other rank of a message.
    """

    op: str
    bytes: int | None
    group_size: int | None
    ranks: tuple[int, ...]
    group: str
    start_ns: int
    end_ns: int
    issue_ns: int
    stream: str
    backend: str = "nccl"
    peer: int | None = None

    @property
    def duration_ns(self) -> int:
        """End less start: waiting for the other ranks, and the transfer."""
        return self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One training step by this rank's clock. `number` is the recording's own."""

    number: int
    start_ns: int
    end_ns: int

    @property
    def duration_ns(self) -> int:
        """End less start."""
        return self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedWork:
    """A kernel whose shape the trace tells, and how long each of its runs took."""

    work: OpWork
    samples_ns: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """One rank's recording. `rank` is None where neither trace nor file name tells it.

    `device` is the recording's name of its GPU, empty where it tells none; `is_gpu` tells whether
    kernels are recorded, for else its computation is what the CPU did. Without `has_timing`
    collectives have no times of their own. `steps` are in order and hold at least one.
    """

    source: str
    rank: int | None
    world_size: int | None
    device: str
    is_gpu: bool
    has_timing: bool
    activities: Activities
    collectives: tuple[Collective, ...]
    steps: tuple[Step, ...]
    works: tuple[TimedWork, ...] = ()
    host_name: str = ""
    warnings: tuple[str, ...] = field(default=())
