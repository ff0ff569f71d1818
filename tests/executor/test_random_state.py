from __future__ import annotations

import random

import numpy as np
import torch

from claw_plan.executor.random_state import RandomStream, random_state, seed_all, set_random_state


def drawn() -> list[float]:
    # A normal number leaves a second one behind in Python's and NumPy's generators.
    return [torch.rand(()).item(), random.gauss(0, 1), float(np.random.normal())]


def test_generators_go_on_where_the_state_was_taken() -> None:
    seed_all(1)
    drawn()
    state = random_state()
    expected = drawn()
    seed_all(2)
    set_random_state(state)
    assert drawn() == expected


def test_a_stream_depends_on_its_seed_alone_and_leaves_the_others_alone() -> None:
    seed_all(1)
    expected = [drawn(), drawn()]
    seed_all(5)
    outside = [drawn(), drawn()]
    seed_all(5)
    stream = RandomStream(1)
    found, between = [], []
    for _ in range(2):
        with stream.drawing():
            found.append(drawn())
        between.append(drawn())
    assert found == expected
    assert between == outside
