"""How one block is best divided over a tensor-parallel group, and what that saves: `BlockSplit`.

The exact choice of `split.program` is told in the words of `tensor_parallel`: which parameters lie
in columns and which in rows, and what is exchanged. `agreeing` gives the rules of a finding that
the choice uses: they are what the executor runs. What it cannot run (channels of convolutions,
the inner size of fused experts) is priced here and not offered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from claw_plan.planner.block_calls import block_calls
from claw_plan.planner.errors import TensorParallelError
from claw_plan.planner.graph import TensorParallelRule
from claw_plan.planner.problem import Problem
from claw_plan.planner.sequence_parallel_search import TRIAL_ERRORS, first_line
from claw_plan.planner.split.costs import SplitCosts
from claw_plan.planner.split.graph import SplitGraph, split_graph
from claw_plan.planner.split.program import Choice, SplitProgram, cost_of, solve
from claw_plan.planner.split.states import WHOLE, State, change_of
from claw_plan.planner.split.ways import Setting, split_program
from claw_plan.planner.subject import Subject
from claw_plan.planner.tensor_parallel import COLUMN, ROW, regions_of


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSplit:
    """The choice for one block at one degree. `columns` and `rows` are parameters, `cut_ops` the
    names of other operators that run divided. `forward` and `backward` are the collectives of the
    passes, in order of the tensors they move. `whole_ns` is the time undivided. `is_proven` is
    False where not every choice could be looked at.
    """

    block: str
    degree: int
    time_ns: int
    whole_ns: int
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    cut_ops: tuple[str, ...]
    forward: tuple[str, ...]
    backward: tuple[str, ...]
    is_proven: bool = True

    def text(self) -> str:
        """One line for people."""
        if not self.columns and not self.rows:
            return f"{self.block}: nothing is divided {self.degree} ways, for none of it pays"
        saved = 1 - self.time_ns / self.whole_ns
        return (
            f"{self.block}, {self.degree} ways: {_modules(self.columns)} by columns, "
            f"{_modules(self.rows)} by rows; {saved:.0%} less time than undivided"
            + ", not proven best"
            * (not self.is_proven)
        )


def _modules(parameters: Sequence[str]) -> str:
    names = dict.fromkeys(_module(name) for name in parameters)
    return ", ".join(names) or "nothing"


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0] or parameter


def block_flows(subject: Subject, batch: int = 1) -> dict[str, SplitGraph | str]:
    """The data flow of every traced block by name, or why it cannot be followed."""
    now = {id(module): name for name, module in subject.module.named_modules()}
    names = [now[id(block)] for block in subject.blocks]
    whole = {now[id(part)]: subject.names[id(part)] for part in subject.blocks}
    inputs = subject.batch(batch)
    found: dict[str, SplitGraph | str] = {}
    with subject.world():
        calls = block_calls(subject.module, names, lambda: subject.forward(inputs))
        for name, call in calls.items():
            try:
                found[whole[name]] = split_graph(call)
            except (TensorParallelError, *TRIAL_ERRORS) as error:
                found[whole[name]] = first_line(error)
    return found


def costs_on(problem: Problem, degree: int) -> SplitCosts:
    """Prices on the problem's cluster, the group as close together as it fits."""
    nodes = -(-degree // problem.devices_per_node)
    launch_ns = problem.device.kernel_launch_ns

    def collective_ns(op: str, size: int) -> int:
        return problem.collective(op, size, degree, nodes).alone_ns

    def gradient_ns(size: int) -> int:
        cost = problem.collective("all_reduce", size, degree, nodes)
        return cost.alone_ns - cost.latency_ns

    return SplitCosts(
        op_ns=lambda work: max(problem.cost.op(work).ns, launch_ns),
        collective_ns=collective_ns,
        gradient_ns=gradient_ns,
    )


def best_split(block: str, graph: SplitGraph, setting: Setting, costs: SplitCosts) -> BlockSplit:
    """The fastest choice for the block, of least memory among equals."""
    program = split_program(graph, setting, costs)
    choice = solve(program)
    if choice is None:
        raise TensorParallelError(f"{block} cannot be divided {setting.degree} ways")
    return told(block, graph, setting, program, choice)


def told(
    block: str, graph: SplitGraph, setting: Setting, program: SplitProgram, choice: Choice
) -> BlockSplit:
    """A choice in words."""
    by_label: dict[str, list[str]] = {"column": [], "row": []}
    cut_ops: dict[str, None] = {}
    for step, way in zip(program.steps, choice.ways, strict=True):
        weights = [
            graph.tensors[number].parameter
            for number, state in zip(step.inputs, way.needs, strict=True)
            if graph.tensors[number].parameter and state.kind == "cut"
        ]
        if way.label in by_label:
            by_label[way.label] += weights
        elif step.inputs and step.outputs and any(s.kind == "cut" for s in way.gives):
            cut_ops[f"{step.name} by {way.label}"] = None
    forward, backward = _exchanges(graph, program, choice)
    return BlockSplit(
        block=block,
        degree=setting.degree,
        time_ns=choice.time_ns,
        whole_ns=_whole_ns(program),
        columns=tuple(dict.fromkeys(by_label["column"])),
        rows=tuple(dict.fromkeys(by_label["row"])),
        cut_ops=tuple(cut_ops),
        forward=tuple(forward),
        backward=tuple(backward),
        is_proven=choice.is_proven,
    )


def _whole_ns(program: SplitProgram) -> int:
    """Time of the block when every rank does all of it."""
    ways = [
        next((w for w in step.ways if all(s == WHOLE for s in (*w.needs, *w.gives))), step.ways[0])
        for step in program.steps
    ]
    return cost_of(program, ways) or 0


def _exchanges(
    graph: SplitGraph, program: SplitProgram, choice: Choice
) -> tuple[list[str], list[str]]:
    """The collectives of both passes as the choice brings tensors from state to state."""
    held: dict[int, set[State]] = {}
    forward: list[str] = []
    backward: list[str] = []
    for step, way in zip(program.steps, choice.ways, strict=True):
        for number, needed in zip(step.inputs, way.needs, strict=True):
            if needed in held[number]:
                continue
            prices = {state: program.price(number, state, needed) for state in held[number]}
            known = {state: price for state, price in prices.items() if price is not None}
            origin = min(known, key=lambda state: known[state])
            change = change_of(origin, needed, graph.tensors[number].needs_grad)
            assert change is not None
            forward += [change.forward] * bool(change.forward)
            backward += [change.backward] * bool(change.backward)
            if known[origin]:
                held[number].add(needed)
        held |= {n: {state} for n, state in zip(step.outputs, way.gives, strict=True)}
    return forward, backward


def agreeing(
    split: BlockSplit, rules: Iterable[TensorParallelRule]
) -> tuple[TensorParallelRule, ...]:
    """Of a block's rules those of the regions that the choice divides."""
    rows = {_module(name) for name in split.rows}
    listed = list(rules)
    kept = {
        member.module
        for region in regions_of(listed)
        if region.row.module in rows
        for member in (*region.columns, region.row)
    }
    chosen: list[TensorParallelRule] = []
    for index, rule in enumerate(listed):
        if rule.style in (COLUMN, ROW):
            chosen += [rule] * (rule.module in kept)
        else:
            following = listed[index + 1]
            chosen += [rule] * (following.module in kept)
    return tuple(chosen)


def beyond(split: BlockSplit, rules: Mapping[str, str]) -> tuple[str, ...]:
    """Modules that the choice divides and no rule of the executor does; `rules` maps module to
    style.
    """
    divided = [*split.columns, *split.rows]
    return tuple(dict.fromkeys(m for m in map(_module, divided) if m not in rules))
