"""`Recorder`: watches one forward and backward and writes down every operator in order.

It sits below autograd, on fake or real tensors. Forward operators belong to the module that runs;
backward ones carry no module and belong to the module whose forward made their autograd node,
found by the node's sequence number. Storages are followed by weak references: what autograd saves,
and how much is alive when. `trace` turns recordings at several batch sizes into `UnitCost`s.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
import torch.nn as nn
import torch.nn.modules.module as module_hooks

from claw_plan.planner.autograd_graph import watch_leaf_gradients, watch_leaves, ways_around
from claw_plan.planner.head_shard import opened
from claw_plan.planner.op_work import Work, num_bytes, works_of
from claw_plan.planner.torch_private import (
    TorchDispatchMode,
    current_node,
    last_sequence_number,
    sequence_number,
    storage_key,
    tree_leaves,
)

FORWARD, BACKWARD = "forward", "backward"


class RecordedOp(NamedTuple):
    """One kernel as it ran at one batch size."""

    unit: int
    phase: str
    module: str
    target: str
    work: Work


class RecordedExchange(NamedTuple):
    """One collective of the axis ('tp', 'cp', 'ep') as it ran; `bytes` of the full buffer."""

    unit: int
    phase: str
    module: str
    op: str
    bytes: int
    axis: str = "tp"


class _Birth(NamedTuple):
    """A storage that came to life (bytes > 0) or died (bytes < 0)."""

    unit: int
    phase: str
    storage: int
    bytes: int


@dataclass(kw_only=True)
class Recording:
    """One step of one model at one batch size, as raw numbers.

    `saved[storage]` is (unit, bytes) of what autograd kept. `boundaries[i]` is the storage that
    leaves unit i, with `boundary_bytes[i]`. `used` are the units that read each parameter,
    `modules[i]` the outermost modules unit i runs. `ways_around[i]` is a module whose output
    reaches unit i or a later one by another way than through the boundary before unit i.
    `arrived` names parameters in the order in which their gradients were complete.
    `last_save[i]` is the number of ops, of all units, before the last that unit i kept something
    for (operators keep their inputs before they run, their outputs after).
    """

    ops: list[RecordedOp | RecordedExchange] = field(default_factory=list)
    lives: list[_Birth] = field(default_factory=list)
    saved: dict[int, tuple[int, int]] = field(default_factory=dict)
    boundaries: dict[int, int] = field(default_factory=dict)
    boundary_bytes: dict[int, int] = field(default_factory=dict)
    param_grads: set[int] = field(default_factory=set)
    used: dict[str, set[int]] = field(default_factory=dict)
    modules: dict[int, list[str]] = field(default_factory=dict)
    ways_around: dict[int, str] = field(default_factory=dict)
    arrived: list[str] = field(default_factory=list)
    last_save: dict[int, int] = field(default_factory=dict)

    def num_recomputed(self, unit: int) -> int:
        """How many ops of the unit's forward torch's checkpoint runs again before it stops."""
        before = self.ops[: self.last_save.get(unit, 0)]
        return sum(op.unit == unit and op.phase == FORWARD for op in before)

    def saved_bytes(self, unit: int) -> int:
        """What autograd keeps of a unit beyond the hidden state that enters it.

        A hidden state counts for the unit it enters. Where autograd does not keep it (a norm that
        first casts it to float32 keeps the cast) it is taken off, so that input and saved bytes
        together are what stays alive.
        """
        passed_on = set(self.boundaries.values())
        kept = sum(
            size
            for storage, (owner, size) in self.saved.items()
            if owner == unit and storage not in passed_on
        )
        enters = self.boundaries.get(unit - 1)
        if enters is None or enters < 0 or enters in self.saved:
            return kept
        return max(0, kept - self.boundary_bytes[unit - 1])

    def timelines(self) -> dict[tuple[int, str], list[int]]:
        """Bytes alive beside saved tensors and parameter gradients, after every change.

        Forward: what the unit itself has made. Backward: gradients in flight (the one that enters
        the unit among them), less what the unit has saved and already freed.
        """
        passed_on = set(self.boundaries.values())
        result: dict[tuple[int, str], list[int]] = {}
        forward: dict[int, int] = {}
        makers: dict[int, int] = {}
        freed: dict[int, int] = {}
        gradients = 0
        born: set[int] = set()
        for unit, phase, storage, size in self.lives:
            if storage in self.param_grads:
                continue
            values = result.setdefault((unit, phase), [])
            owner, _ = (None, 0) if storage in passed_on else self.saved.get(storage, (None, 0))
            if phase == FORWARD:
                if owner is None and makers.setdefault(storage, unit) == unit:
                    forward[unit] = forward.get(unit, 0) + size
                values.append(forward.get(unit, 0))
                continue
            if size > 0:
                born.add(storage)
            if storage in born:
                gradients += size
            elif owner is not None:
                freed[owner] = freed.get(owner, 0) + size
            values.append(gradients + freed.get(unit, 0))
        return result


class Recorder(TorchDispatchMode):
    """Records what runs while it is entered; `recording` holds the result.

    Args:
        names: the fully qualified name of every module, by its id.
        blocks: the modules of the chain in order; unit i+1 is blocks[i].
        parameters: every parameter and buffer by name, whose memory is not "saved" by autograd.
        batch: the model's inputs, which are not either.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Without torch's guard against torch.compile: planning compiles nothing."""
        return False

    def __init__(
        self,
        names: dict[int, str],
        blocks: Sequence[nn.Module],
        parameters: dict[str, torch.Tensor],
        batch: dict[str, torch.Tensor],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = Recording()
        self.phase = FORWARD
        self._names = names
        self._blocks = list(blocks)
        self._parameters = {storage_key(t): name for name, t in parameters.items()}
        self._leaves = list(parameters.values())
        self._leaf_names = {id(tensor): name for name, tensor in parameters.items()}
        self._own = set(self._parameters) | {storage_key(t) for t in batch.values()}
        self._stack: list[str] = []
        self._unit = 0
        self._owners: dict[int, tuple[int, str]] = {}
        self._backward_owner = (len(self._blocks) + 1, "")
        self._alive: dict[int, int] = {}
        self._watches: dict[int, weakref.ref[Any]] = {}
        self._makers: dict[int, int] = {}
        self._nodes: dict[int, Any] = {}
        self._numbers: dict[int, int] = {}
        self._block_names = {names[id(block)] for block in blocks}
        self._spine = _ancestors(self._block_names)
        self._exit = ExitStack()

    def __enter__(self) -> Self:
        pre = module_hooks.register_module_forward_pre_hook(self._enter_module)
        post = module_hooks.register_module_forward_hook(self._leave_module, always_call=True)
        self._exit.callback(pre.remove)
        self._exit.callback(post.remove)
        for index, block in enumerate(self._blocks):
            before = block.register_forward_pre_hook(self._before_block(index), with_kwargs=True)
            after = block.register_forward_hook(self._after_block(index))
            self._exit.callback(before.remove)
            self._exit.callback(after.remove)
        hooks = torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor)
        self._exit.enter_context(hooks)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._exit.close()
        self._watches.clear()  # a dead reference calls back no more
        self._nodes.clear()

    def backward(self, loss: torch.Tensor) -> None:
        """Runs and records the backward pass."""
        around = ways_around(loss.grad_fn, self._numbers, self._nodes)
        for unit, number in around.items():
            _, module = self._owners.get(number, (0, ""))
            self.recording.ways_around[unit] = module
        arrived: dict[int, list[int]] = {}
        watch_leaf_gradients(
            loss.grad_fn,
            lambda leaf, gradient: arrived.setdefault(leaf, []).append(self._storage(gradient)),
        )
        watch_leaves(loss.grad_fn, self._note_arrival)
        self.phase = BACKWARD
        loss.backward()
        # A tied weight's first gradient waits for the others, which are added to it and freed.
        waiting = {numbers[0] for numbers in arrived.values() if len(numbers) > 1}
        kept = {storage_key(p.grad) for p in self._leaves if p.grad is not None}
        self.recording.param_grads = waiting | {
            self._alive[key] for key in kept if key in self._alive
        }

    def _note_arrival(self, leaf: int) -> None:
        name = self._leaf_names.get(leaf)
        if name is not None:
            self.recording.arrived.append(name)

    def exchange(self, op: str, num: int, module: str, axis: str = "tp") -> None:
        """Records a collective of `num` bytes over the axis where it happens."""
        unit, _ = self._place()
        self.recording.ops.append(RecordedExchange(unit, self.phase, module, op, num, axis))

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        name = self._names.get(id(module), "")
        outer = next((entered for entered in self._stack if entered not in self._spine), None)
        is_new = outer is None and name not in self._spine and name not in self._block_names
        if is_new and self.phase == FORWARD:
            self.recording.modules.setdefault(self._unit, []).append(name)
        self._stack.append(name)

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()

    def _before_block(self, index: int) -> Any:
        def hook(block: nn.Module, args: Any, kwargs: Any) -> None:
            if index == 0 and self.phase == FORWARD:
                self._pass_on(0, (args, kwargs))
                self._unit = 1

        return hook

    def _after_block(self, index: int) -> Any:
        def hook(block: nn.Module, args: Any, output: Any) -> None:
            if self.phase == FORWARD:
                self._pass_on(index + 1, output)
                self._unit = index + 2

        return hook

    def _pass_on(self, unit: int, tree: Any) -> None:
        """The hidden state that leaves a unit: the first differentiable tensor, or the first."""
        tensors = [opened(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
        if not tensors:
            return
        hidden = next((tensor for tensor in tensors if tensor.requires_grad), tensors[0])
        self.recording.boundaries[unit] = self._storage(hidden)
        self.recording.boundary_bytes[unit] = num_bytes(hidden)
        self._nodes[unit] = hidden.grad_fn
        self._numbers[unit] = last_sequence_number()

    def _place(self) -> tuple[int, str]:
        """Unit and module that the operator running now belongs to."""
        if self.phase == FORWARD or self._stack:
            # A module that runs in backward is recomputed under activation checkpointing.
            unit = self._unit if self.phase == FORWARD else self._backward_owner[0]
            return unit, self._stack[-1] if self._stack else ""
        node = current_node()
        if node is not None:
            # Leaves' accumulators have no number of their own: they follow who ran before them.
            found = self._owners.get(sequence_number(node))
            self._backward_owner = found or self._backward_owner
        return self._backward_owner

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            # Two of three calls under fake tensors ask for a device, which is answered here.
            is_device = func is torch.ops.prim.device.default and hasattr(args[0], "fake_device")
            return args[0].fake_device if is_device else func(*args, **kwargs)
        out = func(*args, **kwargs)
        place = self._place()
        if self.phase == FORWARD or self._stack:
            # The node is made just before the kernel is called. The first operator under a number
            # owns it: later ones under the same number have no node of their own.
            self._owners.setdefault(last_sequence_number(), place)
        unit, module = place
        target = f"{func.namespace}.{func.overloadpacket.__name__}"
        for work in works_of(func, args, kwargs, out):
            self.recording.ops.append(RecordedOp(unit, self.phase, module, target, work))
        if self.phase == FORWARD:
            self._note_use(unit, args, kwargs)
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._storage(leaf)
        return out

    def _note_use(self, unit: int, args: Any, kwargs: Any) -> None:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                name = self._parameters.get(storage_key(leaf))
                if name is not None:
                    self.recording.used.setdefault(name, set()).add(unit)

    def _storage(self, tensor: torch.Tensor) -> int:
        """The number of the tensor's storage, watched from its first appearance to its death."""
        key = storage_key(tensor)
        if key in self._own:
            return -1
        known = self._alive.get(key)
        if known is not None:
            return known
        storage = tensor.untyped_storage()
        number = len(self._makers)
        size = storage.nbytes()
        unit, _ = self._place()
        self._makers[number] = unit
        self._alive[key] = number
        self.recording.lives.append(_Birth(unit, self.phase, number, size))

        def died(reference: Any) -> None:
            self._alive.pop(key, None)
            place, _ = self._place()
            self.recording.lives.append(_Birth(place, self.phase, number, -size))

        self._watches[number] = weakref.ref(storage, died)
        return number

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.phase == FORWARD:
            self.recording.last_save[self._unit] = len(self.recording.ops)
        number = self._storage(tensor)
        if number >= 0 and number not in self.recording.saved:
            size = tensor.untyped_storage().nbytes()
            self.recording.saved[number] = (self._makers[number], size)
        return tensor


def _ancestors(names: Iterable[str]) -> set[str]:
    """Every module that contains one of them, the root among them."""
    found = {""}
    for name in names:
        parts = name.split(".")
        found.update(".".join(parts[:length]) for length in range(1, len(parts)))
    return found
