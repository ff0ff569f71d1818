"""What a rank has to save, and putting back what was saved: the state between two steps.

Keys are those of torch's own nested state dicts, so that torch reads them: `model.<name>`,
`optim.state.<parameter>.<key>`. Beside them stand `optim.numbers` (an optimizer's plain Python
numbers), `buffers` (non-persistent ones that training has changed), `random.rank<r>` and
`errors.rank<r>` (what codecs did not send yet), and `before`, the weights of one step before where
steps overlap. Names are the whole model's. Each box is written
by one of the ranks that hold it, chosen once so that all write about as much; all others neither
copy nor send it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn

from claw_plan.executor.checkpoint_io import Box
from claw_plan.executor.checkpoint_layout import Part, Shape, parts_of, whole_part
from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.gradients import local
from claw_plan.executor.offload import HostOptimizer
from claw_plan.executor.parallel_model import ParallelModel
from claw_plan.executor.random_state import random_state

MODEL, BUFFERS, RANDOM, ERRORS, BEFORE = "model", "buffers", "random", "errors", "before"
OPTIMIZER, NUMBERS = ("optim", "state"), ("optim", "numbers")

PartKey = tuple[str, Shape]
"""A parameter and the offsets of one of its parts."""

Held = Mapping[str, tuple[Part, ...]]
"""The parts of each parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """All parts of parameters that this rank holds, and of these the ones that it writes.

    `speaks_for` has the parameters whose undivided state (an optimizer's step count) it writes,
    `buffers` the buffers.
    """

    held: Held
    written: Held
    speaks_for: frozenset[str]
    buffers: frozenset[str]


def agree_on_writers(compiled: ParallelModel, group: dist.ProcessGroup) -> Holding:
    """Every rank of the group must call it; the same part is written by one rank."""
    held = {name: parts_of(compiled, name) for name in compiled.parameters}
    mine = (
        {
            (name, part.offsets): part.numel * compiled.parameters[name].element_size()
            for name, parts in held.items()
            for part in parts
        },
        [name for name, _ in own_buffers(compiled)],
    )
    everywhere = [mine] * dist.get_world_size(group)
    dist.all_gather_object(everywhere, mine, group=group)
    writer = share_out([parts for parts, _ in everywhere])
    first: dict[str, Shape] = {}
    for name, offsets in writer:
        first[name] = min(first.get(name, offsets), offsets)
    me = dist.get_rank(group)
    # Running mean and variance of one module come from the same rank: the first that has them.
    earlier = {name for _, buffers in everywhere[:me] for name in buffers}
    return Holding(
        held=held,
        written={
            name: tuple(part for part in parts if writer[name, part.offsets] == me)
            for name, parts in held.items()
        },
        speaks_for=frozenset(name for name in first if writer[name, first[name]] == me),
        buffers=frozenset(mine[1]) - earlier,
    )


def share_out(held: Sequence[Mapping[PartKey, int]]) -> dict[PartKey, int]:
    """Who writes each part: largest first, always the holder that has least to write so far."""
    holders: dict[PartKey, list[int]] = {}
    sizes: dict[PartKey, int] = {}
    for rank, parts in enumerate(held):
        for key, size in parts.items():
            holders.setdefault(key, []).append(rank)
            sizes[key] = size
    load = [0] * len(held)
    writer = {}
    for key in sorted(sizes, key=lambda key: (-sizes[key], key)):
        chosen = min(holders[key], key=lambda rank: (load[rank], rank))
        writer[key] = chosen
        load[chosen] += sizes[key]
    return writer


def own_buffers(compiled: ParallelModel) -> list[tuple[str, torch.Tensor]]:
    """This rank's buffers under the names of the whole model.

    What owns no parameter runs on every stage, so a name may come once for each.
    """
    return [
        (name, buffer)
        for stage in compiled.stages
        for name, buffer in stage.model.named_buffers()
        if name in compiled.whole.shapes
    ]


class ChangedBuffers:
    """Tells non-persistent buffers that are still as the model's constructor made them.

    Those are made again when the model is built; masks and rotary tables can be large.
    """

    def __init__(self, compiled: ParallelModel) -> None:
        self._built = {id(b): (b, b._version) for _, b in own_buffers(compiled)}

    def __contains__(self, buffer: torch.Tensor) -> bool:
        built, version = self._built.get(id(buffer), (None, -1))
        return buffer is not built or buffer._version != version


