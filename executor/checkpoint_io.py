"""Boxes of tensors to and from one folder, by torch.distributed.checkpoint (DCP).

`write_boxes` and `read_boxes` are DCP's `save` and `load` with planners that take each rank's
boxes as they are, so the folder is an ordinary DCP checkpoint that torch reads without us, and
reading cuts boxes anew whatever boxes were written. A rank touches no tensor but its own boxes.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from claw_plan.executor.checkpoint_layout import Shape, box_of

METADATA = ".metadata"
"""DCP's own list of what lies where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A box of the tensor `path` of a nested state dict; `tensor` holds or takes its values."""

    path: tuple[str, ...]
    shape: Shape
    offsets: Shape
    tensor: torch.Tensor

    @property
    def key(self) -> str:
        """The path as DCP flattens it."""
        return ".".join(self.path)


def write_boxes(boxes: Sequence[Box], folder: Path, group: dist.ProcessGroup | None) -> None:
    """Writes the boxes of all ranks of the group, which must be disjoint and fill their tensors.

    Tensors are on the CPU. Raises DCP's CheckpointException, on all ranks, when one cannot; what
    the system refused is an OSError in it.
    """
    # DCP warns of what is meant here: a folder that exists, and one process without a group.
    with warnings.catch_warnings(action="ignore"):
        save(
            {},
            storage_writer=_Writer(folder),
            planner=_WriteBoxes(boxes),
            process_group=group,
            no_dist=group is None,
        )


def read_boxes(boxes: Sequence[Box], folder: Path, group: dist.ProcessGroup | None) -> None:
    """Fills the boxes' tensors, in place and on whatever device they are."""
    with warnings.catch_warnings(action="ignore"):
        load(
            {},
            storage_reader=FileSystemReader(folder),
            planner=_ReadBoxes(boxes),
            process_group=group,
            no_dist=group is None,
        )


def tensors_in(folder: Path) -> Mapping[str, TensorStorageMetadata]:
    """Shape, dtype and boxes of every tensor of a checkpoint, by key."""
    held = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {key: value for key, value in held.items() if isinstance(value, TensorStorageMetadata)}


class _Writer(FileSystemWriter):
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """As torch's, but a full disk stays the OSError that it was.

        Torch closes its archive behind it, which fails too, and only that error would reach the
        other ranks.
        """
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


class _WriteBoxes(DefaultSavePlanner):
    def __init__(self, boxes: Sequence[Box]) -> None:
        super().__init__()
        self._boxes = {MetadataIndex(box.key, box.offsets): box for box in boxes}

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.is_coordinator = {}, is_coordinator

    def create_local_plan(self) -> SavePlan:
        items = [_write_item(index, box) for index, box in self._boxes.items()]
        # How torch nests the keys again when it reads all there is.
        paths = {box.key: box.path for box in self._boxes.values()}
        self.plan = SavePlan(items, planner_data=paths)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        return self._boxes[MetadataIndex(write_item.index.fqn, write_item.index.offset)].tensor


def _write_item(index: MetadataIndex, box: Box) -> WriteItem:
    return WriteItem(
        index=index,
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(torch.Size(box.offsets), box.tensor.size()),
            properties=TensorProperties.create_from_tensor(box.tensor),
            size=torch.Size(box.shape),
        ),
    )


class _ReadBoxes(DefaultLoadPlanner):
    def __init__(self, boxes: Sequence[Box]) -> None:
        super().__init__()
        self._boxes: dict[str, list[Box]] = {}
        for box in boxes:
            self._boxes.setdefault(box.key, []).append(box)

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for key, boxes in self._boxes.items():
            stored = self.metadata.state_dict_metadata[key]
            assert isinstance(stored, TensorStorageMetadata)
            wanted = [
                ChunkStorageMetadata(torch.Size(box.offsets), box.tensor.size()) for box in boxes
            ]
            items += create_read_items_for_chunk_list(key, stored, wanted)
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        index = read_item.dest_index
        box = self._boxes[index.fqn][index.index or 0]
        return box_of(box.tensor, read_item.dest_offsets, read_item.lengths)
