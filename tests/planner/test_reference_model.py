"""The reference transformer as a module: what the trace of it does not show."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from claw_plan.planner.attention_op import fused_operators
from claw_plan.planner.reference_model import Division, ReferenceTransformer, all_to_all
from claw_plan.planner.torch_private import FakeTensorMode
from claw_plan.planner.tp_autograd import StandIn
from claw_plan.profiles.training_row import Dimensions, LatentAttention, MixtureOfExperts

PLAIN = Dimensions(
    layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=64, vocab=50, seq_len=8,
    activation="swiglu", norm="rms",
)  # fmt: skip
EXPERTS = MixtureOfExperts(experts=4, topk=2, expert_ffn=16, shared_ffn=24)
LATENT = LatentAttention(
    q_lora_rank=12, kv_lora_rank=10, qk_nope_dim=6, qk_rope_dim=4, v_head_dim=8
)


def step(dims: Dimensions, division: Division, *, fake: bool = True) -> ReferenceTransformer:
    """A forward and backward of two sequences."""
    ranks = {axis: StandIn(getattr(division, axis)) for axis in ("tp", "cp", "ep")}
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        model = ReferenceTransformer(dims, division, ranks, ((0, False),) * 2)
    with mode, fused_operators():
        tokens = torch.empty(2, dims.seq_len // division.cp, dtype=torch.int64)
        loss = model(tokens, tokens)
        assert loss.shape == () and loss.dtype == torch.float32
        loss.backward()
    return model


@pytest.mark.parametrize("moe", [None, EXPERTS])
@pytest.mark.parametrize("mla", [None, LATENT, replace(LATENT, q_lora_rank=0)])
@pytest.mark.parametrize(
    "division",
    [
        Division(),
        Division(fused_attention=False, fused_loss=False),
        Division(tp=2),
        Division(tp=2, sequence_parallel=True),
        Division(cp=2),
        Division(cp=2, cp_kind="a2a"),
        Division(ep=2),
        Division(tp=2, sequence_parallel=True, ep=4),
        Division(tp=2, ep=2, etp=2),
        Division(tp=2, sequence_parallel=True, ep=2, etp=2),
    ],
)
def test_every_parameter_gets_a_gradient_under_every_division(moe, mla, division):
    model = step(replace(PLAIN, moe=moe, mla=mla), division)
    missing = [name for name, part in model.named_parameters() if part.grad is None]
    assert not missing


def test_ranks_together_hold_the_experts_once():
    dims = replace(PLAIN, moe=EXPERTS)

    def held(division: Division) -> int:
        mlp = step(dims, division).blocks[0].mlp
        return mlp.up.numel() + mlp.down.numel()

    whole = held(Division())
    assert whole == 4 * 3 * 32 * 16  # gated: two matrices up, one down
    assert held(Division(ep=4)) * 4 == whole
    assert held(Division(tp=2, ep=2, etp=2)) * 4 == whole


def test_an_unfused_loss_is_torchs_cross_entropy():
    """On real tensors, where the fused one is torch's own."""
    torch.manual_seed(0)
    dims = replace(PLAIN, kv_heads=4)
    losses = []
    for fused in (True, False):
        division = Division(fused_loss=fused, fused_attention=True)
        model = ReferenceTransformer(dims, division, {}, ())
        torch.manual_seed(1)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
        tokens = torch.randint(0, 50, (2, 8))
        losses.append(model(tokens, tokens.flip(1)))
    torch.testing.assert_close(losses[1], losses[0])


def test_unfused_attention_without_its_dropout_is_scaled_attention(monkeypatch):
    """The scores' scale is left out (it is fused), so queries are scaled here instead."""
    torch.manual_seed(0)
    dims = replace(PLAIN, causal=False)
    fused = ReferenceTransformer(dims, Division(), {}, ((0, True),)).blocks[0].attention
    unfused = ReferenceTransformer(dims, Division(fused_attention=False), {}, ((0, True),))
    q, k, v = torch.randn(1, 4, 8, 8), torch.randn(1, 2, 8, 8), torch.randn(1, 2, 8, 8)
    expected = fused._attend(q, k, v)
    attention = unfused.blocks[0].attention
    ones = torch.ones(())
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *size, **options: ones)
    found = attention._attend(q * 8**-0.5, k, v)
    torch.testing.assert_close(found, expected)


def test_all_to_all_is_its_own_derivative():
    seen = []
    ranks = StandIn(4, exchange=lambda op, size, where: seen.append((op, size, where)))
    rows = torch.ones(8, 3, requires_grad=True)
    sent = all_to_all(rows, ranks, "experts")
    assert sent.shape == rows.shape and seen == [("all_to_all", 8 * 3 * 4, "experts")]
    sent.sum().backward()
    assert rows.grad.shape == rows.shape and len(seen) == 2
