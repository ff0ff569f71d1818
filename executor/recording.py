"""One forward of the whole model, kept as what a pipeline cut needs to know; `stages` then cuts.

The model is called once on a microbatch of fake tensors (nothing is computed; on real ones where
the model looks at values), and hooks note for each module what it returned, how many blocks had
run when it was called (its *gaps*), and which differentiable results a block reads although its
neighbour did not make them (an encoder's output: it must be *carried* along). The autograd graph
of the loss then says what goes around a cut, as a skip connection does: it is *relayed*, sent
along with the hidden state from stage to stage, or where that cannot be the cut is impossible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn as nn

from claw_plan.executor.torch_private import (
    fake_mode,
    know_dataclasses,
    tree_leaves,
    tree_map_only,
)
from claw_plan.planner.errors import PlanError

Run = Callable[[nn.Module], torch.Tensor]
"""Calls the module on its inputs and answers with the loss."""


@dataclass(kw_only=True)
class Recording:
    """What one forward told.

    `outputs` maps a module to its result, tensors on the meta device, and `crosses` to whether
    each of these tensors must cross a cut behind it. `gaps` holds the modules outside the blocks
    that own parameters. `carried` maps a module to (its gap, the last block that reads it).
    `relayed` maps a cut (the block after it) to modules whose results cross it beside the hidden
    state, `around` to one whose result goes around it and cannot be sent. `unused` are modules
    outside the blocks that are never called and whose parameters the loss does not reach. The
    results of `changed` are changed in place after they were returned.
    """

    blocks: tuple[str, ...]
    outputs: dict[str, Any] = field(default_factory=dict)
    crosses: dict[str, list[bool]] = field(default_factory=dict)
    gaps: dict[str, set[int]] = field(default_factory=dict)
    carried: dict[str, tuple[int, int]] = field(default_factory=dict)
    relayed: dict[int, list[str]] = field(default_factory=dict)
    around: dict[int, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    changed: frozenset[str] = frozenset()

    def crossing(self, cut: int) -> tuple[str, ...]:
        """The modules whose results are sent over a cut before block `cut`.

        Raises PlanError where the model cannot be cut.
        """
        if cut in self.around:
            raise PlanError(
                f"no pipeline cut may lie before {self.blocks[cut]}: the result of "
                f"{self.around[cut]} also reaches the loss on a way around it; cut elsewhere, or "
                f"plan with --fix pp=1"
            )
        carried = [name for name, (gap, last) in self.carried.items() if gap < cut <= last]
        return tuple(dict.fromkeys([self.blocks[cut - 1], *carried, *self.relayed.get(cut, [])]))

    def pack(self, names: Sequence[str], values: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        """The tensors to send of the named results, contiguous."""
        return tuple(
            tensor.contiguous()
            for name in names
            for tensor, crosses in zip(_tensors(values[name]), self.crosses[name], strict=True)
            if crosses
        )

    def unpack(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
        """The named results again; a tensor that was not sent, for nobody reads it, is None."""
        stream = iter(tensors)
        flags = iter([flag for name in names for flag in self.crosses[name]])

        def place(recorded: torch.Tensor) -> torch.Tensor | None:
            return next(stream) if next(flags) else None

        return {
            name: place(result)
            if isinstance(result := self.outputs[name], torch.Tensor)
            else tree_map_only(torch.Tensor, place, result)
            for name in names
        }


def record(model: nn.Module, blocks: Sequence[str], run: Run) -> Recording:
    """Runs `model` once, on fake tensors if it bears them. The model is unchanged afterwards."""
    with torch.random.fork_rng(devices=[]):
        try:
            with unchanged(model), fake_mode():
                return _Recorder(model, blocks).record(run)
        except PlanError:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError):
            # What models raise that look at values, which fake tensors do not have.
            with unchanged(model):
                return _Recorder(model, blocks).record(run)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """What a forward leaves on its modules is taken off again.

    Batch norms count their calls, on fake tensors too; CLIP keeps the mask that it was asked for,
    and a fake one would meet real tensors in training.
    """
    values = [(buffer, buffer.clone()) for buffer in model.buffers()]
    held = [
        (names, dict(names))
        for module in model.modules()
        for names in (vars(module), module._buffers)
    ]
    try:
        yield
    finally:
        for names, before in held:
            names.clear()
            names.update(before)
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)


class _Recorder:
    """The hooks of one forward and what they have seen so far."""

    def __init__(self, model: nn.Module, blocks: Sequence[str]) -> None:
        self.model = model
        self.recording = Recording(blocks=tuple(blocks))
        self._names = frozenset(blocks)
        self._finished: list[list[int]] = []
        """For each block that has run: the ids of the tensors it returned."""
        self._made: dict[int, tuple[str, int, torch.Tensor]] = {}
        """Tensor id to its maker, the maker's gap, and the tensor (held: ids are used again)."""
        self._nodes: list[tuple[str, int, list[Any]]] = []
        """A call's module, its gap, and the autograd nodes of what it returned."""
        self._returned: list[tuple[str, torch.Tensor, int]] = []
        """A call's module, a tensor that it returned, and how often that had been changed."""
        self._owners = {
            name
            for name, module in model.named_modules()
            if next(module.parameters(recurse=False), None) is not None
        }

    def record(self, run: Run) -> Recording:
        with self._hooks():
            loss = run(self.model)
        missing = len(self.recording.blocks) - len(self._finished)
        if missing:
            raise PlanError(
                f"the plan names {len(self.recording.blocks)} blocks, but one forward of the "
                f"model ran {len(self._finished)} calls of them; plan again for this model"
            )
        for cut in range(1, len(self.recording.blocks)):
            self._relay(cut, loss)
        self.recording.unused = self._unused(loss)
        self.recording.changed = frozenset(
            name for name, tensor, version in self._returned if tensor._version > version
        )
        return self.recording

    @contextmanager
    def _hooks(self) -> Iterator[None]:
        hooks = [
            module.register_forward_hook(partial(self._after, name))
            for name, module in self.model.named_modules()
        ]
        hooks += [
            self.model.get_submodule(name).register_forward_pre_hook(
                partial(self._before_block, name), with_kwargs=True
            )
            for name in self.recording.blocks
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _before_block(
        self, name: str, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        reader = len(self._finished)
        if reader < len(self.recording.blocks) and self.recording.blocks[reader] != name:
            raise PlanError(
                f"the plan's blocks run in the order they are named, but {name} ran where "
                f"{self.recording.blocks[reader]} was expected; plan again for this model"
            )
        if not reader:
            return
        read = _tensors((*args, *kwargs.values()))[1:]
        wanted = {id(tensor) for tensor in read}
        # Of a block that returns several tensors, the first is the hidden state; the others are
        # sent only if the next block reads them.
        flags = self.recording.crosses[self.recording.blocks[reader - 1]]
        flags[1:] = [key in wanted for key in self._finished[-1]][1:]
        for tensor in read:
            if tensor.requires_grad and id(tensor) not in self._finished[-1]:
                if id(tensor) in self._made:
                    maker, gap, _ = self._made[id(tensor)]
                    if self._can_be_sent(maker):
                        self.recording.carried[maker] = (gap, reader)

    def _after(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        gap = len(self._finished)
        know_dataclasses(output)
        tensors = _tensors(output)
        for tensor in tensors:
            maker = self._made.get(id(tensor))
            if maker is None or not self._can_be_sent(maker[0]):  # what is around it may be
                self._made[id(tensor)] = (name, gap, tensor)
        self._nodes.append((name, gap, [tensor.grad_fn for tensor in tensors]))
        self._returned += [(name, tensor, tensor._version) for tensor in tensors]
        self.recording.outputs[name] = tree_map_only(torch.Tensor, _shape_of, output)
        self.recording.crosses[name] = [tensor.requires_grad for tensor in tensors]
        if name in self._names:
            self._finished.append([id(tensor) for tensor in tensors])
        elif name in self._owners and not self._touches_blocks(name):
            self.recording.gaps.setdefault(name, set()).add(gap)

    def _relay(self, cut: int, loss: torch.Tensor) -> None:
        """Sends along what goes around a cut, module by module, until nothing does.

        What has no parameters and lies outside the blocks runs again on the later stage, from
        what is sent; all else that a way around passes does not, and must itself be sent.
        """
        relayed = self.recording.relayed.setdefault(cut, [])
        while around := self._around(cut, loss):
            last = max(
                (i for i, (name, _) in enumerate(around) if self._is_absent_later(name)),
                default=None,
            )
            if last is None:
                return
            name = next(
                (n for n, _ in around[last:] if n not in relayed and self._can_be_sent(n)), None
            )
            if name is None:
                self.recording.around[cut] = around[last][0]
                return
            relayed.append(name)
            nodes = next(nodes for n, _, nodes in self._nodes if n == name)
            flags = self.recording.crosses[name]
            flags[:] = [flag or node is not None for flag, node in zip(flags, nodes, strict=True)]

    def _is_absent_later(self, name: str) -> bool:
        stands_apart = name in self._owners and not self._touches_blocks(name)
        return stands_apart or self._is_in_block(name)

    def _can_be_sent(self, name: str) -> bool:
        """One result under one name, and no part of a block, which later stages do not have."""
        is_called_once = sum(n == name for n, _, _ in self._nodes) <= 1
        return is_called_once and (name in self._names or not self._is_in_block(name))

    def _is_in_block(self, name: str) -> bool:
        return any(name == b or name.startswith(b + ".") for b in self.recording.blocks)

    def _touches_blocks(self, name: str) -> bool:
        return any(_nested(name, block) for block in self.recording.blocks)

    def _around(self, cut: int, loss: torch.Tensor) -> list[tuple[str, int]]:
        """Calls before the cut that the loss's graph reaches without passing what is sent."""
        sent = self.recording.crossing(cut)
        crossing = {
            node
            for name, _, nodes in self._nodes
            if name in sent
            for node, crosses in zip(nodes, self.recording.crosses[name], strict=True)
            if crosses
        }
        reached = self._reached(loss, crossing) - crossing
        return [
            (name, gap)
            for name, gap, nodes in self._nodes
            if gap < cut and reached.intersection(nodes)
        ]

    def _reached(self, loss: torch.Tensor, ends: set[Any]) -> set[Any]:
        """The nodes from the loss on, `ends` and nothing behind them."""
        seen, stack = set(ends), [loss.grad_fn]
        while stack:
            node = stack.pop()
            if node is not None and node not in seen:
                seen.add(node)
                stack += [parent for parent, _ in node.next_functions]
        return seen

    def _unused(self, loss: torch.Tensor) -> tuple[str, ...]:
        called = {name for name, _, _ in self._nodes}
        leaves = {
            id(node.variable) for node in self._reached(loss, set()) if hasattr(node, "variable")
        }
        return tuple(
            name
            for name in sorted(self._owners - called - {""})
            if not self._touches_blocks(name)
            and not any(
                id(p) in leaves for p in self.model.get_submodule(name).parameters(recurse=False)
            )
        )


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _nested(name: str, block: str) -> bool:
    return not name or name.startswith(block + ".") or block.startswith(name + ".")
