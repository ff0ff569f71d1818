"""Our rows are PyTorch's, action for action."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining import schedules as torchs

from claw_plan.planner.schedule_rows import microbatches_per_round, num_rounds
from claw_plan.planner.schedules import SCHEDULES, schedule_actions, schedule_refusal

MULTI = [name for name, schedule in SCHEDULES.items() if schedule.most_stages != 1]


def rows_of_torch(
    name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int
) -> list[list[str]]:
    """What torch's class computes, without the pauses it pads with; pairs one by one."""
    kind = getattr(torchs, f"Schedule{name}")
    schedule = kind.__new__(kind)
    schedule.pp_group_size, schedule.n_local_stages = num_ranks, stages_per_rank
    schedule._n_microbatches = num_microbatches
    schedule.num_stages = schedule._num_stages = num_ranks * stages_per_rank
    rounds = max(1, num_microbatches // num_ranks)
    schedule.microbatches_per_round = num_microbatches // rounds
    rows = []
    for rank in range(num_ranks):
        row = [a for a in schedule._calculate_single_rank_operations(rank) if a is not None]
        rows.append([str(part) for action in row for part in action.sub_actions or (action,)])
    return rows


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", MULTI)
def test_rows_are_torchs(name: str, num_ranks: int) -> None:
    compared = 0
    for stages_per_rank in (1, 2, 3, 5):
        for count in range(1, 33):
            if not schedule_refusal(name, num_ranks, count, stages_per_rank):
                rows = schedule_actions(name, num_ranks, count, stages_per_rank)
                ours = [[str(action) for action in row] for row in rows]
                assert ours == rows_of_torch(name, num_ranks, count, stages_per_rank)
                compared += 1
    assert compared > 10


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("Interleaved1F1B",
         ["0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"]),
        (
            "ZBVZeroBubble",
            ["0F0 0F1 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 0I1 0W1",
             "1F0 2F0 1F1 2F1 2I0 2W0 1I0 1W0 2I1 2W1 1I1 1W1"],
        ),
    ],
)  # fmt: skip
def test_the_text_of_two_ranks_and_two_microbatches(name: str, rows: list[str]) -> None:
    found = schedule_actions(name, 2, 2, 2)
    assert [" ".join(map(str, row)) for row in found] == rows


def test_rounds_are_equal_and_at_least_as_long_as_the_pipeline() -> None:
    assert (num_rounds(4, 10), microbatches_per_round(4, 10)) == (2, 5)
    assert (num_rounds(4, 3), microbatches_per_round(4, 3)) == (1, 3)
