from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from claw_plan.planner.attention_op import fused_operators, grouped_product
from claw_plan.planner.torch_private import FakeTensorMode, TorchDispatchMode

FULL = ((2, 4, 6, 8),) * 3
CASES = {
    "plain": (FULL, None, {}),
    "causal": (FULL, None, {"is_causal": True}),
    "scaled": (FULL, None, {"scale": 0.3}),
    "grouped": (((2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8)), None, {"enable_gqa": True}),
    "cross": (((2, 4, 6, 8), (2, 4, 9, 8), (2, 4, 9, 8)), None, {}),
    "other value width": (((2, 4, 6, 8), (2, 4, 6, 8), (2, 4, 6, 5)), None, {}),
    "no heads": (((4, 6, 8),) * 3, None, {}),
    "two leading dimensions": (((2, 3, 4, 6, 8),) * 3, None, {}),
    "bias": (FULL, ((1, 4, 6, 6), torch.float64), {}),
    "boolean mask": (FULL, ((6, 6), torch.bool), {}),
    "mask without heads": (((4, 6, 8),) * 3, ((4, 6, 6), torch.float64), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_those_of_torch(name: str) -> None:
    shapes, mask_of, options = CASES[name]
    torch.manual_seed(0)
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    mask: Any = None
    if mask_of is not None:
        values = torch.randn(mask_of[0], dtype=torch.float64)
        mask = values > -1 if mask_of[1] == torch.bool else values.requires_grad_()
        leaves += [] if mask_of[1] == torch.bool else [mask]

    def run() -> list[torch.Tensor]:
        out = F.scaled_dot_product_attention(*leaves[:3], attn_mask=mask, **options)
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
        return [out, *torch.autograd.grad((out * weights).sum(), leaves)]

    expected = run()
    with fused_operators():
        found = run()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


class Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_dropout_and_masks_leave_one_operator_a_pass() -> None:
    with FakeTensorMode(), fused_operators():
        layer = nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True)
        x = torch.randn(2, 5, 32)
        mask = torch.zeros(5, 5, dtype=torch.bool)
        with Names() as seen:
            layer(x, x, x, attn_mask=mask, need_weights=False)[0].sum().backward()
    assert seen.names.count("attention") == seen.names.count("attention_backward") == 1
    assert not {"bmm", "_softmax", "native_dropout"} & set(seen.names)


def test_it_saves_what_flash_attention_saves() -> None:
    saved: list[tuple[int, ...]] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(tuple(t.shape)) or t, lambda t: t
    )
    with FakeTensorMode(), fused_operators():
        q, k, v = (torch.randn(2, h, 6, 8, requires_grad=True) for h in (4, 2, 2))
        with hooks:
            F.scaled_dot_product_attention(q, k, v, enable_gqa=True, dropout_p=0.5)
    assert sorted(saved) == [(2, 2, 6, 8), (2, 2, 6, 8), (2, 4, 6), (2, 4, 6, 8), (2, 4, 6, 8)]


def test_grouped_products_run_fake_in_float32() -> None:
    with FakeTensorMode(), fused_operators():
        rows = torch.randn(12, 8, requires_grad=True)
        experts = torch.randn(3, 8, 16, requires_grad=True)
        offsets = torch.tensor([4, 8, 12], dtype=torch.int32)
        out = torch._grouped_mm(rows, experts, offs=offsets)
        out.sum().backward()
    assert out.shape == (12, 16)
    assert rows.grad.shape == rows.shape and experts.grad.shape == experts.shape


def test_the_operators_are_torchs_own_again_afterwards() -> None:
    q = torch.randn(1, 1, 4, 8)
    with fused_operators():
        pass
    with Names() as seen:
        F.scaled_dot_product_attention(q, q, q)
    assert "attention" not in seen.names


def test_groups_of_equal_size_are_a_batch_of_products() -> None:
    with FakeTensorMode():
        rows = torch.randn(3, 4, 8, requires_grad=True)
        experts = torch.randn(3, 8, 16, requires_grad=True)
        with Names() as seen:
            grouped_product(rows, experts).sum().backward()
    assert seen.names.count("grouped_mm") == 3  # forward, and one for each operand
    assert rows.grad.shape == rows.shape and experts.grad.shape == experts.shape


def test_it_stands_in_on_meta_tensors_too() -> None:
    q = torch.empty(2, 4, 6, 8, device="meta", requires_grad=True)
    with fused_operators(), Names() as seen:
        F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
    assert seen.names.count("attention") == seen.names.count("attention_backward") == 1
