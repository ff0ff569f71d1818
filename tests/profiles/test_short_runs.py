from __future__ import annotations

import statistics
from pathlib import Path

import pytest
import yaml

from claw_plan.profiles import catalogue
from claw_plan.profiles.cluster_file import load_cluster
from claw_plan.profiles.published_kernels import read_kernels
from claw_plan.profiles.published_rows import KernelRow
from claw_plan.profiles.short_runs import short_run_s, short_run_times_ns
from claw_plan.profiles.work import OpWork

DATA = Path(__file__).parents[3] / "shared" / "data" / "kernels.yaml"
H100 = catalogue.device("h100-sxm-80gb")


def gemm(
    m: int, n: int, k: int, dtype: str = "bfloat16", target: str = "", batch: int = 1
) -> OpWork:
    size = 4 if "32" in dtype else 2
    return OpWork(
        kind="gemm",
        dims=(batch, m, n, k),
        dtype=dtype,
        flops=2 * batch * m * n * k,
        bytes=size * batch * (m * k + k * n + m * n),
        target=target,
    )


def row(name: str, work: OpWork, family: str = "xla_matmul_table H100 (sm_90)") -> KernelRow:
    return KernelRow(
        id=name,
        family=family,
        group="",
        cluster=load_cluster("dgx-h100"),
        device_name=H100.name,
        work=work,
        measured_ns=1.0,
    )


def test_short_runs_are_at_the_clocks_and_with_the_overhead_of_their_table() -> None:
    # XLA's first run on H100: 780.1 TFLOP/s at 4096^3 and 7 at 256 x 256 x 256 (4.96 us).
    large = short_run_s(H100, gemm(4096, 4096, 4096), "xla")
    assert 2 * 4096**3 / large == pytest.approx(780.1e12, rel=0.06)
    assert short_run_s(H100, gemm(256, 256, 256), "xla") == pytest.approx(5.5e-6, rel=0.15)
    # NeuSight's calls in fp32 take 47 us before they do anything.
    small = gemm(512, 512, 768, "float32")
    assert 45e-6 < short_run_s(H100, small, "neusight") < 80e-6


def test_the_second_row_of_a_shape_is_the_slower_run() -> None:
    work = gemm(4096, 4096, 4096, target="bf16xbf16->bf16")
    times = short_run_times_ns([row("a", work), row("b", work), row("c", gemm(2048, 4096, 4096))])
    # 780.1 and 583.2 TFLOP/s there.
    assert times["b"] / times["a"] == pytest.approx(780.1 / 583.2, rel=0.1)
    assert times["c"] < times["a"]


def test_tables_nobody_fitted_follow_the_part() -> None:
    work = gemm(4096, 4096, 4096)
    assert short_run_s(H100, work) == short_run_s(H100, work, "xla")
    other = catalogue.device("mi300x")
    # MI300X has no table: what it sustains is the level.
    sustained = other.achieved_flops_per_s["bfloat16"]
    assert 2 * 4096**3 / short_run_s(other, work) == pytest.approx(sustained, rel=0.2)


@pytest.mark.slow
@pytest.mark.skipif(not DATA.exists(), reason="the shared tables are not beside this checkout")
def test_published_products_and_attention_are_met() -> None:
    data = yaml.load(DATA.read_bytes(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    rows = read_kernels(DATA, data).kernels
    times = short_run_times_ns(rows)
    errors: dict[str, list[float]] = {"gemm": [], "attention": []}
    for each in rows:
        errors[each.work.kind].append(abs(times[each.id] / each.measured_ns - 1))
    assert len(errors["gemm"]) > 8000
    assert statistics.median(errors["gemm"]) < 0.05
    assert statistics.median(errors["attention"]) < 0.06
