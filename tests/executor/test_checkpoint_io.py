from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from claw_plan.executor.checkpoint_io import Box, read_boxes, tensors_in, write_boxes

WHOLE = torch.arange(35.0).view(5, 7)


def boxes(whole: torch.Tensor, rows: list[int], columns: list[int]) -> list[Box]:
    """Cuts at these rows and columns."""
    found = []
    for top, bottom in zip([0, *rows], [*rows, 5], strict=True):
        for left, right in zip([0, *columns], [*columns, 7], strict=True):
            if top < bottom and left < right:
                view = whole[top:bottom, left:right]
                found.append(
                    Box(path=("model", "a.b"), shape=(5, 7), offsets=(top, left), tensor=view)
                )
    return found


cuts_of_rows = st.lists(st.integers(0, 5), max_size=3).map(sorted)
cuts_of_columns = st.lists(st.integers(0, 7), max_size=3).map(sorted)


@settings(deadline=None)
@given(cuts_of_rows, cuts_of_columns, cuts_of_rows, cuts_of_columns)
def test_boxes_are_cut_anew(
    rows: list[int], columns: list[int], new_rows: list[int], new_columns: list[int]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_boxes(boxes(WHOLE, rows, columns), Path(folder), None)
        found = torch.full_like(WHOLE, -1)
        read_boxes(boxes(found, new_rows, new_columns), Path(folder), None)
    assert torch.equal(found, WHOLE)


def test_it_is_an_ordinary_checkpoint_of_torch(tmp_path: Path) -> None:
    number = Box(path=("optim", "step"), shape=(), offsets=(), tensor=torch.tensor(3.0))
    write_boxes([*boxes(WHOLE, [2], []), number], tmp_path, None)
    state = {"model": {"a.b": torch.zeros(5, 7)}, "optim": {"step": torch.zeros(())}}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(state["model"]["a.b"], WHOLE) and state["optim"]["step"] == 3
    held = tensors_in(tmp_path)
    assert tuple(held["model.a.b"].size) == (5, 7) and set(held) == {"model.a.b", "optim.step"}
