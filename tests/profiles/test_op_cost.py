from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from claw_plan.profiles import catalogue
from claw_plan.profiles.cost import FITTED, INTERPOLATED
from claw_plan.profiles.kernel_tables import OWN, attention_shape_of, gemm_shape_of
from claw_plan.profiles.op_cost import (
    SETUP_S,
    gemm_s,
    kernel_time,
    level_of,
    roofline_ns,
    shape_efficiency,
)
from claw_plan.profiles.work import OpWork

A100 = replace(
    catalogue.device("a100-sxm-80gb"),
    achieved_flops_per_s={"bfloat16": 243e12, "float32": 18e12, "attention": 160e12},
)
H100 = replace(
    catalogue.device("h100-sxm-80gb"),
    achieved_flops_per_s={"bfloat16": 686e12, "float8": 1205e12, "attention": 314e12},
)
CPU = catalogue.device("cpu")
PLAIN = replace(A100, processors=0, gemm_ramp=0, kernel_launch_ns=0)


def gemm(m: int, n: int, k: int, dtype: str = "bfloat16", batch: int = 1) -> OpWork:
    size = 2 if dtype == "bfloat16" else 4
    return OpWork(
        kind="gemm",
        dims=(batch, m, n, k),
        dtype=dtype,
        flops=2 * batch * m * n * k,
        bytes=size * batch * (m * n + n * k + m * k),
    )


def attention(
    queries: int, *, batch: int = 2, heads: int = 8, causal: int = 1, phase: str = "forward"
) -> OpWork:
    flops = 4 * batch * heads * queries * queries * 64
    return OpWork(
        kind="attention",
        dims=(batch, heads, heads, queries, queries, 64, causal),
        dtype="bfloat16",
        flops=flops,
        bytes=8 * batch * heads * queries * 64,
        phase=phase,
    )


def memory(size: int, kind: str = "memory") -> OpWork:
    return OpWork(kind=kind, dims=(), dtype="bfloat16", flops=size, bytes=size)


def test_infinite_bandwidth_without_overheads_is_pure_compute() -> None:
    device = replace(PLAIN, memory_bytes_per_s=1e30)
    assert roofline_ns(device, gemm(512, 256, 128)) == pytest.approx(
        2 * 512 * 256 * 128 / 243e12 * 1e9
    )


def test_infinite_compute_is_pure_bytes() -> None:
    device = replace(PLAIN, achieved_flops_per_s={"bfloat16": 1e30, "attention": 1e30})
    work = gemm(512, 256, 128)
    assert roofline_ns(device, work) == pytest.approx(work.bytes / (0.85 * 2.039e12) * 1e9)


def test_a_large_gemm_reaches_what_training_sustains() -> None:
    for device, sustained in ((A100, 243e12), (H100, 686e12)):
        work = gemm(16384, 16384, 16384)
        reached = work.flops * 1e9 / roofline_ns(device, work)
        assert 0.94 * sustained < reached <= sustained


def test_nothing_is_faster_than_a_launch() -> None:
    assert roofline_ns(A100, memory(16)) == 15_000
    assert roofline_ns(A100, gemm(1, 1, 1)) == 15_000


def test_attention_is_its_shape_at_the_rate_of_the_device() -> None:
    work = attention(8192)
    shape, origin = attention_shape_of(H100.name)
    seconds = shape.seconds(132, work.dims, phase="forward", flops_per_s=314e12, flops=work.flops)
    assert origin == OWN
    assert roofline_ns(H100, work) == pytest.approx((seconds + SETUP_S) * 1e9)
    # A causal mask halves what is not prologue.
    assert 0.5 < roofline_ns(H100, work) / roofline_ns(H100, attention(8192, causal=0)) < 0.56


def test_a_cpu_takes_flops_over_rate() -> None:
    work = attention(512)
    assert roofline_ns(CPU, work) == pytest.approx(
        work.flops / 2 / (CPU.achieved_flops_per_s["attention"] * 0.5) * 1e9
    )


