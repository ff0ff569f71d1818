"""Every private torch symbol the planner uses, each with why there is no public one.

Checked with torch 2.13; when an upgrade breaks the planner, it breaks here.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

# Fake tensors carry shapes and autograd but no data; only torch._subclasses exports the mode.
from torch._subclasses import fake_tensor

# The common base of all batch normalisations has no public name.
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = [
    "BatchNorm",
    "FakeTensorMode",
    "TorchDispatchMode",
    "attend_to_last",
    "current_node",
    "fake_tensor_log",
    "last_sequence_number",
    "one_sequence_per_row",
    "override_kernels",
    "sequence_number",
    "storage_key",
    "tree_leaves",
    "without_onednn",
    "without_rejection",
]


# Where the fake mode logs the traceback of an operator that refused its shapes.
fake_tensor_log = logging.getLogger(fake_tensor.__name__)


class _UnloadedCompiler(ModuleType):
    """torch._dynamo until it is asked for more than its settings, or to leave a function alone."""

    def __init__(self, config: ModuleType) -> None:
        super().__init__("torch._dynamo")
        self.config = config

    def disable(self, *given: Any, **options: Any) -> Any:
        """What is only to be called outside of compiled code is called as it is."""
        if given and options == {"wrapping": False}:
            return given[0]
        return self.__getattr__("disable")(*given, **options)

    def __getattr__(self, name: str) -> Any:
        # Python asks modules for many dunder names; of those only a package has a path.
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        if sys.modules[self.__name__] is self:
            del sys.modules[self.__name__], torch._dynamo
        return getattr(import_module(self.__name__), name)


def leave_compiler_unloaded() -> None:
    """Loads torch._dynamo.config without the compiler around it, which takes .7 s to import.

    Fake tensors read two switches of it, and kernels that work on shapes alone ask not to be
    compiled. Whoever asks for anything else gets all of it then, with these settings.
    """
    if "torch._dynamo" in sys.modules:
        return
    name = "torch._dynamo.config"
    spec = spec_from_file_location(name, Path(torch.__path__[0], "_dynamo", "config.py"))
    if spec is None or spec.loader is None:
        return
    sys.modules[name] = config = module_from_spec(spec)
    spec.loader.exec_module(config)
    sys.modules["torch._dynamo"] = torch._dynamo = _UnloadedCompiler(config)


class FakeTensorMode(fake_tensor.FakeTensorMode):
    """Torch's mode without its guards against torch.compile, for planning compiles nothing."""

    def __init__(self, **options: Any) -> None:
        leave_compiler_unloaded()
        super().__init__(**options)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    __torch_dispatch__ = getattr(
        fake_tensor.FakeTensorMode.__torch_dispatch__,
        "__wrapped__",
        fake_tensor.FakeTensorMode.__torch_dispatch__,
    )


def last_sequence_number() -> int:
    """The number autograd gave to the node it made last in this thread, -1 if none."""
    return int(torch.autograd._get_sequence_nr()) - 1  # type: ignore[attr-defined]


def current_node() -> Any:
    """The autograd node whose backward runs now, None outside of one."""
    return torch._C._current_autograd_node()


def sequence_number(node: Any) -> int:
    """The number of an autograd node; leaves' accumulators have the largest there is."""
    return int(node._sequence_nr())


def storage_key(tensor: torch.Tensor) -> int:
    """The identity of the memory behind a tensor, equal for all its views, while it lives."""
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def override_kernels(kernels: dict[str, Any]) -> Iterator[None]:
    """Puts Python functions in place of aten operators above autograd: CPU, fake, meta tensors.

    A TorchFunctionMode would miss calls made inside functions that are overridable themselves,
    such as F.multi_head_attention_forward.
    """
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name, kernel in kernels.items():
            for key in ("AutogradCPU", "AutogradMeta"):
                library.impl(name, kernel, key, allow_override=True)
        yield


@contextmanager
def one_sequence_per_row() -> Iterator[None]:
    """Answers in advance whether transformers' rows hold several packed sequences: they do not.

    It reads that off the values of position_ids, which fake tensors have not; it would then build
    an explicit mask and expand grouped keys and values, which the real run does not.
    """
    import sys

    masking = sys.modules.get("transformers.masking_utils")
    name = "find_packed_sequence_indices"
    if masking is None or not hasattr(masking, name):
        yield
        return
    original = getattr(masking, name)
    setattr(masking, name, lambda *args, **kwargs: None)
    try:
        yield
    finally:
        setattr(masking, name, original)


# A tensor with a shape and no data that is not fake: what DTensor is made of.
def without_storage(cls: type, shape: list[int], like: torch.Tensor) -> Any:
    """An instance of a Tensor subclass, shaped `shape`, else like `like`."""
    return torch.Tensor._make_wrapper_subclass(
        cls, shape, dtype=like.dtype, device=like.device, requires_grad=like.requires_grad
    )


# torch's guide to extending it names this context; only torch._C has it.
below_subclasses = torch._C.DisableTorchFunctionSubclass


def attend_to_last(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **settings: Any
) -> torch.Tensor:
    """Causal attention of queries that are the last of the keys' positions, by a device's kernels.

    The public way is the function that was imported first: whoever puts another in its place
    (a comparison without dropout) gets the bias' storage instead of its meaning.
    """
    # Importing it takes a second, for it imports the compiler.
    from torch.nn.attention.bias import CausalBias, causal_lower_right

    bias = causal_lower_right(query.shape[-2], key.shape[-2])
    result: torch.Tensor = CausalBias._dispatch(query, key, value, bias, **settings)
    return result


@contextmanager
def without_onednn() -> Iterator[None]:
    """Without oneDNN, whose fused recurrent layers would hide their matrix products.

    The public torch.backends.mkldnn.flags also sets TF32, which warns on machines without it.
    """
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


@contextmanager
def without_rejection() -> Iterator[None]:
    """Lets `trunc_normal_` draw once where there is nothing to draw: on fake tensors.

    It draws until every value is within its bounds, which it reads. Whoever imported the public
    function keeps it, so it is the one behind it that is replaced.
    """
    original = torch.nn.init._no_grad_trunc_normal_

    def draw(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor if hasattr(tensor, "fake_mode") else original(tensor, *args, **kwargs)

    torch.nn.init._no_grad_trunc_normal_ = draw
    try:
        yield
    finally:
        torch.nn.init._no_grad_trunc_normal_ = original
