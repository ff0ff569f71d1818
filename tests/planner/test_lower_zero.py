"""Megatron's data parallelism on the toy model: what moves, over whom, beside what."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.lower import lower
from claw_plan.planner.lower_zero import CopiedParameters, make_data_parallel
from claw_plan.planner.problem import Problem, Training
from claw_plan.planner.reference_model import Division
from claw_plan.planner.reference_trace import trace_reference
from claw_plan.planner.score import Scorer
from claw_plan.planner.shards import ShardSizes
from claw_plan.planner.space import Space
from claw_plan.profiles.trainer import NEUTRAL, Trainer
from claw_plan.profiles.trainers import load_trainers
from claw_plan.profiles.training_row import Dimensions
from claw_plan.simulator.simulate import makespan_ns, simulate

MEGATRON = Trainer(name="megatron", keeps_compute_copy=True, gradient_bytes=4)
AFTERWARDS = replace(MEGATRON, gradient_bytes=2, reduces_beside=False, gathers_beside=False)
ZERO1 = Candidate(dp_shard=2, zero=1)
ELEMENTS = {0: 64 * 8, 1: 64, 2: 64, 3: 64, 4: 64}
"""Of the toy's units; the epilogue's are the prologue's."""
MS = 1_000_000


def posed(toys, trainer, graph=None, cluster=None, global_batch=4, cost=None) -> Problem:
    """The toy problem in 16 bits under a trainer."""
    cluster = cluster or toys.cluster()
    return Problem(
        graph=graph or toys.graph(layers=4),
        cluster=cluster,
        cost=cost or toys.cost(cluster),
        training=Training(
            global_batch=global_batch,
            seq_len=8,
            precision="bfloat16",
            optimizer="adamw",
            memory_headroom=0.0,
        ),
        trainer=trainer,
    )


def lowered(problem, candidate):
    scorer = Scorer(problem)
    return lower(problem, scorer.shards, candidate, scorer.bounds.stage_path(candidate).cuts)


def traffic(graph) -> list[tuple[str, int]]:
    return [
        (name, int(size))
        for name, kind, size in zip(graph.name, graph.kind, graph.work_bytes, strict=True)
        if kind == "dp_comm"
    ]


@pytest.mark.parametrize("trainer", [MEGATRON, AFTERWARDS])
def test_gradients_are_scattered_and_parameters_gathered_once_a_step(toys, trainer):
    """gradient_bytes an element down, the two bytes of bfloat16 up, whatever the microbatches."""
    found = traffic(lowered(posed(toys, trainer, global_batch=8), ZERO1).graph)
    size = trainer.gradient_bytes
    scattered = [(f"reduce_scatter unit {unit}", size * n) for unit, n in ELEMENTS.items()]
    gathered = [(f"all_gather unit {unit}", 2 * n) for unit, n in ELEMENTS.items()]
    assert sorted(found) == sorted(scattered + gathered)


def test_blocks_that_multiply_in_fp8_are_gathered_in_fp8(toys):
    """One byte an element; the embedding and the head stay in 16 bits."""
    found = traffic(lowered(posed(toys, replace(MEGATRON, gathers_float8=True)), ZERO1).graph)
    gathered = {name: size for name, size in found if name.startswith("all_gather")}
    assert gathered == {
        f"all_gather unit {unit}": n * (2 if unit == 0 else 1) for unit, n in ELEMENTS.items()
    }


def test_without_zero_gradients_are_all_reduced(toys):
    found = traffic(lowered(posed(toys, MEGATRON), Candidate(dp_replicate=2, zero=1)).graph)
    assert sorted(found) == sorted((f"all_reduce unit {u}", 4 * n) for u, n in ELEMENTS.items())


def test_traffic_runs_beside_the_last_backward_and_the_first_forward(toys):
    spans = {s.name: s for s in simulate(lowered(posed(toys, MEGATRON), ZERO1).graph).spans}
    for unit in (1, 2, 3, 4):
        assert spans[f"all_gather unit {unit}"].end_ns <= spans[f"0F0 unit {unit}"].start_ns
        assert spans[f"reduce_scatter unit {unit}"].start_ns == spans[f"0B1 unit {unit}"].end_ns
    assert spans["all_gather unit 4"].end_ns > spans["0F0 unit 0"].start_ns
    assert "0F1" in spans and "0F1 unit 0" not in spans  # nothing meets the others


