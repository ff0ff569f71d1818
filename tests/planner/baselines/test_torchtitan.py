"""torchtitan's job files, of now and of 2024."""

from __future__ import annotations

import pytest

from claw_plan.planner.baselines.setting import REST
from claw_plan.planner.baselines.torchtitan import is_torchtitan, read_torchtitan
from claw_plan.profiles.errors import InputError

LLAMA3_70B = """
[job]
description = "Llama 3 70B training"

[model]
name = "llama3"
flavor = "70B"

[optimizer]
name = "AdamW"
lr = 1.5e-4

[training]
local_batch_size = 8
seq_len = 8192
max_norm = 1.0

[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 8
enable_async_tensor_parallel = true
pipeline_parallel_degree = 1
context_parallel_degree = 1

[activation_checkpoint]
mode = "full"
"""

OLD = """
[training]
batch_size = 4
seq_len = 2048
tensor_parallel_degree = 2
data_parallel_degree = 4
compile = false

[experimental]
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "1f1b"

[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
"""


def test_llama3_70b():
    setting = read_torchtitan(LLAMA3_70B, "llama3_70b.toml")
    assert setting.knobs == {
        "dp_replicate": 1, "dp_shard": REST, "tp": 8, "pp": 1, "cp": 1, "sequence_parallel": True,
        "offload": "none", "schedule": "1F1B", "stages_per_rank": 1, "zero": 3,
        "recompute": "full", "microbatch_size": 8,
    }  # fmt: skip
    assert setting.training["seq_len"] == 8192 and setting.training["optimizer"] == "adamw"
    assert setting.accumulation == 1
    assert setting.place("tp") == "llama3_70b.toml:21: parallelism.tensor_parallel_degree"
    assert [text.split(": ")[1] for text in setting.left_out] == [
        "parallelism.enable_async_tensor_parallel"
    ]


def test_a_file_of_2024():
    setting = read_torchtitan(OLD, "old.toml")
    knobs = setting.knobs
    assert (knobs["tp"], knobs["dp_shard"], knobs["pp"]) == (2, 4, 2)
    assert (knobs["schedule"], knobs["zero"], knobs["recompute"]) == ("1F1B", 1, "half")
    assert (knobs["microbatch_size"], setting.accumulation) == (1, 4)
    assert is_torchtitan(OLD)


@pytest.mark.parametrize(
    "policy, pp, zero",
    [("default", 1, 3), ("default", 2, 1), ("always", 2, 3), ("never", 1, 2), ("never", 2, 1)],
)
def test_when_parameters_are_freed(policy, pp, zero):
    """`get_fsdp_reshard_after_forward_policy`: by default unless there is a pipeline."""
    text = (
        f"[parallelism]\npipeline_parallel_degree = {pp}\n"
        f'fsdp_reshard_after_forward = "{policy}"\n'
    )
    assert read_torchtitan(text, "a.toml").knobs["zero"] == zero


@pytest.mark.parametrize(
    "text, said",
    [
        ("[parallelism]\ntensor_parallel_degree = \n", "a.toml: not valid TOML"),
        ('[parallelism]\ntensor_parallel_degree = "two"\n', "a.toml:2: parallelism.tensor"),
        ("[parallelism]\npipeline_parallel_degree = 2\n"
         'pipeline_parallel_schedule = "LoopedBFS"\n', "'LoopedBFS' is not simulated"),
        ("[training]\nlocal_batch_size = 4\n[parallelism]\npipeline_parallel_degree = 2\n"
         "pipeline_parallel_microbatch_size = 3\n", "do not divide a batch of 4"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_line(text, said):
    with pytest.raises(InputError) as caught:
        read_torchtitan(text, "a.toml")
    assert said in str(caught.value)
