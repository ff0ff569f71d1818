"""Every private symbol of torch that the executor uses, so that a new release breaks one file.

Checked against torch 2.13.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    _Action,
    _add_reduce_grad,
    _add_send_recv,
    _add_unshard_reshard,
    _PipelineScheduleRuntime,
)
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import register_dataclass, tree_leaves, tree_map, tree_map_only

__all__ = [
    "OpOverload",
    "GROUPED_PRODUCTS",
    "TorchDispatchMode",
    "fake_mode",
    "know_dataclasses",
    "own_box",
    "pipeline_runtime",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
]


def fake_mode() -> FakeTensorMode:
    """Tensors without values; real ones that meet them count as fake."""
    return FakeTensorMode(allow_non_fake_inputs=True)
GROUPED_PRODUCTS = (torch._grouped_mm, torch.nn.functional.grouped_mm)
"""Products of ragged groups; models of before torch 2.10 call the private name."""




def know_dataclasses(tree: Any) -> None:
    """Makes the tree functions see into the dataclasses of a model's results."""
    for leaf in tree_leaves(tree):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            register_dataclass(type(leaf))
            know_dataclasses(leaf)


def pipeline_runtime(
    stages: Sequence[PipelineStage],
    rows: Sequence[Sequence[str]],
    num_microbatches: int,
    loss_fn: Callable[[Any, Any], torch.Tensor],
) -> _PipelineScheduleRuntime:
    """PyTorch's interpreter of action text, with all that is no computation added to the rows.

    Each stage is gathered before its first action and stays so until its last; torch's default
    would drop stages again on ranks that hold more than three. Gradients are not divided by the
    number of microbatches: the loss already is.
    """
    runtime = _PipelineScheduleRuntime(
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


def own_box(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(offsets, sizes) of this rank's part in the tensor that the DTensor stands for."""
    [chunk] = tensor.__create_chunk_list__()
    return tuple(chunk.offsets), tuple(chunk.sizes)
