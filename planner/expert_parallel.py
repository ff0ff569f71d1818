"""Experts of a mixture that a rank may hold a part of: found in a block, proven on numbers.

A module of experts is known by what it holds and by how it is called, never by its name: all its
parameters have one first dimension, the expert's, or it owns a list of that many like modules; it
is called with hidden states, the indices of each token's experts, and their weights, and answers
with hidden states. Its own forward then also serves a part of the experts: each row that arrives
has one expert, numbered from the part's first, and the weight 1; the weights are applied where
the token came from. Whether that gives the same numbers is tried here, on a small copy.

Shapes: N tokens, k experts for each, h hidden size, E experts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn

from claw_plan.planner.graph import ExpertRule
from claw_plan.planner.sequence_parallel_search import TRIAL_ERRORS

WANTED = "not with hidden states, indices and weights of each token's experts"
"""How experts that can be shared are called, in words."""

TRIED_EXPERTS, TRIED_TOKENS = 4, 24
"""Sizes of the copy that is tried; so many tokens meet every expert."""

SMALL = (8, 24, 40, 56, 72)
"""Stand-ins of a module's sizes, in fp32 multiples of the 16 bytes that grouped products want."""

MOST_MULTIPLE = 4
"""A size that is so many times another stays that many times it: gate and up lie together."""

TOLERANCE = 1e-4
"""Of results in fp32, whose sums may be taken in another order."""

