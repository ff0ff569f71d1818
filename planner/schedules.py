"""A schedule's name becomes the actions of each pipeline rank, in PyTorch's text.

plan.yaml keeps `{name, stages_per_rank, num_microbatches}`; here it is expanded to rows of
actions, `2F0` (forward of microbatch 0 on stage 2) or `2B0` (its whole backward). The lowering
and the executor both interpret these rows and decide nothing themselves. Rows that a person has
edited lie beside the plan in `<plan>.schedule.csv`, one line per rank, and pass `check_actions`
before anything else sees them: PyTorch's own loader takes repeated actions, microbatches out of
range and text behind a cell, and then fails on one rank while the others wait.

All schedules here have one shape: some forwards ahead, then one backward and one forward in turn,
then the backwards that are left. GPipe and 1F1B have one stage per rank and differ in how many
forwards are ahead; Interleaved1F1B has several stages per rank, pp apart, and goes round them.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from claw_plan.planner.errors import PlanError
from claw_plan.profiles.errors import near_matches
from claw_plan.profiles.files import read_text, write_atomic

FORWARD, BACKWARD = "F", "B"

INTERLEAVED = "Interleaved1F1B"

_CELL = re.compile(r"([0-9]{1,9})([FB])([0-9]{1,9})")


class Action(NamedTuple):
    """One computation of a pipeline rank; `str` gives PyTorch's text."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Rows = tuple[tuple[Action, ...], ...]
"""The actions of rank 0, 1, … in the order they run."""


def _ahead_gpipe(stage: int, num_stages: int, num_microbatches: int) -> int:
    return num_microbatches


def _ahead_1f1b(stage: int, num_stages: int, num_microbatches: int) -> int:
    """Enough that the first backward arrives when the forwards ahead are done.

    Source: PyTorch, torch/distributed/pipelining/schedules.py, Schedule1F1B: its warm-up chunks.
    """
    return min(num_microbatches, num_stages - stage)


_AHEAD: dict[str, Callable[[int, int, int], int]] = {"GPipe": _ahead_gpipe, "1F1B": _ahead_1f1b}


def in_flight(name: str, stage: int, num_stages: int, num_microbatches: int) -> int:
    """Most microbatches whose activations the stage holds at once: all forwards ahead."""
    if name not in _AHEAD:
        raise PlanError(f"there is no schedule {name!r}; {near_matches(name, _AHEAD)}")
    if num_stages < 1 or num_microbatches < 1 or not 0 <= stage < num_stages:
        raise PlanError(
            f"a schedule has stages and microbatches, at least one of each, and counts stages "
            f"from 0; got {stage=} {num_stages=} {num_microbatches=}"
        )
    return _AHEAD[name](stage, num_stages, num_microbatches)


def schedule_actions(
    name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int = 1
) -> Rows:
    """The rows of a schedule by PyTorch's name, rank r running stages r, r + num_ranks, ….

    Raises PlanError for a name that is not known, when there is no stage or microbatch, and for
    numbers of stages and microbatches that the schedule does not take.
    """
    if name == INTERLEAVED:
        return _interleaved(num_ranks, num_microbatches, stages_per_rank)
    if stages_per_rank != 1:
        raise PlanError(f"{name} has one stage per rank, but got {stages_per_rank=}")
    num_stages = num_ranks
    aheads = [in_flight(name, stage, num_stages, num_microbatches) for stage in range(num_stages)]
    if not aheads:
        raise PlanError(f"a schedule has at least one stage; got {num_stages=}")
    return tuple(_row(stage, num_microbatches, ahead) for stage, ahead in enumerate(aheads))


def _row(stage: int, num_microbatches: int, ahead: int) -> tuple[Action, ...]:
    actions = [Action(stage, FORWARD, index) for index in range(ahead)]
    for index in range(num_microbatches):
        actions.append(Action(stage, BACKWARD, index))
        if ahead + index < num_microbatches:
            actions.append(Action(stage, FORWARD, ahead + index))
    return tuple(actions)


