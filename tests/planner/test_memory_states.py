"""States by the table of Rajbhandari et al. 2020 (arXiv 1910.02054): 2 + 2 + 12 bytes, and 1/n."""

from __future__ import annotations

import dataclasses

import pytest

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.memory_states import COPIED, SHARDED, WHOLE, held_parts, kind_of
from claw_plan.planner.shards import ShardSizes
from claw_plan.profiles.trainer import Trainer

MEGATRON = Trainer(name="megatron", keeps_compute_copy=True)
SIXTEEN_BITS = dataclasses.replace(MEGATRON, gradient_bytes=2)
ELEMENTS = 512 + 4 * 64
EVERYTHING = ((0, 6),)


def parts(toys, candidate, trainer=MEGATRON, spans=EVERYTHING, graph=None):
    plain = toys.problem(graph, precision="bfloat16")
    problem = dataclasses.replace(plain, trainer=trainer)
    return held_parts(problem, ShardSizes(problem.graph), candidate, spans)


@pytest.mark.parametrize(
    ("candidate", "trainer", "gradients", "states"),
    [
        (Candidate(zero=3), MEGATRON, 4, 12),
        (Candidate(dp_shard=4, zero=1), MEGATRON, 4, 3),
        (Candidate(dp_shard=4, zero=1), SIXTEEN_BITS, 2, 3),
        (Candidate(dp_shard=2, cp=2, zero=1), MEGATRON, 4, 3),
        (Candidate(dp_replicate=4), SIXTEEN_BITS, 4, 12),
    ],
)
def test_megatron(toys, candidate, trainer, gradients, states):
    found = parts(toys, candidate, trainer)
    assert found["parameters"] == 2 * ELEMENTS
    assert found["gradients"] == gradients * ELEMENTS
    assert found["optimizer"] == states * ELEMENTS


@pytest.mark.parametrize("candidate", [Candidate(dp_shard=4, zero=3), Candidate(zero=3)])
def test_forward_and_backward_alone_keep_no_optimizer(toys, candidate):
    problem = toys.problem()
    problem = dataclasses.replace(
        problem, training=dataclasses.replace(problem.training, optimizer="")
    )
    found = held_parts(problem, ShardSizes(problem.graph), candidate, EVERYTHING)
    assert found["optimizer"] == 0


def test_experts_are_shared_by_their_own_replicas(toys):
    """Four ranks, of which two hold the same experts: states of experts are halved."""
    graph = toys.graph()
    experts = tuple(
        dataclasses.replace(p, is_expert=p.name.startswith("blocks")) for p in graph.parameters
    )
    graph = dataclasses.replace(graph, parameters=experts)
    found = parts(toys, Candidate(dp_shard=4, ep=2, zero=1), graph=graph)
    assert found["optimizer"] == 12 * (512 // 4 + 4 * 64 // 2)


def test_a_rank_of_an_interleaved_schedule_holds_all_its_stages(toys):
    graph = toys.graph(layers=4, tied=False)
    found = parts(toys, Candidate(pp=2), spans=((1, 2), (3, 4)), graph=graph)
    assert found["parameters"] == 2 * 2 * 64


def test_fully_shard_cuts_everything_over_shards_and_contexts(toys):
    graph = toys.graph(layers=4, width=8)
    found = parts(toys, Candidate(dp_shard=2, cp=2), Trainer(name="torch"), graph=graph)
    assert found["parameters"] == 4 * ELEMENTS // 4
    assert found["optimizer"] == 8 * ELEMENTS // 4
    assert "gradients" not in found


def test_kinds(toys):
    def kind(trainer, precision="bfloat16", **knobs):
        problem = dataclasses.replace(toys.problem(precision=precision), trainer=trainer)
        return kind_of(problem, Candidate(**knobs))

    torch = Trainer(name="torch")
    assert kind(MEGATRON, dp_shard=4, zero=1) == COPIED
    assert kind(MEGATRON, dp_shard=4, zero=3) == SHARDED
    assert kind(torch) == SHARDED  # mixed precision is fully_shard's
    assert kind(torch, "float32", dp_replicate=4) == WHOLE
