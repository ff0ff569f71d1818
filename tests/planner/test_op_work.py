from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from claw_plan.planner.op_work import Work, works_of

aten = torch.ops.aten
F32 = 4


def works(func: object, *args: object) -> list[Work]:
    return works_of(func, args, {}, func(*args))  # type: ignore[operator]


def test_matrix_products() -> None:
    a, b, bias = torch.randn(6, 8), torch.randn(8, 10), torch.randn(10)
    one = Work("gemm", (1, 6, 10, 8), "float32", 2 * 6 * 8 * 10, F32 * (48 + 80), F32 * 60)
    assert works(aten.mm.default, a, b) == [one]
    (two,) = works(aten.addmm.default, bias, a, b)
    assert two == one._replace(read_bytes=F32 * (48 + 80 + 10))
    (many,) = works(aten.bmm.default, torch.randn(3, 6, 8), torch.randn(3, 8, 10))
    assert many.dims == (3, 6, 10, 8) and many.flops == 3 * one.flops
    (vector,) = works(aten.mv.default, a, torch.randn(8))
    assert vector.dims == (1, 6, 1, 8) and vector.flops == 2 * 6 * 8
    assert works(aten.mm.default, a.bfloat16(), b.bfloat16())[0].dtype == "bfloat16"


def test_convolutions() -> None:
    image, weight = torch.randn(2, 4, 9, 9), torch.randn(6, 2, 3, 3)
    rest = ([2, 2], [1, 1], [1, 1], False, [0, 0], 2)
    (forward,) = works(aten.convolution.default, image, weight, None, *rest)
    # 5 x 5 outputs of 6 channels; each sees 3 x 3 positions of the 2 channels of its group.
    assert forward.dims == (2, 2, 6, 25, 9)
    assert forward.flops == 2 * 2 * 6 * 25 * 2 * 9
    grad = torch.randn(2, 6, 5, 5)
    back = (grad, image, weight, [6], *rest)
    data, weights, bias = works(aten.convolution_backward.default, *back, [True, True, True])
    assert data.flops == weights.flops == forward.flops
    assert data.read_bytes == F32 * (grad.numel() + weight.numel())
    assert weights.written_bytes == F32 * weight.numel()
    assert (bias.kind, bias.written_bytes) == ("memory", F32 * 6)
    assert len(works(aten.convolution_backward.default, *back, [False, True, False])) == 1


def test_transposed_convolutions_work_on_input_positions() -> None:
    image, weight = torch.randn(2, 4, 5, 5), torch.randn(4, 6, 2, 2)
    rest = (None, [2, 2], [0, 0], [1, 1], True, [0, 0], 1)
    (work,) = works(aten.convolution.default, image, weight, *rest)
    assert work.flops == 2 * 2 * 4 * 6 * 25 * 4


def test_attention_counts_the_whole_square() -> None:
    import claw_plan.planner.attention_op  # noqa: F401  registers the operator

    q, k = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 10, 8)
    options = (None, 0.0, True, 0.5)
    (forward,) = works(torch.ops.claw_plan.attention.default, q, q, q, *options)
    assert forward.dims == (2, 4, 4, 6, 6, 8, 1)
    assert forward.flops == 4 * 2 * 4 * 6 * 6 * 8
    options = (None, 0.0, False, 0.5)
    out, logsumexp = torch.ops.claw_plan.attention.default(q, k, k, *options)
    (backward,) = works(
        torch.ops.claw_plan.attention_backward.default, out, q, k, k, None, out, logsumexp,
        0.0, False, 0.5, False,
    )  # fmt: skip
    assert backward.dims == (2, 4, 2, 6, 10, 8, 0)
    assert 2 * backward.flops == 5 * 4 * 2 * 4 * 6 * 10 * 8


def test_views_and_allocations_are_free() -> None:
    a = torch.randn(6, 8)
    assert works(aten.t.default, a) == []
    assert works(aten.view.default, a, [48]) == []
    assert works(aten.empty_like.default, a) == []


@pytest.mark.parametrize(
    ("func", "args", "read", "written"),
    [
        (aten.add.Tensor, (torch.ones(6, 8), torch.ones(8)), F32 * 56, F32 * 48),
        (aten.relu_.default, (torch.ones(6),), F32 * 6, F32 * 6),
        (aten.copy_.default, (torch.ones(6), torch.ones(6)), F32 * 6, F32 * 6),
        # An expanded operand is read once, a table only at the rows that are taken.
        (aten.clone.default, (torch.ones(1, 8).expand(6, 8),), F32 * 8, F32 * 48),
        (aten.embedding.default, (torch.ones(99, 8), torch.tensor([1, 2])), 16 + 64, F32 * 16),
    ],
)
def test_bytes_moved(func: object, args: tuple[object, ...], read: int, written: int) -> None:
    (work,) = works(func, *args)
    assert (work.kind, work.dims, work.flops) == ("memory", (), 0)
    assert (work.read_bytes, work.written_bytes) == (read, written)


def test_linear_is_two_products_of_its_flops_in_backward() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    x, w = torch.randn(4, 6, requires_grad=True), torch.randn(5, 6, requires_grad=True)
    with FlopCounterMode(display=False) as counted:
        F.linear(x, w).sum().backward()
    assert (
        counted.get_total_flops()
        == 3 * works(aten.mm.default, x.detach(), w.t().detach())[0].flops
    )


def test_products_of_groups_repeat_and_ragged_ones_do_not() -> None:
    import claw_plan.planner.attention_op  # noqa: F401  registers the operator

    grouped = torch.ops.claw_plan.grouped_mm.default
    with torch.device("meta"):
        rows, weights = torch.empty(5, 6, 8), torch.empty(5, 8, 10)
        (equal,) = works(grouped, rows, weights, None)
        ragged_rows, offsets = torch.empty(30, 8), torch.empty(5, dtype=torch.int32)
        (ragged,) = works(grouped, ragged_rows, weights, offsets)
    assert (equal.dims, ragged.dims) == ((5, 6, 10, 8), (1, 30, 10, 8))
    assert equal.flops == ragged.flops == 2 * 30 * 10 * 8


def test_a_narrower_value_costs_its_own_width() -> None:
    import claw_plan.planner.attention_op  # noqa: F401  registers the operator

    with torch.device("meta"):
        q, v = torch.empty(1, 4, 6, 12), torch.empty(1, 4, 6, 8)
        (work,) = works(torch.ops.claw_plan.attention.default, q, q, v, None, 0.0, True, 0.5)
    assert work.flops == 2 * 4 * 6 * 6 * (12 + 8)
