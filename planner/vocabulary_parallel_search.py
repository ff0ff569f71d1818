"""Finds the embedding tables and heads that divide over the vocabulary, from the flow of data.

One forward pass is watched. A table is a weight that `F.embedding` reads at indices made of the
model's own integer inputs; a head is the `F.linear` nearest to the loss on the way back through
autograd's graph. A weight divides when every use of it is one of these two (a tied weight has
both) and the model runs to its loss with the head's scores divided: an operation on them that
would need the other ranks' classes is refused by `HeadShard`, and the refusal is the reason given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
from torch.overrides import TorchFunctionMode

from claw_plan.planner.errors import TensorParallelError
from claw_plan.planner.graph import TensorParallelRule
from claw_plan.planner.head_shard import Arguments, HeadShard, function_name
from claw_plan.planner.linear_modules import nearest_makers
from claw_plan.planner.sequence_parallel_search import TRIAL_ERRORS, first_line
from claw_plan.planner.tensor_parallel import TensorParallelModel
from claw_plan.planner.tp_autograd import StandIn
from claw_plan.planner.vocabulary_parallel import EMBEDDING, HEAD, STYLES, divide_vocabulary

SMALLEST_SHARE = 0.01
"""Of the model's parameters. To divide a table costs an all-reduce of the hidden states of every
token; one that is smaller than this (positions, token types) is not worth it."""

READS = frozenset("dtype device requires_grad is_leaf is_cuda is_floating_point __hash__".split())
"""What may be asked of a weight beside its one use: it is the same for a part."""


@dataclass(frozen=True, kw_only=True)
class VocabularyFinding:
    """The rules, and for each weight that was considered and stays whole the reason."""

    rules: tuple[TensorParallelRule, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)


def find_vocabulary(
    model: nn.Module,
    blocks: Sequence[str],
    forward: Callable[[], torch.Tensor],
    tp_divides: int,
) -> VocabularyFinding:
    """Looks outside `blocks`; `forward` runs the model to its loss once.

    The degrees in question are the divisors of `tp_divides`.
    """
    watch = _Watch(model, blocks)
    with watch.hooked(), torch.enable_grad(), watch:
        loss = forward()
    heads = nearest_makers([loss], watch.makers)
    rules: list[TensorParallelRule] = []
    refused: dict[str, str] = {}
    for weight in watch.candidates(heads):
        try:
            found = watch.rules_of(weight, heads)
            if found[0].heads < tp_divides:
                raise TensorParallelError(f"it has {found[0].heads} rows only")
            _try(model, found, forward, tp_divides)
        except TRIAL_ERRORS as error:
            refused[watch.names[id(weight)]] = first_line(error)
        else:
            rules.extend(found)
    return VocabularyFinding(rules=tuple(rules), refused=refused)


def _try(
    model: nn.Module,
    rules: Sequence[TensorParallelRule],
    forward: Callable[[], torch.Tensor],
    tp_divides: int,
) -> None:
    """Runs the model in the smallest division."""
    if all(rule.style == EMBEDDING for rule in rules):
        return  # a lookup gives whole rows
    degree = next(ways for ways in range(2, tp_divides + 1) if tp_divides % ways == 0)
    divided = TensorParallelModel(ranks=StandIn(degree))
    try:
        divide_vocabulary(model, rules, divided)
        with torch.enable_grad():
            loss = forward()
    finally:
        divided.remove()
    if isinstance(loss, HeadShard):
        raise TensorParallelError("the loss itself is divided")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Use:
    """One call that was given a parameter: by which function, at which place, in which module.

    `at_inputs` if its first argument was made of the model's integer inputs; `option` is one of
    `F.embedding` that has no divided form.
    """

    function: str
    place: int
    module: str
    at_inputs: bool
    option: str


def _option(arguments: Arguments) -> str:
    options = ((3, "max_norm"), (5, "scale_grad_by_freq"), (6, "sparse"))
    return next((name for place, name in options if arguments.get(place, name)), "")


class _Watch(TorchFunctionMode):
    """What is done with the parameters outside the blocks, and which indices come from inputs.

    `makers` are the autograd nodes of watched modules' outputs; `names` the first name of every
    parameter.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[str]) -> None:
        super().__init__()
        self.makers: list[tuple[Any, str]] = []
        self.names: dict[int, str] = {}
        self._model = model
        inside = tuple(f"{block}." for block in blocks)
        self._modules = {
            name: module
            for name, module in model.named_modules()
            if not (name + ".").startswith(inside)
            and any(p is not None and p.ndim == 2 for p in module._parameters.values())
        }
        self._parameters: dict[int, nn.Parameter] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.names.setdefault(id(parameter), name)
            self._parameters[id(parameter)] = parameter
        self._numel = sum(parameter.numel() for parameter in model.parameters())
        self._uses: dict[int, list[_Use]] = {}
        self._entered: list[str] = []
        self._inputs: dict[int, torch.Tensor] = {}

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Follows the model's inputs and where in it the forward stands."""
        handles = [self._model.register_forward_pre_hook(self._given, with_kwargs=True)]
        for name, module in self._modules.items():
            handles.append(module.register_forward_pre_hook(self._before(name)))
            handles.append(module.register_forward_hook(self._after(name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _given(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and not value.is_floating_point():
                self._inputs[id(value)] = value  # held, so that the id stays its own

    def _before(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            self._entered.append(name)

        return hook

    def _after(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._entered.pop()
            if isinstance(output, torch.Tensor) and output.grad_fn is not None:
                self.makers.append((output.grad_fn, name))

        return hook

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        arguments = Arguments(name=function_name(func), args=list(args), kwargs=dict(kwargs or {}))
        tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
        for tensor in tensors:
            if id(tensor) in self._parameters and arguments.name not in READS:
                self._note(tensor, arguments)
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not result.is_floating_point():
            if any(id(tensor) in self._inputs for tensor in tensors):
                self._inputs[id(result)] = result
        return result

    def _note(self, parameter: torch.Tensor, arguments: Arguments) -> None:
        names = ("input", "weight", "bias")
        given = [arguments.get(place, name) is parameter for place, name in enumerate(names)]
        use = _Use(
            function=arguments.name,
            place=given.index(True) if True in given else -1,
            module=self._entered[-1] if self._entered else "",
            at_inputs=id(arguments.get(0, "input")) in self._inputs,
            option=_option(arguments) if arguments.name == STYLES[EMBEDDING] else "",
        )
        self._uses.setdefault(id(parameter), []).append(use)

    def candidates(self, heads: frozenset[str]) -> Iterator[nn.Parameter]:
        """Weights of some size that are read at the model's inputs or make the scores."""
        for identity, uses in self._uses.items():
            parameter = self._parameters[identity]
            looked_up = any(
                use.function == STYLES[EMBEDDING] and use.place == 1 and use.at_inputs
                for use in uses
            )
            is_head = any(
                use.function == STYLES[HEAD] and use.place == 1 and use.module in heads
                for use in uses
            )
            large = parameter.numel() >= SMALLEST_SHARE * self._numel
            if parameter.ndim == 2 and large and (looked_up or is_head):
                yield parameter

    def rules_of(
        self, weight: nn.Parameter, heads: frozenset[str]
    ) -> tuple[TensorParallelRule, ...]:
        """A rule for each module that uses the weight; raises for a use that has no rule."""
        rules: dict[str, TensorParallelRule] = {}
        for use in self._uses[id(weight)]:
            style = next((s for s, name in STYLES.items() if name == use.function), None)
            module = self._modules.get(use.module)
            own = module and next((o for o, p in module._parameters.items() if p is weight), None)
            if style is None or use.place != 1 or module is None or own is None:
                at = use.module or "the model's own forward"
                raise TensorParallelError(f"it is also used by {use.function} in {at}")
            if use.option:
                raise TensorParallelError(f"{use.module} looks it up with {use.option}")
            if style == HEAD and use.module not in heads:
                raise TensorParallelError(f"the loss is not made of what {use.module} gives")
            rules[use.module] = TensorParallelRule(
                module=use.module,
                style=style,
                heads=weight.shape[0],
                weight_dims={own: 0, **(self._bias(module, use.module) if style == HEAD else {})},
            )
        return tuple(rules.values())

    def _bias(self, module: nn.Module, name: str) -> dict[str, int]:
        """The head's own bias, which is cut with it; raises if it is used elsewhere too."""
        for own, parameter in module._parameters.items():
            if parameter is None or parameter.ndim != 1:
                continue
            for use in self._uses.get(id(parameter), []):
                if (use.function, use.place, use.module) != (STYLES[HEAD], 2, name):
                    at = use.module or "the model's own forward"
                    raise TensorParallelError(f"its bias is also used by {use.function} in {at}")
            return {own: 0}
        return {}
