"""The linear modules of a block and which of them feed which, seen in one run of the block.

A module is linear-like when it has one matrix and at most one vector of parameters and its
forward only reshapes and multiplies once (`nn.Linear`, `Conv1D` of GPT-2, and what people write
themselves); which dimension of the matrix is the output is read off the operation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch.overrides import TorchFunctionMode

from claw_plan.planner.head_shard import OF_THE_WHOLE, function_name
from claw_plan.planner.tensor_parallel import bias_name, matrix_name

PRODUCTS = {"linear": 1, "addmm": 2, "matmul": 1, "__matmul__": 1, "mm": 1}
"""Where the matrix stands among the arguments."""

HARMLESS = OF_THE_WHOLE | {"view", "reshape", "flatten", "unflatten", "contiguous"}
HARMLESS |= {"add", "__add__", "__radd__", "__iadd__", "add_"}
TRANSPOSES = frozenset(("t", "T", "mT", "transpose"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearCall:
    """A module with one matrix, as it was called.

    `outputs_first`: the matrix is [outputs, inputs]. `fed_by`: the modules of this kind that were
    last on the way to its input. `refused` says why it cannot be divided, '' if it can.
    """

    name: str
    matrix: str
    bias: str | None
    outputs_first: bool
    fed_by: frozenset[str]
    refused: str = ""


def linear_calls(
    block: nn.Module, run: Callable[[], object], shared: frozenset[int] = frozenset()
) -> dict[str, LinearCall]:
    """Runs the block once; its modules with one matrix in the order of their calls.

    `shared` are the ids of parameters that another module holds too.
    """
    modules = {name: module for name, module in block.named_modules() if _has_one_matrix(module)}
    watch = _Watch(modules)
    handles = []
    for name, module in modules.items():
        handles.append(module.register_forward_pre_hook(watch.before(name)))
        handles.append(module.register_forward_hook(watch.after(name)))
    try:
        with torch.enable_grad(), watch:
            run()
    finally:
        for handle in handles:
            handle.remove()
    return {name: watch.call(name, shared) for name in watch.fed_by}


def shared_parameters(model: nn.Module) -> frozenset[int]:
    """Ids of the parameters that several modules of the model hold."""
    seen: set[int] = set()
    several: set[int] = set()
    for module in model.modules():
        own = {id(p) for p in module._parameters.values() if p is not None}
        several |= seen & own
        seen |= own
    return frozenset(several)


def nearest_makers(
    tensors: Sequence[torch.Tensor], makers: Sequence[tuple[Any, str]]
) -> frozenset[str]:
    """Back along autograd's graph, to the nearest outputs of watched modules.

    `makers` are the nodes of these outputs with the names of their modules.
    """
    named = dict(makers)
    found, seen = set(), set()
    waiting = [t.grad_fn for t in tensors if t.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in named:
            found.add(named[node])
        else:
            waiting.extend(following for following, _ in node.next_functions if following)
    return frozenset(found)


def _has_one_matrix(module: nn.Module) -> bool:
    dims = sorted(parameter.ndim for parameter in module.parameters(recurse=False))
    return dims in ([2], [1, 2]) and not any(True for _ in module.children())


class _Watch(TorchFunctionMode):
    """What runs inside each module, and from whose outputs its input was made."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.fed_by: dict[str, frozenset[str]] = {}
        self._modules = modules
        self._inside: list[str] = []
        self._calls: dict[str, int] = {}
        self._products: dict[str, list[bool]] = {}
        self._others: dict[str, str] = {}
        self._transposed: list[torch.Tensor] = []
        self._makers: list[tuple[Any, str]] = []  # holds the nodes, so that they stay the same

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._inside:
            self._classify(self._inside[-1], function_name(func), args, result)
        return result

    def _classify(self, name: str, op: str, args: Sequence[Any], result: Any) -> None:
        module = self._modules[name]
        matrix = getattr(module, matrix_name(module))
        if op in PRODUCTS and len(args) > PRODUCTS[op]:
            operand = args[PRODUCTS[op]]
            turned = any(operand is t for t in self._transposed)
            if operand is matrix or turned:
                self._products.setdefault(name, []).append((op == "linear") != turned)
                return
        if op in TRANSPOSES and args and args[0] is matrix:
            self._transposed.append(result)
        elif op not in HARMLESS:
            self._others[name] = op

    def before(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            self._calls[name] = self._calls.get(name, 0) + 1
            tensors = [a for a in args if isinstance(a, torch.Tensor)]
            if len(tensors) != 1:
                self._others[name] = "a call with several tensors"
            self.fed_by[name] = self.fed_by.get(name, frozenset()) | nearest_makers(
                tensors, self._makers
            )
            self._inside.append(name)

        return hook

    def after(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._inside.pop()
            if isinstance(output, torch.Tensor) and output.grad_fn is not None:
                self._makers.append((output.grad_fn, name))

        return hook

    def call(self, name: str, shared: frozenset[int]) -> LinearCall:
        module = self._modules[name]
        products = self._products.get(name, [])
        refused = ""
        if self._calls[name] > 1:
            refused = f"{name} is used {self._calls[name]} times in a block"
        elif any(id(p) in shared for p in module.parameters(recurse=False)):
            refused = f"{name} shares its weight with another module"
        elif len(products) != 1 or name in self._others:
            does = self._others.get(name, "no single product")
            refused = f"{name} is not a plain linear ({does})"
        return LinearCall(
            name=name,
            matrix=matrix_name(module),
            bias=bias_name(module),
            outputs_first=bool(products and products[0]),
            fed_by=self.fed_by[name],
            refused=refused,
        )
