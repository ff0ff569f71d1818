"""Which tensor-parallel rules plain `parallelize_module` can follow, proven by arithmetic.

The executor follows the author's code with tensors that know how they are divided. A plain
script has local tensors only, which is right where the code never counts on the whole width:
columns of nn.Linear, code that takes the sizes it is given, rows of nn.Linear. `plain_styles`
accepts rules of that form when the blocks, run once for every rank on the rank's parts of the
weights, add up to what they compute whole. Anything else is refused, with what stands in the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.nn as nn
import torch.nn.functional as F

from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.tensor_parallel import rules_of
from claw_plan.planner.graph import TensorParallelRule
from claw_plan.planner.plan import Plan

ROUNDING = 1e-9
"""Sums of parts differ from the whole by rounding, 1e-15 in fp64; other code by whole values."""

Call = Callable[[nn.Module], object]
Linears = dict[str, tuple[nn.Linear, str]]
"""Name of a linear to itself and its style."""


def plain_styles(plan: Plan, model: nn.Module, call: Call) -> dict[str, str]:
    """Module name inside a block -> 'colwise' or 'rowwise', equal for all blocks.

    `call` runs the model, in fp64, on one microbatch. Raises ExecutionError where the plain form
    would train something else.
    """
    if plan.knobs().sequence_parallel:
        raise _refused("the plan divides the sequence, too", "--fix sequence_parallel=false")
    found = {
        block: {rule.module: rule for rule in rules if rule.style != "region"}
        for block, rules in rules_of(plan, model, plan.blocks).items()
    }
    if not found:
        raise _refused("the plan has no tensor_parallel rule that fits its blocks", "--fix tp=1")
    styles = [{name: rule.style for name, rule in rules.items()} for rules in found.values()]
    if len(found) < len(plan.blocks) or any(other != styles[0] for other in styles):
        raise _refused("its blocks are divided in different ways", "--fix tp=1")
    linears: Linears = {}
    for block, rules in found.items():
        for name, rule in rules.items():
            full = f"{block}.{name}"
            linears[full] = (_plain_linear(model, full, rule, plan.knobs().tp), rule.style)
    _prove(model, linears, plan.knobs().tp, call)
    return styles[0]


def _refused(why: str, instead: str) -> ExecutionError:
    return ExecutionError(
        f"export: {why}, which parallelize_module cannot be told plainly; plan again with "
        f"{instead}, or use `from claw_plan.executor import parallelize`"
    )


def _plain_linear(model: nn.Module, name: str, rule: TensorParallelRule, degree: int) -> nn.Linear:
    linear = model.get_submodule(name)
    dim = 0 if rule.style == "colwise" else 1
    if not isinstance(linear, nn.Linear):
        raise _refused(f"{name} is a {type(linear).__name__}, no nn.Linear", "--fix tp=1")
    if rule.parts != 1:
        raise _refused(f"{name} computes {rule.parts} fused outputs", "--fix tp=1")
    if rule.weight_dims.get("weight") != dim or linear.weight.shape[dim] % degree:
        raise _refused(f"{name} is not divided evenly by tp={degree}", "--fix tp=1")
    return linear


def _prove(model: nn.Module, linears: Linears, degree: int, call: Call) -> None:
    model.eval()  # dropout would draw other numbers in every run
    with torch.no_grad():
        whole: dict[str, list[torch.Tensor]] = {}
        with _forwards(linears, lambda name, linear, style: _noting(linear, style, whole, name)):
            call(model)
        sums: dict[str, list[torch.Tensor]] = {}
        for rank in range(degree):
            replay = {name: iter(values) for name, values in whole.items()}

            def divided(
                name: str,
                linear: nn.Linear,
                style: str,
                rank: int = rank,
                replay: Mapping[str, Iterator[torch.Tensor]] = replay,
            ) -> Callable[[torch.Tensor], torch.Tensor]:
                if style == "colwise":
                    return _columns(linear, rank, degree)
                return _rows(linear, rank, degree, replay[name], sums.setdefault(name, []))

            try:
                with _forwards(linears, divided):
                    call(model)
            except (RuntimeError, ValueError, TypeError, IndexError) as error:
                line = str(error).strip().splitlines()[0]
                raise _refused(
                    f"the model's code counts on the whole width ({line})", "--fix tp=1"
                ) from None
    _compare(linears, whole, sums, degree)


def _compare(
    linears: Linears,
    whole: Mapping[str, Sequence[torch.Tensor]],
    sums: Mapping[str, Sequence[torch.Tensor]],
    degree: int,
) -> None:
    for name, parts in sums.items():
        count = len(whole[name])
        bias = linears[name][0].bias
        for index, expected in enumerate(whole[name]):
            total = torch.stack(list(parts[index::count])).sum(0)
            total = total if bias is None else total + bias
            if len(parts) != count * degree or not torch.allclose(
                total, expected, rtol=ROUNDING, atol=ROUNDING
            ):
                raise _refused(f"parts of {name} do not add up to the whole", "--fix tp=1")


def _noting(
    linear: nn.Linear, style: str, whole: dict[str, list[torch.Tensor]], name: str
) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(tensor: torch.Tensor) -> torch.Tensor:
        output = F.linear(tensor, linear.weight, linear.bias)
        if style == "rowwise":
            whole.setdefault(name, []).append(output)
        return output

    return forward


def _columns(linear: nn.Linear, rank: int, degree: int) -> Callable[[torch.Tensor], torch.Tensor]:
    bias = None if linear.bias is None else linear.bias.chunk(degree)[rank]
    return lambda tensor: F.linear(tensor, linear.weight.chunk(degree)[rank], bias)


def _rows(
    linear: nn.Linear,
    rank: int,
    degree: int,
    replay: Iterator[torch.Tensor],
    parts: list[torch.Tensor],
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Keeps the rank's part of the sum and goes on with the whole, as all ranks would."""

    def forward(tensor: torch.Tensor) -> torch.Tensor:
        parts.append(F.linear(tensor, linear.weight.chunk(degree, dim=1)[rank]))
        return next(replay)

    return forward


@contextmanager
def _forwards(
    linears: Linears,
    make: Callable[[str, nn.Linear, str], Callable[[torch.Tensor], torch.Tensor]],
) -> Iterator[None]:
    for name, (linear, style) in linears.items():
        linear.forward = make(name, linear, style)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        for linear, _ in linears.values():
            del linear.forward