def boxes_to_write(
    compiled: ParallelModel, holding: Holding, changed: ChangedBuffers, rank: int
) -> Iterator[Box]:
    """This rank's share of the state, as views of the live tensors."""
    persistent, before = set(compiled.whole.names.values()), _before(compiled)
    for name, parameter in compiled.parameters.items():
        shape, parts = compiled.whole.shapes[name], holding.written[name]
        yield from _boxes((MODEL, name), shape, local(parameter.detach()), parts)
        if name in before:
            yield from _boxes((BEFORE, name), shape, before[name], parts)
        yield from _optimizer_boxes(compiled, holding, name, parameter)
    for name, buffer in dict(own_buffers(compiled)).items():
        if name in holding.buffers and (name in persistent or buffer in changed):
            room = MODEL if name in persistent else BUFFERS
            yield whole_box((room, name), buffer.detach())
    for purpose, state in random_state().items():
        yield whole_box((RANDOM, f"rank{rank}", purpose), state)
    if compiled.exchange is not None:
        for name, error in compiled.exchange.state.rank_state().items():
            if error.numel():
                yield whole_box((ERRORS, f"rank{rank}", name), error)


def _before(compiled: ParallelModel) -> dict[str, torch.Tensor]:
    """The weights of one step before by name, where steps overlap."""
    if compiled.overlap is None:
        return {}
    names = [name for name, p in compiled.parameters.items() if p.requires_grad]
    return dict(zip(names, compiled.overlap.versions.before, strict=True))


def _boxes(
    path: tuple[str, ...], shape: Shape, own: torch.Tensor, parts: Sequence[Part]
) -> Iterator[Box]:
    for part in parts:
        yield Box(path=path, shape=shape, offsets=part.offsets, tensor=part.of_local(own))


def whole_box(path: tuple[str, ...], tensor: torch.Tensor) -> Box:
    """A tensor that is not divided."""
    shape = tuple(tensor.shape)
    return Box(path=path, shape=shape, offsets=(0,) * len(shape), tensor=tensor)


def _optimizer_boxes(
    compiled: ParallelModel, holding: Holding, name: str, parameter: nn.Parameter
) -> Iterator[Box]:
    shape, speaks = compiled.whole.shapes[name], name in holding.speaks_for
    for key, value in compiled.optimizer.state.get(parameter, {}).items():
        if isinstance(value, torch.Tensor) and value.ndim and _lies_like(value, parameter):
            yield from _boxes((*OPTIMIZER, name, key), shape, local(value), holding.written[name])
        elif isinstance(value, torch.Tensor):
            if value.ndim and holding.held[name] != (whole_part(shape),):
                raise _cannot_be_cut(compiled.optimizer, name, key, tuple(value.shape), shape)
            if speaks:
                yield whole_box((*OPTIMIZER, name, key), local(value))
        elif isinstance(value, bool | int | float):
            if speaks:
                yield whole_box((*NUMBERS, name, key), torch.tensor(value, dtype=_exact(value)))
        elif value is not None:
            raise ExecutionError(
                f"cannot save {optimizer_name(compiled.optimizer)}: its state {key!r} "
                f"of {name} is a {type(value).__name__}, neither tensor nor number"
            )


def _lies_like(value: torch.Tensor, parameter: nn.Parameter) -> bool:
    return local(value).shape == local(parameter).shape


def _exact(value: float) -> torch.dtype:
    return torch.float64 if isinstance(value, float) else torch.int64


def _cannot_be_cut(
    optimizer: torch.optim.Optimizer, name: str, key: str, given: Shape, shape: Shape
) -> ExecutionError:
    return ExecutionError(
        f"the optimizer {optimizer_name(optimizer)} keeps {key!r} of shape {list(given)} for "
        f"{name} of shape {list(shape)}, which does not divide as the parameter does; use "
        "a plan that leaves parameters whole (dp_replicate, pp), or another optimizer"
    )


def optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """Its class; offloaded ones are what steps on the host."""
    inner = optimizer.inner if isinstance(optimizer, HostOptimizer) else optimizer
    return type(inner).__name__


Stored = Mapping[str, tuple[Shape, torch.dtype]]
"""Shape and dtype of what a checkpoint holds, by key."""

