"""Attention and grouped matrix products as ONE operator each while a model is recorded.

A trace on CPU or fake tensors would otherwise see the CPU's own kernel, or some thirty operators
when dropout or a mask is on; the device runs one fused kernel. Inside `fused_operators` every
`scaled_dot_product_attention` becomes `claw_plan::attention`, which keeps for backward what flash
attention keeps: q, k, v, the output and one float32 logarithm of sums per row (Dao et al. 2022).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from claw_plan.planner.torch_private import override_kernels

_LIBRARY: Any = torch.library.Library("claw_plan", "DEF")
_SCALARS = "float dropout, bool causal, float scale"
_LIBRARY.define(
    f"attention(Tensor q, Tensor k, Tensor v, Tensor? mask, {_SCALARS}) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor out, "
    f"Tensor logsumexp, {_SCALARS}, bool mask_grad) -> (Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define("grouped_mm(Tensor a, Tensor b, Tensor? offsets) -> Tensor")

ops = torch.ops.claw_plan


def _scores(q: Any, k: Any, mask: Any, causal: bool, scale: float) -> torch.Tensor:
    """Attention's scores as the definition says; grouped keys stand for several query heads."""
    scores: torch.Tensor = (q @ _per_query_head(k, q).transpose(-1, -2)) * scale
    if causal:
        square = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(~square.tril(), -math.inf)
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask


def _per_query_head(k: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)


def _attention_real(
    q: Any, k: Any, v: Any, mask: Any, dropout: float, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Used when a model is recorded on real tensors; dropout changes no shape and is left out."""
    scores = _scores(q, k, mask, causal, scale)
    out = torch.softmax(scores, dim=-1) @ _per_query_head(v, q)
    return _output_of(q, v).copy_(out), torch.logsumexp(scores.float(), dim=-1)


def _output_of(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Kernels keep q's layout, so that the transpose and reshape after them copy nothing."""
    if v.shape[-1] == q.shape[-1]:
        return torch.empty_like(q)
    return q.new_empty(*q.shape[:-1], v.shape[-1])


def _attention_backward_real(
    grad: Any, q: Any, k: Any, v: Any, mask: Any, out: Any, logsumexp: Any,
    dropout: float, causal: bool, scale: float, mask_grad: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """The derivatives written out, since autograd does not work below autograd."""
    weights = torch.softmax(_scores(q, k, mask, causal, scale), dim=-1)
    by_weight = grad @ _per_query_head(v, q).transpose(-1, -2)
    by_score = weights * (by_weight - (grad * out).sum(-1, keepdim=True))

    def per_key_head(gradient: torch.Tensor) -> torch.Tensor:
        by_group: torch.Tensor = gradient.unflatten(1, (k.shape[1], -1))
        return by_group.sum(2)

    return (
        by_score @ _per_query_head(k, q) * scale,
        per_key_head(by_score.transpose(-1, -2) @ q * scale),
        per_key_head(weights.transpose(-1, -2) @ grad),
        by_score.sum_to_size(mask.shape) if mask_grad else q.new_empty(0),
    )


def _attention_fake(
    q: Any, k: Any, v: Any, mask: Any, dropout: float, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return _output_of(q, v), q.new_empty(q.shape[:-1], dtype=torch.float32)


def _attention_backward_fake(
    grad: Any, q: Any, k: Any, v: Any, mask: Any, out: Any, logsumexp: Any,
    dropout: float, causal: bool, scale: float, mask_grad: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    grads = [torch.empty_like(tensor) for tensor in (q, k, v)]
    return (*grads, torch.empty_like(mask) if mask_grad else q.new_empty(0))


def _grouped_mm_fake(a: torch.Tensor, b: torch.Tensor, offsets: Any) -> torch.Tensor:
    if a.dim() == 2 and b.dim() == 2:
        return a.new_empty(offsets.shape[0], a.shape[0], b.shape[1])
    return a.new_empty(*a.shape[:-1], b.shape[-1])


def _grouped_mm_real(a: Any, b: Any, offsets: Any) -> torch.Tensor:
    return torch.ops.aten._grouped_mm.default(a, b, offsets)  # type: ignore[no-any-return]


for _name, _real, _fake in (
    ("attention", _attention_real, _attention_fake),
    ("attention_backward", _attention_backward_real, _attention_backward_fake),
    ("grouped_mm", _grouped_mm_real, _grouped_mm_fake),
):
    _LIBRARY.impl(_name, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"claw_plan::{_name}", _fake, lib=_LIBRARY)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, mask: Any, *scalars: Any) -> torch.Tensor:
        out, logsumexp = ops.attention(q, k, v, mask, *scalars)
        ctx.save_for_backward(q, k, v, mask, out, logsumexp)
        ctx.scalars = scalars
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        wanted = ctx.needs_input_grad[3]
        saved = ctx.saved_tensors
        dq, dk, dv, dmask = ops.attention_backward(grads[0], *saved, *ctx.scalars, wanted)
        return dq, dk, dv, dmask if wanted else None, None, None, None


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Any, b: Any, offsets: Any) -> torch.Tensor:
        ctx.save_for_backward(a, b, offsets)
        return ops.grouped_mm(a, b, offsets)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        a, b, offsets = ctx.saved_tensors
        da = (
            ops.grouped_mm(grad, b.transpose(-1, -2), offsets) if ctx.needs_input_grad[0] else None
        )
        db = (
            ops.grouped_mm(a.transpose(-1, -2), grad, offsets) if ctx.needs_input_grad[1] else None
        )
        return da, db, None


def _scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Brings the operands to [batch, heads, seq, head_dim] and back."""
    shapes = (query.shape[:-3], key.shape[:-3], value.shape[:-3])
    lead = torch.broadcast_shapes(*shapes)

    def four(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 3:
            return tensor.unsqueeze(1)
        if tensor.dim() == 4 and tensor.shape[:-3] == lead:
            return tensor
        return tensor.expand(*lead, *tensor.shape[-3:]).flatten(0, -4)

    if attn_mask is not None and attn_mask.dim() == 3 and query.dim() == 3:
        attn_mask = attn_mask.unsqueeze(1)
    scalars = (dropout_p, is_causal, query.shape[-1] ** -0.5 if scale is None else scale)
    operands = (four(query), four(key), four(value), attn_mask)
    out: torch.Tensor = _Attention.apply(*operands, *scalars)  # type: ignore[no-untyped-call]
    return out.reshape(*lead, *query.shape[-3:-1], value.shape[-1])


def _grouped_mm(
    a: torch.Tensor, b: torch.Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> torch.Tensor:
    return grouped_product(a, b, offs)


def grouped_product(a: torch.Tensor, b: torch.Tensor, offsets: Any = None) -> torch.Tensor:
    """[groups, m, k] times [groups, k, n], or ragged groups that end at `offsets`."""
    out: torch.Tensor = _GroupedProduct.apply(a, b, offsets)  # type: ignore[no-untyped-call]
    return out


@contextmanager
def fused_operators() -> Iterator[None]:
    """Within it, attention and grouped products are recorded as one operator each."""
    kernels = {
        "scaled_dot_product_attention": _scaled_dot_product_attention,
        "_grouped_mm": _grouped_mm,
    }
    with override_kernels(kernels):
        yield
