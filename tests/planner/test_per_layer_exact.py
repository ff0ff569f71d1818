"""The dynamic program equals every assignment tried, on random tables."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from claw_plan.planner.choices import enumerate_all, rank
from claw_plan.planner.per_layer import LayerChoices, LayerOption, LayerTable, StepEnds
from claw_plan.planner.per_layer_exact import best_layers, solve_layers

OPTIONS = (
    LayerOption("full", "reshard"), LayerOption("none", "reshard"), LayerOption("none", "keep")
)  # fmt: skip


def random_choices(seed: int, blocks: int, *, reduces: bool, alike: bool) -> LayerChoices:
    """Costs of any size; least memory first, as options are. The ends have one option."""
    rng = np.random.default_rng(seed)
    units, count = blocks + 2, len(OPTIONS)

    def table(most: int) -> np.ndarray:
        rows = rng.integers(0, most, (units, count))
        rows[2:-1] = rows[1] if alike else rows[2:-1]
        rows[0], rows[-1] = rows[0, :1], rows[-1, :1]
        return rows

    gather = table(60)
    gather[[0, -1]] = 0
    return LayerChoices(
        table=LayerTable(
            compute_ns=table(100),
            gather_ns=gather,
            reduce_ns=rng.integers(0, 120, units) * reduces,
            held_bytes=np.sort(table(50), axis=1),
            forward_bytes=table(90),
            kernel_bytes=table(90),
            reduced_bytes=rng.integers(0, 60, units),
            coming_bytes=table(40),
        ),
        ends=StepEnds(
            num_microbatches=int(rng.integers(1, 4)),
            forward_ns=200,
            accumulate_ns=5,
            root_reduce_ns=int(rng.integers(0, 50)),
            reduces_ns=int(rng.integers(0, 900)),
            after_ns=11,
            always_bytes=40,
            end_bytes=30,
        ),
        options=OPTIONS,
        capacity_bytes=int(rng.integers(40, 60 + 45 * blocks)),
    )


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.booleans(), st.booleans())
def test_it_equals_brute_force(seed, blocks, reduces, alike):
    choices = random_choices(seed, blocks, reduces=reduces, alike=alike)
    scores = choices.scores(enumerate_all(choices))
    best = int(rank(scores)[0])
    solved = solve_layers(choices)
    if scores.excess_bytes[best]:
        assert solved is None
        return
    assert solved is not None and solved.is_proven
    found = choices.scores(np.array([solved.assignment]))
    assert found.excess_bytes[0] == 0
    assert found.time_ns[0] == scores.time_ns[best]


def test_with_memory_for_all_every_block_takes_its_fastest():
    choices = replace(random_choices(3, 5, reduces=False, alike=True), capacity_bytes=10**9)
    best = choices.scores(enumerate_all(choices)).time_ns.min()
    assert choices.scores(np.array([best_layers(choices)])).time_ns[0] == best
