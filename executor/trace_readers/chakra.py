"""A PyTorch execution trace, as Chakra takes it, becomes a `RankTrace`.

Such a trace holds operators with their shapes and who called whom, in nodes. As PyTorch writes it
no operator has a time; then it tells collectives and shapes, and nothing about speed. Chakra's
linker adds `ts`, `dur` and `cat` of the profiler's trace to each node; then it is read like one.
Two layouts are in use: inputs beside the node's fields (schema 1.0.x), or in `inputs` and `attrs`
(1.0.2-chakra and newer).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from claw_plan.executor.trace_readers.kineto import FAR_NS, read_kineto
from claw_plan.executor.trace_readers.kineto_collectives import op_of
from claw_plan.executor.trace_readers.rank_trace import Collective, RankTrace, Step, activities
from claw_plan.executor.trace_readers.shaped_ops import tensor_bytes
from claw_plan.profiles.errors import InputError

NODES = "nodes"
MAX_COLLECTIVES = 1_000_000

ATTRIBUTES = {
    "collective_name": "Collective name",
    "in_msg_nelems": "In msg nelems",
    "out_msg_nelems": "Out msg nelems",
    "pg_size": "Group size",
    "pg_name": "Process Group Name",
    "dtype": "dtype",
}
"""What nodes call the arguments that a profiler's trace holds under other names."""


def read_execution_trace(members: Iterable[tuple[str, Any]], source: str) -> RankTrace:
    """The rank's operators. Raises InputError when the nodes are none of an execution trace."""
    head: dict[str, Any] = {}
    timed: list[tuple[str, Any]] = []
    collectives: list[Collective] = []
    nodes = operators = 0
    seen: Counter[str] = Counter()
    for key, node in members:
        if key != NODES:
            head[key] = node
            continue
        nodes += 1
        if not isinstance(node, dict) or not isinstance(node.get("name"), str):
            seen["broken"] += 1
            continue
        fields = _fields(node)
        if "ts" in node and "dur" in node:
            timed.append(("traceEvents", _event(node, fields)))
        operators += "::" in node["name"]
        if "record_param_comms" in node["name"] and len(collectives) < MAX_COLLECTIVES:
            collectives.append(_collective(fields))
    if nodes == seen["broken"]:
        raise InputError(f"{source}: its nodes are none of an execution trace (they have no name)")
    said = [f"{seen['broken']} nodes have no name: left out"] if seen["broken"] else []
    if timed:
        trace = read_kineto([*_facts(head), *timed], source)
        return replace(trace, warnings=(*trace.warnings, *said))
    said.append(
        f"an execution trace, not a profiler's: {operators} operators and their order, without "
        "times; record with torch.profiler (export_chrome_trace) to learn how long they take"
    )
    return RankTrace(
        source=source,
        rank=_number(head.get("rank")),
        world_size=_number(head.get("world_size")),
        device="",
        is_gpu=False,
        has_timing=False,
        activities=activities([], ()),
        collectives=tuple(collectives),
        steps=(_window(head),),
        warnings=tuple(said),
    )


def _facts(head: Mapping[str, Any]) -> list[tuple[str, Any]]:
    known = {key: head[key] for key in ("rank", "world_size") if key in head}
    return [("distributedInfo", known)] if known else []


def _number(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 31 else None


def _window(head: Mapping[str, Any]) -> Step:
    """The time the recording took; its clock counts microseconds."""
    start, end = head.get("start_ts"), head.get("finish_ts")
    if type(start) is int and type(end) is int and 0 <= start < end < FAR_NS // 1000:
        return Step(number=0, start_ns=start * 1000, end_ns=end * 1000)
    return Step(number=0, start_ns=0, end_ns=0)


def _fields(node: Mapping[str, Any]) -> dict[str, Any]:
    """A node's inputs and attributes, in either layout."""
    fields: dict[str, Any] = {}
    inputs = node.get("inputs")
    if isinstance(inputs, dict):
        fields["dims"], fields["types"] = inputs.get("shapes"), inputs.get("types")
        fields["values"] = inputs.get("values")
    else:
        fields["dims"], fields["types"] = node.get("input_shapes"), node.get("input_types")
        fields["values"] = inputs
    attributes = node.get("attrs")
    for one in attributes if isinstance(attributes, list) else []:
        known = ATTRIBUTES.get(str(one.get("name"))) if isinstance(one, dict) else None
        if known is not None:
            fields[known] = one.get(
                "value", next((v for k, v in one.items() if k.endswith("_val")), None)
            )
    return fields


def _event(node: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The profiler's event that Chakra's linker took the node's times from."""
    types = fields["types"] if isinstance(fields["types"], list) else []
    plain = [str(one).removeprefix("Tensor(").removesuffix(")") for one in types]
    args = {key: value for key, value in fields.items() if key in ATTRIBUTES.values()}
    return {
        "ph": "X",
        "cat": node.get("cat") or "cpu_op",
        "name": node["name"],
        "ts": node["ts"],
        "dur": node["dur"],
        "pid": 0,
        "tid": node.get("tid", 0),
        "args": {"Input Dims": fields["dims"], "Input type": plain, **args},
    }


def _collective(fields: Mapping[str, Any]) -> Collective:
    """A `record_param_comms` node: the operation is an attribute, or a text among the inputs."""
    values = fields["values"] if isinstance(fields["values"], list) else []
    named = str(fields.get("Collective name", ""))
    texts = [named, *(value for value in values if isinstance(value, str))]
    ops = [op for op in map(op_of, texts) if op != "other"]
    dims, types = fields["dims"], fields["types"]
    size = None
    if isinstance(dims, list) and isinstance(types, list) and dims and types:
        inner = str(types[0]).removeprefix("GenericList[").removesuffix("]").split(",")[0]
        size = tensor_bytes(dims[0], inner)
    return Collective(
        op=ops[0] if ops else "other",
        bytes=size,
        group_size=_number(fields.get("Group size")),
        ranks=(),
        group=str(fields.get("Process Group Name", "")),
        start_ns=0,
        end_ns=0,
        issue_ns=0,
        stream="",
    )
