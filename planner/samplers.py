"""Searchers over `Choices` under one contract, by name: what `--search` offers.

Whatever the searcher: the start and what is known are evaluated first, so the answer is never
worse; a problem with no more assignments than the budget is enumerated, so there the answer is
the best; random numbers come from the seed alone, so it is the same every time. The budget is a
number of evaluations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from claw_plan.planner.choices import (
    Answer,
    Assignment,
    Choices,
    Evaluations,
    enumerate_all,
    size_of,
)
from claw_plan.planner.errors import PlanError
from claw_plan.simulator.task_graph import Int

SEARCHERS = ("auto", "exhaustive", "tpe", "cmaes", "nsga2", "rl", "anneal", "random")

OPTUNA = ("tpe", "cmaes", "nsga2", "random")
"""Those that Optuna samples, and so can be kept in a storage and resumed."""

ROWS = 4096
"""Assignments scored at once."""

Searcher = Callable[[Evaluations, int], None]


def search_choices(
    choices: Choices,
    searcher: str = "auto",
    *,
    budget: int = 1000,
    seed: int = 0,
    known: Sequence[Assignment] = (),
    storage: str | None = None,
    policy: Path | None = None,
) -> Answer:
    """The best assignment a searcher finds with so many evaluations, start and `known` counted.

    `storage` keeps the trials of an Optuna study, which the same call resumes; `policy` is the
    file of a pre-trained policy.
    """
    if searcher not in SEARCHERS:
        raise PlanError(f"--search is one of {', '.join(SEARCHERS)}, but got {searcher!r}")
    if storage is not None and searcher not in OPTUNA:
        raise PlanError(
            f"--storage keeps the studies of {', '.join(OPTUNA)}, but --search is {searcher}"
        )
    if policy is not None and searcher != "rl":
        raise PlanError(f"--policy is read by --search rl, but --search is {searcher}")
    if searcher == "exhaustive":
        budget = max(budget, size_of(choices) + len(known) + 1)
    evaluations = Evaluations(choices, budget)
    evaluations.ask([choices.start, *known])
    if searcher == "exhaustive" or size_of(choices) <= evaluations.left:
        _try_all(evaluations)
    else:
        searcher_of(searcher, storage, policy)(evaluations, seed)
    return evaluations.best


def searcher_of(searcher: str, storage: str | None, policy: Path | None) -> Searcher:
    """What draws and asks; optuna and the policies of torch are only imported when named."""
    if searcher in OPTUNA:
        from claw_plan.planner.samplers_optuna import optuna_searcher

        return optuna_searcher(searcher, storage)
    if searcher == "rl":
        from claw_plan.planner.policy_search import policy_searcher

        return policy_searcher(policy)
    return anneal if searcher == "anneal" else _solve_or_anneal


def _try_all(evaluations: Evaluations) -> None:
    rows = enumerate_all(evaluations.choices)
    for first in range(0, len(rows), ROWS):
        evaluations.ask(rows[first : first + ROWS])


def _solve_or_anneal(evaluations: Evaluations, seed: int) -> None:
    """The problem's own exact method; without one, descent and annealing (docs/samplers.md)."""
    solution = evaluations.choices.solve()
    if solution is not None:
        evaluations.ask([solution])
        return
    _descend(evaluations)
    if evaluations.left:
        anneal(evaluations, seed)


def _descend(evaluations: Evaluations) -> None:
    """Moves one variable at a time to a neighbouring option, until none is better."""
    sizes = evaluations.choices.sizes
    improved = True
    while improved and evaluations.left:
        before = evaluations.best
        for variable, size in enumerate(sizes):
            at = evaluations.best.assignment
            for option in (at[variable] - 1, at[variable] + 1):
                if 0 <= option < size and evaluations.left:
                    evaluations.ask([(*at[:variable], option, *at[variable + 1 :])])
        improved = evaluations.best != before


HOTTEST, COLDEST = 0.003, 1e-5
"""First and last temperature, as fractions of the start's time: differences between neighbours
are of that size."""


def anneal(evaluations: Evaluations, seed: int) -> None:
    """Simulated annealing (Kirkpatrick et al. 1983, Science 220) from the best known.

    A move gives one variable another option, or exchanges those of two, or lets a run of
    neighbours choose alike. The temperature falls geometrically over the budget.
    """
    rng = np.random.default_rng(seed)
    sizes = np.array(evaluations.choices.sizes, np.int64)
    at = np.array(evaluations.best.assignment, np.int64)
    cost, steps = evaluations.best_cost, evaluations.left
    for step in range(steps):
        heat = HOTTEST * (COLDEST / HOTTEST) ** (step / max(1, steps - 1))
        near = _moved(at, sizes, rng)
        new = float(evaluations.cost(evaluations.ask(near[None]))[0])
        if new <= cost or rng.random() < math.exp((cost - new) / heat):
            at, cost = near, new


def check_storage(storage: str | None) -> None:
    """Raises PlanError for what no study can be kept in; before anything is searched."""
    if storage is None:
        return
    kind, is_url, rest = storage.partition(":///")
    path = Path(rest if is_url else storage).absolute()
    if "://" in storage and kind != "sqlite":
        raise PlanError(f"--storage {storage}: give a file, or a database as sqlite:///study.db")
    if not path.parent.is_dir():
        raise PlanError(
            f"--storage {storage}: there is no folder {str(path.parent)!r}; make it, or name a "
            "file in one that is there"
        )
    if path.is_dir():
        raise PlanError(f"--storage {storage}: that is a folder; name a file in it")


def _moved(at: Int, sizes: Int, rng: np.random.Generator) -> Int:
    """A neighbour."""
    near = at.copy()
    kind, first = rng.integers(3), int(rng.integers(len(at)))
    if kind == 0 or len(at) == 1:
        near[first] = (near[first] + rng.integers(1, max(2, sizes[first]))) % sizes[first]
    elif kind == 1:
        other = int(rng.integers(len(at)))
        near[first] = min(at[other], sizes[first] - 1)
        near[other] = min(at[first], sizes[other] - 1)
    else:
        stop = first + int(rng.integers(1, 1 + max(1, len(at) // 4)))
        near[first:stop] = np.minimum(rng.integers(sizes[first]), sizes[first:stop] - 1)
    return near
