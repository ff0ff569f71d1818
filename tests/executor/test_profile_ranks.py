from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from claw_plan.executor import profile_ranks as module
from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.profile_ranks import (
    local_cluster,
    profile_ranks,
    tensor_parallel_refusal,
)
from claw_plan.planner.model_source import load_model
from claw_plan.profiles.measurement import Measurement
from claw_plan.profiles.work import CollectiveWork, OpWork

EXAMPLES = Path(__file__).parents[2] / "examples"
WIDTH, HIDDEN = 32, 128
GPT = "GPT(GPTConfig(vocab_size=61, block_size=16, n_layer=2, n_head=4, n_embd=32))"
INPUTS = "idx=int64[B,16]<61 targets=int64[B,16]<61"


def graph(**values: Any) -> Any:
    known = {"no_tensor_parallel": "", "tp_divides": 4, "takes_tp": lambda ranks: 4 % ranks == 0}
    return SimpleNamespace(**known | values)


def test_weights_are_divided_only_where_heads_allow_it() -> None:
    assert tensor_parallel_refusal(graph(), 4) == ""
    assert tensor_parallel_refusal(graph(), 3) == "the model's heads divide by 4 at most"
    assert tensor_parallel_refusal(graph(no_tensor_parallel="no pairs"), 2) == "no pairs"


def test_a_machine_without_gpus_has_as_many_devices_as_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert local_cluster(3).num_devices == 3
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    with pytest.raises(ExecutionError, match="no GPU and 2 cores; give at most 16"):
        local_cluster(17)


def test_more_gpus_than_there_are_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ExecutionError, match="--gpus is 4, but this machine has 2"):
        local_cluster(4)
    monkeypatch.setattr(module, "detect_gpu_node", lambda: None)
    with pytest.raises(ExecutionError, match="NVML does not tell"):
        local_cluster(2)


def forward_products(measured: list[Measurement]) -> set[tuple[int, ...]]:
    works = [one.work for one in measured if isinstance(one.work, OpWork)]
    return {w.dims for w in works if w.kind == "gemm" and w.phase == "forward"}


@pytest.mark.slow
def test_each_division_is_measured_with_its_collectives() -> None:
    loaded = load_model(EXAMPLES / "gpt.py", build=GPT, inputs=INPUTS)
    sharded, divided = profile_ranks(loaded, [2], 2)
    tokens = 2 * 16
    # Shards are gathered before they compute; divided weights compute a half each.
    assert (1, tokens, HIDDEN, WIDTH) in forward_products(sharded)
    assert (1, tokens, HIDDEN // 2, WIDTH) in forward_products(divided)
    ops = [
        {one.work.op for one in some if isinstance(one.work, CollectiveWork)}
        for some in (sharded, divided)
    ]
    assert {"all_gather", "reduce_scatter"} <= ops[0]
    assert "all_reduce" in ops[1]
    assert {one.ranks_per_host for one in sharded} == {2}
    assert {one.provenance["command"] for one in divided} == {"claw-plan profile"}


@pytest.mark.slow
def test_an_undividable_model_is_measured_sharded_and_the_reason_said(tmp_path: Path) -> None:
    path = tmp_path / "mlp.py"
    path.write_text(
        "import torch, torch.nn as nn\n"
        "def build_model(): return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))\n"
        "def example_batch(n): return {'input': torch.randn(n, 8)}\n"
        "def loss(output, batch): return output.square().mean()\n"
    )
    said: list[str] = []
    (sharded,) = profile_ranks(load_model(path), [2], 2, say=said.append)
    assert forward_products(sharded) == {(1, 2, 8, 8)}
    assert said and said[0].startswith("not measured with tp=2: ")
