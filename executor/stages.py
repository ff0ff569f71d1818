"""A pipeline stage of an untouched module: foreign parts become stubs, the forward leaves early.

A `Stage` of blocks [start, end) is the user's own model, changed at foreign places only:

- blocks before `start`, and other modules that own parameters and are called before or after the
  stage's part, return zeros of their shape, made once, that take no memory;
- the result of block start - 1 is replaced by what was received from the stage before;
- block `end` raises, and the stage answers with what must be sent on;
- what owns no parameter (masks, rotary tables) runs again on every stage.

The absent modules are dropped and their memory with them. Nothing that stays is wrapped, so
parameters keep their names. Every stage is called with the model's own inputs as keywords.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn as nn

from claw_plan.executor.recording import Recording
from claw_plan.executor.torch_private import tree_leaves, tree_map, tree_map_only
from claw_plan.planner.head_shard import opened

LossOf = Callable[[nn.Module, dict[str, torch.Tensor]], torch.Tensor]
"""Calls the model on a batch and answers with the loss."""


Takes = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""What a stage makes of a tensor that it receives, given the same one of the recorded model."""


class _StageDone(BaseException):
    """Leaves the model's forward. Not an Exception: a model's own handler must not catch it."""


class StandIn(nn.Module):
    """In a module's place. Its settings can still be read: `self.conv.stride`, `block.kind`."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self._original = (_shell(original),)  # in a tuple, so that it is no child

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_original" not in vars(self):
                raise
            return getattr(self._original[0], name)


class _Absent(StandIn):
    """Stands for a module that runs on an earlier or later stage."""

    def __init__(self, original: nn.Module, recorded: Any, *, is_changed: bool) -> None:
        super().__init__(original)
        self._recorded = recorded
        self._is_changed = is_changed
        self._made: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._made is None:
            # One element seen at every index costs nothing; but what the model changes in place
            # (dropout after an embedding) must be there in full, and anew each time.
            make = partial(_zeros if self._is_changed else _zero_view, _device_of((args, kwargs)))
            made = tree_map_only(torch.Tensor, make, self._recorded)
            if self._is_changed:
                return made
            self._made = made
        return _in_own_containers(self._made)

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        self._made = None  # it lies where the module lay before
        moved: nn.Module = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return moved


class _Leave(StandIn):
    """Stands where the next stage begins."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise _StageDone


class Stage(nn.Module):
    """Blocks [start, end) of `model`, which it changes; with both ends, the whole model.

    Answers with the loss (last stage) or with the tensors to send.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_of: LossOf,
        recording: Recording | None = None,
        span: tuple[int, int] = (0, 0),
    ) -> None:
        super().__init__()
        self.model = model
        self._loss_of = loss_of
        self._recording = recording
        self._entry: tuple[str, ...] = ()
        self._exit: tuple[str, ...] = ()
        self._received: dict[str, Any] = {}
        self._values: dict[str, Any] = {}
        self.takes: Takes = lambda received, recorded: received
        if recording is not None:
            self._cut(recording, *span)

    def _cut(self, recording: Recording, start: int, end: int) -> None:
        blocks = recording.blocks
        self._entry = recording.crossing(start) if start > 0 else ()
        self._exit = recording.crossing(end) if end < len(blocks) else ()
        for name, gaps in recording.gaps.items():
            if not any(start <= gap < end or gap == end == len(blocks) for gap in gaps):
                self._drop(name, recording)
        for name in recording.unused if start > 0 else ():  # kept on the first stage alone
            self._drop(name, recording)
        for index, name in enumerate(blocks):
            if index < start:
                self._drop(name, recording)
            elif index >= end:
                self.model.set_submodule(name, _Leave(self.model.get_submodule(name)))
        for name in {*self._entry, *self._exit}:
            module = self.model.get_submodule(name)
            changed = name in recording.changed
            module.register_forward_hook(partial(self._pass_on, name, is_changed=changed))

    def _drop(self, name: str, recording: Recording) -> None:
        absent = _Absent(
            self.model.get_submodule(name),
            recording.outputs.get(name),
            is_changed=name in recording.changed,
        )
        self.model.set_submodule(name, absent)

    def _pass_on(
        self, name: str, module: nn.Module, args: Any, output: Any, *, is_changed: bool
    ) -> Any:
        passed = self._received.get(name, output)
        self._values[name] = tree_map_only(torch.Tensor, opened, passed)
        # What the model changes in place must be sent on as it was, and may not be a leaf.
        return tree_map_only(torch.Tensor, torch.clone, passed) if is_changed else passed

    def _take(self, received: Any, recorded: Any) -> Any:
        return self.takes(received, recorded) if isinstance(received, torch.Tensor) else received

    def forward(self, *received: torch.Tensor, **batch: torch.Tensor) -> Any:
        """Takes what the stage before sent, and the model's own inputs by name."""
        if self._recording is not None:
            taken = self._recording.unpack(self._entry, received)
            for name, value in taken.items():
                recorded = self._recording.outputs[name]
                self._received[name] = tree_map(self._take, value, recorded)
        try:
            return self._loss_of(self.model, batch)
        except _StageDone:
            assert self._recording is not None
            return self._recording.pack(self._exit, self._values)
        finally:
            self._values.clear()
            self._received.clear()


def _shell(module: nn.Module) -> nn.Module:
    """The module with its plain attributes, and its tensors on the meta device.

    A copy, since the same module may stand under another name of this stage.
    """
    shell: nn.Module = object.__new__(type(module))
    kept = {
        name: value
        for name, value in vars(module).items()
        if not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value))
    }
    vars(shell).update(kept)
    vars(shell).update(
        _parameters=tree_map_only(nn.Parameter, _parameter_on_meta, module._parameters),
        _buffers=tree_map_only(torch.Tensor, lambda t: t.to("meta"), module._buffers),
        _modules={key: child and _shell(child) for key, child in module._modules.items()},
    )
    return shell


def _parameter_on_meta(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)


def _device_of(tree: Any) -> torch.device:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            return leaf.device
    return torch.device("cpu")


def _in_own_containers(tree: Any) -> Any:
    """The same leaves; the model may go on to change containers it was given."""
    return tree if isinstance(tree, torch.Tensor) else tree_map(lambda leaf: leaf, tree)


def _zeros(device: torch.device, recorded: torch.Tensor) -> torch.Tensor:
    return torch.zeros(recorded.shape, dtype=recorded.dtype, device=device)


def _zero_view(device: torch.device, recorded: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), dtype=recorded.dtype, device=device).expand(recorded.shape)