def test_or_all_of_it_at_the_end(toys):
    spans = list(simulate(lowered(posed(toys, AFTERWARDS), ZERO1).graph).spans)
    last = max(span.end_ns for span in spans if span.kind == "backward")
    assert all(span.start_ns >= last for span in spans if span.kind == "dp_comm")
    assert {span.stream for span in spans} == {"stage 0 compute"}


def test_each_rank_steps_its_part(toys):
    """28 bytes for each element it owns, at 10 bytes/ns."""
    for candidate, owners in ((ZERO1, 2), (replace(ZERO1, zero=3, dp_shard=1), 1)):
        graph = lowered(posed(toys, MEGATRON), candidate).graph
        spans = [span for span in simulate(graph).spans if span.kind == "optimizer"]
        elements = sum(n // owners for n in ELEMENTS.values())
        assert [span.end_ns - span.start_ns for span in spans] == [28 * elements // 10]


@dataclass
class Asked:
    """A cost model that remembers which collectives it was asked about."""

    cost: object
    works: list = field(default_factory=list)

    def collective(self, work):
        self.works.append((work.op, work.bytes, work.group_size, work.nodes))
        return self.cost.collective(work)

    def __getattr__(self, name):
        return getattr(self.cost, name)


def asked(toys, candidate, cluster, graph=None, trainer=MEGATRON):
    cost = Asked(toys.cost(cluster))
    lowered(posed(toys, trainer, graph, cluster, 16, cost), candidate)
    return set(cost.works)


def test_partly_sharded_states_are_reduced_over_all_and_gathered_over_few(toys):
    """Groups of two on a node hold the states twice over: gradients cross the network."""
    cluster = toys.cluster(nodes=2, devices=2)
    found = asked(toys, Candidate(dp_replicate=2, dp_shard=2, zero=1), cluster)
    assert found == {
        *(("all_reduce", 4 * n, 4, 2) for n in (512, 64)),
        *(("all_gather", 2 * n, 2, 1) for n in (512, 64)),
    }


def test_a_wide_shard_group_on_one_node_still_reduces_over_both(toys):
    cluster = toys.cluster(nodes=2, devices=4)
    found = asked(toys, Candidate(dp_replicate=2, dp_shard=4, zero=1), cluster)
    assert {(size, nodes) for op, _, size, nodes in found if op == "all_reduce"} == {(8, 2)}


def test_contexts_hold_the_same_parameters(toys):
    cluster = toys.cluster(nodes=2, devices=2)
    found = asked(toys, Candidate(dp_replicate=2, cp=2, zero=3), cluster)
    assert {(op, size, nodes) for op, _, size, nodes in found} == {("all_reduce", 4, 2)}


def with_experts(graph):
    """Every block's weight becomes an expert's, beside a dense one of as many elements."""
    dense = graph.parameters[1:]
    experts = tuple(
        replace(each, names=(each.name + ".experts",), is_expert=True) for each in dense
    )
    return replace(graph, parameters=(*graph.parameters, *experts))


def test_experts_have_fewer_replicas(toys):
    """Eight ranks, experts over four of them: dense over 8, experts over 2."""
    cluster = toys.cluster(nodes=2, devices=4)
    graph = with_experts(toys.graph(layers=4))
    found = asked(toys, Candidate(dp_shard=8, ep=4, zero=1), cluster, graph)
    assert found == {
        ("reduce_scatter", 4 * 512, 8, 2),
        ("reduce_scatter", 4 * 64, 8, 2),
        ("reduce_scatter", 4 * 64, 2, 2),
        ("all_gather", 2 * 512, 8, 2),
        ("all_gather", 2 * 64, 8, 2),
        ("all_gather", 2 * 64, 2, 2),
    }


def test_what_computation_loses_to_traffic_beside_it(toys):
    """By hand, one microbatch of two samples; half of the shorter is lost.

    Gathers: 1024 + 4 x 128 bytes at 1 byte/us and five latencies of 5 us are 1.561 ms, all beside
    the forward. Reductions: 0.261 ms of units 4, 3, 2 beside the blocks' backward after each, of
    unit 1 beside the prologue's 0.4 ms.
    """
    problem = posed(toys, replace(MEGATRON, overlap_loss=0.5))
    found = lowered(problem, replace(ZERO1, microbatch_size=2))
    lost = sum(lost_ns for _, lost_ns in found.parts.values())
    assert lost == pytest.approx((1.561 + 4 * 0.261) / 2 * MS, abs=10)
    neutral = lowered(posed(toys, MEGATRON), replace(ZERO1, microbatch_size=2))
    assert makespan_ns(found.graph) > makespan_ns(neutral.graph)


def test_further_ranks_cost_time_of_their_own(toys):
    times = [
        makespan_ns(lowered(posed(toys, replace(MEGATRON, zero_rank_ns=each)), ZERO1).graph)
        for each in (0.0, 7000.0)
    ]
    assert times[1] - times[0] == 7000 * (2 - 1)


def test_the_kind_is_the_trainers_and_the_candidates_choice(toys):
    def kind(trainer, candidate):
        problem = posed(toys, trainer)
        return type(
            make_data_parallel(problem, ShardSizes(problem.graph), candidate, None, 0, 6)
        ).__name__

    assert kind(MEGATRON, ZERO1) == CopiedParameters.__name__
    assert kind(MEGATRON, Candidate(dp_replicate=2)) == CopiedParameters.__name__
    assert kind(MEGATRON, Candidate(dp_shard=2)) == "Sharded"
    assert kind(NEUTRAL, Candidate(dp_replicate=2)) == "Sharded"  # fully_shard casts


FAST = Trainer(
    name="fast", memory_scale=0.4, attention_scale=0.5, tp_scale=0.3, dp_scale=0.3,
    gradient_bytes=2, host_ns=2000.0, overlap_loss=0.6, keeps_compute_copy=True,
)  # fmt: skip


@pytest.mark.parametrize(
    "trainer", [*load_trainers().values(), FAST, AFTERWARDS], ids=lambda one: one.name
)
def test_no_bound_exceeds_its_simulation_under_any_trainer(toys, trainer):
    rng = random.Random(trainer.name)
    cluster = toys.cluster(
        nodes=rng.choice([1, 2]),
        devices=4,
        intra_bytes_per_s=rng.choice([1e5, 1e7]),
        inter_bytes_per_s=rng.choice([1e4, 1e6]),
    )
    graph = toys.graph(layers=6, flops=rng.choice([10, 1000]), hidden=rng.choice([10, 1000]))
    problem = posed(toys, trainer, graph, cluster, global_batch=8)
    scorer, space = Scorer(problem), Space(problem, {})
    candidates = [c for group in space.groups() for c in space.members(group)]
    for candidate in rng.sample(candidates, 30):
        path = scorer.bounds.stage_path(candidate)
        if path is not None:
            step_ns = scorer.step_time_ns(candidate, path.cuts)
            assert scorer.bounds.candidate_ns(candidate, path) <= step_ns, candidate
            assert scorer.bounds.even_ns(candidate) <= step_ns, candidate


def test_only_what_ranks_hold_whole_is_summed_over_divided_sequences(toys):
    """The weights of the two norms of each layer, in fp32; not those before the head.

    The reference transformer's parameters have the shapes of a rank; none says what tp divides.
    """
    hidden, layers = 64, 4
    sizes = Dimensions(
        layers=layers, hidden=hidden, heads=4, kv_heads=4, head_dim=16, ffn=128, vocab=256,
        seq_len=32, activation="swiglu", norm="rms",
    )  # fmt: skip
    division = Division(tp=2, sequence_parallel=True)
    graph = trace_reference(sizes, division, "bfloat16")
    problem = posed(toys, MEGATRON, graph=graph)
    candidate = Candidate(tp=2, sequence_parallel=True, zero=1)
    found = lowered(problem, candidate).graph
    summed = [
        int(size)
        for name, size in zip(found.name, found.work_bytes, strict=True)
        if name == "sequence-parallel gradients"
    ]
    norms = [p for p in graph.parameters if len(p.shape) == 1 and 0 < min(p.units) <= layers]
    assert len(norms) == 2 * layers
    # An fp32 flag follows each gradient in a bucket.
    assert summed == [2 * layers * 4 * (hidden + 1)]
