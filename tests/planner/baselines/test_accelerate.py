"""What `accelerate config` writes."""

from __future__ import annotations

import pytest

from claw_plan.planner.baselines.accelerate import is_accelerate, read_accelerate
from claw_plan.planner.baselines.setting import NODE, REST
from claw_plan.profiles.errors import InputError

HEAD = "compute_environment: LOCAL_MACHINE\nnum_machines: 2\nnum_processes: 16\n"

FSDP1 = (
    HEAD
    + """distributed_type: FSDP
mixed_precision: bf16
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_offload_params: false
  fsdp_sharding_strategy: {}
  fsdp_activation_checkpointing: true
"""
)

MEGATRON = """compute_environment: LOCAL_MACHINE
deepspeed_config: {}
distributed_type: MEGATRON_LM
megatron_lm_config:
  megatron_lm_gradient_clipping: 1.0
  megatron_lm_num_micro_batches: 2
  megatron_lm_pp_degree: 2
  megatron_lm_recompute_activations: true
  megatron_lm_sequence_parallelism: true
  megatron_lm_tp_degree: 2
  megatron_lm_use_distributed_optimizer: true
mixed_precision: bf16
num_machines: 1
num_processes: 4
"""


@pytest.mark.parametrize(
    "strategy, shard, replicate, zero",
    [
        ("FULL_SHARD", REST, 1, 3),
        ("1", REST, 1, 3),
        ("SHARD_GRAD_OP", REST, 1, 2),
        ("HYBRID_SHARD", NODE, REST, 3),
        ("5", NODE, REST, 2),
        ("NO_SHARD", 1, REST, None),
    ],
)
def test_strategies_of_fsdp(strategy, shard, replicate, zero):
    """torch.distributed.fsdp.ShardingStrategy; the numbers are its values."""
    setting = read_accelerate(FSDP1.format(strategy), "fsdp.yaml")
    knobs = setting.knobs
    assert (knobs["dp_shard"], knobs["dp_replicate"], knobs.get("zero")) == (
        shard, replicate, zero,
    )  # fmt: skip
    assert knobs["recompute"] == "full" and "microbatch_size" not in knobs
    assert setting.devices == 16 and setting.training == {"precision": "bfloat16"}


def test_fsdp2_frees_parameters_after_forward_or_not():
    text = HEAD + "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n"
    freed, kept = (
        read_accelerate(f"{text}  fsdp_reshard_after_forward: {value}\n", "f.yaml").knobs["zero"]
        for value in ("true", "false")
    )
    assert (freed, kept) == (3, 2)


def test_megatron_plugin():
    setting = read_accelerate(MEGATRON, "megatron.yaml")
    knobs = setting.knobs
    assert (knobs["tp"], knobs["pp"], knobs["sequence_parallel"]) == (2, 2, True)
    assert (knobs["dp_shard"], knobs["zero"], knobs["recompute"]) == (REST, 1, "attention")
    assert setting.accumulation == 2 and setting.training["clip_norm"] == 1.0
    assert setting.place("tp") == "megatron.yaml:10: megatron_lm_config.megatron_lm_tp_degree"


def test_ddp_and_parallelism_config():
    text = HEAD + "distributed_type: MULTI_GPU\nmixed_precision: 'no'\n"
    setting = read_accelerate(text, "ddp.yaml")
    assert (setting.knobs["dp_replicate"], setting.knobs["dp_shard"]) == (REST, 1)
    assert setting.training == {"precision": "float32"}
    more = "parallelism_config:\n  parallelism_config_tp_size: 2\n"
    assert read_accelerate(text + more, "ddp.yaml").knobs["tp"] == 2


def test_deepspeed_plugin():
    text = HEAD + "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 3\n"
    text += "  offload_optimizer_device: cpu\n  gradient_accumulation_steps: 4\n"
    setting = read_accelerate(text, "ds.yaml")
    assert (setting.knobs["zero"], setting.knobs["offload"]) == (3, "optimizer")
    assert setting.accumulation == 4


@pytest.mark.parametrize(
    "tail, said",
    [
        ("distributed_type: TPU\n", "a.yaml:4: distributed_type: 'TPU' is not simulated"),
        ("distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n",
         "give that file as the baseline"),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: SOME}\n",
         "but got 'SOME'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_line(tail, said):
    with pytest.raises(InputError) as caught:
        read_accelerate(HEAD + tail, "a.yaml")
    assert said in str(caught.value)


def test_recognised_by_its_keys():
    assert is_accelerate(MEGATRON) and not is_accelerate("nodes: []\n")
