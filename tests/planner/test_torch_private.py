from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest
import torch
import torch.nn as nn

from claw_plan.planner.torch_private import (
    FakeTensorMode,
    current_node,
    last_sequence_number,
    one_sequence_per_row,
    override_kernels,
    sequence_number,
    storage_key,
    without_onednn,
    without_rejection,
)


def test_a_node_has_the_number_that_was_the_last_when_it_was_made() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    assert sequence_number(y.grad_fn) == last_sequence_number()
    z = y + 1
    assert sequence_number(z.grad_fn) == last_sequence_number() == sequence_number(y.grad_fn) + 1


def test_the_current_node_is_the_one_whose_backward_runs() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    seen = []
    x.register_hook(lambda grad: seen.append(current_node()))
    assert current_node() is None
    y.sum().backward()
    assert seen[0] is not None and current_node() is None


def test_views_share_a_storage_key() -> None:
    x = torch.ones(4)
    assert storage_key(x) == storage_key(x[1:]) != storage_key(x.clone())


def test_kernels_are_replaced_above_autograd_and_put_back() -> None:
    x = torch.ones(2, requires_grad=True)
    with override_kernels({"relu": lambda tensor: tensor * 5}):
        y = torch.relu(x)
        y.sum().backward()
    assert y.tolist() == x.grad.tolist() == [5.0, 5.0]
    assert torch.relu(x).tolist() == [1.0, 1.0]


def test_packed_sequences_are_denied_only_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    masking = ModuleType("transformers.masking_utils")
    masking.find_packed_sequence_indices = lambda ids: "asked"
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", masking)
    with one_sequence_per_row():
        assert masking.find_packed_sequence_indices(1) is None
    assert masking.find_packed_sequence_indices(1) == "asked"
    monkeypatch.delitem(sys.modules, "transformers.masking_utils")
    with one_sequence_per_row():
        assert "transformers.masking_utils" not in sys.modules


def test_fake_tensors_have_shapes_only() -> None:
    with FakeTensorMode():
        big = torch.empty(10**6, 10**6)
        assert (big @ big).shape == (10**6, 10**6)


def test_onednn_is_off_inside() -> None:
    lstm, x = torch.nn.LSTM(4, 4), torch.randn(2, 3, 4)

    def operators() -> str:
        with torch.profiler.profile() as profile:
            lstm(x)
        return profile.key_averages().table()

    with without_onednn():
        assert "mkldnn" not in operators()
    assert "mkldnn" in operators()


def test_truncated_normals_of_fake_tensors_are_not_drawn() -> None:
    with FakeTensorMode(), without_rejection():
        assert nn.init.trunc_normal_(torch.empty(3), std=1.0).shape == (3,)
    with without_rejection():
        assert nn.init.trunc_normal_(torch.empty(500), std=9.0).abs().max() <= 2.0


UNLOADED = """
import sys, torch
from claw_plan.planner.mixed import result
from claw_plan.planner.torch_private import FakeTensorMode
with FakeTensorMode():
    layer = torch.nn.Linear(4, 4)
    torch.nn.functional.gelu(layer(torch.ones(2, 4))).sum().backward()
assert "torch._dynamo.eval_frame" not in sys.modules
assert layer.weight.grad.shape == (4, 4)
torch._dynamo.config.cache_size_limit = 3
doubled = torch.compile(lambda x: 2 * x, backend="eager", fullgraph=True)
assert torch.equal(doubled(torch.ones(2)), torch.full((2,), 2.0))
import torch._dynamo.utils, torch._dynamo as compiler
assert sys.modules["torch._dynamo"] is torch._dynamo is compiler
assert compiler.__file__ and compiler.config.cache_size_limit == 3
"""


@pytest.mark.slow
def test_the_compiler_is_loaded_when_it_is_asked_for() -> None:
    """In a process of its own, for other tests compile."""
    subprocess.run([sys.executable, "-c", UNLOADED], check=True)