MOST_TRIED = 1 << 22
"""Elements of a module that may be tried in its own sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCall:
    """One call of experts: its three tensors, and how to make it again with others."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    hidden: int | str
    index: int | str
    weights: int | str

    @classmethod
    def read(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ExpertCall | None:
        """The call, or None if it is no call of experts."""
        places: dict[int | str, Any] = dict([*enumerate(args), *kwargs.items()])
        tensors = {at: value for at, value in places.items() if isinstance(value, torch.Tensor)}
        whole = [at for at, value in tensors.items() if value.dtype in (torch.int64, torch.int32)]
        if len(tensors) != 3 or len(whole) != 1:
            return None
        index = tensors[whole[0]]
        floats = [at for at, value in tensors.items() if value.is_floating_point()]
        weights = [at for at in floats if tensors[at].shape == index.shape]
        if len(floats) != 2 or len(weights) != 1 or index.ndim < 2:
            return None
        hidden = next(at for at in floats if at != weights[0])
        if tensors[hidden].shape[:-1].numel() != index.shape[:-1].numel():
            return None
        return cls(
            args=tuple(args), kwargs=kwargs, hidden=hidden, index=whole[0], weights=weights[0]
        )

    def __getitem__(self, place: int | str) -> torch.Tensor:
        found = self.args[place] if isinstance(place, int) else self.kwargs[place]
        assert isinstance(found, torch.Tensor)
        return found

    def again(
        self,
        forward: Callable[..., Any],
        hidden: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """The same call with other tensors."""
        new = {self.hidden: hidden, self.index: index, self.weights: weights}
        args = [new.get(at, value) for at, value in enumerate(self.args)]
        result: torch.Tensor = forward(
            *args, **{name: new.get(name, value) for name, value in self.kwargs.items()}
        )
        return result


class ExpertList(nn.ModuleList):
    """A part of a list of modules: counted from 0, under the names of the whole list."""

    def __init__(self, whole: nn.ModuleList, start: int, end: int) -> None:
        super().__init__()
        for index in range(start, end):
            self.add_module(str(index), whole[index])

    def __getitem__(self, index: Any) -> Any:
        """Modules by their place in the part."""
        return list(self._modules.values())[index]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertFinding:
    """Rules by block; `refused` says why a block's experts cannot be shared out.

    `calls` has how the module of each was called, by its name.
    """

    rules: Mapping[str, tuple[ExpertRule, ...]] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    calls: Mapping[str, ExpertCall] = field(default_factory=dict)


Call = tuple[tuple[Any, ...], dict[str, Any], Any]
"""Arguments and result."""


def find_experts(
    model: nn.Module, blocks: Sequence[str], forward: Callable[[], object], samples: int
) -> ExpertFinding:
    """The experts of each block. `forward` runs the model on so many samples, perhaps fake ones.

    Must be called where tensors are real: copies are tried.
    """
    inside = {block: dict(_holders(model.get_submodule(block))) for block in blocks}
    holders = [module for held in inside.values() for module in held.values()]
    if not holders:
        return ExpertFinding(refused=dict(_lists(model, blocks)))
    calls, read = _calls(holders, forward), {}
    known: dict[tuple[object, ...], ExpertRule | str] = {}
    rules: dict[str, tuple[ExpertRule, ...]] = {}
    refused: dict[str, str] = {}
    for block, held in inside.items():
        own = []
        for name, module in held.items():
            shapes = tuple(p.shape for p in module.parameters())
            key = (name, type(module), shapes)
            if key not in known:
                known[key] = _rule_of(name, module, calls.get(id(module)), samples)
            found = known[key]
            if isinstance(found, str):
                refused[block] = f"{block}.{name}: {found}"
            else:
                own.append(found)
                args, kwargs, _ = calls[id(module)]
                read[f"{block}.{name}"] = ExpertCall.read(args, kwargs)
        if own:
            rules[block] = tuple(own)
    known_calls = {name: call for name, call in read.items() if call is not None}
    return ExpertFinding(rules=rules, refused=refused, calls=known_calls)


def _lists(model: nn.Module, blocks: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Of each block with a list of like modules, why that cannot be shared."""
    for block in blocks:
        for name, module in model.get_submodule(block).named_modules():
            if isinstance(module, nn.ModuleList) and _are_alike(module):
                yield block, f"{block}.{name}: its modules are called one by one, {WANTED}"


def _are_alike(listed: nn.ModuleList) -> bool:
    kinds = {(type(e), tuple(p.shape for p in e.parameters())) for e in listed}
    return len(listed) > 1 and len(kinds) == 1


def _holders(block: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that hold experts and nothing else, outermost first."""
    taken: list[str] = []
    for name, module in block.named_modules():
        if (
            name
            and not any(name.startswith(f"{outer}.") for outer in taken)
            and count_experts(module)
        ):
            taken.append(name)
            yield name, module


def count_experts(module: nn.Module) -> int:
    """How many experts the module holds; 0 where it is no module of experts."""
    own = list(module._parameters.values())
    if listed := _list_of(module):
        return len(_child(module, listed))
    if type(module).__module__.startswith("torch.nn."):  # a convolution has three dimensions too
        return 0
    below = sum(1 for child in module.children() for _ in child.parameters())
    if below or not any(p is not None and p.ndim == 3 for p in own):
        return 0
    firsts = {p.shape[0] for p in own if p is not None}
    return firsts.pop() if len(firsts) == 1 else 0


def _child(module: nn.Module, name: str) -> nn.ModuleList:
    child = module._modules[name]
    assert isinstance(child, nn.ModuleList)
    return child


def _list_of(module: nn.Module) -> str:
    """The module's list of like modules, if that holds all its parameters; or ''."""
    holders = [
        name
        for name, child in module.named_children()
        if next(child.parameters(), None) is not None
    ]
    if any(p is not None for p in module._parameters.values()) or len(holders) != 1:
        return ""
    child = module._modules[holders[0]]
    if not isinstance(child, nn.ModuleList) or isinstance(module, nn.ModuleList):
        return ""
    return holders[0] if _are_alike(child) else ""


def _calls(modules: Sequence[nn.Module], forward: Callable[[], object]) -> dict[int, Call]:
    """The first call of each module in one run of `forward`."""
    calls: dict[int, Call] = {}

    def hook(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        calls.setdefault(id(module), (args, kwargs, result))

    handles = [m.register_forward_hook(hook, with_kwargs=True) for m in modules]
    try:
        with torch.no_grad():
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _rule_of(name: str, module: nn.Module, call: Call | None, samples: int) -> ExpertRule | str:
    """The rule of a module, or why there is none."""
    experts = count_experts(module)
    if call is None:
        return f"the model does not call it {WANTED}"
    args, kwargs, result = call
    read = ExpertCall.read(args, kwargs)
    if read is None:
        return f"it is called otherwise, {WANTED}"
    if not isinstance(result, torch.Tensor) or result.shape != read[read.hidden].shape:
        return "its result is not of the shape of the hidden states it was given"
    hidden, rows = read[read.hidden], read[read.index].numel()
    counters = [key for key, value in vars(module).items() if value == experts and _is_int(value)]
    choices = [(), *((key,) for key in counters), tuple(counters)]
    for counted_by in choices:
        rule = ExpertRule(
            module=name,
            experts=experts,
            counted_by=counted_by,
            listed=_list_of(module),
            rows_per_sample=rows // samples,
            row_bytes=hidden.shape[-1] * hidden.element_size(),
        )
        if any(_agrees(*tried, read, rule) for tried in tried_copies(module, hidden.shape[-1])):
            return rule
    return "run on a part of its experts, its forward gives other numbers"


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def hold_part(module: nn.Module, rule: ExpertRule, part: int, parts: int) -> range:
    """Leaves the module, in place, this part of its experts; answers with their numbers."""
    experts = count_experts(module)
    each = experts // parts
    kept = range(part * each, (part + 1) * each)
    if rule.listed:
        whole = _child(module, rule.listed)
        module._modules[rule.listed] = ExpertList(whole, kept.start, kept.stop)
    else:
        for key, weight in module._parameters.items():
            if weight is not None:
                own = weight.detach()[kept.start : kept.stop].clone()
                module._parameters[key] = nn.Parameter(own, requires_grad=weight.requires_grad)
    for key in rule.counted_by:
        setattr(module, key, each)
    return kept


def tried_copies(module: nn.Module, hidden: int) -> Iterator[tuple[nn.Module, int]]:
    """Copies with random weights, each with its hidden size: one small, one of its own sizes."""
    weights = list(module.parameters())
    small = _small_sizes({size for p in weights for size in p.shape[0 if p.ndim < 3 else 1 :]})
    yield _copy(module, small | {count_experts(module): TRIED_EXPERTS}), small.get(hidden, hidden)
    if sum(p.numel() for p in weights) <= MOST_TRIED:
        yield _copy(module, {}), hidden


def _small_sizes(sizes: set[int]) -> dict[int, int]:
    """A small stand-in for each size; small multiples of another stay multiples of it."""
    found: dict[int, int] = {}
    left = iter(SMALL)
    for size in sorted(sizes):
        factors = [
            (size // known, small) for known, small in found.items() if size % known == 0
        ]  # fmt: skip
        factor, small = min(factors, default=(0, 0))
        found[size] = factor * small if 1 < factor <= MOST_MULTIPLE else next(left, size)
    return found


def _copy(module: nn.Module, sizes: Mapping[int, int]) -> nn.Module:
    """The module with random real weights of these sizes in place of its own."""
    new = copy.copy(module)
    new._parameters = {
        key: weight if weight is None else nn.Parameter(_random(weight, sizes))
        for key, weight in module._parameters.items()
    }
    new._buffers = {
        key: value if value is None else torch.zeros(value.shape, dtype=value.dtype)
        for key, value in module._buffers.items()
    }
    children = list(module._modules.items())
    if isinstance(module, nn.ModuleList):
        children = children[: sizes.get(len(children), len(children))]
    new._modules = {key: c if c is None else _copy(c, sizes) for key, c in children}
    for key, value in vars(module).items():
        if _is_int(value) and value in sizes and not key.startswith("_"):
            setattr(new, key, sizes[value])
    return new


def _random(weight: torch.Tensor, sizes: Mapping[int, int]) -> torch.Tensor:
    shape = [sizes.get(size, size) for size in weight.shape]
    return torch.randn(shape) * torch.tensor(shape[-1]).rsqrt()


def _agrees(tried: nn.Module, size: int, read: ExpertCall, rule: ExpertRule) -> bool:
    """Whether two halves of the experts, each on its rows, give what all of them give."""
    experts, top_k = count_experts(tried), read[read.index].shape[-1]
    if experts % 2:
        return False
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        hidden = torch.randn(TRIED_TOKENS, size)
        scores, index = torch.rand(TRIED_TOKENS, experts).topk(min(top_k, experts))
        try:
            whole = read.again(tried.forward, hidden, index, scores)
            made = hidden.new_zeros(index.numel(), size)
            for part in range(2):
                half = shallow_copy(tried)
                kept = hold_part(half, rule, part, 2)
                flat = index.flatten()
                rows = ((flat >= kept.start) & (flat < kept.stop)).nonzero()[:, 0]
                own = (flat[rows] - kept.start)[:, None]
                tokens = hidden[rows // index.shape[1]]
                made[rows] = read.again(half.forward, tokens, own, torch.ones(own.shape))
        except TRIAL_ERRORS:
            return False
    joined = (made.view(*index.shape, size) * scores[..., None]).sum(1)
    return torch.allclose(joined, whole, rtol=TOLERANCE, atol=TOLERANCE)


def shallow_copy(module: nn.Module) -> nn.Module:
    """The same weights in a module whose own part may be taken."""
    new = copy.copy(module)
    new._parameters = dict(module._parameters)
    new._modules = dict(module._modules)
    return new
