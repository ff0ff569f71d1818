"""The chain of blocks in a module tree, and which of its blocks are alike.

Blocks are the children of the outermost containers (ModuleList, Sequential, ModuleDict) whose
children are of one class and are each called exactly once, in order: GPT's `h`, Llama's
`model.layers`, T5's `encoder.block` and then `decoder.block`, ResNet's `layer1` to `layer4`.
Long runs of blocks alike are traced by a few of them; `Fold` takes the others out of their
container for that time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.nn as nn

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)

FOLDS = (2, 3, None)
"""How many blocks of a structure are traced from the start of a model, beside its last, tried in
this order; None for all. The first may meet other inputs than the rest. The second and the next
one traced must cost alike, to show that those between cost so too: with 2 that one is the last,
and with 3, for models whose last block is unlike, it is the third."""


@dataclass(frozen=True, eq=False)
class Container:
    """A module that holds blocks; `children` are all of them, in order."""

    name: str
    module: nn.Module
    children: tuple[tuple[str, nn.Module], ...]

    @property
    def block_names(self) -> list[str]:
        """Fully qualified names of all its blocks."""
        return [f"{self.name}.{key}" if self.name else key for key, _ in self.children]


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
    # Lists of embedding tables stand side by side; a list of lists is no list of blocks.
    one_class = len({type(child) for child in children}) == 1
    other = (nn.Embedding, nn.EmbeddingBag, nn.ModuleList, nn.ModuleDict)
    return one_class and len(children) >= 2 and not isinstance(children[0], other)


def chain_of(found: Sequence[Container], calls: Sequence[int]) -> list[Container]:
    """Those of the containers whose blocks form one chain in the order of `calls`.

    `calls` are the ids of all modules in the order in which a forward entered them. Of two
    containers whose blocks take turns only the larger can be the chain.
    """
    spans: list[tuple[int, int, Container]] = []
    for container in found:
        present = [id(child) for child in container.module.children()]
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
    """For each block a value that is equal for blocks alike.

    That is: the same tree of classes, shapes and plain attributes. Integers that count up from
    block to block are its index and are left out.
    """
    described = [_attributes(child) for _, child in container.children]
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
    """Which blocks of a container are traced.

    `stands_for[i]` is the traced block like block i; the pairs of `alike` must cost the same.
    """

    container: Container
    kept: list[int] = field(default_factory=list)
    stands_for: list[int] = field(default_factory=list)
    alike: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def of(cls, container: Container, first: int | None) -> Fold:
        """Keeps the `first` blocks of every structure and its last (None: all of them)."""
        places: dict[Any, list[int]] = {}
        for index, structure in enumerate(structures(container)):
            places.setdefault(structure, []).append(index)
        count = len(container.children)
        fold = cls(container, stands_for=list(range(count)))
        for same in places.values():
            if first is None or len(same) <= first + 1:
                fold.kept += same
                continue
            kept = [*same[:first], same[-1]]
            fold.kept += kept
            fold.alike.append((kept[1], kept[2]))
            for index in same[first:-1]:
                fold.stands_for[index] = kept[1]
        fold.kept.sort()
        return fold

    def apply(self) -> None:
        """Leaves only the kept blocks in the container."""
        children = self.container.children
        renumber = not isinstance(self.container.module, nn.ModuleDict) and all(
            key.isdigit() for key, _ in children
        )
        self.container.module._modules.clear()
        for place, index in enumerate(self.kept):
            key, child = children[index]
            self.container.module._modules[str(place) if renumber else key] = child

    def undo(self) -> None:
        """Puts all blocks back."""
        self.container.module._modules.clear()
        self.container.module._modules.update(self.container.children)
