from __future__ import annotations

from pathlib import Path

import pytest
import torch

from claw_plan.executor import profile_model as module
from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.profile_model import device_name, profile_model
from claw_plan.planner.model_source import LoadedModel, load_model
from claw_plan.profiles.work import OpWork

MODEL = """
import torch, torch.nn as nn

def build_model():
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))

def example_batch(n):
    return {"input": torch.randn(n, 32)}

def loss(output, batch):
    return output.square().mean()
"""


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedModel:
    path = tmp_path / "mlp.py"
    path.write_text(MODEL)
    return load_model(path)


def test_every_product_is_measured_at_every_batch(loaded: LoadedModel) -> None:
    threads = torch.get_num_threads()
    found = profile_model(loaded, [2, 4], device=torch.device("cpu"), repeats=2)
    gemms = [m for m in found if isinstance(m.work, OpWork) and m.work.kind == "gemm"]
    forward = {m.work.dims for m in gemms if m.work.phase == "forward"}
    # batch x out x in of both layers, at both sizes
    assert forward == {(1, n, out, k) for n in (2, 4) for out, k in ((64, 32), (8, 64))}
    assert {m.work.phase for m in gemms} == {"forward", "backward"}
    assert all(len(m.samples_ns) >= 2 and min(m.samples_ns) >= 0 for m in gemms)
    assert {m.device for m in found} == {"cpu-core"}
    assert torch.get_num_threads() == threads


def test_kernels_carry_the_precision_they_ran_in(loaded: LoadedModel) -> None:
    found = profile_model(loaded, [2], device=torch.device("cpu"), precision="bf16", repeats=1)
    assert {m.work.dtype for m in found if m.work.kind == "gemm"} == {"bfloat16"}


def test_a_model_that_does_not_fit_names_what_did(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = module._one_step

    def step(*args: object) -> module.Samples:
        if args[2]["input"].shape[0] > 2:  # type: ignore[index]
            raise torch.OutOfMemoryError("out of memory")
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "_one_step", step)
    with pytest.raises(ExecutionError, match="a batch of 4 does not fit cpu; a batch of 2 did"):
        profile_model(loaded, [2, 4], device=torch.device("cpu"), repeats=1)


def test_names() -> None:
    assert device_name(torch.device("cpu")) == "cpu-core"
