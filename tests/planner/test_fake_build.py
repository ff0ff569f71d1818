from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn as nn

from claw_plan.planner.errors import TraceError
from claw_plan.planner.fake_build import build_fake
from claw_plan.planner.model_source import LoadedModel, load_model
from claw_plan.planner.torch_private import FakeTensorMode

NET = """
import torch
import torch.nn as nn
class Net(nn.Module):
    def __init__(self, read, size=4):
        super().__init__()
        self.rate = torch.linspace(0, 1, 5)[2].item() if read else 0.5
        self.one, self.two = nn.Linear(size, size), nn.Linear(size, size)
        self.two.weight = self.one.weight
        self.one.bias.requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
"""


def load(tmp_path: Path, build: str) -> LoadedModel:
    path = tmp_path / "model.py"
    path.write_text(NET, encoding="utf-8")
    return load_model(path, build=build, inputs="x=float32[B,4]")


@pytest.mark.parametrize("read", [False, True])
def test_parameters_and_buffers_are_fake_and_ties_kept(tmp_path: Path, read: bool) -> None:
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    module = build_fake(load(tmp_path, f"Net({read})"), fake)
    for tensor in [*module.parameters(), *module.buffers()]:
        assert tensor.fake_mode is fake
    assert module.rate == 0.5
    assert module.two.weight is module.one.weight
    assert isinstance(module.one.weight, nn.Parameter)
    assert not module.one.bias.requires_grad and module.two.bias.requires_grad


def test_reading_values_needs_no_more_memory(tmp_path: Path) -> None:
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    module = build_fake(load(tmp_path, "Net(True, size=40_000)"), fake)
    assert module.one.weight.numel() == 1_600_000_000


def test_registration_is_torchs_own_again(tmp_path: Path) -> None:
    build_fake(load(tmp_path, "Net(True)"), FakeTensorMode(allow_non_fake_inputs=True))
    assert torch.equal(nn.Linear(2, 2, bias=False).weight * 0, torch.zeros(2, 2))


def test_a_real_error_is_the_models_own(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="ZeroDivisionError"):
        build_fake(load(tmp_path, "Net(1 / 0)"), FakeTensorMode(allow_non_fake_inputs=True))


SELF_READING = """
import torch
import torch.nn as nn
class Net(nn.Module):
    def __init__(self, scaled=False, size=4):
        super().__init__()
        self.one, self.two = nn.Linear(size, size), nn.Linear(size, size)
        self.two.weight = self.one.weight
        nn.init.trunc_normal_(self.one.weight, std=0.02)
        if scaled:
            self.scale = self.one.weight.abs().max().item()
"""


def test_truncated_normals_draw_nothing(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(SELF_READING)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    model = load_model(tmp_path / "model.py", build="Net(size=40_000)", inputs="x=float32[B,4]")
    assert build_fake(model, fake).one.weight.numel() == 1_600_000_000
    drawn = nn.init.trunc_normal_(torch.empty(1000), std=1.0, a=-0.5, b=0.5)
    assert drawn.abs().max() <= 0.5 < torch.empty(1000).normal_().abs().max()


def test_constructors_that_read_their_parameters_run_for_real(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.py").write_text(SELF_READING)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    model = load_model(tmp_path / "model.py", build="Net(True)", inputs="x=float32[B,4]")
    module = build_fake(model, fake)
    assert 0 < module.scale < 0.2
    assert module.two.weight is module.one.weight
    assert all(parameter.fake_mode is fake for parameter in module.parameters())
    # Two biases of 16 bytes and, before they are tied, two weights of 64.
    monkeypatch.setattr("claw_plan.planner.fake_build.REAL_LIMIT_BYTES", 160)
    build_fake(model, fake)
    monkeypatch.setattr("claw_plan.planner.fake_build.REAL_LIMIT_BYTES", 159)
    with pytest.raises(TraceError, match=r"reads the values of its parameters, and .* too large"):
        build_fake(model, fake)


def test_initialisers_are_as_before_after_a_build(tmp_path: Path) -> None:
    build_fake(load(tmp_path, "Net(False)"), FakeTensorMode(allow_non_fake_inputs=True))
    assert torch.equal(nn.init.ones_(torch.zeros(2)), torch.ones(2))
    with pytest.raises(TraceError):
        build_fake(load(tmp_path, "Net(False, -1)"), FakeTensorMode(allow_non_fake_inputs=True))
    assert torch.equal(nn.init.zeros_(torch.ones(2)), torch.zeros(2))
