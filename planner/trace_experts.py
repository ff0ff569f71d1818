"""A traced model's graph with the experts that ranks may share, or why they may not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from claw_plan.planner.expert_parallel import ExpertFinding, find_experts
from claw_plan.planner.expert_tensor_parallel import with_inner_size
from claw_plan.planner.graph import ExpertRule, ModelGraph
from claw_plan.planner.subject import Subject

SAMPLES = 2
"""Of the batch whose calls of experts are looked at."""


def traced_names(subject: Subject) -> list[str]:
    """The names of the traced blocks as the folded model has them."""
    now = {id(module): name for name, module in subject.module.named_modules()}
    return [now[id(block)] for block in subject.blocks]


def experts_of(subject: Subject) -> ExpertFinding:
    """What the traced blocks hold."""

    def forward() -> torch.Tensor:
        with subject.world():
            return subject.forward(subject.batch(SAMPLES))

    return find_experts(subject.module, traced_names(subject), forward, SAMPLES)


def dividing(subject: Subject, found: ExpertFinding, divides: int) -> ExpertFinding:
    """The same with the inner sizes of experts that every tensor-parallel degree divides."""
    known: dict[ExpertRule, ExpertRule] = {}
    for block, own in found.rules.items():
        for rule in own:
            if rule not in known:
                name = f"{block}.{rule.module}"
                module, call = subject.module.get_submodule(name), found.calls[name]
                known[rule] = with_inner_size(rule, module, call, divides)
    rules = {block: tuple(known[rule] for rule in own) for block, own in found.rules.items()}
    return replace(found, rules=rules)


def undivided(found: ExpertFinding) -> ExpertFinding:
    """The same with experts that tensor parallelism leaves whole."""
    rules = {
        block: tuple(replace(rule, inner=0, weight_dims=()) for rule in own)
        for block, own in found.rules.items()
    }
    return replace(found, rules=rules)


def with_experts(subject: Subject, graph: ModelGraph, found: ExpertFinding) -> ModelGraph:
    """The graph with rules for its experts, which name structures as its units do."""
    structures = _structures(subject, graph, traced_names(subject))
    rules: dict[ExpertRule, set[int]] = {}
    for block, own in found.rules.items():
        for rule in own:
            rules.setdefault(rule, set()).add(structures[block])
    why = next(iter(found.refused.values()), "no module of the blocks holds experts")
    return replace(
        graph,
        expert_parallel=tuple(
            replace(rule, structures=tuple(sorted(where))) for rule, where in rules.items()
        ),
        no_expert_parallel="" if rules else why,
    )


def _structures(subject: Subject, graph: ModelGraph, names: Sequence[str]) -> Mapping[str, int]:
    places = dict(zip(names, subject.kept, strict=True))
    return {name: graph.blocks[place].structure for name, place in places.items()}
