"""A traced model's graph with the experts that ranks may share, or why they may not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from claw_plan.planner.expert_parallel import ExpertFinding, find_experts
from claw_plan.planner.graph import ExpertRule, ModelGraph
from claw_plan.planner.subject import Subject

SAMPLES = 2
"""Of the batch whose calls of experts are looked at."""


def with_experts(subject: Subject, graph: ModelGraph) -> ModelGraph:
    """The graph with rules for its experts, which name structures as its units do."""
    finding, names = _found(subject)
    structures = _structures(subject, graph, names)
    rules: dict[ExpertRule, set[int]] = {}
    for block, own in finding.rules.items():
        for rule in own:
            rules.setdefault(rule, set()).add(structures[block])
    why = next(iter(finding.refused.values()), "")
    if not rules and not why:
        why = "no module of the blocks holds experts"
    return replace(
        graph,
        expert_parallel=tuple(
            replace(rule, structures=tuple(sorted(where))) for rule, where in rules.items()
        ),
        no_expert_parallel=why,
    )


def _found(subject: Subject) -> tuple[ExpertFinding, list[str]]:
    """What the traced blocks hold, and their names as the folded model has them."""
    now = {id(module): name for name, module in subject.module.named_modules()}
    names = [now[id(block)] for block in subject.blocks]

    def forward() -> torch.Tensor:
        with subject.world():
            return subject.forward(subject.batch(SAMPLES))

    return find_experts(subject.module, names, forward, SAMPLES), names


def _structures(subject: Subject, graph: ModelGraph, names: list[str]) -> Mapping[str, int]:
    places = dict(zip(names, subject.kept, strict=True))
    return {name: graph.blocks[place].structure for name, place in places.items()}
