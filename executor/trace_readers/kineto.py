"""A trace of PyTorch's profiler (Kineto's Chrome trace) becomes a `RankTrace`.

Read once, event by event, into columns; `kineto_columns` holds them and makes the RankTrace.
Events need not be in order of time. Times are microseconds, often with fractions, and since
2024 count from `baseTimeNanoseconds`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from claw_plan.executor.trace_readers.kineto_columns import Columns, CommOp, Facts
from claw_plan.executor.trace_readers.rank_trace import RankTrace
from claw_plan.executor.trace_readers.shaped_ops import SHAPED, call_of
from claw_plan.profiles.errors import InputError

KERNELS = ("kernel", "Kernel", "gpu_memcpy", "gpu_memset", "Memcpy", "Memset")
OPERATORS = ("cpu_op", "Operator", "operator")
LAUNCHES = ("cuda_runtime", "cuda_driver", "Runtime", "hip_runtime", "xpu_runtime")

COMM_OP = re.compile(
    r"(?:nccl|rccl|gloo|mpi|ucc|xccl|hccl):|_?c10d(?:_functional)?::|record_param"
)
"""Beginnings of operators and annotations that stand for a collective, or wait for one."""

COMM_KERNEL = re.compile(r"nccl|rccl|mscclpp?_|oneccl", re.IGNORECASE)
LOADER = re.compile(
    r"DataLoader|data[_ ]?load|load_(?:data|batch)|(?:get|next|fetch)_batch", re.IGNORECASE
)
"""PyTorch's own annotation of its data loader, and what people call theirs."""

STEP = re.compile(r"ProfilerStep#(\d{1,15})\Z")
LAUNCH = re.compile(r"launch|memcpy|memset", re.IGNORECASE)

FAR_NS = 1 << 61
"""Times farther than 73 years from the trace's zero are broken."""

MAX_EVENTS = 60_000_000
"""Kept events of one rank; at 40 bytes each more would not fit into the memory of a laptop."""

PLAIN, WITH_SHAPES, ANNOTATION = range(3)
"""What is done with an operator: only its time is kept, its shapes too, or it marks something."""

KEPT_ARGS = (
    "Collective name", "In msg nelems", "Out msg nelems", "Group size", "dtype",
    "Process Group Name", "Process Group Ranks", "Src Rank", "Dst Rank", "Input Dims",
    "Input type",
)  # fmt: skip
"""What is said of a collective: c10's ParamCommsUtils writes all but the inputs, since 2.2."""


def read_kineto(members: Iterable[tuple[str, Any]], source: str) -> RankTrace:
    """The rank's recording, from the members of the JSON object.

    Raises InputError when there is no event that lasts.
    """
    reader = _Reader(source)
    for key, value in members:
        if key == "traceEvents":
            reader.event(value)
        else:
            reader.fact(key, value)
    return reader.columns.rank_trace()


