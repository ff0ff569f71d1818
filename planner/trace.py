"""From a `LoadedModel` to a `ModelGraph`: trace small, scale exactly.

One step is recorded at three small batch sizes on fake tensors, with long runs of like blocks
folded to a few; `fit` makes the costs, and here the units, parameters and refused cuts of the
whole model are put together from them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn as nn

from claw_plan.planner.chain import FOLDS
from claw_plan.planner.errors import TraceError
from claw_plan.planner.fake_build import check_size
from claw_plan.planner.fit import Fit, ProgramChanges
from claw_plan.planner.graph import (
    PLAIN,
    ModelGraph,
    Parameter,
    TensorParallelRule,
    Unit,
    UnitCost,
)
from claw_plan.planner.model_source import LoadedModel
from claw_plan.planner.recorder import Recording
from claw_plan.planner.subject import Around, Subject
from claw_plan.planner.torch_private import BatchNorm
from claw_plan.planner.trace_divided import DividedTrace, trace_divided
from claw_plan.planner.trace_experts import with_experts
from claw_plan.profiles.errors import InputError

BATCH_SIZES = (2, 3, 5)
"""Two fit the line and the third must lie on it; 1 is left out, since broadcasting treats a
dimension of size 1 unlike any other."""

LARGE_SHARE = 0.05
"""Of all parameters; what tensor parallelism leaves whole beyond it is told."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Progress = Callable[[str], None]

AroundSubject = Callable[[Subject], Around]
"""What is put around each recorded step of a subject."""


def trace(
    model: LoadedModel,
    *,
    seq_len: int | None,
    dtype: str,
    fold: bool = True,
    progress: Progress | None = None,
    around: AroundSubject | None = None,
) -> ModelGraph:
    """The model's graph for sequences of `seq_len` and compute in `dtype`.

    `fold=False` runs every block instead of a few of each kind; the result is the same.
    `progress` is told in words what is being done. With `around`, what is traced is what that
    makes of each step: one rank's part of it, without tensor parallelism. Raises TraceError when
    the model cannot be run, or not be trained as it stands.
    """
    if dtype not in DTYPES:
        raise InputError(f"a model is traced in {', '.join(DTYPES)}, but got {dtype!r}")
    tell = progress or (lambda text: None)
    tell(f"building {model.name}")
    try:
        for first in FOLDS if fold else FOLDS[-1:]:
            subject = Subject.prepare(model, seq_len=seq_len, dtype=DTYPES[dtype], fold=first)
            subject.around = around(subject) if around is not None else None
            graph = _graph_of(subject, tell)
            if graph is not None:
                return graph
    except TraceError as error:
        if error.__cause__ is None or around is not None:
            raise  # a refusal of our own: real tensors would not change it
        return _traced_on_real_tensors(model, seq_len, tell, error)
    raise AssertionError("without a fold no block stands for another")


def _traced_on_real_tensors(
    model: LoadedModel, seq_len: int | None, tell: Progress, cause: TraceError
) -> ModelGraph:
    """The same on real tensors, for models that need values; raises `cause` if that fails too."""
    check_size(model, cause)
    tell(f"running {model.name} on real tensors")
    subject = Subject.prepare(model, seq_len=seq_len, dtype=torch.float32, real=True)
    graph = _graph_of(subject, tell)
    assert graph is not None
    sentence = (
        "the model's values decide how it goes on, and ranks may go other ways; it was traced on "
        "small random batches of real float32 tensors (on fake ones: "
        f"{str(cause).removeprefix(str(model.path))[2:]})"
    )
    return replace(graph, may_miss=True, assumptions=(sentence, *graph.assumptions))


