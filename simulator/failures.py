"""A long training under failures, played event by event with SimPy.

It is the oracle of the closed form in `planner.goodput`: work in intervals, a checkpoint after
each, failures at exponential times whatever is being done; a failure loses the work since the last
checkpoint and costs a restart, which may fail too.
"""

from __future__ import annotations

import random
from collections.abc import Generator

import simpy

from claw_plan.simulator.errors import SimulationError

MOST_FAILURES = 100_000
"""A training that meets more is not going to end."""


def training_time(
    work: float, interval: float, checkpoint: float, restart: float, mtbf: float, seed: int
) -> float:
    """How long `work` takes; all in one unit of time. Raises SimulationError if it never ends."""
    env = simpy.Environment()
    training = env.process(_train(env, work, interval, checkpoint, restart))
    env.process(_fail(env, training, random.Random(seed), mtbf))
    env.run(until=training)
    return float(env.now)


def _train(
    env: simpy.Environment, work: float, interval: float, checkpoint: float, restart: float
) -> Generator[simpy.Event, None, None]:
    done, is_down = 0.0, False
    while done < work:
        piece = min(interval, work - done)
        try:
            if is_down:
                yield env.timeout(restart)
                is_down = False
            yield env.timeout(piece + checkpoint)
            done += piece
        except simpy.Interrupt:
            is_down = True


def _fail(
    env: simpy.Environment, training: simpy.Process, draw: random.Random, mtbf: float
) -> Generator[simpy.Event, None, None]:
    for _ in range(MOST_FAILURES):
        yield env.timeout(draw.expovariate(1 / mtbf))
        if not training.is_alive:
            return
        training.interrupt()
    raise SimulationError(f"{MOST_FAILURES} failures and the training has not ended; {mtbf=}")
