"""Launch scripts as people write them for Megatron-LM."""

from __future__ import annotations

import pytest

from claw_plan.planner.baselines.megatron import is_megatron, read_megatron
from claw_plan.planner.baselines.setting import REST
from claw_plan.profiles.errors import InputError

GPT3_175B = """#!/bin/bash
# 1,024 devices
GPUS_PER_NODE=8
NNODES=128
TP=8

torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES --master_addr $MASTER_ADDR \\
    pretrain_gpt.py \\
    --tensor-model-parallel-size ${TP} \\
    --pipeline-model-parallel-size 8 \\
    --num-layers-per-virtual-pipeline-stage 3 \\
    --sequence-parallel \\
    --num-layers 96 --hidden-size 12288 --num-attention-heads 96 \\
    --seq-length 2048 --micro-batch-size 1 --global-batch-size 1536 \\
    --recompute-granularity selective \\
    --optimizer adam --lr 6.0e-5 --clip-grad 1.0 --bf16 \\
    --use-distributed-optimizer --overlap-grad-reduce --tp-comm-overlap
"""

PLAIN = "pretrain.py --micro-batch-size=4 --tensor-model-parallel-size=1 --fp16 --num-layers 24"


def test_gpt3_175b_on_1024_devices():
    """degrees as in Korthikanti et al. 2022, table 3: 96 layers / 8 ranks / 3 = 4 stages each."""
    setting = read_megatron(GPT3_175B, "train.sh")
    assert setting.knobs == {
        "tp": 8, "pp": 8, "cp": 1, "sequence_parallel": True, "microbatch_size": 1,
        "dp_replicate": 1, "dp_shard": REST, "zero": 1, "offload": "none",
        "schedule": "Interleaved1F1B", "stages_per_rank": 4, "recompute": "attention",
    }  # fmt: skip
    assert setting.training == {
        "global_batch": 1536, "seq_len": 2048, "precision": "bfloat16", "optimizer": "adamw",
        "clip_norm": 1.0,
    }  # fmt: skip
    assert setting.devices == 1024
    assert setting.place("tp") == "train.sh:9: --tensor-model-parallel-size 8"
    assert setting.left_out == (
        "train.sh:17: --tp-comm-overlap: tensor-parallel traffic is reckoned exposed",
    )


def test_defaults_are_megatrons():
    setting = read_megatron(PLAIN, "line.txt")
    assert (setting.knobs["pp"], setting.knobs["dp_replicate"], setting.knobs["dp_shard"]) == (
        1, REST, 1,
    )  # fmt: skip
    assert setting.knobs["recompute"] == "none" and "zero" not in setting.knobs
    assert setting.training == {"precision": "float16", "clip_norm": 1.0}
    assert setting.devices is None


def test_what_the_script_does_not_say_is_left_open_and_told():
    setting = read_megatron(PLAIN.replace("=4", " $MBS"), "line.txt")
    assert "microbatch_size" not in setting.knobs
    told = "line.txt:1: --micro-batch-size: the file gives MBS no value; left open"
    assert setting.left_out == (told,)


@pytest.mark.parametrize(
    "flags, knobs",
    [
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
         {"recompute": "full"}),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 5",
         {"recompute": "full", "recompute_blocks": 5}),
        ("--use-distributed-optimizer --data-parallel-sharding-strategy optim_grads_params",
         {"zero": 3, "dp_shard": REST}),
        ("--use-torch-fsdp2", {"zero": 3}),
        ("--optimizer-cpu-offload", {"offload": "optimizer"}),
        ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 3",
         {"stages_per_rank": 3, "schedule": "Interleaved1F1B"}),
        ("--expert-model-parallel-size 4 --context-parallel-size 2", {"ep": 4, "cp": 2}),
    ],
)  # fmt: skip
def test_flags_and_their_knobs(flags, knobs):
    found = read_megatron(f"{PLAIN} {flags}", "line.txt").knobs
    assert {name: found[name] for name in knobs} == knobs


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--tensor-model-parallel-size two", "line.txt:1: --tensor-model-parallel-size two must"),
        ("--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 5",
         "the 24 layers do not divide into 4 ranks of virtual stages of 5"),
        ("--data-parallel-sharding-strategy all", "one of no_shard, optim"),
        ("--clip-grad much", "--clip-grad much must be a number"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_line(flags, said):
    with pytest.raises(InputError) as caught:
        read_megatron(f"{PLAIN} {flags}", "line.txt")
    assert said in str(caught.value)


def test_recognised_by_its_flags():
    assert is_megatron(GPT3_175B) and is_megatron(PLAIN) and not is_megatron("echo hello")
