"""The same model traced with tensor parallelism, with and without sequence parallelism.

The rules come from `tensor_parallel_search` and `vocabulary_parallel_search`, the divided modules
from `tensor_parallel` and `vocabulary_parallel`; one rank runs on its local shapes with stand-ins
for the collectives. A step at the smallest valid degree and one at the next tell what is divided
from what every rank does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn as nn

from claw_plan.planner.errors import PlanError, TraceError
from claw_plan.planner.expert_parallel import ExpertFinding
from claw_plan.planner.expert_tensor_parallel import divide_experts, tensor_rule
from claw_plan.planner.fit import Fit, ProgramChanges
from claw_plan.planner.graph import SEQUENCE, TENSOR, TensorParallelRule, UnitCost
from claw_plan.planner.join import Join
from claw_plan.planner.sequence_parallel import divide_sequence
from claw_plan.planner.side_by_side import side_by_side
from claw_plan.planner.subject import Exchanged, Subject
from claw_plan.planner.tensor_parallel import apply_rules
from claw_plan.planner.tensor_parallel_search import TensorParallelFinding, find_rules
from claw_plan.planner.tp_autograd import StandIn
from claw_plan.planner.trace_experts import dividing, experts_of, undivided
from claw_plan.planner.vocabulary_parallel import divide_vocabulary
from claw_plan.planner.vocabulary_parallel_search import VocabularyFinding, find_vocabulary

BATCH_SIZES = (2, 3)
"""Two fit the line; that there is one was checked without tensor parallelism."""


@dataclass(frozen=True, kw_only=True)
class DividedTrace:
    """What was found, the costs by variant, and the divided dimension of parameters by name.

    `partial_dims` has the divided dimensions of each degree that divides less. `vocabulary` are
    the rules of embedding tables and heads, named from the model.
    """

    finding: TensorParallelFinding
    vocabulary: tuple[TensorParallelRule, ...] = ()
    costs: dict[str, list[UnitCost]] = field(default_factory=dict)
    dims: dict[str, int] = field(default_factory=dict)
    partial_dims: dict[int, dict[str, int]] = field(default_factory=dict)
    experts: ExpertFinding = field(default_factory=ExpertFinding)
    assumptions: tuple[str, ...] = ()


def trace_divided(subject: Subject) -> DividedTrace:
    """Costs of the variants `tensor` and `sequence`, as far as the model allows them."""
    experts = experts_of(subject)
    found = _trace_divided(subject, experts)
    return found if found.experts.rules else replace(found, experts=undivided(experts))


def _trace_divided(subject: Subject, experts: ExpertFinding) -> DividedTrace:
    if subject.fake is None or not subject.blocks:
        why = "there is no chain of blocks" if subject.fake else "it was traced on real tensors"
        return DividedTrace(finding=TensorParallelFinding(reason=why, no_sequence_parallel=why))
    if subject.around is not None:
        why = "it is not proven with context parallelism"
        return DividedTrace(finding=TensorParallelFinding(reason=why, no_sequence_parallel=why))
    now = {id(module): name for name, module in subject.module.named_modules()}
    names = [now[id(block)] for block in subject.blocks]
    batch = subject.batch(BATCH_SIZES[0])

    def forward() -> torch.Tensor:
        return subject.forward(batch)

    with subject.world():
        finding = find_rules(subject.module, names, forward)
        if not finding.rules:
            return DividedTrace(finding=finding)
        vocabulary = find_vocabulary(subject.module, names, forward, finding.tp_divides)
    inner = dividing(subject, experts, finding.tp_divides)
    if any(rule.inner for own in inner.rules.values() for rule in own):
        with suppress(PlanError, TraceError):  # else experts stay whole
            return _traced(subject, finding, vocabulary, names, inner)
    try:
        return _traced(subject, finding, vocabulary, names)
    except (PlanError, TraceError) as error:
        if not vocabulary.rules:
            return DividedTrace(finding=replace(finding, **_without_rules(error)))
        without = dict.fromkeys((rule.module for rule in vocabulary.rules), str(error))
        vocabulary = VocabularyFinding(refused={**vocabulary.refused, **without})
    try:
        return _traced(subject, finding, vocabulary, names)
    except (PlanError, TraceError) as error:
        return DividedTrace(finding=replace(finding, **_without_rules(error)))


def _without_rules(error: Exception) -> dict[str, Any]:
    return {"rules": (), "tp_divides": 1, "partial": {}, "reason": str(error)}


def _traced(
    subject: Subject,
    finding: TensorParallelFinding,
    vocabulary: VocabularyFinding,
    names: list[str],
    experts: ExpertFinding | None = None,
) -> DividedTrace:
    """The costs with these rules; raises where the model does not run with them."""
    inner = _inner_rules(experts) if experts is not None else {}
    rules = _Rules(blocks=finding.by_block(), vocabulary=vocabulary.rules, experts=inner)
    degrees = [ways for ways in range(2, finding.tp_divides + 1) if finding.tp_divides % ways == 0]
    works = {TENSOR: partial(_costs, subject, rules, degrees[:2])}
    degrees = [ways for ways in degrees if (subject.seq_len or 1) % ways == 0]
    if not finding.no_sequence_parallel and not degrees:
        why = "the model's inputs have no sequence"
        if subject.seq_len is not None:
            why = f"no tensor-parallel degree divides a sequence of {subject.seq_len}"
        finding = replace(finding, no_sequence_parallel=why)
    if not finding.no_sequence_parallel:
        works[SEQUENCE] = partial(_costs, subject, rules, degrees[:2], sequence=True)
    some = {
        degree: _Rules(blocks=finding.by_block(degree), vocabulary=vocabulary.rules)
        for degree in finding.partial
    }
    for degree in some:
        works[f"{TENSOR}@{degree}"] = partial(_costs, subject, some[degree], [degree])
    variants = dict(zip(works, side_by_side(list(works.values())), strict=True))
    if why := variants[TENSOR].refused:
        raise PlanError(why)
    if SEQUENCE in variants and (why := variants[SEQUENCE].refused):
        finding = replace(finding, no_sequence_parallel=why)
    costs = {name: variant.costs for name, variant in variants.items() if not variant.refused}
    # A degree that does not run is not offered.
    some = {degree: each for degree, each in some.items() if f"{TENSOR}@{degree}" in costs}
    finding = replace(finding, partial={degree: finding.partial[degree] for degree in some})
    inexact = {name: degree for each in variants.values() for name, degree in each.inexact.items()}
    assumptions = [
        f"under tensor parallelism exact at degree {degree} only: {name}"
        for name, degree in sorted(inexact.items())[:1]
    ]
    assumptions += [
        f"under tensor parallelism every rank holds the whole {weight}: {why}"
        for weight, why in vocabulary.refused.items()
    ]
    return DividedTrace(
        finding=finding,
        vocabulary=vocabulary.rules,
        costs=costs,
        dims=_dims(subject, rules, names),
        partial_dims={degree: _dims(subject, each, names) for degree, each in some.items()},
        experts=experts or ExpertFinding(),
        assumptions=tuple(assumptions),
    )


@dataclass(frozen=True, kw_only=True)
class _Rules:
    """Those of the blocks by name, those of tables and heads, and of experts by block."""

    blocks: Mapping[str, tuple[TensorParallelRule, ...]]
    vocabulary: tuple[TensorParallelRule, ...]
    experts: Mapping[str, tuple[TensorParallelRule, ...]] = field(default_factory=dict)


def _inner_rules(experts: ExpertFinding) -> dict[str, tuple[TensorParallelRule, ...]]:
    return {
        block: tuple(tensor_rule(rule) for rule in own if rule.inner)
        for block, own in experts.rules.items()
    }


@dataclass(frozen=True, kw_only=True)
class _Variant:
    """The costs of the units, and of what is exact at one degree only, that degree by name.

    Or why the model does not run so.
    """

    costs: list[UnitCost] = field(default_factory=list)
    inexact: dict[str, int] = field(default_factory=dict)
    refused: str = ""


def _costs(
    subject: Subject, rules: _Rules, degrees: list[int], *, sequence: bool = False
) -> _Variant:
    """The costs through those at one or two degrees; the only valid degree needs no second.

    What is not on a line between two is exact at the first of them.
    """
    try:
        each = [_costs_at(subject, rules, degree, sequence) for degree in degrees]
    except (PlanError, TraceError) as error:
        return _Variant(refused=str(error))
    if len(each) == 1:
        return _Variant(costs=each[0])
    join = Join(*degrees)
    joined = [join.unit(one, other) for one, other in zip(*each, strict=True)]
    return _Variant(costs=joined, inexact=dict.fromkeys(join.inexact, degrees[0]))


def _costs_at(subject: Subject, rules: _Rules, degree: int, sequence: bool) -> list[UnitCost]:
    # Exchanges name modules as the folded model has them; the graph as the whole model does.
    whole = {name: subject.names[id(part)] for name, part in subject.module.named_modules()}

    @contextmanager
    def around(module: nn.Module, exchanged: Exchanged) -> Iterator[None]:
        ranks = StandIn(degree, exchange=lambda op, num, where: exchanged(op, num, whole[where]))
        applied = apply_rules(module, rules.blocks, ranks, sequence_parallel=sequence)
        divide_vocabulary(module, rules.vocabulary, applied)
        divide_experts(module, rules.experts, applied, sequence_parallel=sequence)
        hooks = divide_sequence(subject.blocks, rules.blocks, ranks) if sequence else []
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            applied.remove()

    recordings = [subject.record(size, around) for size in BATCH_SIZES]
    try:
        return Fit(BATCH_SIZES).units(recordings, len(subject.blocks) + 2)
    except ProgramChanges as change:
        raise PlanError(
            f"divided, it runs other operators for other batches ({change})"
        ) from change


def _dims(subject: Subject, rules: _Rules, names: list[str]) -> dict[str, int]:
    """The divided dimension of every parameter of the whole model that has one."""
    found = {}
    kept = dict(zip(subject.kept, names, strict=True))
    for block, like in zip(subject.block_names, subject.stands_for, strict=True):
        here = kept[like]
        for rule in (*rules.blocks.get(here, ()), *rules.experts.get(here, ())):
            for own, dim in rule.weight_dims.items():
                found[f"{block}.{rule.module}.{own}" if rule.module else f"{block}.{own}"] = dim
    for rule in rules.vocabulary:
        found |= {f"{rule.module}.{own}": dim for own, dim in rule.weight_dims.items()}
    return found
