"""Reported failures on unlike devices, each with the right outcome; names are the cases'."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from claw_plan.planner.graph import ModelGraph
from claw_plan.planner.mixed.kinds import MixedProblem, kinds_of
from claw_plan.planner.mixed.planning import plan_alone, plan_mixed
from claw_plan.planner.mixed.score import MixedScorer
from claw_plan.planner.mixed.search import search_mixed
from claw_plan.planner.mixed.space import MixedSpace
from claw_plan.planner.model_source import load_model
from claw_plan.planner.problem import Problem, Training
from claw_plan.planner.shards import ShardSizes
from claw_plan.planner.trace import trace
from claw_plan.profiles.cluster_file import cluster_from_mapping, load_cluster
from claw_plan.profiles.cost_model import ClusterCostModel

GPT = Path(__file__).parents[2] / "examples" / "gpt.py"
INPUTS = "idx=int64[B,256]<1024 targets=int64[B,256]<1024"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def graph() -> ModelGraph:
    """A GPT of 6 blocks."""
    config = "vocab_size=1024, block_size=256, n_layer=6, n_head=8, n_embd=512"
    model = load_model(GPT, build=f"GPT(GPTConfig({config}))", inputs=INPUTS)
    return trace(model, seq_len=256, dtype="float32")


def device(name: str, tflops: float, memory: str, count: int) -> dict[str, object]:
    """A node's entry; its devices reach others over PCIe 4 x8."""
    return {
        "devices": {
            "type": "custom",
            "name": name,
            "count": count,
            "memory": memory,
            "bandwidth": "800 GB/s",
            "peak": {"float32": f"{tflops} TFLOPS"},
        },
        "intra": {"bandwidth": "16 GB/s", "latency": "5 us"},
        "nics": {"bandwidth": "16 GB/s", "latency": "5 us", "count": count},
        "host": {"memory": "256 GiB", "cores": 16},
    }


def problem(graph: ModelGraph, nodes: list[dict[str, object]], batch: int) -> Problem:
    cluster = cluster_from_mapping({"name": "unlike", "nodes": nodes}, "case")
    training = Training(
        global_batch=batch,
        seq_len=256,
        precision="float32",
        optimizer="adamw",
        memory_headroom=0.0,
    )
    cost = ClusterCostModel(cluster, with_launches=False)
    return Problem(graph=graph, cluster=cluster, cost=cost, training=training)


MAKE_COST = partial(ClusterCostModel, with_launches=False)


def test_het_3080_4090(graph: ModelGraph) -> None:
    """Two boxes of 2 x 3080 and 2 x 4090 each: more layers on 4090s, tp among equal GPUs only.

    Each stage is held against the memory of its own kind.
    """
    nodes = [device("rtx-3080", 30, "10 GiB", 2), device("rtx-4090", 80, "24 GiB", 2)] * 2
    whole = problem(graph, nodes, 8)
    mixed = MixedProblem(whole=whole, kinds=kinds_of(whole, MAKE_COST))
    assert [kind.num_devices for kind in mixed.kinds] == [4, 4]
    scorer = MixedScorer(mixed, ShardSizes(graph))
    found = search_mixed(MixedSpace(scorer))
    best = found.ranked[0][1]
    (pipeline,) = best.pipelines
    units: dict[int, list[int]] = {0: [], 1: []}
    for rank, (start, stop) in zip(pipeline.ranks, pipeline.cuts, strict=True):
        units[rank.kind].append(stop - start)
    assert sum(units[1]) > sum(units[0]) > 0
    scored = scorer.score(best)
    assert all(stage.fits for stage in scored.memory)
    capacities = {stage.capacity_bytes for stage in scored.memory}
    assert len(capacities) == 2


def test_het_8gb_16gb(graph: ModelGraph) -> None:
    """One GPU twice as fast as the other: shares of 6 and 12, weighted by samples."""
    nodes = [device("small", 20, "8 GiB", 1), device("large", 40, "16 GiB", 1)]
    whole = problem(graph, nodes, 18)
    answer = plan_mixed(plan_alone(whole, MAKE_COST), known_ns=None)
    best = answer.shared.ranked[0][1]
    assert [pipeline.batch for pipeline in best.pipelines] == [6, 12]
    assert answer.mixed is not None and answer.mixed.fits


def test_het_one_box(tmp_path: Path) -> None:
    """5 GPUs of one box, one of them in a slot of 8 lanes: kinds and widths are each GPU's own.

    Each entry stands for the slots of one kind; no power of two is needed anywhere.
    """
    slots = (
        ("rtx-5090", 1, "{bandwidth: 31.5 GB/s, latency: 5 us}"),
        ("rtx-5090", 1, "{type: pcie5-x16}"),
        ("rtx-4090", 3, "{type: pcie4-x16}"),
    )
    lines = [
        f"- devices: {{type: {name}, count: {count}}}\n  intra: {link}\n  nics: {link}\n"
        for name, count, link in slots
    ]
    (tmp_path / "box.yaml").write_text("nodes:\n" + "".join(lines))
    cluster = load_cluster(str(tmp_path / "box.yaml"))
    assert cluster.num_devices == 5
    assert [node.device_count for node in cluster.nodes] == [1, 1, 3]
    assert [node.nic.bytes_per_s for node in cluster.nodes] == [31.5e9, 63e9, 31.5e9]
    assert len({node.device.name for node in cluster.nodes}) == 2
    assert cluster.nodes[0] != cluster.nodes[1]  # as wide as its slot, a kind of its own
