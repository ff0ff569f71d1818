"""Kernel and collective times against published measurements, without any fit to the machine.

Rows are never asserted one by one: published tables of one part differ by several percent between
runs. What is asserted is the mean error over a table, with room for a few points.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from claw_plan.profiles import catalogue
from claw_plan.profiles.cluster import Network
from claw_plan.profiles.cluster_file import load_cluster
from claw_plan.profiles.collective_cost import analytic_collective
from claw_plan.profiles.op_cost import roofline_ns
from claw_plan.profiles.work import CollectiveWork, OpWork

DATA = Path(__file__).parents[3] / "shared" / "data"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not DATA.exists(), reason="the shared tables are not beside this checkout"),
]


@pytest.fixture(scope="module")
def kernels() -> Mapping[str, Any]:
    return table("kernels.yaml")


@pytest.fixture(scope="module")
def collectives() -> list[Mapping[str, Any]]:
    found = table("collectives.yaml")["nccl_tests"]
    rows: list[Mapping[str, Any]] = found["rows"] if isinstance(found, dict) else found
    needed = ("bytes", "time_us", "nodes", "ranks")
    return [row for row in rows if all(key in row for key in needed)]


def table(name: str) -> Any:
    with (DATA / name).open() as file:
        return yaml.load(file, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def mean_error(pairs: Iterable[tuple[float, float]]) -> float:
    """Mean absolute percentage error of (predicted, measured)."""
    errors = [abs(predicted / measured - 1) for predicted, measured in pairs]
    assert len(errors) >= 5
    return 100 * sum(errors) / len(errors)


def gemm_ns(device: str, dtype: str, row: Mapping[str, Any]) -> tuple[float, float]:
    batch, m, n, k = (int(row[name]) for name in ("batch", "m", "n", "k"))
    size = 4 if dtype == "float32" else 2
    work = OpWork(
        kind="gemm",
        dims=(batch, m, n, k),
        dtype=dtype,
        flops=2 * batch * m * n * k,
        bytes=size * batch * (m * n + n * k + m * k),
    )
    return roofline_ns(catalogue.device(device), work), work.flops / row["tflops"] / 1e3


def test_a100_products_in_bf16(kernels: Mapping[str, Any]) -> None:
    rows = kernels["simumax_efficiency"]["rows"]
    chosen = [r for r in rows if r["op"] == "matmul" and r["gpu"] == "A100-PCIe-80GB"]
    assert len(chosen) > 100
    assert mean_error(gemm_ns("a100-pcie-80gb", "bfloat16", row) for row in chosen) < 5


@pytest.mark.parametrize(
    ("gpu", "device"),
    [
        ("A100-PCIE-40GB", "a100-pcie-40gb"),
        ("A100 80GB PCIe", "a100-pcie-80gb"),
        ("H100 80GB HBM3", "h100-sxm-80gb"),
        ("V100-PCIE-32GB", "v100-sxm-32gb"),
        ("T4", "t4"),
        ("L4", "l4"),
    ],
)
def test_products_in_fp32(kernels: Mapping[str, Any], gpu: str, device: str) -> None:
    rows = kernels["neusight_linear_fp32"]["rows"]
    chosen = [row for row in rows if row["gpu"] == gpu and row["time_ms"] > 0.1]
    assert len(chosen) > 500
    assert mean_error(gemm_ns(device, "float32", row) for row in chosen) < 17


@pytest.mark.parametrize(
    ("gpu", "node_type", "nodes", "limit"),
    [
        ("A100-80GB", "dgx-a100-80gb", 1, 10),
        ("B200", "dgx-b200", 1, 13),
        ("H100-80GB", "dgx-h100", 4, 13),
        ("H100-80GB", "dgx-h100", 8, 15),
    ],
)
def test_long_all_reduces(
    collectives: list[Mapping[str, Any]], gpu: str, node_type: str, nodes: int, limit: float
) -> None:
    node = load_cluster(node_type).nodes[0]

    def both(row: Mapping[str, Any]) -> tuple[float, float]:
        work = CollectiveWork(
            op="all_reduce", bytes=row["bytes"], group_size=row["ranks"], nodes=row["nodes"]
        )
        return analytic_collective(node, Network(), work).alone_ns / 1e3, row["time_us"]

    chosen = [
        row
        for row in collectives
        if (row["gpu"], row["nodes"], row["collective"]) == (gpu, nodes, "all_reduce")
        and row["bytes"] >= 1 << 26
        and row["ranks"] == 8 * nodes
    ]
    assert mean_error(both(row) for row in chosen) < limit
