"""The same model traced with tensor parallelism, with and without sequence parallelism.

The rules come from `tensor_parallel_search`, the divided modules from `tensor_parallel`; one rank
runs on its local shapes with stand-ins for the collectives. A step at degree 1 and one at the
smallest valid degree tell what is divided from what every rank does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch.nn as nn

from claw_plan.planner.errors import PlanError, TraceError
from claw_plan.planner.fit import Fit, ProgramChanges
from claw_plan.planner.graph import SEQUENCE, TENSOR, TensorParallelRule, UnitCost
from claw_plan.planner.join import Join
from claw_plan.planner.sequence_parallel import divide_sequence
from claw_plan.planner.subject import Exchanged, Subject
from claw_plan.planner.tensor_parallel import apply_rules
from claw_plan.planner.tensor_parallel_search import TensorParallelFinding, find_rules
from claw_plan.planner.tp_autograd import StandIn

BATCH_SIZES = (2, 3)
"""Two fit the line; that there is one was checked without tensor parallelism."""

Rules = Mapping[str, tuple[TensorParallelRule, ...]]


@dataclass(frozen=True, kw_only=True)
class DividedTrace:
    """What was found, the costs by variant, and the divided dimension of parameters by name."""

    finding: TensorParallelFinding
    costs: dict[str, list[UnitCost]] = field(default_factory=dict)
    dims: dict[str, int] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()


def trace_divided(subject: Subject) -> DividedTrace:
    """Costs of the variants `tensor` and `sequence`, as far as the model allows them."""
    if subject.fake is None or not subject.blocks:
        why = "there is no chain of blocks" if subject.fake else "it was traced on real tensors"
        return DividedTrace(finding=TensorParallelFinding(reason=why, no_sequence_parallel=why))
    now = {id(module): name for name, module in subject.module.named_modules()}
    names = [now[id(block)] for block in subject.blocks]
    batch = subject.batch(BATCH_SIZES[0])
    with subject.world():
        finding = find_rules(subject.module, names, lambda: subject.forward(batch))
    if not finding.rules:
        return DividedTrace(finding=finding)
    rules, costs = finding.by_block(), {}
    inexact: set[str] = set()
    degrees = [ways for ways in range(2, finding.tp_divides + 1) if finding.tp_divides % ways == 0]
    try:
        costs[TENSOR] = _costs(subject, rules, degrees[:2], inexact)
    except (PlanError, TraceError) as error:
        refused = replace(finding, rules=(), tp_divides=1, reason=str(error))
        return DividedTrace(finding=refused)
    degrees = [ways for ways in degrees if (subject.seq_len or 1) % ways == 0]
    if not finding.no_sequence_parallel and not degrees:
        why = f"no tensor-parallel degree divides a sequence of {subject.seq_len}"
        finding = replace(finding, no_sequence_parallel=why)
    if not finding.no_sequence_parallel:
        try:
            costs[SEQUENCE] = _costs(subject, rules, degrees[:2], inexact, sequence=True)
        except (PlanError, TraceError) as error:
            finding = replace(finding, no_sequence_parallel=str(error))
    assumptions = (
        f"under tensor parallelism exact at degree {degrees[0]} only: {name}"
        for name in sorted(inexact)[:1]
    )
    return DividedTrace(
        finding=finding,
        costs=costs,
        dims=_dims(subject, rules, names),
        assumptions=tuple(assumptions),
    )


def _costs(
    subject: Subject,
    rules: Rules,
    degrees: list[int],
    inexact: set[str],
    *,
    sequence: bool = False,
) -> list[UnitCost]:
    """The costs through those at one or two degrees; the only valid degree needs no second."""
    each = [_costs_at(subject, rules, degree, sequence) for degree in degrees]
    if len(each) == 1:
        return each[0]
    join = Join(*degrees)
    joined = [join.unit(one, other) for one, other in zip(*each, strict=True)]
    inexact |= join.inexact
    return joined


def _costs_at(subject: Subject, rules: Rules, degree: int, sequence: bool) -> list[UnitCost]:
    # Exchanges name modules as the folded model has them; the graph as the whole model does.
    whole = {name: subject.names[id(part)] for name, part in subject.module.named_modules()}

    @contextmanager
    def around(module: nn.Module, exchanged: Exchanged) -> Iterator[None]:
        ranks = StandIn(degree, exchange=lambda op, num, where: exchanged(op, num, whole[where]))
        applied = apply_rules(module, rules, ranks, sequence_parallel=sequence)
        hooks = divide_sequence(subject.blocks, rules, ranks) if sequence else []
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


def _dims(subject: Subject, rules: Rules, names: list[str]) -> dict[str, int]:
    """The divided dimension of every parameter of the whole model that has one."""
    found = {}
    kept = dict(zip(subject.kept, names, strict=True))
    for block, like in zip(subject.block_names, subject.stands_for, strict=True):
        for rule in rules.get(kept[like], ()):
            for own, dim in rule.weight_dims.items():
                found[f"{block}.{rule.module}.{own}" if rule.module else f"{block}.{own}"] = dim
    return found
