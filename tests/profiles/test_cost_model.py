from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from claw_plan.profiles.cluster import Cluster
from claw_plan.profiles.cluster_file import load_cluster
from claw_plan.profiles.collective_cost import analytic_collective
from claw_plan.profiles.cost import ANALYTIC, FITTED, INTERPOLATED, MEASURED
from claw_plan.profiles.cost_model import ClusterCostModel
from claw_plan.profiles.measurement import Measurement
from claw_plan.profiles.op_cost import roofline_ns
from claw_plan.profiles.profile import Profile
from claw_plan.profiles.work import CollectiveWork, OpWork

CPU = load_cluster("cpu")


def gemm(m: int, target: str = "aten.mm") -> OpWork:
    return OpWork(
        kind="gemm",
        dims=(1, m, 256, 256),
        dtype="float32",
        flops=2 * m * 256 * 256,
        bytes=4 * (512 * m + 256 * 256),
        target=target,
    )


def memory(size: int, target: str) -> OpWork:
    return OpWork(kind="memory", dims=(), dtype="float32", flops=0, bytes=size, target=target)


def all_reduce(size: int, ranks: int = 2) -> CollectiveWork:
    return CollectiveWork(op="all_reduce", bytes=size, group_size=ranks, nodes=1, backend="gloo")


def measured(
    work: OpWork | CollectiveWork, *samples_ns: int, ranks_per_host: int = 1
) -> Measurement:
    device = "cpu-core" if isinstance(work, OpWork) else "cpu-core/loopback"
    return Measurement(
        device=device, work=work, samples_ns=samples_ns, ranks_per_host=ranks_per_host
    )


def model(*measurements: Measurement, cluster: Cluster = CPU) -> ClusterCostModel:
    return ClusterCostModel(cluster, Profile(measurements=measurements))


