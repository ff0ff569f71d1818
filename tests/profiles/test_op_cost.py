from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from claw_plan.profiles import catalogue
from claw_plan.profiles.op_cost import gemm_s, roofline_ns, sustained_flops_per_s
from claw_plan.profiles.work import OpWork

A100 = catalogue.device("a100-sxm-80gb")
H100 = catalogue.device("h100-sxm-80gb")
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


def test_a_whole_wave_of_the_largest_tiles_costs_nothing_extra() -> None:
    # 108 processors take 108 tiles of 256 x 128: 27 * 256 rows, 4 * 128 columns.
    m, n, k = 27 * 256, 4 * 128, 4096
    assert gemm_s(A100, "bfloat16", 1, m, n, k) == pytest.approx(
        2 * m * n * k / 243e12 * (1 + 110 / k)
    )


def test_one_tile_more_pays_most_of_a_wave() -> None:
    # 28 * 4 = 112 tiles: .6 * 216 + .4 * 112 = 174.4 tiles are paid, unless smaller tiles fit.
    m, n, k = 28 * 256, 4 * 128, 4096
    bare_s = 2 * m * n * k / 243e12 * (1 + 110 / k)
    largest = 174.4 / 112
    # 128 x 64: 56 * 8 = 448 tiles, 5 waves: .6 * 540 + .4 * 448 = 503.2, at .82 efficiency.
    medium = 503.2 / 448 / 0.82
    # 128 x 128: 56 * 4 = 224 tiles, 3 waves: .6 * 324 + .4 * 224 = 284, at .95.
    square = 284 / 224 / 0.95
    assert gemm_s(A100, "bfloat16", 1, m, n, k) == pytest.approx(
        bare_s * min(largest, square, medium)
    )


def test_a_large_gemm_reaches_what_training_sustains() -> None:
    for device, sustained in ((A100, 243e12), (H100, 686e12)):
        work = gemm(16384, 16384, 16384)
        reached = work.flops * 1e9 / roofline_ns(device, work)
        assert 0.97 * sustained < reached <= sustained


def test_nothing_is_faster_than_a_launch() -> None:
    assert roofline_ns(A100, memory(16)) == 15_000
    assert roofline_ns(A100, gemm(1, 1, 1)) == 15_000


def test_a_causal_mask_halves_attention() -> None:
    assert roofline_ns(H100, attention(8192)) == pytest.approx(
        roofline_ns(H100, attention(8192, causal=0)) / 2
    )
    work = attention(8192)
    ramp = 1 + 10 * 4096 / (8192 * 2 * 8)
    assert roofline_ns(H100, work) == pytest.approx(work.flops / 2 / 314e12 * ramp * 1e9)


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
    assert roofline_ns(device, work) == pytest.approx(expected * 1e9)
    depthwise = replace(work, flops=flops // 64)
    assert roofline_ns(device, depthwise) == pytest.approx(expected * 1e9 / 64)


def test_dtypes_without_units_run_in_the_next_wider() -> None:
    v100 = catalogue.device("v100-sxm-16gb")
    assert sustained_flops_per_s(v100, "float16") == 84e12
    assert sustained_flops_per_s(v100, "bfloat16") == 13e12
    assert sustained_flops_per_s(A100, "float8") == 243e12
    assert sustained_flops_per_s(A100, "complex64") == 18e12


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
