"""The collectives of a Kineto trace, put together from what is said of them in several places.

With a GPU a collective is its NCCL kernel. Since torch 2.2 the kernel says operation, elements
and group itself; before, the operator that launched it (`nccl:all_reduce` within
`record_param_comms` within `c10d::allreduce_`) says operation and input. On a CPU gloo's own
annotation is the collective. "Process Group Ranks" is cut after 30 ranks: then the group's size,
or the trace's `pg_config`, tells.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from claw_plan.executor.trace_readers.intervals import Int
from claw_plan.executor.trace_readers.rank_trace import Collective
from claw_plan.executor.trace_readers.shaped_ops import element_bytes, tensor_bytes

if TYPE_CHECKING:
    from claw_plan.executor.trace_readers.kineto_columns import Columns, CommOp

_OPS = (
    ("all_reduce", "allreduce"),
    ("reduce_scatter", "reducescatter"),
    ("all_gather", "allgather"),
    ("all_to_all", "alltoall"),
    ("broadcast", "broadcast"),
    ("barrier", "barrier"),
    ("recv", "recv"),
    ("send", "send"),
    ("reduce", "reduce"),
    ("gather", "gather"),
    ("scatter", "scatter"),
)
_DONE_BY = re.compile(r"(nccl|rccl|gloo|mpi|ucc|xccl|hccl):")
NESTED = 8
"""How many operators back one is looked for that is still open: three nest, some overlap."""


class Found(NamedTuple):
    """The collectives in order of start, and sentences about what they lack."""

    collectives: tuple[Collective, ...]
    warnings: tuple[str, ...]


def op_of(name: str) -> str:
    """'nccl:_all_gather_base', 'allreduce' or a kernel's name as the field's word for it."""
    kernel = re.match(r"(?:nccl|rccl)(?:Dev)?Kernel_([A-Za-z]+)", name)
    plain = re.sub(r"[^a-z]", "", (kernel[1] if kernel else name).lower())
    if "sendrecv" in plain:
        return "send"
    return next((op for op, word in _OPS if word in plain), "other")


def collectives_of(columns: Columns, launches: Int, lanes: Sequence[str]) -> Found:
    """All collectives of the trace. `launches` are (time, thread) of every kernel's launch."""
    groups = _Groups(columns.facts.distributed)
    by_thread = _by_thread(columns.comm_ops)
    if columns.comm_kernels:
        found = _of_kernels(columns, launches, lanes, by_thread, groups)
    else:
        found = _of_annotations(columns, by_thread, groups)
    said = []
    if groups.assumed:
        said.append(
            "collectives name no process group: each is taken to be of all "
            f"{groups.world_size} ranks"
        )
    unsized = sum(one.bytes is None and one.op != "barrier" for one in found)
    if unsized:
        said.append(f"{unsized} collectives do not tell their size")
    return Found(tuple(sorted(found, key=lambda one: one.start_ns)), tuple(said))


class _Groups:
    """Process groups by name, as the trace's head describes them."""

    def __init__(self, distributed: Mapping[str, Any]) -> None:
        config = distributed.get("pg_config")
        config = [one for one in config if isinstance(one, dict)] if type(config) is list else []
        self._sizes = {str(one.get("pg_name")): one.get("pg_size") for one in config}
        self._ranks = {str(one.get("pg_name")): _ranks(one.get("ranks")) for one in config}
        size = distributed.get("world_size")
        self.world_size = size if type(size) is int and 0 < size < 1 << 31 else None
        self.assumed = False

    def group(self, args: Mapping[str, Any]) -> tuple[str, int | None, tuple[int, ...]]:
        """(name, size, ranks) of the group that a collective's arguments name, if they do."""
        name = str(args.get("Process Group Name", ""))
        ranks: tuple[int, ...] = ()
        text = args.get("Process Group Ranks")
        if isinstance(text, str) and "..." not in text and len(text) < 1 << 16:
            try:
                ranks = _ranks(json.loads(text))
            except (ValueError, RecursionError):
                ranks = ()
        ranks = ranks or self._ranks.get(name, ())
        for size in (args.get("Group size"), self._sizes.get(name), len(ranks)):
            if type(size) is int and 0 < size < 1 << 31:
                return name, size, ranks if len(ranks) == size else ()
        sizes = {size for size in self._sizes.values() if type(size) is int}
        if len(sizes) == 1:  # one group, or several that all hold the same ranks
            same = set(self._ranks.values())
            return name, sizes.pop(), same.pop() if len(same) == 1 else ()
        self.assumed = self.world_size is not None
        return name, self.world_size, ()


def _ranks(value: object) -> tuple[int, ...]:
    if isinstance(value, list) and all(type(rank) is int for rank in value):
        return tuple(value)
    return ()