def _graph_of(subject: Subject, tell: Progress) -> ModelGraph | None:
    """The graph, or None if blocks that stand for others do not cost alike."""
    tell(f"tracing {subject.model.name} at batch sizes {', '.join(map(str, BATCH_SIZES))}")
    recordings = subject.record_all(BATCH_SIZES)
    costs, assumptions = _plain_costs(subject, recordings)
    for one, other in subject.alike:
        if _bare(subject, costs, one) != _bare(subject, costs, other):
            return None
    tell(f"looking for tensor parallelism in {subject.model.name}")
    divided = trace_divided(subject)
    assumptions += divided.assumptions
    every = {PLAIN: costs, **divided.costs}
    return with_experts(
        subject, _assemble(subject, recordings[0], every, divided, assumptions), divided.experts
    )


def _plain_costs(
    subject: Subject, recordings: Sequence[Recording]
) -> tuple[list[UnitCost], list[str]]:
    """The costs without tensor parallelism, and sentences on what is not exact in them."""
    count = len(subject.kept) + 2
    fit = Fit(BATCH_SIZES)
    try:
        costs = fit.units(recordings, count)
    except ProgramChanges as change:
        if subject.fake is not None:
            raise TraceError(
                f"{subject.model.path}: it runs other operators for other batch sizes "
                f"({change}), so its cost is no function of the batch"
            ) from change
        last = BATCH_SIZES[-1]
        return Fit([last]).units(recordings[-1:], count), [
            f"the model runs other operators for other batches ({change}); all costs are taken "
            f"in proportion to those of a batch of {last}"
        ]
    if not fit.curved:
        return costs, []
    more = f" and {len(fit.curved) - 3} more" if len(fit.curved) > 3 else ""
    return costs, [
        "costs that do not grow in proportion to the batch, and are exact only near a batch of "
        f"{BATCH_SIZES[-1]}: {', '.join(sorted(fit.curved)[:3])}{more}"
    ]


def _bare(subject: Subject, costs: list[UnitCost], block: int) -> UnitCost:
    """A block's cost with module names relative to the block, so that like blocks are equal."""
    unit = subject.kept.index(block) + 1
    return _relative(costs[unit], subject.block_names[block])


def _relative(cost: UnitCost, block: str) -> UnitCost:
    def bare(ops: Iterable[object]) -> tuple[object, ...]:
        return tuple(
            replace(op, module="." + op.module[len(block) :])  # type: ignore[attr-defined,type-var]
            if (op.module + ".").startswith(block + ".")  # type: ignore[attr-defined]
            else op
            for op in ops
        )

    return replace(cost, forward=bare(cost.forward), backward=bare(cost.backward))  # type: ignore[arg-type]


def _assemble(
    subject: Subject,
    recording: Recording,
    costs: Mapping[str, list[UnitCost]],
    divided: DividedTrace,
    assumptions: list[str],
) -> ModelGraph:
    blocks = subject.block_names
    traced_unit = {block: place + 1 for place, block in enumerate(subject.kept)}
    # For every unit of the whole model the traced unit that stands for it.
    source = [0, *(traced_unit[block] for block in subject.stands_for), len(subject.kept) + 1]
    units, distinct = _units(subject, recording, costs, source)
    parameters = _parameters(subject, recording, source, divided)
    unused = [p.name for p in parameters if not p.units and p.trainable]
    if unused:
        assumptions.append(
            f"never used, so without a gradient: {', '.join(unused[:3])}; a pipeline keeps what "
            "is outside the blocks on its first stage"
        )
    assumptions += [*_held_whole(parameters, blocks, divided), *_of_the_batch(subject)]
    partial = divided.finding.partial
    return ModelGraph(
        name=subject.model.name,
        fingerprint=_fingerprint(subject, parameters),
        parameters=tuple(replace(p, units=p.units or (0,)) for p in parameters),
        buffer_bytes=sum(b.numel() * b.element_size() for b in _buffers(subject)),
        units=units,
        costs={name: tuple(each[unit] for unit in distinct) for name, each in costs.items()},
        tensor_parallel=_rules(subject, divided, units, divided.finding.rules),
        partial={ways: _rules(subject, divided, units, some) for ways, some in partial.items()},
        vocabulary_parallel=divided.vocabulary,
        no_tensor_parallel=divided.finding.reason,
        no_sequence_parallel=divided.finding.no_sequence_parallel,
        tp_divides=divided.finding.tp_divides,
        cut_refused=_refused(blocks, recording, source),
        may_miss=any(
            p.requires_grad and name not in recording.arrived
            for name, p in subject.module.named_parameters()
        ),
        seq_len=subject.seq_len,
        dtype=str(subject.dtype).removeprefix("torch."),
        inputs={
            name: (str(value.dtype).removeprefix("torch."), tuple(value.shape[1:]))
            for name, value in subject.batch(2).items()
        },
        assumptions=tuple(assumptions),
    )


