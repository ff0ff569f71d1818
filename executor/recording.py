"""One forward of the whole model, kept as what a pipeline cut needs to know; `stages` then cuts.

The model is called once on a microbatch of fake tensors (nothing is computed; on real ones where
the model looks at values), and hooks note for each module what it returned, how many blocks had
run when it was called (its *gaps*), and which differentiable results a block reads although its
neighbour did not make them (an encoder's output: it must be *carried* along). The autograd graph
of the loss then says which cuts are impossible, because something goes around them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn as nn

from claw_plan.executor.torch_private import fake_mode, tree_leaves, tree_map, tree_map_only
from claw_plan.planner.errors import PlanError

Run = Callable[[nn.Module], torch.Tensor]
"""Calls the module on its inputs and answers with the loss."""


@dataclass(kw_only=True)
class Recording:
    """What one forward told.

    `outputs` maps a module to its result, tensors on the meta device; one that must cross a cut
    behind it has `requires_grad`. `gaps` holds the modules outside the blocks that own
    parameters. `carried` maps a module to (its gap, the last block that reads its result).
    `around` maps a cut (the block after it) to a module whose result also goes around it.
    """

    blocks: tuple[str, ...]
    outputs: dict[str, Any] = field(default_factory=dict)
    gaps: dict[str, set[int]] = field(default_factory=dict)
    carried: dict[str, tuple[int, int]] = field(default_factory=dict)
    around: dict[int, str] = field(default_factory=dict)

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
        return tuple(dict.fromkeys([self.blocks[cut - 1], *carried]))

    def pack(self, names: Sequence[str], values: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        """The tensors to send: the differentiable ones of the named results, contiguous."""
        return tuple(
            value.contiguous()
            for name in names
            for value, recorded in zip(
                tree_leaves(values[name]),
                tree_leaves(self.outputs[name]),
                strict=True,
            )
            if _crosses(recorded)
        )

    def unpack(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
        """The named results again; what was not sent is None, the next block makes its own."""
        stream = iter(tensors)

        def place(recorded: object) -> torch.Tensor | None:
            return next(stream) if _crosses(recorded) else None

        return {name: tree_map(place, self.outputs[name]) for name in names}


def record(model: nn.Module, blocks: Sequence[str], run: Run) -> Recording:
    """Runs `model` once, on fake tensors if it bears them. The model is unchanged afterwards."""
    with _unchanged_buffers(model), torch.random.fork_rng(devices=[]):
        try:
            with fake_mode():
                return _Recorder(model, blocks).record(run)
        except PlanError:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError):
            # What models raise that look at values, which fake tensors do not have.
            return _Recorder(model, blocks).record(run)


@contextmanager
def _unchanged_buffers(model: nn.Module) -> Iterator[None]:
    """Batch norms count their calls, on fake tensors too."""
    before = [buffer.clone() for buffer in model.buffers()]
    yield
    with torch.no_grad():
        for buffer, value in zip(model.buffers(), before, strict=True):
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
            for name in self._around(cut, loss)[-1:]:
                self.recording.around[cut] = name
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
        previous = _tensors(self.recording.outputs[self.recording.blocks[reader - 1]])
        wanted = {id(tensor) for tensor in read}
        # Of a block that returns several tensors, the first is the hidden state; the others are
        # sent only if the next block reads them.
        for recorded, key in list(zip(previous, self._finished[-1], strict=True))[1:]:
            recorded.requires_grad_(recorded.requires_grad and key in wanted)
        for tensor in read:
            if tensor.requires_grad and id(tensor) not in self._finished[-1]:
                if id(tensor) in self._made:
                    maker, gap, _ = self._made[id(tensor)]
                    self.recording.carried[maker] = (gap, reader)

    def _after(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        gap = len(self._finished)
        tensors = _tensors(output)
        for tensor in tensors:
            self._made.setdefault(id(tensor), (name, gap, tensor))
        self._nodes.append((name, gap, [tensor.grad_fn for tensor in tensors]))
        self.recording.outputs[name] = tree_map_only(torch.Tensor, _shape_of, output)
        if name in self._names:
            self._finished.append([id(tensor) for tensor in tensors])
        elif next(module.parameters(recurse=False), None) is not None and not any(
            _nested(name, block) for block in self.recording.blocks
        ):
            self.recording.gaps.setdefault(name, set()).add(gap)

    def _around(self, cut: int, loss: torch.Tensor) -> list[str]:
        """Modules before the cut that the loss's graph reaches without passing what is sent."""
        sent = self.recording.crossing(cut)
        crossing = {
            node
            for name, _, nodes in self._nodes
            if name in sent
            for node, recorded in zip(nodes, _tensors(self.recording.outputs[name]), strict=True)
            if recorded.requires_grad
        }
        seen, stack = set(crossing), [loss.grad_fn]
        while stack:
            node = stack.pop()
            if node is not None and node not in seen:
                seen.add(node)
                stack += [parent for parent, _ in node.next_functions]
        reached = seen - crossing
        return [n for n, gap, nodes in self._nodes if gap < cut and reached.intersection(nodes)]


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _crosses(recorded: object) -> bool:
    return isinstance(recorded, torch.Tensor) and recorded.requires_grad


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return meta.requires_grad_(tensor.requires_grad)


def _nested(name: str, block: str) -> bool:
    return not name or name.startswith(block + ".") or block.startswith(name + ".")
