from __future__ import annotations

import pytest

from claw_plan.profiles.attention_cost import AttentionShape
from claw_plan.profiles.fit.attention import AttentionRow, attention_rows, fit_attention

TRUTH = AttentionShape(
    table="planted",
    flops_per_s=3.5 / (1 / 220e12 + 2.5 / 180e12),
    forward=220e12 / (3.5 / (1 / 220e12 + 2.5 / 180e12)),
    backward=180e12 / (3.5 / (1 / 220e12 + 2.5 / 180e12)),
    forward_tail=0.7,
    backward_tail=0.3,
    exponentials=17.0,
)


def planted() -> list[AttentionRow]:
    rows = []
    for heads in (4, 8, 16, 32, 64):
        for length in (2048, 4096, 16384):
            for phase in ("forward", "backward"):
                dims = (1, heads, heads, length, length, 128, 1)
                row = AttentionRow(dims=dims, value_size=128, phase=phase, seconds=1.0)
                seconds = TRUTH.seconds(
                    108, dims, phase=phase, flops_per_s=TRUTH.flops_per_s, flops=row.flops
                )
                rows.append(AttentionRow(dims=dims, value_size=128, phase=phase, seconds=seconds))
    return rows


def test_planted_constants_are_found() -> None:
    shape, errors = fit_attention(planted(), 108, generation="a100", source="s")
    assert shape.flops_per_s == pytest.approx(TRUTH.flops_per_s, rel=0.02)
    assert shape.forward == pytest.approx(TRUTH.forward, rel=0.02)
    assert shape.forward_tail == pytest.approx(0.7, rel=0.05)
    assert shape.backward_tail == pytest.approx(0.3, rel=0.1)
    assert max(map(abs, errors)) < 0.05


def test_rows_count_the_whole_square() -> None:
    row = {
        "gpu": "B200", "op": "sdp_bwd", "batch": 1, "seq_len": 4096, "head_num": 128,
        "kv_head_num": 128, "qk_head_dim": 192, "v_head_dim": 128, "tflops": 1445.7,
    }  # fmt: skip
    (read,) = attention_rows({"simumax_efficiency": {"rows": [row]}}, "B200")
    assert read.flops == 2.5 * 2 * 128 * 4096**2 * (192 + 128)
    assert read.seconds == pytest.approx(read.flops / 1445.7e12)
    assert read.dims == (1, 128, 128, 4096, 4096, 192, 1)
    assert attention_rows({"simumax_efficiency": {"rows": [row]}}, "A100-PCIe-80GB") == []
