"""`ModelGraph`: what one training step of a model costs, as arithmetic on batch and tp degree.

A model is a chain of *units*: the prologue (all that runs before the first block), the blocks,
and the epilogue (all after the last, the loss included). Pipeline stages are runs of units, FSDP
groups are units, activation checkpoints are blocks. Units of equal structure share one
`UnitCost`, so a model of 80 layers holds three.

Every number that depends on the microbatch or on the tensor-parallel degree is an `Amount`, so a
model is traced at small sizes once and read at any size exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import gcd
from typing import NamedTuple

from claw_plan.planner.candidate import ALL_GATHER

PLAIN, TENSOR, SEQUENCE = "plain", "tensor", "sequence"
"""The variants of a unit's cost: no tensor parallelism, with it, and with sequence parallelism."""


class Amount(NamedTuple):
    """A count of the form  fixed + per_sample*b + (split_fixed + split_per_sample*b) / tp."""

    fixed: int = 0
    per_sample: int = 0
    split_fixed: int = 0
    split_per_sample: int = 0

    def at(self, batch: int, tp: int = 1) -> int:
        """Its value for `batch` samples a microbatch and a tensor-parallel degree, rounded up."""
        split = self.split_fixed + self.split_per_sample * batch
        return self.fixed + self.per_sample * batch + -(-split // tp)

    def __add__(self, other: object) -> Amount:
        if not isinstance(other, Amount):
            return NotImplemented
        return Amount(*(a + b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One kernel. `kind` and `dims` are those of `profiles.work.OpWork`.

    `module` is the fully qualified name of the innermost module it ran in. `flops`, `read_bytes`
    and `written_bytes` are of one rank.
    """

    kind: str
    target: str
    module: str
    dims: tuple[Amount, ...]
    dtype: str
    flops: Amount
    read_bytes: Amount
    written_bytes: Amount


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A collective in the middle of a pass; `bytes` is the full buffer.

    `axis` is the mesh axis it runs over: 'tp', or 'cp' and 'ep' where a model is divided so.
    """

    op: str
    bytes: Amount
    module: str
    axis: str = "tp"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCost:
    """One forward and one backward of a unit for one microbatch, in execution order.

    `saved_bytes`: what autograd keeps from forward to backward, parameters and unit input left
    out. `input_bytes` and `output_bytes`: the hidden state that enters and leaves it.
    `forward_peak_bytes` and `backward_peak_bytes`: the most that is alive in the pass beyond what
    was alive at its start (saved tensors and gradients of the unit's parameters left out).
    `num_recomputed`: how many of `forward` run again under activation checkpointing, which stops
    at the last tensor that autograd keeps; None for all.
    """

    forward: tuple[Op | Exchange, ...]
    backward: tuple[Op | Exchange, ...]
    saved_bytes: Amount
    input_bytes: Amount
    output_bytes: Amount
    forward_peak_bytes: Amount
    backward_peak_bytes: Amount
    num_recomputed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter, ties counted once under the first of its names.

    `names` are all fully qualified names that hold it; `units` the indices of units that use it;
    `tp_dim` the dimension tensor parallelism divides, None where every rank holds the whole;
    `partial_dims` say otherwise for some degrees, as (degree, dimension or None).
    `is_expert` where expert parallelism divides it: its replicas are fewer than others', by
    `shared_by` where ranks of data parallelism alone share the experts.
    `arrival` orders the parameters of a unit by when the backward completes their gradients.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    units: tuple[int, ...]
    tp_dim: int | None = None
    is_expert: bool = False
    shared_by: int = 1
    arrival: int = 0
    partial_dims: tuple[tuple[int, int | None], ...] = ()

    def dim_at(self, tp: int) -> int | None:
        """The dimension that tensor parallelism of that degree divides."""
        for degree, dim in self.partial_dims:
            if degree == tp:
                return dim
        return self.tp_dim

    @property
    def name(self) -> str:
        """The first name."""
        return self.names[0]

    @property
    def numel(self) -> int:
        """Number of elements."""
        total = 1
        for size in self.shape:
            total *= size
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A link of the chain. `structure` indexes `ModelGraph.costs[variant]`.

    `name` is the block's fully qualified name, or 'prologue' and 'epilogue'; `modules` are the
    outermost modules it runs.
    """

    name: str
    modules: tuple[str, ...]
    structure: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallelRule:
    """How tensor parallelism treats one module of every block; see `planner.tensor_parallel`.

    `module` is relative to the block (''  is the block itself). `style` is 'region' (activations
    enter whole), 'colwise' or 'rowwise'. `heads` is what must divide by the degree; `parts` how
    many equal pieces a fused column weight holds (q, k, v: 3). `weight_dims` maps the module's
    own parameters to the dimension that is divided. `structures` are those it applies to. Rules
    outside the blocks name modules from the model and are of style 'embedding' or 'head', `heads`
    being the size of the vocabulary; see `planner.vocabulary_parallel`. `rows` is the order in
    which its rows are divided where it is not their own (`planner.vocabulary_parallel_order`).
    """

    module: str
    style: str
    heads: int
    parts: int = 1
    weight_dims: Mapping[str, int] = field(default_factory=dict)
    structures: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRule:
    """Experts that ranks may share out; see `planner.expert_parallel`.

    `module` is relative to the block. `counted_by` are its attributes that say how many experts
    there are, `listed` is its list of one module for each, '' where their weights lie in common
    tensors. A sample makes `rows_per_sample` pairs of a token and one of its experts, each with a
    hidden state of `row_bytes`. Tensor parallelism divides the `inner` size, of which each tensor
    of `weight_dims` holds one or two along its dimension; 0 leaves experts whole.
    """

    module: str
    experts: int
    counted_by: tuple[str, ...] = ()
    listed: str = ""
    rows_per_sample: int = 0
    row_bytes: int = 0
    inner: int = 0
    weight_dims: tuple[tuple[str, int], ...] = ()
    structures: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModelGraph:
    """Everything the planner knows of a model.

    `costs[variant][structure]` is a UnitCost; `tensor` and `sequence` are absent when no
    tensor-parallel pair was found, with the reason in `no_tensor_parallel`. `tp_divides` is the
    number every degree must divide, but for those of `partial`, at which only these rules apply
    and `costs` of the variant 'tensor@degree' hold. `ep` ranks share the experts, whose
    parameters are then a rank's part (`planner.expert_graph`); `cp` ranks share each sequence, and
    costs are then a rank's part (`planner.trace_context`). `cut_refused` maps a unit index to
    the reason why no pipeline cut may lie before it. `seq_len` is None for models without a
    sequence. `launches_per_op` is how many kernels the host launches for one that was traced: 1,
    unless the trace stands for a program that it leaves small kernels out of. `may_miss` where a
    backward may leave trained parameters without gradient. `ready_shares` tells, where a run has
    recorded it, after which share of its unit's backward a parameter's gradient is complete.
    `assumptions` are sentences the report prints.
    """

    name: str
    fingerprint: str
    parameters: tuple[Parameter, ...]
    buffer_bytes: int
    units: tuple[Unit, ...]
    costs: Mapping[str, tuple[UnitCost, ...]]
    tensor_parallel: tuple[TensorParallelRule, ...] = ()
    vocabulary_parallel: tuple[TensorParallelRule, ...] = ()
    expert_parallel: tuple[ExpertRule, ...] = ()
    no_tensor_parallel: str = ""
    no_expert_parallel: str = ""
    no_sequence_parallel: str = ""
    tp_divides: int = 1
    ep: int = 1
    cp: int = 1
    cp_comm_type: str = ALL_GATHER
    partial: Mapping[int, tuple[TensorParallelRule, ...]] = field(default_factory=dict)
    cut_refused: Mapping[int, str] = field(default_factory=dict)
    seq_len: int | None = None
    dtype: str = "float32"
    inputs: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    launches_per_op: float = 1.0
    may_miss: bool = False
    ready_shares: Mapping[str, float] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()

    @cached_property
    def num_parameters(self) -> int:
        """Elements of all parameters, tied ones once."""
        return sum(parameter.numel * parameter.shared_by for parameter in self.parameters)

    @property
    def ep_divides(self) -> int:
        """The number of experts that every ep must divide; 1 without experts to share."""
        return gcd(*(rule.experts for rule in self.expert_parallel)) or 1

    @property
    def blocks(self) -> tuple[Unit, ...]:
        """The units between prologue and epilogue."""
        return self.units[1:-1]

    @cached_property
    def edges(self) -> tuple[int, ...]:
        """The units at which a stage may start or end, the first and the end among them."""
        last = len(self.units) - 1
        return (0, *(unit for unit in range(2, last) if unit not in self.cut_refused), last + 1)

    def cost(self, unit: int, variant: str = PLAIN, tp: int = 1) -> UnitCost:
        """The cost of the unit of that index; `tp` tells where a degree has costs of its own."""
        return self.costs_at(variant, tp)[self.units[unit].structure]

    def costs_at(self, variant: str, tp: int) -> tuple[UnitCost, ...]:
        """The costs of all structures at a tensor-parallel degree."""
        return self.costs[f"{variant}@{tp}" if tp in self.partial else variant]

    def rules_at(self, tp: int) -> tuple[TensorParallelRule, ...]:
        """What is divided in the blocks at that degree."""
        return self.partial.get(tp, self.tensor_parallel)

    def takes_tp(self, tp: int) -> bool:
        """Whether tensor parallelism of that degree divides anything."""
        return tp == 1 or tp in self.partial or self.tp_divides % tp == 0

    def flops(self, batch: int) -> tuple[int, int]:
        """Forward and backward operations of the whole model for `batch` samples."""
        each = [self.unit_flops(index, batch) for index in range(len(self.units))]
        return sum(forward for forward, _ in each), sum(backward for _, backward in each)

    def unit_flops(self, index: int, batch: int) -> tuple[int, int]:
        """The same of one unit."""
        cost = self.cost(index)
        forward = sum(op.flops.at(batch) for op in cost.forward if isinstance(op, Op))
        return forward, sum(op.flops.at(batch) for op in cost.backward if isinstance(op, Op))