def _by_thread(ops: Sequence[CommOp]) -> dict[int, tuple[list[int], list[CommOp]]]:
    threads: dict[int, list[CommOp]] = {}
    for op in sorted(ops, key=lambda op: (op.start_ns, -op.end_ns)):
        threads.setdefault(op.thread, []).append(op)
    return {thread: ([op.start_ns for op in own], own) for thread, own in threads.items()}


def _open_at(time: int, own: tuple[list[int], list[CommOp]] | None) -> list[CommOp]:
    """The operators of a thread that are open at a time, the innermost first."""
    if own is None:
        return []
    starts, ops = own
    last = bisect_right(starts, time)
    return [op for op in reversed(ops[max(0, last - NESTED) : last]) if op.end_ns >= time]


def _of_kernels(
    columns: Columns,
    launches: Int,
    lanes: Sequence[str],
    by_thread: Mapping[int, tuple[list[int], list[CommOp]]],
    groups: _Groups,
) -> list[Collective]:
    found = []
    names = list(columns._names)
    base = columns.facts.base_ns
    for index, own_args in zip(columns.comm_kernels, columns.comm_kernel_args, strict=True):
        start, end, name, lane, _ = columns.kernels[5 * index : 5 * index + 5]
        issue, thread = (int(value) for value in launches[index])
        callers = _open_at(issue, by_thread.get(thread)) if thread >= 0 else []
        found.append(
            _collective(
                [own_args, *(op.args for op in callers)],
                [str(own_args.get("Collective name", "")), *(op.name for op in callers)],
                names[name],
                groups,
                start_ns=start + base,
                end_ns=end + base,
                issue_ns=(issue if thread >= 0 else start) + base,
                stream=lanes[lane],
                backend="nccl",
            )
        )
    return found


def _of_annotations(
    columns: Columns,
    by_thread: Mapping[int, tuple[list[int], list[CommOp]]],
    groups: _Groups,
) -> list[Collective]:
    """The library's annotations; the operators that issued them stand on other threads."""
    found = []
    base = columns.facts.base_ns
    for op in columns.comm_ops:
        library = _DONE_BY.match(op.name)
        if library is None:
            continue
        callers = _open_at(op.start_ns, by_thread.get(op.thread))
        start = op.start_ns
        if op_of(op.name) in ("send", "recv"):
            start = _asked_ns(op, by_thread[op.thread])
        found.append(
            _collective(
                [op.args, *(caller.args for caller in callers)],
                [op.name],
                op.name,
                groups,
                start_ns=start + base,
                end_ns=op.end_ns + base,
                issue_ns=start + base,
                stream=f"{library[1]} {op.thread}",
                backend="nccl" if library[1] in ("nccl", "rccl") else "gloo",
            )
        )
    return found


def _asked_ns(op: CommOp, own: tuple[list[int], list[CommOp]]) -> int:
    """When a message was asked for: gloo waits in `c10d::recv_`, before its annotation begins."""
    starts, ops = own
    before = ops[max(0, bisect_right(starts, op.start_ns) - 2)]
    is_its = before.name.startswith("c10d::") and op_of(before.name) == op_of(op.name)
    return before.start_ns if is_its else op.start_ns


def _collective(
    args: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    kernel: str,
    groups: _Groups,
    **times: Any,
) -> Collective:
    """One collective; what comes first in `args` and `names` is believed first."""
    told = [op for op in (op_of(name) for name in names if name) if op != "other"]
    op = told[0] if told else op_of(kernel)
    merged: dict[str, Any] = {}
    for some in args:
        merged = {**some, **merged}
    group, size, ranks = groups.group(merged)
    full = next((one for one in (_full_bytes(op, some, size) for some in args) if one), None)
    peer = merged.get("Dst Rank" if op == "send" else "Src Rank")
    return Collective(
        op=op,
        bytes=0 if op == "barrier" else full,
        group_size=size,
        ranks=ranks,
        group=group,
        peer=peer if op in ("send", "recv") and type(peer) is int else None,
        **times,
    )


def _full_bytes(op: str, args: Mapping[str, Any], group_size: int | None) -> int | None:
    """The full buffer: the larger of input and output, which for a gather is the output."""
    element = element_bytes(args.get("dtype"))
    counts = [args.get("In msg nelems"), args.get("Out msg nelems")]
    if element and all(type(count) is int and 0 <= count < 1 << 50 for count in counts):
        sizes = [int(count or 0) * element for count in counts]
        return sizes[1] if op == "all_gather" else sizes[0] or sizes[1]
    dims, types = args.get("Input Dims"), args.get("Input type")
    if not (isinstance(dims, list) and isinstance(types, list) and dims and types):
        return None
    one = tensor_bytes(dims[0], types[0])
    if one and op == "all_gather" and group_size:
        return one * group_size
    return one
