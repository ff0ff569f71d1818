"""Optuna's samplers over `Choices`: TPE, CMA-ES, NSGA-II and random; studies can be resumed.

TPE and NSGA-II are told of missing memory as a constraint (Deb's rule: what fits first, then who
misses least); CMA-ES knows none and is given `Evaluations.cost`. Variables are integers, for their
options are in the order of the memory they take. TPE: Bergstra et al. 2011, NeurIPS 24. CMA-ES:
Hansen 2016, arXiv 1604.00772, with the margin for integers of Hamano et al. 2022, arXiv
2205.13482. NSGA-II: Deb et al. 2002, IEEE TEVC 6(2).
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from claw_plan.planner.choices import Assignment, Choices, Evaluations
from claw_plan.planner.samplers import check_storage

MISSING = "missing_bytes"
"""The constraint's name, and the attribute's by which a resumed study knows what fits."""


def optuna_searcher(name: str, storage: str | None) -> Callable[[Evaluations, int], None]:
    """A searcher of that name; with a storage (a database's URL or a journal file) it resumes."""

    def search(evaluations: Evaluations, seed: int) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = _study(name, storage, evaluations, seed)
        distributions = _distributions(evaluations.choices)
        while evaluations.left:
            trial = study.ask(distributions)
            values = tuple(trial.params[key] for key in distributions)
            scores = evaluations.ask([values])
            trial.set_user_attr(MISSING, int(scores.excess_bytes[0]))
            if name == "cmaes":
                value = evaluations.cost(scores)[0]
            else:
                trial.set_constraint(MISSING, float(scores.excess_bytes[0]))
                value = scores.time_ns[0]
            study.tell(trial, float(value))

    return search


def _distributions(choices: Choices) -> dict[str, BaseDistribution]:
    return {f"x{i:03}": IntDistribution(0, size - 1) for i, size in enumerate(choices.sizes)}


def _study(name: str, storage: str | None, evaluations: Evaluations, seed: int) -> optuna.Study:
    """A new study that begins with the best known, or the one that the storage has.

    Of an old one the best trial is evaluated again, so that the answer is no worse than it.
    """
    kept = _storage(storage)
    title = f"{name}-{_fingerprint(evaluations.choices)}-{seed}"
    old: Sequence[FrozenTrial] = ()
    if kept is not None:
        known = optuna.get_all_study_names(storage=kept)
        if title in known:
            study = optuna.load_study(study_name=title, storage=kept)
            old = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    # A resumed study must not draw again what it has drawn.
    sampler = _sampler(name, seed + len(old), evaluations)
    study = optuna.create_study(
        study_name=title, storage=kept, sampler=sampler, load_if_exists=True
    )
    if old:
        best = min(old, key=lambda trial: (trial.user_attrs[MISSING], trial.value or 0.0))
        evaluations.ask([tuple(best.params.values())])
    else:
        study.enqueue_trial(_params(evaluations.choices, evaluations.best.assignment))
    return study


def _params(choices: Choices, assignment: Assignment) -> dict[str, Any]:
    return dict(zip(_distributions(choices), assignment, strict=True))


def _sampler(name: str, seed: int, evaluations: Evaluations) -> BaseSampler:
    with warnings.catch_warnings():
        # Where CMA-ES starts is set by x0, which Optuna 5 warns of and 6 will take away.
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # the margin
        if name == "tpe":
            return optuna.samplers.TPESampler(seed=seed)
        if name == "nsga2":
            return optuna.samplers.NSGAIISampler(seed=seed)
        if name == "cmaes":
            start = _params(evaluations.choices, evaluations.best.assignment)
            return optuna.samplers.CmaEsSampler(
                seed=seed, x0=start, sigma0=_sigma(evaluations.choices), with_margin=True
            )
        return optuna.samplers.RandomSampler(seed=seed)


def _sigma(choices: Choices) -> float:
    """A sixth of the widest range, as Optuna's own default has it of the narrowest."""
    return max(0.5, (max(choices.sizes) - 1) / 6)


def _fingerprint(choices: Choices) -> str:
    """Names the problem: its shape and the scores of its start and its dearest assignment."""
    ends = np.array([choices.start, [size - 1 for size in choices.sizes]], np.int64)
    scores = choices.scores(ends)
    text = repr((choices.sizes, scores.time_ns.tolist(), scores.excess_bytes.tolist()))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _storage(storage: str | None) -> optuna.storages.BaseStorage | None:
    """A database by its URL, else a journal in a file."""
    if storage is None:
        return None
    check_storage(storage)
    if ":///" in storage:
        return optuna.storages.get_storage(storage)
    return optuna.storages.JournalStorage(JournalFileBackend(storage))
