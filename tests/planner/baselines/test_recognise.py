"""Which format a file has is read from its content."""

from __future__ import annotations

import pytest

from claw_plan.planner.baselines.recognise import read_setting
from claw_plan.profiles.errors import InputError

FILES = {
    "Megatron-LM": "python pretrain_gpt.py --micro-batch-size 1 --tensor-model-parallel-size 2",
    "torchtitan": "[training]\nlocal_batch_size = 1\n[parallelism]\ntensor_parallel_degree = 2\n",
    "DeepSpeed": '{"train_batch_size": 8, "zero_optimization": {"stage": 1}}',
    "Accelerate": "distributed_type: MULTI_GPU\nnum_processes: 8\nmixed_precision: bf16\n",
}


@pytest.mark.parametrize("name", FILES)
def test_the_name_does_not_matter(name, tmp_path):
    path = tmp_path / "config"
    path.write_text(FILES[name])
    assert read_setting(path).format == name


@pytest.mark.parametrize("text", ["", "nodes: [{type: cpu}]\n", "[tool.ruff]\nline-length = 99\n"])
def test_other_files_are_refused_with_what_is_known(text, tmp_path):
    path = tmp_path / "other.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=r"other\.yaml is no training configuration"):
        read_setting(path)
