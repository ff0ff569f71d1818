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
from claw_plan.profiles.published_collectives import read_collectives
from claw_plan.profiles.published_fields import load_yaml
from claw_plan.profiles.published_kernels import read_kernels
from claw_plan.profiles.published_times import collective_times_ns
from claw_plan.profiles.short_runs import short_run_times_ns
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


@pytest.mark.parametrize(
    ("table", "gpu", "limit"),
    [
        ("simumax_efficiency", "A100-PCIe-80GB", 4),
        ("xla_matmul_table", "B200", 5),
        ("neusight_linear_fp32", "A100-PCIE-40GB", 8),
        ("neusight_linear_fp32", "A100 80GB PCIe", 8),
        ("neusight_linear_fp32", "H100 80GB HBM3", 9),
        ("neusight_linear_fp32", "V100-PCIE-32GB", 6),
        ("neusight_linear_fp32", "T4", 10),
        ("neusight_linear_fp32", "L4", 10),
    ],
)
def test_products(kernels: Mapping[str, Any], table: str, gpu: str, limit: float) -> None:
    rows = [row for row in kernels[table]["rows"] if row["gpu"] == gpu]
    read = read_kernels(DATA / "kernels.yaml", {table: {"rows": rows}}).kernels
    chosen = [row for row in read if row.work.kind == "gemm" and "grouped" not in row.work.target]
    assert len(chosen) > 100
    times = short_run_times_ns(chosen)
    assert mean_error((times[row.id], row.measured_ns) for row in chosen) < limit


def test_element_wise_kernels_move_at_the_shared_bandwidth(kernels: Mapping[str, Any]) -> None:
    # Aceso, V100: gelu in fp16 over 2048 tokens of 4 * 5120 (GPT-3 13B), read and written.
    rows = kernels["aceso_op_profiles"]["rows"]
    gelu = [
        row["fwd_us"]
        for row in rows
        if (row["model"], row["op"]) == ("gpt_13B", "enc-MLP-gelu")
        and row["mbs"] == row["tp"] == 1
    ]
    work = OpWork(kind="memory", dims=(), dtype="float16", flops=0, bytes=2 * 2 * 2048 * 4 * 5120)
    assert gelu
    ns = roofline_ns(catalogue.device("v100-sxm-32gb"), work)
    assert ns / 1e3 == pytest.approx(sum(gelu) / len(gelu), rel=0.1)


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


@pytest.mark.parametrize(("is_large", "limit"), [(True, 10), (False, 20)])
def test_collectives_of_every_kind(is_large: bool, limit: float) -> None:
    path = DATA / "collectives.yaml"
    rows = read_collectives(path, load_yaml(path)).collectives
    predicted = collective_times_ns(rows)
    chosen = [row for row in rows if (row.work.bytes >= 1 << 20) == is_large]
    assert len(chosen) > 500
    assert mean_error((predicted[row.id], row.measured_ns) for row in chosen) < limit
