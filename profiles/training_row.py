"""`TrainingRow`: one published training run as the planner can repeat it, with what was measured.

`published_training` reads files into rows; `planner.validation` predicts them;
`planner.trainer_fit` fits the constants of trainers to them. Everything a source leaves out has
been filled in by the reader and named in `assumed`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from claw_plan.profiles.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureOfExperts:
    """Routed experts of a transformer; the first `dense_layers` have a plain MLP instead.

    `shared_ffn` is the width of the expert that sees every token, 0 without one.
    """

    experts: int
    topk: int
    expert_ffn: int
    shared_ffn: int = 0
    dense_layers: int = 0
    dense_ffn: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention, by the names of DeepSeek's configuration files."""

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_dim: int
    qk_rope_dim: int
    v_head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimensions:
    """The sizes of a transformer. `activation` is 'gelu', 'swiglu' or 'squared-relu'.

    `sliding_window` tokens are seen by `sliding_window_layers` of the layers, 0 without.
    `learned_positions` adds a table of positions; else they are rotary. `norm` is 'layer' or
    'rms'. `ffn` is the width of the plain MLP (0 when every layer has experts).
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    seq_len: int
    activation: str = "gelu"
    norm: str = "layer"
    tied: bool = False
    causal: bool = True
    learned_positions: bool = False
    sliding_window: int = 0
    sliding_window_layers: int = 0
    moe: MixtureOfExperts | None = None
    mla: LatentAttention | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedPlan:
    """How a published run was split; degrees multiply to the GPUs (ep and etp divide dp*cp*tp).

    `sharding` is what data parallelism shards: 'none', 'zero1', 'zero2' or 'zero3', over
    `shard_group` ranks (0: all). `reshard` frees gathered parameters after the forward pass.
    `recompute` is 'none', 'full', 'attention' (Megatron's selective: the core of the attention),
    'half' (torchtitan's and others' selective: the ratio is the trainer's) or 'moe' (norms and
    expert activations). `dtype` is what kernels compute in; `linear_dtype` that of the linear
    layers when lower: 'float8' or 'float4', scaled as `scaling` says ('tensor', 'row', 'block').
    `overlaps_tp` is false where the source says that tensor-parallel traffic is not overlapped.
    `layers_per_stage` lists the layers of every stage where the source prints them (or cuts that
    give them), in the order of the model.
    """

    dp: int
    tp: int
    pp: int
    cp: int
    ep: int
    etp: int
    vpp: int
    micro_batch: int
    global_batch: int
    sharding: str
    shard_group: int = 0
    reshard: bool = True
    recompute: str = "none"
    sequence_parallel: bool = False
    dtype: str = "bfloat16"
    linear_dtype: str = ""
    scaling: str = ""
    schedule: str = "1F1B"
    compiled: bool = False
    cuda_graphs: bool = False
    async_tp: bool = False
    overlaps_tp: bool = True
    cp_kind: str = "ring"
    layers_per_stage: tuple[int, ...] = ()

    @property
    def num_microbatches(self) -> int:
        """Microbatches a rank runs in a step."""
        return self.global_batch // (self.dp * self.micro_batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRow:
    """A run. `trainer` names the software (a key of trainers.yaml), not who published it.

    `complete` when the source prints all that decides the time; `assumed` says in words what was
    filled in. `optimizer` is 'adamw', or '' where only forward and backward were timed.
    `memory_kind` is 'allocated', 'reserved', 'nvidia-smi', 'activations' or 'states'.
    `out_of_memory` is None where the source says nothing of it.
    """

    id: str
    family: str
    group: str
    trainer: str
    trust: str
    complete: bool
    model_name: str
    dimensions: Dimensions
    cluster: Cluster
    device_name: str
    plan: PublishedPlan
    step_time_ns: int | None
    memory_bytes: int | None = None
    memory_kind: str = ""
    out_of_memory: bool | None = None
    optimizer: str = "adamw"
    assumed: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    source: str = ""
