"""The whole way from a model file to a plan: trace, search, baselines, explanation.

`make_plan` is what the command line calls, and what another program would; `simulate_plan`
scores a plan that exists, edited or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from claw_plan.planner.asynchronous_search import search_asynchronous, with_asynchronous
from claw_plan.planner.averaging_choices import training_refusal
from claw_plan.planner.baseline import Baseline, baseline_of, training_of
from claw_plan.planner.baselines.recognise import read_setting
from claw_plan.planner.baselines.setting import Setting
from claw_plan.planner.bucket_choice import with_planned_buckets
from claw_plan.planner.context_search import ContextSearch, pinned_context
from claw_plan.planner.cut_search import search_beyond
from claw_plan.planner.errors import PlanError
from claw_plan.planner.expert_search import pinned_experts, search_experts
from claw_plan.planner.explain import binds, infeasible, reasons
from claw_plan.planner.graph import ModelGraph
from claw_plan.planner.model_source import LoadedModel, load_model
from claw_plan.planner.objective import (
    MEMORY,
    Objective,
    StepTime,
    check_met,
    objective_of,
    said_of,
)
from claw_plan.planner.pareto import Point, front, least_memory
from claw_plan.planner.pinned import batch_refusal, check_pinned, pinned_candidate, pinned_for
from claw_plan.planner.plain_baselines import agrees, plain_baselines
from claw_plan.planner.plan import Plan
from claw_plan.planner.plan_writer import write_plan
from claw_plan.planner.planned import open_planned
from claw_plan.planner.posing import Progress, pose_problem
from claw_plan.planner.problem import Problem, Training
from claw_plan.planner.refine import SearchSettings, refine
from claw_plan.planner.samplers import check_storage
from claw_plan.planner.schedules import ASYNCHRONOUS
from claw_plan.planner.score import Scored, Scorer, score_others
from claw_plan.planner.search import SearchReport
from claw_plan.planner.search_space import Choice, Searched, search_space
from claw_plan.planner.space import Space
from claw_plan.planner.supported import codecs_named
from claw_plan.profiles.cluster import Cluster
from claw_plan.profiles.cluster_file import load_cluster
from claw_plan.profiles.profile import Profile, load_profile
from claw_plan.profiles.trainer import NEUTRAL, Trainer
from claw_plan.profiles.work import PRECISIONS

DEFAULT_GLOBAL_BATCH = 256


@dataclass(frozen=True, kw_only=True)
class PlanningRequest:
    """What a plan is asked for; None leaves a setting to the cluster file or the default."""

    model: Path
    cluster: str
    build: str | None = None
    inputs: str | None = None
    global_batch: int | None = None
    seq_len: int | None = None
    precision: str | None = None
    optimizer: str | None = None
    clip_norm: float | None = None
    memory_headroom: float = 0.10
    fix: Mapping[str, Any] = field(default_factory=dict)
    profile: Path | None = None
    top: int = 3
    seed: int = 0
    time_limit_s: float | None = None
    output_folder: Path = Path()
    progress: Progress | None = None
    baseline: Path | None = None
    objective: str = "step_time"
    steps: int | None = None
    front: bool = False
    search: str | None = None
    storage: str | None = None
    policy: Path | None = None
    codecs: str = ""
    asynchronous: bool = False
    token_frequencies: Path | None = None


@dataclass(frozen=True, kw_only=True)
class PlanningResult:
    """The plan and why. A baseline is scored, or a sentence that says why it cannot be.

    `given` is the user's own setting, None where there is none.
    """

    plan: Plan
    best: Scored
    alternatives: tuple[Scored, ...]
    baselines: Mapping[str, Scored | str]
    search: SearchReport
    graph: ModelGraph
    cluster: Cluster
    assumptions: tuple[str, ...]
    reasons: tuple[str, ...]
    given: Baseline | None = None
    objective: str = "step_time"
    front: tuple[Point, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Posed:
    """A request whose model is traced: the problem, and what plans say beside it."""

    problem: Problem
    assumed: tuple[str, ...]
    model: LoadedModel
    profile: Profile | None
    profile_name: str
    setting: Setting | None


def pose(request: PlanningRequest) -> Posed:
    """Reads what is asked for. Raises InputError, TraceError or PlanError."""
    say = request.progress or (lambda what, done: None)
    cluster = load_cluster(request.cluster)
    check_pinned(request.fix, cluster)
    check_storage(request.storage)
    codecs_named(request.codecs)
    setting = read_setting(request.baseline) if request.baseline else None
    say("loading the model", 0.0)
    model = load_model(request.model, build=request.build, inputs=request.inputs)
    profile, profile_name = _find_profile(request.profile, request.cluster, cluster)
    problem, assumed = _pose(request, cluster, model, profile, setting)
    return Posed(
        problem=problem,
        assumed=(*assumed, *cluster.assumptions, *_said_of(problem.trainer)),
        model=model,
        profile=profile,
        profile_name=profile_name,
        setting=setting,
    )


def make_plan(request: PlanningRequest, posed: Posed | None = None) -> PlanningResult:
    """Plans a model; the slowest device counts for all. `posed` is the request if it is read.

    Raises InputError, TraceError, PlanError or InfeasiblePlan.
    """
    posed = posed or pose(request)
    say = request.progress or (lambda what, done: None)
    problem, setting = posed.problem, posed.setting
    request = replace(request, fix=pinned_for(problem.training.optimizer, request.fix))
    if request.objective == MEMORY:
        problem = least_memory(problem, request.fix)
    plain_scorer, problem = Scorer(problem), pinned_experts(problem, request.fix)
    problem = pinned_context(problem, posed.model, request.fix)
    scorer = Scorer(problem)
    space = Space(problem, request.fix, codecs_named(request.codecs))
    objective = objective_of(request.objective, scorer, space, request.steps)
    say("scoring the baselines", 0.2)
    plain = plain_baselines(plain_scorer, request.fix)
    given = baseline_of(setting, plain_scorer) if setting else None
    known = [choice for choice in plain.values() if agrees(choice, request.fix)]
    scorer, found = _search(request, posed.model, scorer, space, known, objective)
    problem = scorer.problem
    ranked = _with_given(found, given, request.fix, objective)
    if not ranked:
        raise infeasible(scorer, found)
    settings = SearchSettings(request.search, request.storage, request.policy, request.seed)
    refined = refine(scorer, ranked[0], request.fix, settings)
    bucketed = with_planned_buckets(
        scorer, refined.choice, request.fix, own_optimizer=posed.model.optimizer is not None
    )
    best = scorer.score(*bucketed.choice)
    check_met(objective, best.candidate, best.step_time_ns)
    others = [*ranked[1:], *(choice for _, choice in found.looked_at)][: request.top]
    alternatives, baselines = _beside(scorer, others, plain_scorer, plain)
    plan = write_plan(
        problem,
        best,
        posed.model,
        folder=request.output_folder,
        profile=posed.profile_name,
        search=asdict(found.report),
    )
    return PlanningResult(
        plan=plan,
        best=best,
        alternatives=alternatives,
        baselines=baselines,
        search=found.report,
        graph=problem.graph,
        cluster=problem.cluster,
        assumptions=(*posed.assumed, *problem.cost.assumptions, *problem.graph.assumptions),
        reasons=(
            *refined.sentences,
            *bucketed.sentences,
            *_reasons(request, objective, scorer, found, best),
        ),
        objective=request.objective.partition("=")[0],
        front=front(problem, request.fix) if request.front else (),
        given=given,
    )


def _beside(
    scorer: Scorer,
    others: Sequence[Choice],
    plain_scorer: Scorer,
    plain: Mapping[str, Choice | str],
) -> tuple[tuple[Scored, ...], dict[str, Scored | str]]:
    """What stands beside the plan: runners-up, the fastest first, and baselines or why not."""
    compared = {name: choice for name, choice in plain.items() if not isinstance(choice, str)}
    scored = score_others(
        [(scorer, choice) for choice in others]
        + [(plain_scorer, choice) for choice in compared.values()]
    )
    alternatives = sorted(scored[: len(others)], key=lambda each: each.step_time_ns)
    known = dict(zip(compared, scored[len(others) :], strict=True))
    baselines = {
        name: choice if isinstance(choice, str) else known[name] for name, choice in plain.items()
    }
    return tuple(alternatives), baselines


def _search(
    request: PlanningRequest,
    model: LoadedModel,
    scorer: Scorer,
    space: Space,
    known: Sequence[Choice],
    objective: Objective,
) -> tuple[Scorer, Searched]:
    """The space, then what it left out near its best. Raises PlanError where it is empty."""
    other_than_time = None if isinstance(objective, StepTime) else objective
    limits: dict[str, Any] = {
        "time_limit_s": request.time_limit_s,
        "progress": request.progress,
        "objective": other_than_time,
    }
    if request.fix.get("schedule") in ASYNCHRONOUS:
        return scorer, search_asynchronous(scorer, request.fix, **limits)
    found = search_space(scorer, space, known=known, **limits)
    if not found.report.space:
        raise PlanError(space.explain_empty())
    found = search_beyond(scorer, found, request.fix, other_than_time)
    if request.asynchronous:
        found = with_asynchronous(scorer, found, request.fix, other_than_time)
    codecs = codecs_named(request.codecs)
    context = ContextSearch(model=model, fix=request.fix, objective=other_than_time, codecs=codecs)
    return context.search(*search_experts(scorer, found, request.fix, other_than_time, codecs))


def _reasons(
    request: PlanningRequest, objective: Objective, scorer: Scorer, found: Searched, best: Scored
) -> tuple[str, ...]:
    """Why not another way; under other objectives than time its sentences would be wrong."""
    if request.objective == "step_time":
        return tuple(reasons(scorer, found, best))
    cluster = scorer.problem.cluster
    return said_of(objective, cluster, best.candidate, best.step_time_ns), binds(best)


def _with_given(
    found: Searched, given: Baseline | None, fix: Mapping[str, Any], objective: Objective
) -> tuple[Choice, ...]:
    """What was simulated, best first, the user's own setting among it where it may be the answer.

    It may have stages that the space does not cut so, or more microbatches than are offered.
    """
    if given is None or given.scored is None or not given.offered or not given.scored.fits:
        return found.ranked
    own = (given.scored.candidate, given.scored.cuts)
    if own in found.ranked or not agrees(own, fix):
        return found.ranked
    valued = [(objective.value(*c, found.times_ns[c[0]]), c) for c in found.ranked]
    worth = objective.value(*own, given.scored.step_time_ns)
    better = sum(value <= worth for value, _ in valued)
    return (*found.ranked[:better], own, *found.ranked[better:])


def _said_of(trainer: Trainer) -> tuple[str, ...]:
    if trainer is NEUTRAL:
        return ()
    sentence = (
        f"no profile: overlap, host and fusion as the trainer {trainer.name!r}, {trainer.source}"
    )
    return (sentence,)


def _pose(
    request: PlanningRequest,
    cluster: Cluster,
    model: LoadedModel,
    profile: Profile | None,
    setting: Setting | None,
) -> tuple[Problem, list[str]]:
    """The problem, and sentences on what was assumed in posing it.

    What the command line and the cluster file leave open is as in the user's own setting.
    """
    settings, assumed = dict(cluster.training), []
    for name, value in (training_of(setting, cluster) if setting else {}).items():
        if name not in settings and getattr(request, name) is None:
            settings[name] = value
            assumed.append(f"{name} {value} ({setting.place(name) if setting else ''})")
    batch = request.global_batch or settings.get("global_batch")
    if batch is None:
        batch = DEFAULT_GLOBAL_BATCH
        assumed.append(f"global batch {batch} (--global-batch)")
    if why := batch_refusal(request.fix, batch):
        raise PlanError(why)
    seq_len = request.seq_len or settings.get("seq_len") or model.seq_len()
    precision = request.precision or settings.get("precision")
    if precision is None:
        precision = _best_precision(cluster)
        assumed.append(f"precision {precision} (--precision)")
    precision = PRECISIONS.get(precision, precision)
    _check_precision(precision, cluster)
    if precision == "float16":
        assumed.append(
            "float16 ends at 65504: the loss scale keeps gradients in range, not activations of "
            "weights that were trained in bfloat16"
        )
    optimizer = request.optimizer or settings.get("optimizer")
    if optimizer is None:
        optimizer = "adamw"
        assumed.append("optimizer adamw (--optimizer)")
    training = Training(
        global_batch=batch,
        seq_len=seq_len,
        precision=precision,
        optimizer=optimizer,
        memory_headroom=request.memory_headroom,
        seed=request.seed,
        clip_norm=request.clip_norm or settings.get("clip_norm"),
    )
    pinned = pinned_candidate(pinned_for(optimizer, request.fix))
    if why := training_refusal(training, pinned.codec, pinned.collective):
        raise PlanError(f"--fix {why}")
    return pose_problem(model, cluster, training, profile, request.progress), assumed


def _best_precision(cluster: Cluster) -> str:
    """bf16 where every device has it at more than the fp32 rate; CPUs compute in fp32."""
    for node in cluster.nodes:
        peaks = node.device.peak_flops_per_s
        if node.device.kind == "cpu" or "bfloat16" not in peaks:
            return "float32"
    return "bfloat16"


def _check_precision(precision: str, cluster: Cluster) -> None:
    """Refuses 16 bits that some device has no kernels for; CPUs compute in any precision."""
    for node in cluster.nodes:
        has = node.device.peak_flops_per_s
        if node.device.kind != "cpu" and precision in {"bfloat16", "float16"} - has.keys():
            raise PlanError(
                f"--precision {precision}: {node.device.name} computes in "
                f"{', '.join(sorted(has))}; choose one of them"
            )


def _find_profile(given: Path | None, text: str, cluster: Cluster) -> tuple[Profile | None, str]:
    """The profile given, else that of the cluster file's or the cluster's name."""
    if given is not None:
        return load_profile(given), given.name
    for path in (Path(f"{text}.profile"), Path(f"{cluster.name}.profile")):
        if path.is_file():
            return load_profile(path), path.name
    return None, "catalogue"


def simulate_plan(path: Path, profile: Path | None = None) -> Scored:
    """Scores a plan file as it stands. Raises InputError or PlanError for what is wrong in it."""
    return simulate_under(path, [load_profile(profile) if profile is not None else None])[0]


def simulate_under(path: Path, profiles: Sequence[Profile | None]) -> list[Scored]:
    """The plan file's score under each profile; the model is traced once."""
    planned = open_planned(path)
    return [planned.under(profile).scored for profile in profiles]
