from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from claw_plan.executor import benchmark
from claw_plan.executor.benchmark_device import DeviceRates
from claw_plan.profiles.cluster_file import cluster_from_mapping, load_cluster
from claw_plan.profiles.cost import MEASURED
from claw_plan.profiles.cost_model import ClusterCostModel
from claw_plan.profiles.profile import Profile
from claw_plan.profiles.work import CollectiveWork, OpWork

PROVENANCE = {"when": "2026-11-29", "torch": "2.13.0"}


def gemm(dtype: str, size: int, ns: int) -> tuple[OpWork, tuple[int, ...]]:
    work = OpWork(
        kind="gemm", dims=(1, size, size, size), dtype=dtype, flops=2 * size**3, bytes=12 * size**2
    )
    return work, (3 * ns, ns, 2 * ns, 2 * ns, 9 * ns)


def gloo(op: str, start_ns: int, bytes_per_s: float, share: float) -> Any:
    return {
        CollectiveWork(op=op, bytes=size, group_size=2, nodes=1, backend="gloo"): (
            round(start_ns + share * size * 1e9 / bytes_per_s),
        )
        for size in (1 << 10, 1 << 16, 1 << 20, 1 << 24)
    }


def load(folder: Path, content: Any) -> Any:
    path = folder / "machine.yaml"
    path.write_text(yaml.safe_dump(dict(content)))
    return load_cluster(str(path))


def test_measured_figures_arrive_in_the_cluster(tmp_path: Path) -> None:
    ops = [gemm("float32", 1000, 20_000_000), gemm("float32", 500, 2_000_000)]
    samples = gloo("all_reduce", 500_000, 1e9, 1.0) | gloo("all_gather", 300_000, 2e9, 0.5)
    content = benchmark.cpu_cluster(ops, 12.5e9, 3500, samples, PROVENANCE)
    cluster = load(tmp_path, content)
    (node,) = cluster.nodes
    # 2 * 500^3 flops: 125 GFLOP/s at the fastest 2 ms, half of it at the lower quartile of 4 ms.
    assert node.device.peak_flops_per_s == {"float32": 125e9}
    assert node.device.achieved_flops_per_s["float32"] == 62.5e9
    assert node.device.memory_bytes_per_s == 12.5e9
    assert node.device.kernel_launch_ns == 3500
    assert "measured on 2026-11-29 with torch 2.13.0" in node.device.source
    assert node.intra.startup_ns == pytest.approx({"all_reduce": 500_000, "all_gather": 300_000})
    assert node.intra.achieved_bytes_per_s == pytest.approx(
        {"all_reduce": 1e9, "all_gather": 2e9}, rel=1e-3
    )
    assert "gloo between two processes" in node.intra.source
    # The cost model gives back what was measured.
    costs = ClusterCostModel(cluster)
    for work, (ns,) in samples.items():
        assert costs.collective(work).alone_ns == pytest.approx(ns, rel=0.01)
    assert cluster.assumptions == ()


def test_one_core_multiplies_copies_and_launches() -> None:
    with benchmark._one_thread():
        work, samples = benchmark.measure_attention()
        assert work.flops == 4 * 4 * 6 * 256 * 256 * 64
        assert min(samples) > 0
        assert 1e8 < benchmark.measure_copy() < 1e13
        assert 100 < benchmark.measure_launch() < 10_000_000


def test_slow_dtypes_are_not_tried_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "_SLOW_NS", 0)
    monkeypatch.setattr(benchmark, "_GEMM_SIZES", (8, 16))
    assert [work.dims[1] for work, _ in benchmark.measure_gemms()] == [8] * 4


def test_a_gpu_machine_is_described_by_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    node = {"devices": {"type": "h100-sxm-80gb", "count": 8}}
    monkeypatch.setattr(benchmark, "detect_gpu_node", lambda: node)
    heard: list[str] = []
    content, measurements = benchmark.measure_machine(heard.append)
    assert content["nodes"] == [node]
    assert measurements == []
    assert heard == ["looking for GPUs"]


def test_gpus_are_measured_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    node = {
        "devices": {"type": "h100-sxm-80gb", "count": 2},
        "intra": {"type": "nvswitch4"},
        "host": {"memory": "1 TB", "cores": 64},
    }
    rates = DeviceRates(flops_per_s={"bfloat16": 6e14}, copy_bytes_per_s=3e12, launch_ns=5000)
    work = CollectiveWork(op="send", bytes=1 << 20, group_size=2, nodes=1)
    monkeypatch.setattr(benchmark, "detect_gpu_node", lambda: node)
    monkeypatch.setattr(benchmark, "measure_device", lambda device: rates)
    monkeypatch.setattr(benchmark, "measure_local_group", lambda count: {work: (100_000,)})
    content, (measurement,) = benchmark.measure_machine(benchmark=True)
    (entry,) = content["nodes"]
    assert entry["devices"]["achieved"] == {"bfloat16": "600 TFLOPS"}
    assert "overrides the nominal 450 GB/s" in entry["source"]
    assert (measurement.device, measurement.work) == ("h100-sxm-80gb/nvswitch4", work)
    assert cluster_from_mapping(content, "t").num_devices == 2


@pytest.mark.slow
def test_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "detect_gpu_node", lambda: None)
    content, measurements = benchmark.measure_machine()
    cluster = load(tmp_path, content)
    assert cluster.backend == "gloo"
    costs = ClusterCostModel(cluster, Profile(measurements=tuple(measurements)))
    assert len(measurements) > 30
    for measurement in measurements:
        if isinstance(measurement.work, OpWork):
            assert costs.op(measurement.work).source == MEASURED
        else:
            # Ranks leave a barrier one after the other, so that gloo's lower quartile counts.
            samples = sorted(measurement.samples_ns)
            cost = costs.collective(measurement.work)
            assert cost.alone_ns == pytest.approx(samples[len(samples) // 4], abs=1)