class _Reader:
    """Sorts events into columns."""

    def __init__(self, source: str) -> None:
        self.columns = Columns(source, Facts())
        self._handlers: dict[str, Callable[[dict[str, Any], int, int], None]] = {}
        for names, handler in (
            (KERNELS, self._kernel),
            (OPERATORS, self._operator),
            (LAUNCHES, self._launch),
            (("user_annotation",), self._annotation),
        ):
            self._handlers.update(dict.fromkeys(names, handler))
        self._kernel_names: dict[str, bool] = {}
        self._operator_names: dict[str, int] = {}

    def fact(self, key: str, value: Any) -> None:
        """What the trace says of itself."""
        facts = self.columns.facts
        if key == "distributedInfo" and isinstance(value, dict):
            facts.distributed = value
        elif key == "deviceProperties" and isinstance(value, list):
            facts.devices = [one for one in value if isinstance(one, dict)]
        elif key == "baseTimeNanoseconds" and type(value) is int and abs(value) < FAR_NS:
            facts.base_ns = value
        elif key == "host_name":
            facts.host_name = str(value)

    def event(self, event: Any) -> None:
        """One event of the list; what is no event counts as broken."""
        if type(event) is not dict:
            self.columns.broken("are no events")
            return
        if event.get("ph") != "X":
            if event.get("ph") in ("B", "E"):
                self.columns.broken("are begin and end marks, which are not read")
            return
        category, start, duration = event.get("cat"), event.get("ts"), event.get("dur", 0)
        handler = self._handlers.get(category) if type(category) is str else None
        if handler is None:
            return
        if type(start) not in (int, float) or type(duration) not in (int, float):
            self.columns.broken("have no time")
            return
        try:
            start_ns, duration_ns = round(start * 1000), round(duration * 1000)  # type: ignore[operator]
        except (ValueError, OverflowError):  # NaN and infinity
            self.columns.broken("have no time")
            return
        if not (-FAR_NS < start_ns < FAR_NS and duration_ns < FAR_NS):
            self.columns.broken("have no plausible time")
        elif duration_ns < 0:
            self.columns.broken("end before they start")
        else:
            handler(event, start_ns, start_ns + duration_ns)

    def _kernel(self, event: dict[str, Any], start_ns: int, end_ns: int) -> None:
        name, args = str(event.get("name")), _args(event)
        is_comm = self._kernel_names.get(name)
        if is_comm is None:
            is_comm = bool(COMM_KERNEL.search(name)) and not name.startswith("Mem")
            self._kernel_names[name] = is_comm
        lane = (args.get("device", event.get("pid")), args.get("stream", event.get("tid")))
        correlation = args.get("correlation")
        if type(correlation) is not int or not 0 <= correlation < FAR_NS:
            correlation = -1
        self.columns.kernel(start_ns, end_ns, name, str(lane), correlation)
        if is_comm:
            self.columns.comm_kernels.append(len(self.columns.kernels) // 5 - 1)
            kept = {key: args[key] for key in KEPT_ARGS if key in args}
            self.columns.comm_kernel_args.append(kept)
        self._limit(len(self.columns.kernels) // 5)

    def _operator(self, event: dict[str, Any], start_ns: int, end_ns: int) -> None:
        name = str(event.get("name"))
        kind = self._operator_names.get(name)
        if kind is None:
            kind = self._operator_names[name] = _kind_of_operator(name)
        if kind == ANNOTATION:
            self._annotation(event, start_ns, end_ns)
            return
        thread = self.columns.thread(event.get("pid"), event.get("tid"))
        call = -1
        if kind == WITH_SHAPES:
            args = _args(event)
            found = call_of(
                name, args.get("Input Dims"), args.get("Input type"), args.get("Concrete Inputs")
            )
            call = -1 if found is None else self.columns.call(found)
        self.columns.operator(start_ns, end_ns, name, thread, call)
        self._limit(len(self.columns.operators) // 5)

    def _launch(self, event: dict[str, Any], start_ns: int, end_ns: int) -> None:
        correlation = _args(event).get("correlation")
        if (
            type(correlation) is int
            and 0 <= correlation < FAR_NS
            and LAUNCH.search(str(event.get("name")))
        ):
            thread = self.columns.thread(event.get("pid"), event.get("tid"))
            self.columns.launch(correlation, start_ns, thread)
            self._limit(len(self.columns.launches) // 3)

    def _annotation(self, event: dict[str, Any], start_ns: int, end_ns: int) -> None:
        name = str(event.get("name"))
        thread = self.columns.thread(event.get("pid"), event.get("tid"))
        if step := STEP.match(name):
            self.columns.steps.append((int(step[1]), start_ns, end_ns))
        elif COMM_OP.match(name):
            args = _args(event)
            kept = {key: args[key] for key in KEPT_ARGS if key in args}
            self.columns.comm_ops.append(CommOp(name, start_ns, end_ns, thread, kept))
            self._limit(len(self.columns.comm_ops) * 8)
        elif name.startswith("Optimizer.step#"):
            self.columns.optimizer_steps.append((start_ns, end_ns))
        elif LOADER.search(name):
            self.columns.inputs.append((start_ns, end_ns))

    def _limit(self, kept: int) -> None:
        if kept > MAX_EVENTS:
            raise InputError(
                f"{self.columns.source} has more than {MAX_EVENTS:,} events to keep; record fewer "
                "steps"
            )


def _kind_of_operator(name: str) -> int:
    is_mark = COMM_OP.match(name) or STEP.match(name) or LOADER.search(name)
    if is_mark:
        return ANNOTATION
    return WITH_SHAPES if name in SHAPED else PLAIN


def _args(event: dict[str, Any]) -> dict[str, Any]:
    args = event.get("args")
    return args if type(args) is dict else {}