def _interleaved(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Rows:
    """Rounds of microbatches over the rank's stages, in order forward and in reverse backward.

    Source: Narayanan et al. 2021 (arXiv 2104.04473, section 2.2), as PyTorch has it
    (torch/distributed/pipelining/schedules.py, ScheduleInterleaved1F1B).
    """
    if min(num_ranks, num_microbatches, stages_per_rank) < 1:
        raise PlanError(
            f"a schedule has ranks, stages and microbatches, at least one of each; got "
            f"{num_ranks=} {stages_per_rank=} {num_microbatches=}"
        )
    rounds = max(1, num_microbatches // num_ranks)
    in_round, rest = divmod(num_microbatches, rounds)
    if rest:
        raise PlanError(
            f"{INTERLEAVED} runs its microbatches in {rounds} equal rounds, but "
            f"{num_microbatches} do not divide by {rounds}; take a multiple of {num_ranks}"
        )
    total = num_microbatches * stages_per_rank

    def action(rank: int, kind: str, step: int) -> Action:
        turn, place = divmod(step, in_round)
        chunk = turn % stages_per_rank
        chunk = chunk if kind == FORWARD else stages_per_rank - 1 - chunk
        microbatch = turn // stages_per_rank * in_round + place
        return Action(chunk * num_ranks + rank, kind, microbatch)

    rows = []
    for rank in range(num_ranks):
        ahead = interleaved_ahead(rank, num_ranks, num_microbatches, stages_per_rank)
        row = [action(rank, FORWARD, step) for step in range(ahead)]
        for step in range(total):
            if ahead + step < total:
                row.append(action(rank, FORWARD, ahead + step))
            row.append(action(rank, BACKWARD, step))
        rows.append(tuple(row))
    return tuple(rows)


def interleaved_ahead(
    rank: int, num_ranks: int, num_microbatches: int, stages_per_rank: int
) -> int:
    """Forwards that a rank of the interleaved schedule runs before its first backward's turn."""
    in_round = num_microbatches // max(1, num_microbatches // num_ranks)
    ahead = (stages_per_rank - 1) * in_round + 2 * (num_ranks - 1 - rank)
    return min(ahead, num_microbatches * stages_per_rank)


def parse_action(text: str) -> Action:
    """'2F0' to an action; blanks around it are no matter. Raises PlanError for anything else."""
    match = _CELL.fullmatch(text.strip())
    if match is None:
        raise PlanError(
            f"an action is <stage>F<microbatch> (forward) or <stage>B<microbatch> (backward), "
            f"as in 2F0, and nothing more; got {text!r}"
        )
    return Action(int(match[1]), match[2], int(match[3]))


def check_actions(
    rows: Sequence[Sequence[Action]], num_stages: int, num_microbatches: int
) -> None:
    """Raises PlanError unless the rows train every microbatch once on every stage.

    Each stage lives on one rank, each rank has work, each (stage, microbatch) has one forward
    and, later, one backward, and ranks that wait for each other's results all get through.
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
    if action.kind not in (FORWARD, BACKWARD):
        raise PlanError(f"{where}: an action is F or B, but got {action.kind!r}")
    if not 0 <= action.stage < num_stages:
        raise PlanError(f"{where}: the stages are 0 to {num_stages - 1}")
    if not 0 <= action.microbatch < num_microbatches:
        raise PlanError(f"{where}: the microbatches are 0 to {num_microbatches - 1}")


def _check_counts(
    rows: Sequence[Sequence[Action]], num_stages: int, num_microbatches: int
) -> None:
    counts = Counter(action for row in rows for action in row)
    repeated = [str(action) for action, count in counts.items() if count > 1]
    missing = [
        str(action)
        for stage in range(num_stages)
        for kind in (FORWARD, BACKWARD)
        for index in range(num_microbatches)
        if (action := Action(stage, kind, index)) not in counts
    ]
    for what, cells in (("repeated", repeated), ("missing", missing)):
        if cells:
            more = f" and {len(cells) - 5} more" if len(cells) > 5 else ""
            raise PlanError(
                f"{num_stages} stages run each of {num_microbatches} microbatches once forward "
                f"and once backward; {what}: {', '.join(cells[:5])}{more}"
            )


def action_needs(action: Action, num_stages: int) -> tuple[Action, ...]:
    """The actions whose results this one takes: its own forward and its neighbour's result."""
    stage, kind, index = action
    if kind == FORWARD:
        return (Action(stage - 1, FORWARD, index),) if stage else ()
    own = Action(stage, FORWARD, index)
    return (own,) if stage == num_stages - 1 else (own, Action(stage + 1, BACKWARD, index))


def _check_order(rows: Sequence[Sequence[Action]], num_stages: int) -> None:
    """Runs the rows, without time: a rank goes on while its next action has what it needs."""
    for rank, row in enumerate(rows):
        seen: set[Action] = set()
        for action in row:
            if action.kind == BACKWARD and action._replace(kind=FORWARD) not in seen:
                raise PlanError(f"rank {rank}: {action} comes before its forward")
            seen.add(action)
    done: set[Action] = set()
    next_index = [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while next_index[rank] < len(row) and done.issuperset(
                action_needs(row[next_index[rank]], num_stages)
            ):
                done.add(row[next_index[rank]])
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
