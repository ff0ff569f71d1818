"""`OpWork` and `CollectiveWork`: the keys of every cost and of every measurement.

A cost model is asked "how long does this work take?", a recorder answers "this work took so
long"; both speak of the same two nouns, so that a measurement is found again whoever made it.
"""

from __future__ import annotations

from dataclasses import dataclass

OP_KINDS = ("gemm", "attention", "conv", "memory", "optimizer")
"""`gemm` dims (batch, m, n, k); `attention` dims (batch, heads, kv_heads, seq_q, seq_k, head_dim,
causal 0|1); `conv` dims (batch, channels_in, channels_out, output positions, kernel positions);
`memory` (bound by bytes: element-wise, norms, copies) and `optimizer` dims ()."""

COLLECTIVE_OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send")

PRECISIONS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
PRECISIONS |= {name: name for name in PRECISIONS.values()}
"""What people call the precisions that kernels compute in."""

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}
DTYPE_BYTES |= {"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1}
DTYPE_BYTES |= {"complex64": 8, "complex128": 16}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpWork:
    """One kernel's work on one device.

    `dims` are in the order `OP_KINDS` gives; `bytes` are those read and written by the kernel
    on its own (no fusion, no cache); `target` is the operator's name, used to report.
    """

    kind: str
    dims: tuple[int, ...]
    dtype: str
    flops: int
    bytes: int
    phase: str = "forward"
    target: str = ""

    def __post_init__(self) -> None:
        if self.kind not in OP_KINDS:
            raise ValueError(f"kind must be one of {OP_KINDS}, but got {self.kind=}")
        if self.flops < 0 or self.bytes < 0:
            raise ValueError(f"work is not negative, but got {self.flops=}, {self.bytes=}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveWork:
    """One collective of one group of ranks.

    `bytes` is the full buffer (for all_gather the gathered one, for reduce_scatter the one before
    scattering; for send the message), as nccl-tests counts it. `nodes` is the number of hosts the
    group spans; its ranks are spread evenly over them. `backend` names the library (nccl, gloo).
    `concurrent` groups like it on the same nodes talk at the same time and share the NICs; 0 says
    that every device of the nodes is in one.
    """

    op: str
    bytes: int
    group_size: int
    nodes: int
    algorithm: str = "auto"
    backend: str = "nccl"
    concurrent: int = 0

    def __post_init__(self) -> None:
        if self.op not in COLLECTIVE_OPS:
            raise ValueError(f"op must be one of {COLLECTIVE_OPS}, but got {self.op=}")
        if self.bytes < 0 or self.group_size < 1 or not 1 <= self.nodes <= self.group_size:
            raise ValueError(f"not a collective: {self.bytes=}, {self.group_size=}, {self.nodes=}")
        if self.concurrent < 0:
            raise ValueError(f"groups are counted from 0, but got {self.concurrent=}")