def _rules(
    subject: Subject,
    divided: DividedTrace,
    units: Sequence[Unit],
    rules: Sequence[TensorParallelRule],
) -> tuple[TensorParallelRule, ...]:
    """The rules of the blocks, naming structures as units do."""
    now = {id(module): name for name, module in subject.module.named_modules()}
    structure = {
        now[id(block)]: units[place + 1].structure
        for place, block in zip(subject.kept, subject.blocks, strict=True)
    }
    found = [{structure[name] for name in names} for names in divided.finding.structures]
    return tuple(
        replace(rule, structures=tuple(sorted(set().union(*(found[i] for i in rule.structures)))))
        for rule in rules
    )


def _held_whole(
    parameters: Sequence[Parameter], blocks: Sequence[str], divided: DividedTrace
) -> Iterator[str]:
    """Matrices of the blocks that tensor parallelism leaves whole, where they weigh much."""
    whole: dict[str, int] = {}
    for parameter in parameters if divided.finding.rules else ():
        block = next((name for name in blocks if parameter.name.startswith(f"{name}.")), None)
        if block and parameter.tp_dim is None and len(parameter.shape) > 1:
            name = parameter.name.removeprefix(f"{block}.")
            whole[name] = whole.get(name, 0) + parameter.numel
    share = sum(whole.values()) / max(1, sum(parameter.numel for parameter in parameters))
    if share >= LARGE_SHARE:
        names = sorted(whole, key=lambda name: -whole[name])
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        yield (
            f"under tensor parallelism every rank holds {share:.0%} of the parameters whole, "
            f"matrices of the blocks: {', '.join(names[:3])}{more}"
        )


def _of_the_batch(subject: Subject) -> list[str]:
    """What in the model depends on how a batch is divided."""
    modules = list(subject.module.modules())
    found = []
    if any(isinstance(module, BatchNorm) and module.training for module in modules):
        found.append("BatchNorm takes its statistics over each rank's microbatch alone")
    if any(isinstance(module, nn.Dropout) and module.p > 0 for module in modules):
        found.append("dropout draws other masks when the batch or the heads are divided")
    return found


def _units(
    subject: Subject,
    recording: Recording,
    costs: Mapping[str, list[UnitCost]],
    source: list[int],
) -> tuple[tuple[Unit, ...], list[int]]:
    """All units, and for each distinct structure the traced unit that has its costs."""
    blocks = subject.block_names
    traced_names = ["prologue", *(blocks[block] for block in subject.kept), "epilogue"]
    known: dict[tuple[UnitCost, ...], int] = {}
    distinct: list[int] = []
    units = []
    for name, traced in zip(["prologue", *blocks, "epilogue"], source, strict=True):
        bare = tuple(_relative(each[traced], traced_names[traced]) for each in costs.values())
        if bare not in known:
            known[bare] = len(distinct)
            distinct.append(traced)
        own = (name,) if 0 < traced < len(traced_names) - 1 else ()
        modules = (*own, *recording.modules.get(traced, ()))
        units.append(Unit(name=name, modules=modules, structure=known[bare]))
    return tuple(units), distinct


def _refused(blocks: list[str], recording: Recording, source: list[int]) -> dict[int, str]:
    if not blocks:
        return {1: "the model has no chain of blocks to cut between"}
    return {
        unit: f"the output of {recording.ways_around[traced] or 'the model itself'} goes around it"
        for unit, traced in enumerate(source)
        if traced in recording.ways_around
    }


