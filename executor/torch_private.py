"""Every private symbol of torch that the executor uses, so that a new release breaks one file.

Checked against torch 2.13.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn as nn
from torch._ops import OpOverload
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    _Action,
    _add_reduce_grad,
    _add_send_recv,
    _add_unshard_reshard,
    _PipelineScheduleRuntime,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import register_dataclass, tree_leaves, tree_map, tree_map_only

from claw_plan.planner.torch_private import FakeTensorMode

__all__ = [
    "GROUPED_PRODUCTS",
    "OpOverload",
    "PipelineRuntime",
    "TorchDispatchMode",
    "fake_mode",
    "keeping_versions",
    "know_dataclasses",
    "leave_to_others",
    "own_box",
    "pipeline_runtime",
    "reshard_over",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "watch_dispatched",
]


GROUPED_PRODUCTS = (torch._grouped_mm, torch.nn.functional.grouped_mm)
"""Products of ragged groups; models of before torch 2.10 call the private name."""


def fake_mode() -> FakeTensorMode:
    """Tensors without values; real ones that meet them count as fake."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def know_dataclasses(tree: Any) -> None:
    """Makes the tree functions see into the dataclasses of a model's results."""
    for leaf in tree_leaves(tree):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            register_dataclass(type(leaf))
            know_dataclasses(leaf)


class PipelineRuntime(_PipelineScheduleRuntime):
    """PyTorch's interpreter of action text, given microbatches that are apart already.

    Its own `step` would split a whole batch, and targets beside it, once more.
    """

    _NO_TARGET = torch.empty(0)
    """The model finds its own loss: what the loss function gets as target says nothing."""

    def prepare(self, microbatch: dict[str, torch.Tensor]) -> None:
        """What comes before the first action: stages learn shapes and make their buffers."""
        for stage in self._stages:
            stage.has_backward = self._has_backward
        self._initialize_stages((), microbatch, self._NO_TARGET)

    def run(self, microbatches: list[dict[str, torch.Tensor]]) -> None:
        """All actions of this rank; microbatches are what stages are called with."""
        for stage in self._stages:
            stage.has_backward = self._has_backward
            stage.clear_runtime_states()
        targets = [self._NO_TARGET] * len(microbatches)
        self._step_microbatches(kwarg_mbs=microbatches, target_mbs=targets, return_outputs=False)


def pipeline_runtime(
    stages: Sequence[PipelineStage],
    rows: Sequence[Sequence[str]],
    num_microbatches: int,
    loss_fn: Callable[[Any, Any], torch.Tensor],
) -> PipelineRuntime:
    """The runtime of these rows, with all that is no computation added to them.

    Each stage is gathered before its first action and stays so until its last; torch's default
    would drop stages again on ranks that hold more than three. Gradients are not divided by the
    number of microbatches: the loss already is.
    """
    runtime = PipelineRuntime(  # type: ignore[no-untyped-call]
        list(stages), n_microbatches=num_microbatches, loss_fn=loss_fn, scale_grads=False
    )
    actions: dict[int, list[_Action | None]] = {
        rank: [_Action.from_str(text) for text in row] for rank, row in enumerate(rows)
    }
    runtime._validate_and_set_stage_mapping(actions)
    with_data: dict[int, list[Any]] = {
        rank: _add_reduce_grad(
            list(_add_unshard_reshard(row, max_active_stages=len(stages))), num_microbatches
        )
        for rank, row in actions.items()
    }
    home = runtime.stage_index_to_group_rank
    runtime.pipeline_order_with_comms = _add_send_recv(
        with_data, stage_to_rank=home.__getitem__, num_stages=len(home)
    )
    return runtime


def leave_to_others(module: nn.Module, names: Sequence[str]) -> None:
    """DistributedDataParallel will leave these parameters of the module alone."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)


def reshard_over(module: nn.Module, mesh: DeviceMesh) -> None:
    """After a forward, the parameters of the module's group are cut over the mesh's last axis.

    `mesh` has two axes and was made by all ranks. The module is one that reshards.
    """
    assert isinstance(module, FSDPModule)
    group = module._get_fsdp_state()._fsdp_param_group
    if group is None:
        return
    info = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    group.post_forward_mesh_info = info
    for parameter in group.fsdp_params:
        parameter.post_forward_mesh_info = info
        whole = torch.empty(parameter._orig_size, device="meta")
        parameter._init_sharded_post_forward_param_metadata(whole)


def own_box(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(offsets, sizes) of this rank's part in the tensor that the DTensor stands for."""
    [chunk] = tensor.__create_chunk_list__()
    return tuple(chunk.offsets), tuple(chunk.sizes)


def after_backward(call: Callable[[], None]) -> None:
    """Runs the call when the backward that runs now has ended, in its thread."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def keeping_versions(tensors: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
    """Changes in place meanwhile are not seen by graphs that have saved the tensors."""
    return _unsafe_preserve_version_counter(tuple(tensors))


@contextmanager
def watch_dispatched(
    names: Mapping[str, str], saw: Callable[[str, Sequence[Any]], None]
) -> Iterator[None]:
    """Calls `saw` with names[operator] and the arguments of each of these c10d operators.

    Also of those that C++ calls. Each call is handed on below autograd, where it belongs.
    """
    after = torch._C._after_autograd_keyset

    def watching(name: str) -> Callable[..., Any]:
        operator = getattr(torch.ops.c10d, name).default

        def call(keys: Any, *args: Any) -> Any:
            saw(names[name], args)
            return operator.redispatch(keys & after, *args)

        return call

    library = torch.library.Library("c10d", "IMPL")
    try:
        for name in names:
            for device in ("AutogradCPU", "AutogradCUDA"):
                library.impl(name, watching(name), device, with_keyset=True)
        yield
    finally:
        library._destroy()
