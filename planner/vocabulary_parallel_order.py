"""The order in which the rows of a vocabulary are divided over ranks, where it is not their own.

`planner.vocabulary_parallel` trains with it; plans hold it as text. Checkpoints and everything
else outside a rank know the table in its own order. `planner.vocabulary_parallel_balance` finds
an order from the frequencies of tokens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from claw_plan.planner.errors import PlanError


@dataclass(frozen=True, slots=True, eq=False)
class RowOrder:
    """`rows[i]` is the row of the whole table that stands at place i of the divided one."""

    rows: tuple[int, ...]
    _places: dict[torch.device, torch.Tensor] = field(default_factory=dict)

    def select(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """The whole with its rows in this order."""
        return whole.index_select(dim, torch.tensor(self.rows, device=whole.device))

    def restore(self, ordered: torch.Tensor, dim: int) -> torch.Tensor:
        """Undoes `select`."""
        return ordered.index_select(dim, self._inverse(ordered.device))

    def places(self, indices: torch.Tensor) -> torch.Tensor:
        """Where rows stand; an index outside the vocabulary is refused, as by a lookup."""
        found = self._inverse(indices.device).index_select(0, indices.flatten())
        return found.view(indices.shape)

    def _inverse(self, device: torch.device) -> torch.Tensor:
        if device not in self._places:
            self._places[device] = torch.tensor(self.rows).argsort().to(device)
        return self._places[device]


def rows_text(rows: Sequence[int]) -> str:
    """The rows for a plan, neighbours as 17-25."""
    edges = [0, *(i for i, (a, b) in enumerate(pairwise(rows), 1) if b != a + 1), len(rows)]
    runs = [(rows[start], rows[end - 1]) for start, end in pairwise(edges)]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def rows_of_text(text: str) -> list[int]:
    """Reads `rows_text`. Raises PlanError for what names no row or not every row once."""
    rows: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if found is None:
            raise PlanError(f"vocabulary_rows: rows are as in 0-17,25, but got {part.strip()!r}")
        first, last = int(found[1]), int(found[2] or found[1])
        rows.extend(range(first, last + 1))
    if sorted(rows) != list(range(len(rows))):
        raise PlanError(
            f"vocabulary_rows: every row of the table once, but these {len(rows)} rows are not "
            f"0 to {len(rows) - 1}; plan again with --token-frequencies"
        )
    return rows