def _whole(subject: Subject) -> list[tuple[str, nn.Module]]:
    """Every module of the whole model by name, those folded away included."""
    for fold in subject.folds:
        fold.undo()
    modules = list(subject.module.named_modules(remove_duplicate=False))
    for fold in subject.folds:
        fold.apply()
    return modules


def _buffers(subject: Subject) -> list[torch.Tensor]:
    return list({id(b): b for _, m in _whole(subject) for b in m.buffers(recurse=False)}.values())


def _parameters(
    subject: Subject, recording: Recording, source: list[int], divided: DividedTrace
) -> list[Parameter]:
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for module_name, module in _whole(subject):
        for key, tensor in module._parameters.items():
            if tensor is not None:
                name = f"{module_name}.{key}" if module_name else key
                names.setdefault(id(tensor), []).append(name)
                tensors[id(tensor)] = tensor
    traced_names = {id(traced): name for name, traced in subject.module.named_parameters()}
    unit_of_block = {name: unit + 1 for unit, name in enumerate(subject.block_names)}
    first_names = {traced_names[i]: found[0] for i, found in names.items() if i in traced_names}
    arrivals = _arrivals(subject, recording, first_names)
    dims, partial_dims = divided.dims, divided.partial_dims
    result = []
    for identity, found in names.items():
        parameter = tensors[identity]
        used = recording.used.get(traced_names.get(identity, ""), set())
        own = {unit for name in found for unit in _block_units(name, unit_of_block)}
        # What lies in a block is used there, not in the blocks that the block stands for.
        shared = {
            unit
            for unit, traced in enumerate(source)
            if traced in used and (not own or traced in (0, source[-1]))
        }
        result.append(
            Parameter(
                names=tuple(dict.fromkeys(found)),
                shape=tuple(parameter.shape),
                dtype=str(subject.dtype_of(parameter)).removeprefix("torch."),
                trainable=parameter.requires_grad,
                units=tuple(sorted(own | shared)),
                tp_dim=_divided_dim(dims, found),
                partial_dims=tuple(
                    (ways, _divided_dim(dims, found)) for ways, dims in partial_dims.items()
                ),
                arrival=next((arrivals[n] for n in found if n in arrivals), 0),
            )
        )
    return _numbered(result)


def _divided_dim(dims: Mapping[str, int], names: Sequence[str]) -> int | None:
    return next((dims[name] for name in names if name in dims), None)


def _numbered(parameters: Sequence[Parameter]) -> list[Parameter]:
    """With arrivals counted from 0 in each unit, whatever was traced beside it."""
    seen: dict[int, int] = {}
    numbers = {}
    for parameter in sorted(parameters, key=lambda p: p.arrival):
        unit = min(parameter.units, default=0)
        numbers[parameter.name] = seen[unit] = seen.get(unit, -1) + 1
    return [replace(p, arrival=numbers[p.name]) for p in parameters]


def _arrivals(
    subject: Subject, recording: Recording, first_names: Mapping[str, str]
) -> dict[str, int]:
    """When gradients are complete, by names of the whole model; alike blocks do it alike."""
    found = {
        first_names[name]: place
        for place, name in enumerate(recording.arrived)
        if name in first_names
    }
    blocks = subject.block_names
    for block, stand in zip(blocks, subject.stands_for, strict=True):
        like = f"{blocks[stand]}."
        found |= {
            f"{block}.{name.removeprefix(like)}": place
            for name, place in found.items()
            if name.startswith(like) and blocks[stand] != block
        }
    return found


def _block_units(name: str, unit_of_block: dict[str, int]) -> list[int]:
    parts = name.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts)))
    return [unit_of_block[prefix] for prefix in prefixes if prefix in unit_of_block]


def _fingerprint(subject: Subject, parameters: list[Parameter]) -> str:
    """A hash of the module tree, parameters and chain: equal for models that plan alike."""
    tree = [(name, type(module).__qualname__) for name, module in _whole(subject)]
    text = repr((tree, parameters, subject.block_names, subject.seq_len))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