Finish = Callable[[], None]
"""What is left to do once the boxes are filled."""


def boxes_to_read(
    compiled: ParallelModel, held: Held, stored: Stored
) -> tuple[list[Box], list[Finish]]:
    """Boxes in the live tensors of this rank, optimizer state made for what is stored."""
    boxes, finish = model_boxes(compiled, held, stored), list[Finish]()
    state = _by_parameter(stored, OPTIMIZER)
    numbers = _by_parameter(stored, NUMBERS)
    for name, parameter in compiled.parameters.items():
        if not parameter.requires_grad:
            continue
        own = compiled.optimizer.state[parameter]
        own.clear()
        for key in state.get(name, ()):
            found, value = _state_boxes(compiled, held[name], name, key, stored)
            boxes += found
            own[key] = value
        for key in numbers.get(name, ()):
            _, dtype = stored[".".join((*NUMBERS, name, key))]
            box = whole_box((*NUMBERS, name, key), torch.zeros((), dtype=dtype))
            boxes.append(box)
            finish.append(_number_into(own, key, box.tensor))
    if compiled.overlap is not None:
        before = _before(compiled)
        has_before = all(f"{BEFORE}.{name}" in stored for name in before)
        for name, weights in before.items() if has_before else ():
            boxes += _boxes((BEFORE, name), compiled.whole.shapes[name], weights, held[name])
        versions = compiled.overlap.versions
        finish.append(partial(versions.take_newest, before_too=not has_before))
    return boxes, finish


def model_boxes(compiled: ParallelModel, held: Held, stored: Stored) -> list[Box]:
    """Boxes in parameters and buffers; non-persistent buffers only if they are stored so."""
    boxes: list[Box] = []
    for name, parameter in compiled.parameters.items():
        shape, own = compiled.whole.shapes[name], local(parameter.detach())
        boxes += _boxes((MODEL, name), shape, own, held[name])
    for name, buffer in own_buffers(compiled):
        for room in (MODEL, BUFFERS):
            found = stored.get(f"{room}.{name}")
            if found is not None and found[0] == tuple(buffer.shape):
                boxes.append(whole_box((room, name), buffer.detach()))
    return boxes


def _state_boxes(
    compiled: ParallelModel, parts: Sequence[Part], name: str, key: str, stored: Stored
) -> tuple[list[Box], torch.Tensor]:
    """Room for one entry of an optimizer's state, and the boxes that fill it."""
    parameter, whole = compiled.parameters[name], compiled.whole.shapes[name]
    path = (*OPTIMIZER, name, key)
    shape, dtype = stored[".".join(path)]
    if shape and shape == whole:
        if isinstance(compiled.optimizer, HostOptimizer):
            value = torch.zeros_like(local(parameter.detach()), dtype=dtype, device="cpu")
        else:
            value = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        return list(_boxes(path, shape, local(value), parts)), value
    if shape and tuple(parts) != (whole_part(whole),):
        raise _cannot_be_cut(compiled.optimizer, name, key, shape, whole)
    value = torch.zeros(shape, dtype=dtype, device=_device_of(compiled, parameter, key))
    return [whole_box(path, value)], value


def _device_of(compiled: ParallelModel, parameter: nn.Parameter, key: str) -> torch.device:
    """Torch's optimizers count steps on the CPU unless their kernels read the count."""
    if isinstance(compiled.optimizer, HostOptimizer):
        return torch.device("cpu")
    [group] = [
        group
        for group in compiled.optimizer.param_groups
        if any(one is parameter for one in group["params"])
    ]
    on_device = key != "step" or group.get("capturable") or group.get("fused")
    return parameter.device if on_device else torch.device("cpu")


def _by_parameter(stored: Stored, room: tuple[str, str]) -> dict[str, list[str]]:
    """The optimizer's keys by the parameter they belong to."""
    found: dict[str, list[str]] = {}
    prefix = ".".join(room) + "."
    for full in stored:
        if full.startswith(prefix):
            name, _, key = full.removeprefix(prefix).rpartition(".")
            found.setdefault(name, []).append(key)
    return found


def _number_into(own: dict[str, object], key: str, tensor: torch.Tensor) -> Finish:
    def finish() -> None:
        own[key] = tensor.item()

    return finish
