"""What rows of actions must obey, and their file.

Rows that a person has edited lie beside the plan in `<plan>.schedule.csv`, one line per rank, and
pass `check_actions` before anything else sees them: PyTorch's own loader takes repeated actions,
microbatches out of range and text behind a cell, and then fails on one rank while the others
wait.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from claw_plan.planner.actions import (
    FORWARD,
    KINDS,
    Action,
    Rows,
    message_for,
    message_of,
    own_before,
    parse_action,
)
from claw_plan.planner.errors import PlanError
from claw_plan.profiles.files import read_text, write_atomic


def check_actions(
    rows: Sequence[Sequence[Action]], num_stages: int, num_microbatches: int
) -> None:
    """Raises PlanError unless the rows train every microbatch once on every stage.

    Each stage lives on one rank, each rank has work, each (stage, microbatch) has one forward
    and, later, one backward, whole or as I and then W; and ranks that wait for each other's
    results all get through.
    """
    rank_of: dict[int, int] = {}
    for rank, row in enumerate(rows):
        if not row:
            raise PlanError(f"every rank has actions, but row {rank} of {len(rows)} is empty")
        for action in row:
            _check_range(action, rank, num_stages, num_microbatches)
            home = rank_of.setdefault(action.stage, rank)
            if home != rank:
                raise PlanError(
                    f"a stage lives on one rank, but stage {action.stage} is on rank {home} and, "
                    f"by {action}, on rank {rank}"
                )
    _check_counts(rows, num_stages, num_microbatches)
    _check_order(rows, num_stages)


def _check_range(action: Action, rank: int, num_stages: int, num_microbatches: int) -> None:
    where = f"rank {rank}: {action}"
    if action.kind not in KINDS:
        raise PlanError(f"{where}: an action is one of {', '.join(KINDS)}, not {action.kind!r}")
    if not 0 <= action.stage < num_stages:
        raise PlanError(f"{where}: the stages are 0 to {num_stages - 1}")
    if not 0 <= action.microbatch < num_microbatches:
        raise PlanError(f"{where}: the microbatches are 0 to {num_microbatches - 1}")


def _check_counts(
    rows: Sequence[Sequence[Action]], num_stages: int, num_microbatches: int
) -> None:
    counts = Counter(action for row in rows for action in row)
    repeated = [str(action) for action, count in counts.items() if count > 1]
    missing = []
    for stage in range(num_stages):
        for index in range(num_microbatches):
            whole, first, second = (Action(stage, kind, index) for kind in "BIW")
            if Action(stage, FORWARD, index) not in counts:
                missing.append(f"{stage}F{index}")
            parts = [part for part in (first, second) if part in counts]
            if whole in counts:
                repeated += [f"{part} beside {whole}" for part in parts]
            elif len(parts) != 2:
                missing.append(str(second if first in parts else first if parts else whole))
    for what, cells in (("repeated", repeated), ("missing", missing)):
        if cells:
            more = f" and {len(cells) - 5} more" if len(cells) > 5 else ""
            raise PlanError(
                f"{num_stages} stages run each of {num_microbatches} microbatches once forward "
                f"and once backward; {what}: {', '.join(cells[:5])}{more}"
            )


def _check_order(rows: Sequence[Sequence[Action]], num_stages: int) -> None:
    """Runs the rows, without time: a rank goes on while its next action has what it needs."""
    for rank, row in enumerate(rows):
        seen: set[tuple[int, str, int]] = set()
        for action in row:
            before = own_before(action)
            if before is not None and before not in seen:
                what = "forward" if before[1] == FORWARD else "I"
                raise PlanError(f"rank {rank}: {action} comes before its {what}")
            seen.add(action)
    sent: set[tuple[int, str, int] | None] = {None}
    next_index = [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while (
                next_index[rank] < len(row)
                and message_for(row[next_index[rank]], num_stages) in sent
            ):
                sent.add(message_of(row[next_index[rank]]))
                next_index[rank] += 1
                moved = True
    waiting = [
        f"rank {rank} at {row[next_index[rank]]}"
        for rank, row in enumerate(rows)
        if next_index[rank] < len(row)
    ]
    if waiting:
        raise PlanError(f"the schedule never ends, its ranks wait: {', '.join(waiting)}")


def write_schedule_csv(rows: Sequence[Sequence[Action]], path: Path) -> None:
    """Writes one line per rank, a cell per action, as PyTorch's loader takes it. Atomic."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([str(a) for a in row] for row in rows)
    write_atomic(path, text.getvalue())


def read_schedule_csv(path: Path, num_stages: int, num_microbatches: int) -> Rows:
    """Reads and checks rows that a person may have edited; empty cells are pauses, left out.

    Raises InputError for a file that cannot be read, PlanError with the file for rows that are
    not right, and with line and cell for one that is no action.
    """
    try:
        lines = list(csv.reader(read_text(path).splitlines()))
    except csv.Error as error:
        raise PlanError(f"{path}: the rows are no CSV: {error}") from None
    rows: list[tuple[Action, ...]] = []
    for line, cells in enumerate(lines, start=1):
        row: list[Action] = []
        for column, cell in enumerate(cells, start=1):
            try:
                row += [parse_action(cell)] if cell.strip() else []
            except PlanError as error:
                raise PlanError(f"{path}, line {line}, cell {column}: {error}") from None
        rows.append(tuple(row))
    try:
        check_actions(rows, num_stages, num_microbatches)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None
    return tuple(rows)