def test_without_a_profile_physics_answers() -> None:
    cost = ClusterCostModel(CPU).op(gemm(512))
    assert cost.source == ANALYTIC
    assert cost.ns == -int(-roofline_ns(CPU.nodes[0].device, gemm(512)) // 1)


def test_what_was_measured_is_believed() -> None:
    costs = model(measured(gemm(512), 700_000, 900_000, 800_000))
    assert costs.op(gemm(512)) == replace(costs.op(gemm(512)), ns=800_000, source=MEASURED)


def test_how_bytes_were_counted_does_not_hide_a_measured_shape() -> None:
    costs = model(measured(gemm(512), 800_000))
    assert costs.op(replace(gemm(512), bytes=1)).source == MEASURED
    assert costs.op(replace(gemm(512), phase="backward")).source != MEASURED


def test_between_measured_shapes_it_interpolates_and_beyond_it_says_fitted() -> None:
    costs = model(measured(gemm(256), 1_000_000), measured(gemm(4096), 16_000_000))
    between, beyond = costs.op(gemm(1024)), costs.op(gemm(16384))
    assert between.source == INTERPOLATED
    assert between.ns == pytest.approx(4_000_000, rel=0.01)
    assert beyond.source == FITTED
    assert beyond.ns == pytest.approx(64_000_000, rel=0.01)


def test_element_wise_kernels_are_told_apart_by_name() -> None:
    costs = model(measured(memory(10**6, "add"), 10**6), measured(memory(10**6, "gelu"), 10**7))
    assert costs.op(memory(10**7, "add")).ns == pytest.approx(10**7, rel=1e-6)
    assert costs.op(memory(10**7, "gelu")).ns == pytest.approx(10**8, rel=1e-6)
    # An unknown one is like the kind as a whole.
    assert costs.op(memory(10**6, "tanh")).source == INTERPOLATED
    assert 10**6 < costs.op(memory(10**6, "tanh")).ns < 10**7


def test_other_dtypes_and_devices_learn_nothing() -> None:
    costs = model(measured(gemm(512), 800_000))
    assert costs.op(replace(gemm(512), dtype="bfloat16")).source == ANALYTIC
    gpu = model(measured(gemm(512), 800_000), cluster=load_cluster("dgx-h100"))
    assert gpu.op(gemm(512)) == model(cluster=load_cluster("dgx-h100")).op(gemm(512))


def test_ranks_up_to_the_cores_are_believed_most(monkeypatch: pytest.MonkeyPatch) -> None:
    node = replace(CPU.nodes[0], cores=2)
    two_cores = replace(CPU, nodes=(node,))
    alone, beside = measured(gemm(512), 10**6), measured(gemm(512), 2 * 10**6, ranks_per_host=2)
    crowded = measured(gemm(512), 3 * 10**6, 9 * 10**6, 10**7, 10**7, ranks_per_host=4)
    assert model(alone, beside, crowded, cluster=two_cores).op(gemm(512)).ns == 2 * 10**6
    assert model(crowded, cluster=two_cores).op(gemm(512)).ns == 9 * 10**6


def test_measured_collectives_last_what_was_measured() -> None:
    work = all_reduce(1 << 20)
    costs = model(measured(work, 3_000_000))
    cost = costs.collective(work)
    assert cost.alone_ns == pytest.approx(3_000_000, abs=1)
    assert (cost.bytes, cost.link, cost.source) == (1 << 20, "intra", MEASURED)
    assert 0 < cost.latency_ns < 3_000_000


def test_learnt_constants_lengthen_measured_collectives() -> None:
    work = all_reduce(1 << 20)
    constants = {"cpu-core": {"collective_scale": 1.5, "collective_overhead_ns": 70_000.0}}
    learnt = Profile(measurements=(measured(work, 3_000_000),), constants=constants)
    cost = ClusterCostModel(CPU, learnt).collective(work)
    assert cost.alone_ns == pytest.approx(1.5 * 3_000_000 + 70_000, abs=2)
    assert (cost.bytes, cost.source) == (1 << 20, MEASURED)
    alone = all_reduce(1 << 20, ranks=1)  # sends nothing
    assert ClusterCostModel(CPU, learnt).collective(alone).alone_ns == 0


def test_collectives_of_other_sizes_and_groups_follow() -> None:
    slow, plain = 2.0, ClusterCostModel(CPU)
    works = [all_reduce(size) for size in (1 << 10, 1 << 16, 1 << 22)]
    costs = model(*(measured(w, round(slow * plain.collective(w).alone_ns)) for w in works))
    for work, source in (
        (all_reduce(1 << 18), INTERPOLATED),
        (all_reduce(1 << 26), FITTED),
        (all_reduce(1 << 18, ranks=4), INTERPOLATED),
    ):
        assert costs.collective(work).source == source
        assert costs.collective(work).alone_ns == pytest.approx(
            slow * plain.collective(work).alone_ns, rel=0.05
        )


def test_a_group_of_one_stays_free() -> None:
    costs = model(measured(all_reduce(1 << 20), 3_000_000))
    assert costs.collective(all_reduce(1 << 20, ranks=1)).alone_ns == 0


def test_of_mixed_devices_the_slowest_counts_and_is_said(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("nodes: [{type: dgx-h100}, {type: dgx-a100-80gb}]")
    mixed = load_cluster(str(path))
    work = OpWork(
        kind="gemm", dims=(1, 4096, 4096, 4096), dtype="bfloat16", flops=2 * 4096**3, bytes=10**8
    )
    costs = ClusterCostModel(mixed)
    assert costs.op(work) == ClusterCostModel(load_cluster("dgx-a100-80gb")).op(work)
    assert costs.assumptions == (
        "devices differ (a100-sxm-80gb, h100-sxm-80gb): every rank is as slow as the slowest",
    )
    far = CollectiveWork(op="all_gather", bytes=1 << 30, group_size=16, nodes=2)
    assert costs.collective(far) == analytic_collective(mixed.nodes[1], mixed.network, far)


def test_ranks_on_some_nodes_meet_only_their_links(tmp_path: Path) -> None:
    """Three hosts, the last with a quarter of the rate: closed forms of a message and a ring."""
    path = tmp_path / "c.yaml"
    host = "host: {memory: 8 GiB, cores: 1}, devices: {type: cpu, cores: 1, count: 1}"
    lines = [
        f"{{nics: {{name: n{rate}, bandwidth: {rate} Mb/s, latency: 2 ms}}, {host}}}"
        for rate in (200, 200, 50)
    ]
    path.write_text(f"nodes: [{', '.join(lines)}]")
    cluster = load_cluster(str(path))
    costs = ClusterCostModel(cluster)
    fast, slow = costs.among(cluster.nodes[:2]), costs.among(cluster.nodes[2:])
    send = CollectiveWork(op="send", bytes=10**6, group_size=2, nodes=2, backend="gloo")
    assert fast.collective(send).alone_ns == 2_000_000 + 40_000_000  # 1 MB at 25 MB/s
    assert slow.collective(send).alone_ns == 2_000_000 + 160_000_000
    ring = CollectiveWork(op="all_reduce", bytes=3 * 10**6, group_size=3, nodes=3, backend="gloo")
    # 2 (n-1)/n of the bytes leave each host; both passes wait n times for a hop.
    assert fast.collective(ring).alone_ns == 2 * 3 * 2_000_000 + 160_000_000
    assert slow.collective(ring).alone_ns == 2 * 3 * 2_000_000 + 640_000_000
    assert (
        costs.collective(ring)
        == slow.collective(ring)
        == costs.among(cluster.nodes).collective(ring)
    )
    assert costs.quickest().collective(ring) == fast.collective(ring)
    assert costs.among(cluster.nodes) is costs
    assert costs.among(cluster.nodes[:1]) is fast
    uniform = ClusterCostModel(load_cluster("2xdgx-h100"))
    assert uniform.quickest() is uniform.among(uniform.cluster.nodes[1:]) is uniform


def test_gpus_too_meet_the_nics_they_cross(tmp_path: Path) -> None:
    """InfiniBand HDR beside NDR: half the rate, so a ring's flow lasts twice as long."""
    path = tmp_path / "c.yaml"
    path.write_text(
        "nodes: [{type: dgx-h100, count: 2}, {type: dgx-h100, nics: {type: ib-hdr, count: 8}}]"
    )
    cluster = load_cluster(str(path))
    costs = ClusterCostModel(cluster)
    work = CollectiveWork(op="send", bytes=1 << 30, group_size=2, nodes=2)
    fast, slow = costs.among(cluster.nodes[:2]), costs.among(cluster.nodes[2:])
    assert fast.collective(work) == analytic_collective(cluster.nodes[0], cluster.network, work)
    assert slow.collective(work) == analytic_collective(cluster.nodes[2], cluster.network, work)
    assert slow.collective(work).alone_ns > 1.9 * fast.collective(work).alone_ns
    assert costs.collective(work) == slow.collective(work)


def test_constants_of_the_profile_act() -> None:
    profile = Profile(constants={"cpu-core": {"op_scale": 1.5, "step_overhead_ns": 123.0}})
    costs = ClusterCostModel(CPU, profile)
    assert costs.step_overhead_ns() == 123
    assert costs.op(gemm(4096)).ns == pytest.approx(
        1.5 * ClusterCostModel(CPU).op(gemm(4096)).ns, abs=2
    )
    assert ClusterCostModel(CPU).step_overhead_ns() == 1_000_000
    assert ClusterCostModel(load_cluster("dgx-h100")).step_overhead_ns() == 5_600_000


@given(
    st.dictionaries(st.integers(1, 10_000), st.integers(1, 10**9), min_size=1, max_size=8),
    st.integers(1, 10_000),
    st.integers(0, 10_000),
)
def test_unmeasured_shapes_never_get_cheaper_by_growing(
    points: dict[int, int], m: int, more: int
) -> None:
    costs = model(*(measured(gemm(size), ns) for size, ns in points.items()))
    # Another phase: its own shapes are not measured, the family is.
    small = costs.op(replace(gemm(m), phase="backward"))
    large = costs.op(replace(gemm(m + more), phase="backward"))
    assert 0 < small.ns <= large.ns
    assert small.source in (INTERPOLATED, FITTED)
