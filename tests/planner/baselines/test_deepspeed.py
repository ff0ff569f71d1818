"""DeepSpeed's configuration files."""

from __future__ import annotations

import json

import pytest

from claw_plan.planner.baselines.deepspeed import is_deepspeed, read_deepspeed
from claw_plan.planner.baselines.setting import REST
from claw_plan.profiles.errors import InputError

ZERO3 = """{
\t"train_batch_size": 256,
\t"train_micro_batch_size_per_gpu": 4,
\t"gradient_accumulation_steps": 8,
\t"bf16": {"enabled": true},
\t"gradient_clipping": 1.0,
\t"optimizer": {"type": "AdamW", "params": {"lr": 3e-5}},
\t"zero_optimization": {
\t\t"stage": 3,
\t\t"offload_optimizer": {"device": "cpu", "pin_memory": true},
\t\t"offload_param": {"device": "cpu"},
\t\t"overlap_comm": true
\t}
}
"""


def read(values):
    return read_deepspeed(json.dumps(values, indent=1), "ds.json")


def test_zero3_with_offload():
    setting = read_deepspeed(ZERO3, "ds.json")
    assert setting.knobs == {
        "pp": 1, "cp": 1, "tp": 1, "sequence_parallel": False, "schedule": "1F1B",
        "stages_per_rank": 1, "zero": 3, "dp_shard": REST, "dp_replicate": 1,
        "offload": "optimizer", "microbatch_size": 4,
    }  # fmt: skip
    assert setting.training == {
        "precision": "bfloat16", "optimizer": "adamw", "clip_norm": 1.0, "global_batch": 256,
    }  # fmt: skip
    assert setting.accumulation == 8
    assert setting.place("microbatch_size") == "ds.json:3: train_micro_batch_size_per_gpu"
    assert setting.left_out == (
        "ds.json:11: zero_optimization.offload_param: parameters stay on the device",
    )


def test_auto_is_left_open_and_told():
    setting = read({"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}})
    assert "microbatch_size" not in setting.knobs and setting.knobs["zero"] == 2
    assert setting.left_out == ('ds.json:2: train_micro_batch_size_per_gpu: is "auto"; left open',)


@pytest.mark.parametrize(
    "zero, knobs",
    [
        ({"stage": 0}, {"dp_replicate": REST, "dp_shard": 1}),
        ({"stage": 1}, {"dp_shard": REST, "zero": 1}),
        ({"stage": 3, "mics_shard_size": 8}, {"dp_shard": 8, "dp_replicate": REST}),
        ({"stage": 3, "zero_hpz_partition_size": 8}, {"dp_shard": REST, "reshard_ranks": 8}),
        ({"stage": 2, "offload_optimizer": {"device": "none"}}, {"offload": "none"}),
    ],
)
def test_stages(zero, knobs):
    found = read({"zero_optimization": zero}).knobs
    assert {name: found[name] for name in knobs} == knobs


def test_what_is_wrong_is_said_with_its_line():
    with pytest.raises(InputError, match=r"ds\.json:3: zero_optimization\.stage must be a whole"):
        read({"zero_optimization": {"stage": "three"}})


def test_recognised_by_its_keys():
    assert is_deepspeed(ZERO3) and not is_deepspeed('{"nodes": []}')
