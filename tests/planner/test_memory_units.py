"""What a layer keeps, against the formulas of Korthikanti et al. 2022 (arXiv 2205.05198).

Table 2 of the paper, in bytes of 16 bits for s tokens, b samples, width h, a heads, t ranks.
"""

from __future__ import annotations

import dataclasses

import pytest

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.low_precision import with_linear_dtype
from claw_plan.planner.memory_units import UnitMemory, together, unit_memory
from claw_plan.planner.problem import Problem
from claw_plan.planner.reference_model import Division
from claw_plan.planner.reference_trace import trace_reference
from claw_plan.profiles.trainer import NEUTRAL, Trainer
from claw_plan.profiles.training_row import Dimensions

S, B, H, A, T, VOCAB = 256, 2, 512, 8, 4, 2048
DIMS = Dimensions(
    layers=2,
    hidden=H,
    heads=A,
    kv_heads=A,
    head_dim=H // A,
    ffn=4 * H,
    vocab=VOCAB,
    seq_len=S,
    learned_positions=True,
)
OLD = Trainer(
    name="old",
    keeps_compute_copy=True,
    loss_in_place=True,
    gradient_bytes=2,
    fused_attention=False,
    fused_loss=False,
)
NEW = Trainer(name="new", keeps_compute_copy=True, loss_in_place=True)
STATISTICS = 16 * S * B + 2
"""Means and deviations of the norms and dropout's scale, which the paper leaves out."""


def memory(toys, candidate, trainer=OLD, unit=1, dims=DIMS, linear="float16"):
    division = Division(
        tp=candidate.tp,
        sequence_parallel=candidate.sequence_parallel,
        cp=candidate.cp,
        fused_attention=trainer.fused_attention,
        fused_loss=trainer.fused_loss,
    )
    plain = toys.problem()
    problem = Problem(
        graph=with_linear_dtype(trace_reference(dims, division, "float16"), linear),
        cluster=plain.cluster,
        cost=plain.cost,
        training=dataclasses.replace(plain.training, precision="float16"),
        trainer=trainer,
    )
    return unit_memory(problem, dataclasses.replace(candidate, microbatch_size=B), unit)


@pytest.mark.parametrize(
    ("recompute", "factor"),
    [("none", 10 + 24 / T + 5 * A * S / (H * T)), ("attention", 10 + 24 / T), ("full", 2)],
)
def test_tensor_parallel(toys, recompute, factor):
    holds = memory(toys, Candidate(tp=T, recompute=recompute)).holds
    assert 0 <= holds - S * B * H * factor <= STATISTICS


@pytest.mark.parametrize(
    ("recompute", "factor"), [("none", 34 + 5 * A * S / H), ("attention", 34), ("full", 2)]
)
def test_sequence_parallel_divides_all_of_it(toys, recompute, factor):
    candidate = Candidate(tp=T, sequence_parallel=True, recompute=recompute)
    holds = memory(toys, candidate).holds
    assert 0 <= holds - S * B * H * factor / T <= STATISTICS


def test_recompute_makes_again_what_it_did_not_keep(toys):
    none = memory(toys, Candidate(tp=T))
    for mode in ("attention", "full"):
        other = memory(toys, Candidate(tp=T, recompute=mode))
        assert other.holds + other.remade == none.holds


def test_torch_keeps_what_it_gathers(toys):
    """Not Megatron: the whole sequence that enters attention and MLP stays."""
    candidate = Candidate(tp=T, sequence_parallel=True)
    theirs = memory(toys, candidate, Trainer(name="torch", fused_attention=True))
    ours = memory(toys, candidate, NEW)
    assert theirs.holds - ours.holds == 2 * (2 * S * B * H) * (T - 1) // T


@pytest.mark.parametrize(("trainer", "forward"), [(NEW, 2 + 4), (OLD, 2 + 4 + 4)])
def test_the_loss_overwrites_its_scores(toys, trainer, forward):
    """Of each logit: 16 bits, fp32, and without a fused kernel the exponentials in fp32."""
    epilogue = memory(toys, Candidate(tp=T), trainer, unit=3)
    logits = S * B * VOCAB // T
    assert epilogue.forward_peak == forward * logits
    assert epilogue.backward_peak == 6 * logits
    assert 0 <= epilogue.holds - 2 * (2 * S * B * H) <= STATISTICS


def test_a_loss_that_reads_16_bit_scores(toys):
    """Of each logit: 16 bits, and as many of its gradient."""
    trainer = dataclasses.replace(NEW, score_bytes=2)
    epilogue = memory(toys, Candidate(tp=T), trainer, unit=3)
    assert epilogue.forward_peak == epilogue.backward_peak == 4 * (S * B * VOCAB // T)


def test_a_ring_keeps_its_own_keys_and_values(toys):
    """Twice the ranks: half the tokens each, and still nothing of the others'."""
    two, four = (memory(toys, Candidate(cp=cp), NEUTRAL) for cp in (2, 4))
    assert two.holds == pytest.approx(2 * four.holds, rel=0.01)


def test_selective_recompute_of_torchtitan(toys):
    """The results of attention and of half of the products: qkv, out, up and down."""
    half = memory(toys, Candidate(recompute="half"), NEUTRAL)
    kept = (3 * H + H + 4 * H + H) // 2 + H
    # One fp32 logarithm of sums for each head and token comes with attention's result.
    assert half.holds == S * B * (2 * H + 2 * kept + 4 * A)


@pytest.mark.parametrize(("linear", "each"), [("float16", 2), ("float8", 1), ("float4", 1)])
def test_late_gradients_keep_what_arrived_at_their_products(toys, linear, each):
    """qkv, out, up and down: 3, 1, 4 and 1 widths of every token; of fp4 a byte at the most."""
    late = memory(toys, Candidate(), NEUTRAL, linear=linear).late
    assert late == each * S * B * (3 + 1 + 4 + 1) * H


def test_units_together_peak_where_the_highest_of_them_does():
    """By hand: 100 and 10 are held; forwards peak at 100 + 20 and at 110 + 5.

    In backward the second runs first, at 110 + 7 + 3 with its gradient of 50; then the first, at
    100 + 40 + 30 with both gradients, 50 and 60, the highest.
    """
    first = UnitMemory(holds=100, remade=40, forward_peak=20, backward_peak=30, late=1)
    second = UnitMemory(holds=10, remade=7, forward_peak=5, backward_peak=3, late=2)
    both = together([first, second], [60, 50])
    assert both.holds == 110 and both.late == 3
    assert 110 + both.forward_peak == 120
    assert 110 + both.remade + both.backward_peak + 60 + 50 == 100 + 40 + 30 + 60 + 50
    alone = together([first], [60])
    assert (alone.holds, alone.forward_peak, alone.backward_peak) == (100, 20, 40 + 30)
