"""What tensor parallelism divides in each kind of block and what that saves, one line each.

`explain` prints it: the choice of `split.choice` at the plan's degree and microbatch, beside
what the plan's rules divide.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.errors import TensorParallelError
from claw_plan.planner.graph import ModelGraph, TensorParallelRule
from claw_plan.planner.model_source import LoadedModel
from claw_plan.planner.problem import Problem
from claw_plan.planner.split.choice import (
    BlockSplit,
    agreeing,
    best_split,
    beyond,
    block_flows,
    costs_on,
)
from claw_plan.planner.split.graph import SplitGraph
from claw_plan.planner.split.ways import Setting
from claw_plan.planner.subject import Subject
from claw_plan.planner.tensor_parallel import REGION
from claw_plan.profiles.units import format_ns


def split_lines(model: LoadedModel, problem: Problem, candidate: Candidate) -> tuple[str, ...]:
    """A line for each kind of block; none where the plan has no tensor parallelism."""
    if candidate.tp == 1:
        return ()
    graph = problem.graph
    subject = Subject.prepare(
        model, seq_len=graph.seq_len, dtype=getattr(torch, graph.dtype), fold=2
    )
    setting = Setting(
        degree=candidate.tp,
        batch=candidate.microbatch_size,
        sequence=candidate.sequence_parallel,
    )
    flows = block_flows(subject, setting.batch)
    return tuple(_lines(problem, setting, _one_of_each(graph, flows)))


def _one_of_each(
    graph: ModelGraph, flows: dict[str, SplitGraph | str]
) -> dict[int, tuple[str, SplitGraph | str]]:
    """By structure the first traced block of every data flow: first and last blocks may differ
    from the others in what they keep, and not in what they compute.
    """
    found: dict[object, tuple[int, tuple[str, SplitGraph | str]]] = {}
    for unit in graph.blocks:
        if unit.name in flows:
            flow = flows[unit.name]
            key = flow if isinstance(flow, str) else flow.signature()
            found.setdefault(key, (unit.structure, (unit.name, flow)))
    return dict(found.values())


def _lines(
    problem: Problem, setting: Setting, flows: dict[int, tuple[str, SplitGraph | str]]
) -> Iterator[str]:
    costs = costs_on(problem, setting.degree)
    for structure, (block, flow) in flows.items():
        if isinstance(flow, str):
            yield f"{block}: its data flow cannot be followed: {flow}"
            continue
        try:
            split = best_split(block, flow, setting, costs)
        except TensorParallelError as error:
            yield str(error)
            continue
        rules = [
            rule
            for rule in problem.graph.rules_at(setting.degree)
            if structure in (rule.structures or (structure,))
        ]
        yield _line(split, rules)


def _line(split: BlockSplit, rules: list[TensorParallelRule]) -> str:
    text = (
        f"{split.text()} ({format_ns(split.time_ns)} of {format_ns(split.whole_ns)} for both "
        "passes of a microbatch)"
    )
    style = {rule.module: rule.style for rule in rules if rule.style != REGION}
    more = [name for name in style if name not in {r.module for r in agreeing(split, rules)}]
    if more:
        text += f"; the plan divides {', '.join(more)} too, which does not pay by itself"
    if left := beyond(split, style):
        text += f"; {', '.join(left)} would be divided too, which is not executed yet"
    return text
