"""Settings of others on our problem: degrees, cuts, verdicts."""

from __future__ import annotations

import pytest

from claw_plan.planner.baseline import baseline_of, degrees_of, training_of
from claw_plan.planner.baselines.megatron import read_megatron
from claw_plan.planner.baselines.setting import NODE, REST, Setting
from claw_plan.planner.candidate import Candidate
from claw_plan.planner.errors import PlanError
from claw_plan.planner.score import Scorer

PLAIN = {
    "pp": 1, "tp": 1, "cp": 1, "dp_replicate": REST, "dp_shard": 1, "sequence_parallel": False,
    "schedule": "1F1B", "stages_per_rank": 1, "offload": "none", "recompute": "none",
    "microbatch_size": 1,
}  # fmt: skip


def setting(**changes):
    more = {name: changes.pop(name) for name in ("devices", "accumulation") if name in changes}
    return Setting(format="Test", file="test.sh", knobs={**PLAIN, **changes}, **more)


@pytest.fixture
def scorer(toys):
    return Scorer(
        toys.problem(toys.graph(layers=4), toys.cluster(nodes=2, devices=4), global_batch=16)
    )


def test_what_is_left_of_the_devices(toys):
    cluster = toys.cluster(nodes=2, devices=4)
    assert degrees_of(setting(pp=2), cluster)["dp_replicate"] == 4
    assert degrees_of(setting(dp_shard=REST, dp_replicate=1), cluster)["dp_shard"] == 8
    hybrid = degrees_of(setting(dp_shard=NODE, dp_replicate=REST), cluster)
    assert (hybrid["dp_shard"], hybrid["dp_replicate"]) == (4, 2)
    assert degrees_of(setting(devices=4), cluster)["dp_replicate"] == 4
    with pytest.raises(PlanError, match=r"tp=3 = 3 does not divide the 8 devices"):
        degrees_of(setting(tp=3), cluster)


def test_the_batch_follows_from_its_parts(toys):
    cluster = toys.cluster(nodes=2, devices=4)
    assert training_of(setting(accumulation=3, microbatch_size=2), cluster) == {"global_batch": 48}


def test_the_score_is_that_of_the_candidate(scorer):
    found = baseline_of(setting(pp=2, dp_replicate=4, dp_shard=1), scorer)
    candidate = Candidate(pp=2, dp_replicate=4)
    assert found.scored.candidate == candidate and found.offered and not found.verdict
    assert found.scored.cuts == ((0, 3), (3, 6))
    assert found.scored.step_time_ns == scorer.step_time_ns(candidate, ((0, 3), (3, 6)))


def test_what_is_left_open_is_chosen_at_its_best(scorer):
    knobs = {k: v for k, v in PLAIN.items() if k not in ("microbatch_size", "recompute")}
    free = Setting(format="Test", file="test.yaml", knobs=knobs)
    best = baseline_of(free, scorer).scored.step_time_ns
    for size in (1, 2):
        for recompute in ("none", "full"):
            one = baseline_of(setting(microbatch_size=size, recompute=recompute), scorer)
            assert best <= one.scored.step_time_ns


def test_out_of_memory_is_said_with_its_place_and_size(toys):
    graph, cluster = toys.graph(layers=4), toys.cluster(devices=4, memory_bytes=9_000, kind="cpu")
    scorer = Scorer(toys.problem(graph, cluster, global_batch=16))
    found = baseline_of(setting(), scorer)
    worst = scorer.memory.stages(Candidate(dp_replicate=4), ((0, 6),))[0]
    missing = worst.peak_bytes - worst.capacity_bytes
    assert missing > 0
    assert found.verdict.startswith("out of memory: stage 0 needs")
    assert found.verdict.endswith(f"{missing / 1024:.1f} KiB too much")


@pytest.mark.parametrize(
    "knobs, said",
    [
        ({"cp": 2}, "context parallelism is not simulated"),
        ({"tp": 8}, "heads divide by 4 only"),
        ({"pp": 8, "dp_replicate": 1}, "4 blocks make no 8 stages"),
        ({"microbatch_size": 16}, "does not divide"),
    ],
)
def test_what_cannot_be_scored_says_why(scorer, knobs, said):
    found = baseline_of(setting(**knobs), scorer)
    assert found.scored is None and said in found.refused and "test.sh" in found.refused


def test_differences_from_what_is_planned_are_told(scorer):
    text = "--micro-batch-size 1 --tensor-model-parallel-size 2 --global-batch-size 64 --bf16"
    notes = baseline_of(read_megatron(text, "a.sh"), scorer).notes
    assert any("its global_batch 64 is compared at the planned 16" in note for note in notes)
