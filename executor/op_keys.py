"""Dispatched operators and collectives under the keys the planner looks costs up by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from claw_plan.planner.op_work import Work, num_bytes, works_of
from claw_plan.profiles.work import CollectiveWork, OpWork

ATTENTION = "_scaled_dot_product_"
"""How the names of all fused attention kernels begin, backward ones ending in `_backward`."""

_COLLECTIVES = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
}
"""Dispatcher names of the collectives whose cost the planner asks for."""


def op_works(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any, phase: str
) -> list[OpWork]:
    """The kernels of one call as keys; attention kernels of any device as one kind."""
    name = func.overloadpacket.__name__
    if name.startswith(ATTENTION):
        works = [_attention(func, args, kwargs, out, is_backward=name.endswith("_backward"))]
        target = "claw_plan.attention_backward" if name.endswith("_backward") else ""
        target = target or "claw_plan.attention"
    else:
        works = works_of(func, args, kwargs, out)
        target = f"{func.namespace}.{name}"
    return [
        OpWork(
            kind=work.kind,
            dims=work.dims,
            dtype=work.dtype,
            flops=work.flops,
            bytes=work.read_bytes + work.written_bytes,
            phase=phase,
            target=target,
        )
        for work in works
    ]


def _attention(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any, *, is_backward: bool
) -> Work:
    """Kernels differ in their arguments' places, not in their names."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    q, k, v = given["query"], given["key"], given["value"]
    causal = int(bool(given.get("is_causal", False)))
    # Of the whole square: two products forward, five backward (planner.op_work says the same).
    products = 5 if is_backward else 2
    flops = 2 * products * math.prod(q.shape[:3]) * k.shape[2] * q.shape[3]
    outputs = [leaf for leaf in _tensors(out) if leaf.dim() >= 3]
    inputs = [q, k, v]
    if is_backward:
        gradient = given["grad_out"] if "grad_out" in given else given["grad_out_"]
        inputs += [gradient, given["out"], given["logsumexp"]]
    return Work(
        "attention",
        (q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], causal),
        str(q.dtype).removeprefix("torch."),
        flops,
        sum(num_bytes(tensor) for tensor in inputs),
        sum(num_bytes(tensor) for tensor in outputs),
    )


class Collective(NamedTuple):
    """A collective about to run: its op, full buffer and group."""

    op: str
    bytes: int
    group: dist.ProcessGroup

    def work(self, nodes: int) -> CollectiveWork:
        """Its key, for a group that spans `nodes` hosts."""
        size = dist.get_world_size(self.group)
        backend = "nccl" if dist.get_backend(self.group) == "nccl" else "gloo"
        return CollectiveWork(
            op=self.op,
            bytes=self.bytes,
            group_size=size,
            nodes=min(nodes, size),
            backend=backend,
        )


def collective_of(func: Any, args: Sequence[Any]) -> Collective | None:
    """What a c10d call is; None for sends, barriers and the rest."""
    op = _COLLECTIVES.get(func.overloadpacket.__name__)
    if op is None:
        return None
    tensors = [_tensors(argument) for argument in args]
    # All three have the result first; a reduce-scatter's full buffer is its input, second.
    buffers = tensors[1] if op == "reduce_scatter" else tensors[0]
    names = [argument.name for argument in func._schema.arguments]
    group = dist.ProcessGroup.unbox(args[names.index("process_group")])
    return Collective(op, sum(tensor.nbytes for tensor in buffers), group)


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    return (
        [leaf for part in tree for leaf in _tensors(part)]
        if isinstance(tree, list | tuple)
        else []
    )
