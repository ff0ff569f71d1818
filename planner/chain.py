"""The chain of blocks in a module tree, and which of its blocks are alike.

Blocks are the children of the outermost containers (ModuleList, Sequential, ModuleDict) whose
children are of one class and are each called exactly once, in order: GPT's `h`, Llama's
`model.layers`, T5's `encoder.block` and then `decoder.block`, ResNet's `layer1` to `layer4`.
Where a container lists lists (`for attn, ff in self.layers`), their modules are the blocks. Long
runs of blocks alike are traced by a few of them; `Fold` takes the others out of their
container for that time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch.nn as nn

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
LISTS = (nn.ModuleList, nn.ModuleDict)
"""Containers that are not called."""

FOLDS = (2, 3, None)
"""How many blocks of a structure are traced from the start of a model, beside its last, tried in
this order; None for all. The first may meet other inputs than the rest. The second and the next
one traced must cost alike, to show that those between cost so too: with 2 that one is the last,
and with 3, for models whose last block is unlike, it is the third."""


@dataclass(frozen=True, eq=False)
class Container:
    """A module that holds blocks; `entries` are all its children, in order."""

    name: str
    module: nn.Module
    entries: tuple[tuple[str, nn.Module], ...]

    @cached_property
    def children(self) -> tuple[tuple[str, nn.Module], ...]:
        """All blocks by their names in the container: its entries, or what these list."""
        return tuple(block for key, entry in self.entries for block in blocks_of(key, entry))

    @property
    def block_names(self) -> list[str]:
        """Fully qualified names of all its blocks."""
        return [f"{self.name}.{key}" if self.name else key for key, _ in self.children]


def blocks_of(key: str, entry: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The entry itself, or where it is a list the modules with parameters that it lists."""
    if not isinstance(entry, LISTS):
        yield key, entry
        return
    for own, child in entry.named_children():
        if any(True for _ in child.parameters()):
            yield from blocks_of(f"{key}.{own}", child)


def containers(model: nn.Module) -> list[Container]:
    """The outermost containers whose children could be blocks, in the order of the tree."""
    return list(_search("", model))


def _search(name: str, module: nn.Module) -> Iterator[Container]:
    children = tuple(module.named_children())
    if isinstance(module, CONTAINERS) and _could_be_blocks([child for _, child in children]):
        yield Container(name, module, children)
        return
    for key, child in children:
        yield from _search(f"{name}.{key}" if name else key, child)


def _could_be_blocks(children: Sequence[nn.Module]) -> bool:
    one_class = len({type(child) for child in children}) == 1
    if not one_class or len(children) < 2:
        return False
    if isinstance(children[0], LISTS):
        return all(any(blocks_of("", child)) for child in children)
    # Lists of embedding tables stand side by side.
    return not isinstance(children[0], nn.Embedding | nn.EmbeddingBag)


def chain_of(found: Sequence[Container], calls: Sequence[int]) -> list[Container]:
    """Those of the containers whose blocks form one chain in the order of `calls`.

    `calls` are the ids of all modules in the order in which a forward entered them. Of two
    containers whose blocks take turns only the larger can be the chain.
    """
    spans: list[tuple[int, int, Container]] = []
    for container in found:
        entries = container.module.named_children()
        present = [id(block) for key, entry in entries for _, block in blocks_of(key, entry)]
        at = [index for index, call in enumerate(calls) if call in set(present)]
        if [calls[index] for index in at] == present:
            spans.append((at[0], at[-1], container))
    chosen: list[tuple[int, int, Container]] = []
    for first, last, container in sorted(spans, key=lambda span: -_numel(span[2])):
        if all(last < other[0] or first > other[1] for other in chosen):
            chosen.append((first, last, container))
    return [container for _, _, container in sorted(chosen, key=lambda span: span[0])]


def _numel(container: Container) -> int:
    return sum(p.numel() for _, child in container.children for p in child.parameters())


def structures(container: Container) -> list[Any]:
    """For each entry a value that is equal for entries alike.

    That is: the same tree of classes, shapes and plain attributes. Integers that count up from
    block to block are its index and are left out.
    """
    described = [_attributes(entry) for _, entry in container.entries]
    counters = {
        key
        for key, value in described[0].items()
        if type(value) is int
        and all(other.get(key) == value + step for step, other in enumerate(described))
    }
    return [
        tuple((key, value) for key, value in block.items() if key not in counters)
        for block in described
    ]


def _attributes(block: nn.Module) -> dict[tuple[str, str], Any]:
    found: dict[tuple[str, str], Any] = {}
    for name, module in block.named_modules():
        found[name, "class"] = type(module)
        for key, value in vars(module).items():
            if isinstance(value, bool | str | int):
                found[name, key] = value
            elif isinstance(value, float):
                found[name, key] = value != 0.0  # a probability or factor: on or off
            elif isinstance(value, tuple) and all(isinstance(part, int) for part in value):
                found[name, key] = value
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for key, tensor in tensors:
            found[name, key] = (tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
    return found


@dataclass
class Fold:
    """Which entries of a container are traced, and with them which blocks.

    `stands_for[i]` is the traced block like block i; the pairs of `alike` must cost the same.
    """

    container: Container
    kept_entries: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    stands_for: list[int] = field(default_factory=list)
    alike: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def of(cls, container: Container, first: int | None) -> Fold:
        """Keeps the `first` entries of every structure and its last (None: all of them)."""
        places: dict[Any, list[int]] = {}
        for index, structure in enumerate(structures(container)):
            places.setdefault(structure, []).append(index)
        stands_for, alike = list(range(len(container.entries))), []
        for same in places.values():
            if first is not None and len(same) > first + 1:
                alike.append((same[1], same[2] if first > 2 else same[-1]))
                for index in same[first:-1]:
                    stands_for[index] = same[1]
        starts = [0, *accumulate(len(list(blocks_of("", e))) for _, e in container.entries)]
        blocks = [range(start, stop) for start, stop in pairwise(starts)]
        return cls(
            container,
            kept_entries=[index for index, other in enumerate(stands_for) if index == other],
            kept=[
                b
                for index, other in enumerate(stands_for)
                if index == other
                for b in blocks[index]
            ],
            stands_for=[block for other in stands_for for block in blocks[other]],
            alike=[
                pair
                for one, other in alike
                for pair in zip(blocks[one], blocks[other], strict=True)
            ],
        )

    def apply(self) -> None:
        """Leaves only the kept entries in the container."""
        entries = self.container.entries
        renumber = not isinstance(self.container.module, nn.ModuleDict) and all(
            key.isdigit() for key, _ in entries
        )
        self.container.module._modules.clear()
        for place, index in enumerate(self.kept_entries):
            key, entry = entries[index]
            self.container.module._modules[str(place) if renumber else key] = entry

    def undo(self) -> None:
        """Puts all entries back."""
        self.container.module._modules.clear()
        self.container.module._modules.update(self.container.entries)
