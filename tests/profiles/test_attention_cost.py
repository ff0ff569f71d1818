from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from claw_plan.profiles.attention_cost import AttentionShape, kernel_size
from claw_plan.profiles.kernel_tables import attention_shape_of

H100, _ = attention_shape_of("h100-sxm-80gb")
PLAIN = AttentionShape(
    table="hand",
    flops_per_s=1.0,
    forward=1.0,
    backward=1.0,
    forward_tail=0.0,
    backward_tail=0.0,
    exponentials=0.0,
)


def seconds(
    shape: AttentionShape,
    queries: int,
    keys: int,
    *,
    batch: int = 2,
    heads: int = 16,
    size: int = 128,
    value: int | None = None,
    causal: int = 1,
    phase: str = "forward",
    share: float = 1.0,
) -> float:
    factor = 2.5 if phase == "backward" else 1.0
    both = size + (size if value is None else value)
    return shape.seconds(
        132,
        (batch, heads, heads, queries, keys, size, causal),
        phase=phase,
        flops_per_s=1e12,
        flops=round(share * 2 * factor * batch * heads * queries * keys * both),
    )


def test_a_row_of_queries_pays_its_keys_a_prologue_and_half_a_tile() -> None:
    # 4 d flops a pair; 100 columns before the first, without a mask.
    pairs = 2 * 16 * 4096 * (4096 + 100)
    assert seconds(PLAIN, 4096, 4096, causal=0) == pytest.approx(4 * 128 * pairs / 1e12)
    masked = 2 * 16 * 4096 * ((4096 + 128) / 2 + 100)
    assert seconds(PLAIN, 4096, 4096) == pytest.approx(4 * 128 * masked / 1e12)
    backward = 2 * 16 * 4096 * (4096 + 250)
    assert seconds(PLAIN, 4096, 4096, causal=0, phase="backward") == pytest.approx(
        10 * 128 * backward / 1e12
    )


def test_the_longest_row_is_waited_for() -> None:
    shape = replace(PLAIN, forward_tail=0.5)
    more = seconds(shape, 4096, 4096) - seconds(PLAIN, 4096, 4096)
    assert more == pytest.approx(0.5 * 128 * (4096 + 100) * 132 * 4 * 128 / 1e12)


@pytest.mark.parametrize(
    ("causal", "published"),
    [
        (1, {512: (191, 292), 1024: (260, 423), 2048: (298, 521), 4096: (319, 579)}),
        (0, {512: (309, 467), 1024: (350, 565), 2048: (362, 625), 4096: (368, 638)}),
    ],
)
def test_long_sequences_are_as_much_faster_as_published(
    causal: int, published: dict[int, tuple[int, int]]
) -> None:
    # FlashAttention-3's paper, figure 5: versions 2 and 3 on H100, head size 128, 16k tokens.
    longest = (335, 616) if causal else (370, 648)

    def rate(length: int) -> float:
        time = seconds(H100, length, length, batch=16384 // length, causal=causal)
        return length / time

    for length, rates in published.items():
        shares = sorted(rate_there / top for rate_there, top in zip(rates, longest, strict=True))
        share = rate(length) / rate(16384)
        assert 0.9 * shares[0] < share < 1.12 * shares[1], length


def test_heads_run_in_the_next_larger_kernel() -> None:
    assert [kernel_size(size) for size in (8, 64, 72, 108, 128, 144, 216, 257)] == [
        32, 64, 96, 128, 128, 192, 256, 320,
    ]  # fmt: skip
    assert seconds(PLAIN, 1024, 1024, size=108) == seconds(PLAIN, 1024, 1024, size=128)


def test_narrower_values_are_padded_and_windows_are_not() -> None:
    whole = seconds(PLAIN, 4096, 4096, size=192)
    assert seconds(PLAIN, 4096, 4096, size=192, value=128) == pytest.approx(whole)
    window = seconds(PLAIN, 4096, 4096, share=0.25, causal=0)
    assert window == pytest.approx(4 * 128 * 2 * 16 * 4096 * (1024 + 100) / 1e12)


def test_small_heads_spend_more_on_exponentials() -> None:
    # H100 reaches between .72 and .89 of head size 128's rate at 64 (figure 5).
    wide = seconds(H100, 16384, 16384, batch=1, heads=16, size=128)
    narrow = seconds(H100, 16384, 16384, batch=1, heads=32, size=64)
    assert 0.72 < wide / narrow < 0.89


LENGTHS = st.integers(1, 20_000)


@given(
    st.sampled_from(["a100-sxm-80gb", "h100-sxm-80gb", "b200-sxm-180gb", "mi300x"]),
    LENGTHS,
    LENGTHS,
    st.integers(1, 999),
    st.sampled_from(["forward", "backward"]),
    st.sampled_from([0, 1]),
)
def test_attention_never_gets_cheaper_by_growing(
    device: str, queries: int, keys: int, more: int, phase: str, causal: int
) -> None:
    shape, _ = attention_shape_of(device)
    kind = {"phase": phase, "causal": causal}
    before = seconds(shape, queries, keys, **kind)  # type: ignore[arg-type]
    for after in ((queries + more, keys), (queries, keys + more)):
        assert 0 < before <= seconds(shape, *after, **kind) * (1 + 1e-9)  # type: ignore[arg-type]