def test_convolution_is_its_implicit_gemm() -> None:
    batch, channels_in, channels_out, positions, kernel = 8, 64, 128, 56 * 56, 9
    flops = 2 * batch * positions * channels_out * channels_in * kernel
    work = OpWork(
        kind="conv",
        dims=(batch, channels_in, channels_out, positions, kernel),
        dtype="bfloat16",
        flops=flops,
        bytes=0,
    )
    device = replace(H100, kernel_launch_ns=0)
    expected = gemm_s(device, "bfloat16", 1, batch * positions, channels_out, channels_in * kernel)
    assert roofline_ns(device, work) == pytest.approx((expected + SETUP_S) * 1e9)
    depthwise = replace(work, flops=flops // 64)
    assert roofline_ns(device, depthwise) == pytest.approx((expected / 64 + SETUP_S) * 1e9)


def test_a_measured_product_keeps_its_place_among_shapes() -> None:
    # XLA's H100 has 780.1 TFLOP/s at 4096 x 4096 x 4096, its constants 886 without end.
    shape = gemm_shape_of(H100.name, "bfloat16").shape
    efficiency = shape_efficiency(H100, "bfloat16", 1, 4096, 4096, 4096)
    assert efficiency == pytest.approx(780.1e12 / shape.flops_per_s, rel=0.05)
    time = kernel_time(H100, gemm(4096, 4096, 4096))
    assert (time.source, time.spread) == (INTERPOLATED, 0.0)


def test_far_products_are_fitted_and_less_certain() -> None:
    near = kernel_time(H100, gemm(3000, 3000, 3000))
    far = kernel_time(H100, gemm(30_000, 30_000, 30_000))
    borrowed = kernel_time(catalogue.device("h200-sxm-141gb"), gemm(3000, 3000, 3000))
    other = kernel_time(catalogue.device("mi300x"), gemm(3000, 3000, 3000))
    assert (near.source, far.source, borrowed.source) == (INTERPOLATED, FITTED, INTERPOLATED)
    assert 0 < near.spread < borrowed.spread < far.spread
    assert (other.source, other.spread > near.spread) == (FITTED, True)


def test_the_level_says_how_the_time_follows_a_rate() -> None:
    cases = [
        (gemm(4096, 4096, 4096), "bfloat16"),
        (gemm(512, 512, 512), "bfloat16"),
        (gemm(4096, 4096, 4096, "float8"), "float8"),
        (attention(8192), "attention"),
    ]
    for work, level in cases:
        here = kernel_time(H100, work)
        assert here.level == level
        faster = dict(H100.achieved_flops_per_s)
        faster[level] *= 1 + 1e-6
        there = kernel_time(replace(H100, achieved_flops_per_s=faster), work)
        slope = math.log(there.ns / here.ns) / 1e-6
        assert slope == pytest.approx(-here.level_share, abs=1e-3)
    assert level_of(H100, gemm(4096, 4096, 4096)) == "bfloat16"
    assert level_of(H100, attention(8192)) == "attention"
    assert level_of(H100, memory(10**9)) is None
    assert level_of(H100, gemm(1, 4096, 4096)) is None


def test_fp8_is_faster_but_needs_deeper_products() -> None:
    gain = [
        kernel_time(H100, gemm(4096, 4096, k)).ns
        / kernel_time(H100, gemm(4096, 4096, k, "float8")).ns
        for k in (520, 2050, 16400)
    ]
    assert gain == sorted(gain)
    assert 1.05 < gain[0] < gain[2] < 1205 / 686


def test_grouped_products_pay_for_the_weights_of_every_group() -> None:
    b200 = catalogue.device("b200-sxm-180gb")
    b200 = replace(b200, achieved_flops_per_s=b200.achieved_flops_per_s | {"bfloat16": 1139e12})
    # SimuMax on B200: groups, rows, n, k and the rate of the forward product in TFLOP/s.
    for groups, rows, n, k, rate in ((256, 128, 4096, 7168, 468), (40, 9832, 3072, 5120, 1068)):
        work = replace(gemm(rows, n, k, batch=groups), target="claw_plan.grouped_mm")
        assert work.flops / kernel_time(b200, work).ns / 1e3 == pytest.approx(rate, rel=0.2)
        single = replace(work, target="aten.bmm")
        assert kernel_time(b200, single).ns < kernel_time(b200, work).ns


def test_accumulating_results_costs_their_bytes() -> None:
    plain = gemm(4000, 4000, 1000)
    accumulated = replace(plain, bytes=plain.bytes + 6 * 4000 * 4000)
    shape = gemm_shape_of(A100.name, "bfloat16").shape
    more = kernel_time(A100, accumulated).ns - kernel_time(A100, plain).ns
    expected = shape.extra_share * 6 * 4000 * 4000 / A100.memory_bytes_per_s * 1e9
    assert more == pytest.approx(expected, rel=0.05)


def test_head_sizes_that_tensor_cores_cannot_load_are_slow() -> None:
    def scores(head: int) -> float:
        return kernel_time(A100, gemm(2048, 2048, head, batch=64)).ns

    assert scores(108) > 3 * scores(112)
    assert 1 < scores(120) / scores(128) < 1.15


SIZES = st.integers(1, 20_000)
DEVICES = st.sampled_from(sorted(catalogue.catalogue().devices)).map(catalogue.device)


@given(DEVICES, SIZES, SIZES, SIZES, st.integers(1, 5000), st.sampled_from("mnk"))
def test_a_gemm_never_gets_cheaper_by_growing(
    device: object, m: int, n: int, k: int, more: int, grown: str
) -> None:
    small = {"m": m, "n": n, "k": k}
    large = small | {grown: small[grown] + more}
    before = roofline_ns(device, gemm(**small))  # type: ignore[arg-type]
    after = roofline_ns(device, gemm(**large))  # type: ignore[arg-type]
    assert 0 < before <= after * (1 + 1e-12)


@given(
    DEVICES, st.integers(1, 8192), st.integers(1, 500), st.sampled_from(["forward", "backward"])
)
def test_attention_never_gets_cheaper_by_growing(
    device: object, queries: int, more: int, phase: str
) -> None:
    before = roofline_ns(device, attention(queries, phase=phase))  # type: ignore[arg-type]
    after = roofline_ns(device, attention(queries + more, phase=phase))  # type: ignore[arg-type]
    assert 0 < before <= after * (1 + 1e-12)


@given(DEVICES, st.integers(0, 10**12), st.integers(0, 10**12))
def test_memory_bound_work_never_gets_cheaper_by_growing(
    device: object, size: int, more: int
) -> None:
    before = roofline_ns(device, memory(size))  # type: ignore[arg-type]
    assert 0 < before <= roofline_ns(device, memory(size + more))  # type: ignore[arg-type]


@given(st.floats(1.0, 100.0))
def test_time_falls_with_rate_and_bandwidth(factor: float) -> None:
    work = gemm(1000, 1000, 1000)
    faster = replace(
        A100,
        memory_bytes_per_s=A100.memory_bytes_per_s * factor,
        achieved_flops_per_s={k: v * factor for k, v in A100.achieved_flops_per_s.items()},
    )
    assert roofline_ns(faster, work) <= roofline_ns(A100, work) * (1 + 1e-12)


@pytest.mark.parametrize("kind", ["gemm", "conv", "attention"])
def test_work_of_unknown_shape_still_has_a_time(kind: str) -> None:
    work = OpWork(kind=kind, dims=(), dtype="float32", flops=10**12, bytes=8)
    assert math.isfinite(roofline_ns(CPU, work))
    assert roofline_ns(CPU, work) > 0
