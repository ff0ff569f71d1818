"""Finished runs become a better Profile: their measurements are merged in, constants refitted.

`learn` closes the circle. Every run's plan is predicted again from the merged measurements, with
neutral constants and with each moved a little; what is left between predicted and measured steps
then gives the device's constants (`profiles.fit`). The answer shows each run's measured step
beside the prediction before and after.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from claw_plan.executor.run_files import (
    MEASUREMENTS,
    PLAN,
    RESULT,
    read_result,
)
from claw_plan.planner.plan import Plan, load_plan
from claw_plan.planner.planning import simulate_under
from claw_plan.profiles.cluster_file import cluster_from_mapping
from claw_plan.profiles.errors import InputError
from claw_plan.profiles.fit import NEUTRAL, StepTime, fit_constants
from claw_plan.profiles.profile import Profile, load_profile, save_profile
from claw_plan.profiles.units import NS_PER_MS

PROBES = {
    "op_scale": 1.05,
    "collective_scale": 1.05,
    "op_overhead_ns": 10_000.0,
    "collective_overhead_ns": 100_000.0,
}
"""Values at which the slope of a prediction is taken: small against a step, large against a ns.
A step's own overhead is simply added."""

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedRun:
    """One run: its measured step, and the prediction for it before and after learning.

    Where `unlike_plan` says why its steps are not those of the plan, only the times of its kernels
    were learnt.
    """

    run: str
    knobs: str
    measured_ns: int
    before_ns: int
    after_ns: int
    unlike_plan: str = ""

    def error(self, predicted_ns: int) -> float:
        """How far a prediction is off, as a fraction of the measured step."""
        return predicted_ns / self.measured_ns - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What `learn` did. `skipped` are folders without a finished run."""

    profile: Path
    measurements: int
    runs: tuple[LearnedRun, ...]
    skipped: tuple[str, ...]

    def median_error(self, after: bool) -> float | None:
        """The middle of the absolute errors after learning, or before, of runs as planned."""
        errors = [
            abs(run.error(run.after_ns if after else run.before_ns))
            for run in self.runs
            if not run.unlike_plan
        ]
        return statistics.median(errors) if errors else None


def learn(
    folders: Sequence[Path],
    profile_path: Path | None = None,
    progress: Progress = lambda what, done: None,
) -> Learned:
    """Merges the runs into the profile (by default `<cluster name>.profile`) and refits it.

    Raises InputError when no folder holds a finished run, or when the runs are of several
    clusters and no profile is named.
    """
    runs = {folder: load_plan(folder / PLAN) for folder in folders if is_finished(folder)}
    if not runs:
        raise InputError(
            f"no finished run in {', '.join(map(str, folders)) or 'nothing'}; name folders that "
            "`claw-plan run` wrote, as in runs/*"
        )
    path = profile_path or default_profile_path(runs.values())
    before = load_profile(path) if path.exists() else Profile(name=path.stem)
    merged = before
    for folder in runs:
        if (folder / MEASUREMENTS).is_file():
            merged = merged.merge(load_profile(folder / MEASUREMENTS))
    progress("predicting with what was known", 0.1)
    results = {folder: read_result(folder) for folder in runs}
    measured = {
        folder: round(result.step_time_ms["median"] * NS_PER_MS)
        for folder, result in results.items()
    }
    trials = [before, *(_with_constants(merged, runs, values) for values in _trial_constants())]
    known: dict[Path, int] = {}
    steps: list[StepTime] = []
    for count, (folder, plan) in enumerate(runs.items()):
        progress("predicting with the new measurements", 0.1 + 0.6 * count / len(runs))
        known[folder], *tried = _predict(folder, trials)
        if not results[folder].unlike_plan:
            steps.append(_step_time(plan, tried, measured[folder]))
    fitted = merged.merge(Profile(constants=fit_constants(steps)))
    progress("predicting with the fitted constants", 0.7)
    after = {folder: _predict(folder, [fitted])[0] for folder in runs}
    save_profile(fitted, path)
    return Learned(
        profile=path,
        measurements=len(fitted.measurements) - len(before.measurements),
        runs=tuple(
            LearnedRun(
                run=str(folder),
                knobs=plan.knobs().short(),
                measured_ns=measured[folder],
                before_ns=known[folder],
                after_ns=after[folder],
                unlike_plan=results[folder].unlike_plan,
            )
            for folder, plan in runs.items()
        ),
        skipped=tuple(str(folder) for folder in folders if folder not in runs),
    )


def is_finished(folder: Path) -> bool:
    """Whether a run that ended well is recorded there."""
    return (folder / PLAN).is_file() and (folder / RESULT).is_file()


def default_profile_path(plans: Iterable[Plan]) -> Path:
    """The profile the plans were made with, else `<cluster name>.profile`, in this folder."""
    names = {_profile_name(plan) for plan in plans}
    if len(names) > 1:
        raise InputError(
            f"the runs are of several clusters ({', '.join(sorted(names))}); name one with "
            "--profile, or learn from each alone"
        )
    return Path(names.pop())


def _profile_name(plan: Plan) -> str:
    known = plan.prediction.profile if plan.prediction else ""
    return known if known.endswith(".profile") else f"{plan.cluster['name']}.profile"


def _predict(folder: Path, profiles: Sequence[Profile]) -> list[int]:
    """The step time of a run's plan under each profile."""
    return [scored.step_time_ns for scored in simulate_under(folder / PLAN, profiles)]


def _trial_constants() -> list[dict[str, float]]:
    """All neutral, then each probe alone."""
    return [NEUTRAL, *(NEUTRAL | {name: value} for name, value in PROBES.items())]


def _with_constants(
    profile: Profile, runs: dict[Path, Plan], values: Mapping[str, float]
) -> Profile:
    return replace(profile, constants={_device(plan): values for plan in runs.values()})


def _device(plan: Plan) -> str:
    return cluster_from_mapping(plan.cluster, PLAN).nodes[0].device.name


def _step_time(plan: Plan, tried: Sequence[int], measured: int) -> StepTime:
    neutral, *probed = tried
    slopes = {
        name: max(0.0, (moved - neutral) / (value - NEUTRAL[name]))
        for (name, value), moved in zip(PROBES.items(), probed, strict=True)
    }
    return StepTime(
        device=_device(plan),
        measured_ns=measured,
        predicted_ns=neutral,
        slopes=slopes | {"step_overhead_ns": 1.0},
    )
