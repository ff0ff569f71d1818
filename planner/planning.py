"""The whole way from a model file to a plan: trace, search, baselines, explanation.

`make_plan` is what the command line calls, and what another program would; `simulate_plan`
scores a plan that exists, edited or not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeGuard

from claw_plan.planner.baseline import Baseline, baseline_of, training_of
from claw_plan.planner.baselines.recognise import read_setting
from claw_plan.planner.baselines.setting import Setting
from claw_plan.planner.candidate import Candidate
from claw_plan.planner.errors import InfeasiblePlan, PlanError
from claw_plan.planner.explain import infeasible_message, reasons
from claw_plan.planner.graph import ModelGraph
from claw_plan.planner.model_source import LoadedModel, load_model
from claw_plan.planner.pinned import batch_refusal, check_pinned
from claw_plan.planner.plan import Plan, load_plan
from claw_plan.planner.plan_check import check_plan, model_of_plan
from claw_plan.planner.plan_stages import cuts_of_plan
from claw_plan.planner.plan_writer import write_plan
from claw_plan.planner.problem import Problem, Training
from claw_plan.planner.refine import SearchSettings, refine
from claw_plan.planner.score import Scored, Scorer
from claw_plan.planner.search import SearchReport
from claw_plan.planner.search_space import Choice, Searched, search_space
from claw_plan.planner.space import Space
from claw_plan.planner.trace import trace
from claw_plan.planner.vocabulary_parallel import STYLES
from claw_plan.profiles.cluster import Cluster
from claw_plan.profiles.cluster_file import cluster_from_mapping, load_cluster
from claw_plan.profiles.cost_model import ClusterCostModel
from claw_plan.profiles.profile import Profile, load_profile
from claw_plan.profiles.trainer import NEUTRAL, Trainer
from claw_plan.profiles.trainers import DEFAULT as DEFAULT_TRAINER
from claw_plan.profiles.trainers import load_trainers
from claw_plan.profiles.work import PRECISIONS

DEFAULT_GLOBAL_BATCH = 256

Progress = Callable[[str, float], None]


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
    search: str | None = None
    storage: str | None = None
    policy: Path | None = None


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


def make_plan(request: PlanningRequest) -> PlanningResult:
    """Plans a model. Raises InputError, TraceError, PlanError or InfeasiblePlan."""
    say = request.progress or (lambda what, done: None)
    cluster = load_cluster(request.cluster)
    check_pinned(request.fix, cluster)
    setting = read_setting(request.baseline) if request.baseline else None
    say("loading the model", 0.0)
    model = load_model(request.model, build=request.build, inputs=request.inputs)
    profile, profile_name = _find_profile(request.profile, request.cluster, cluster)
    problem, assumed = _pose(request, cluster, model, profile, setting)
    scorer = Scorer(problem)
    space = Space(problem, request.fix)
    say("scoring the baselines", 0.2)
    plain = _baselines(scorer, request.fix)
    given = baseline_of(setting, scorer) if setting else None
    found = search_space(
        scorer,
        space,
        known=[choice for choice in plain.values() if _agrees(choice, request.fix)],
        time_limit_s=request.time_limit_s,
        progress=say,
    )
    if not found.report.space:
        raise PlanError(space.explain_empty())
    ranked = _with_given(found, given, request.fix)
    if not ranked:
        raise InfeasiblePlan(infeasible_message(scorer, found))
    settings = SearchSettings(request.search, request.storage, request.policy, request.seed)
    refined = refine(scorer, ranked[0], request.fix, settings)
    best = scorer.score(*refined.choice)
    others = [*ranked[1:], *(choice for _, choice in found.looked_at)][: request.top]
    alternatives = [scorer.score(*choice) for choice in others]
    plan = write_plan(
        problem,
        best,
        model,
        folder=request.output_folder,
        profile=profile_name,
        search=asdict(found.report),
    )
    return PlanningResult(
        plan=plan,
        best=best,
        alternatives=tuple(sorted(alternatives, key=lambda scored: scored.step_time_ns)),
        baselines={
            name: choice if isinstance(choice, str) else scorer.score(*choice)
            for name, choice in plain.items()
        },
        search=found.report,
        graph=problem.graph,
        cluster=cluster,
        assumptions=(
            *assumed,
            *cluster.assumptions,
            *problem.cost.assumptions,
            *_said_of(problem.trainer),
            *problem.graph.assumptions,
        ),
        reasons=(*refined.sentences, *reasons(scorer, space, found, best)),
        given=given,
    )


def _with_given(
    found: Searched, given: Baseline | None, fix: Mapping[str, Any]
) -> tuple[Choice, ...]:
    """What was simulated, best first, the user's own setting among it where it may be the answer.

    It may have stages that the space does not cut so, or more microbatches than are offered.
    """
    if given is None or given.scored is None or not given.offered or not given.scored.fits:
        return found.ranked
    own = (given.scored.candidate, given.scored.cuts)
    if own in found.ranked or not _agrees(own, fix):
        return found.ranked
    slower = [c for c in found.ranked if found.times_ns[c[0]] > given.scored.step_time_ns]
    faster = found.ranked[: len(found.ranked) - len(slower)]
    return (*faster, own, *slower)


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
    return _problem(model, cluster, training, profile, request.progress), assumed


def _problem(
    model: LoadedModel,
    cluster: Cluster,
    training: Training,
    profile: Profile | None,
    progress: Progress | None,
) -> Problem:
    say = progress or (lambda what, done: None)
    graph = trace(
        model,
        seq_len=training.seq_len,
        dtype=training.precision,
        progress=lambda what: say(what, 0.1),
    )
    return Problem(
        graph=graph,
        cluster=cluster,
        training=replace(training, seq_len=graph.seq_len),
        **_costs(cluster, profile),
    )


def _costs(cluster: Cluster, profile: Profile | None) -> dict[str, Any]:
    """The cost model, and what software adds to it: as published runs tell, or as a profile does.

    On CPUs only a profile tells, and a collective there stops the computation anyway.
    """
    is_known = profile is not None and bool(profile.measurements)
    if cluster.backend == "gloo" or is_known:
        return {"cost": ClusterCostModel(cluster, profile), "trainer": NEUTRAL}
    trainer = load_trainers()[DEFAULT_TRAINER]
    return {"cost": ClusterCostModel(cluster, profile, with_launches=False), "trainer": trainer}


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


def _baselines(scorer: Scorer, fix: Mapping[str, Any]) -> dict[str, Choice | str]:
    """Plain FSDP and DDP over all devices, each at its best microbatch and recompute."""
    devices = scorer.problem.cluster.num_devices
    free = {knob: fix[knob] for knob in ("microbatch_size", "recompute") if knob in fix}
    plain = {
        "FSDP": {"pp": 1, "tp": 1, "dp_replicate": 1, "dp_shard": devices},
        "DDP": {"pp": 1, "tp": 1, "dp_shard": 1, "dp_replicate": devices},
    }
    return {name: _baseline(scorer, {**knobs, **free}) for name, knobs in plain.items()}


def _baseline(scorer: Scorer, fix: Mapping[str, Any]) -> Choice | str:
    """The best that has these knobs, or why there is none."""
    try:
        space = Space(scorer.problem, fix)
    except PlanError as error:
        return str(error)
    found = search_space(scorer, space)
    if found.ranked:
        return found.ranked[0]
    return infeasible_message(scorer, found) if found.report.space else space.explain_empty()


def _agrees(choice: Choice | str, fix: Mapping[str, Any]) -> TypeGuard[Choice]:
    """Whether a baseline is a candidate of the space under these pins."""
    return not isinstance(choice, str) and all(
        getattr(choice[0], knob) == value for knob, value in fix.items()
    )


def simulate_plan(path: Path, profile: Path | None = None) -> Scored:
    """Scores a plan file as it stands. Raises InputError or PlanError for what is wrong in it."""
    return simulate_under(path, [load_profile(profile) if profile is not None else None])[0]


def simulate_under(path: Path, profiles: Sequence[Profile | None]) -> list[Scored]:
    """The plan file's score under each profile; the model is traced once."""
    plan = load_plan(path)
    candidate = check_plan(plan, path.name)
    model = model_of_plan(plan, path)
    cluster = _used(plan, cluster_from_mapping(plan.cluster, f"{path.name}: cluster"))
    settings = plan.training
    training = Training(
        global_batch=settings.global_batch,
        seq_len=settings.seq_len,
        precision=settings.precision,
        optimizer=settings.optimizer,
        memory_headroom=0.0,
        seed=settings.seed,
        clip_norm=settings.clip_norm,
    )
    problem = _problem(model, cluster, training, None, None)
    _check_against(problem.graph, candidate, plan)
    cuts = cuts_of_plan(plan, problem.graph)
    return [
        Scorer(
            Problem(
                graph=problem.graph,
                cluster=cluster,
                training=problem.training,
                **_costs(cluster, profile),
            )
        ).score(candidate, cuts)
        for profile in profiles
    ]


def _used(plan: Plan, cluster: Cluster) -> Cluster:
    """The nodes whose devices the plan uses: slower ones that it leaves out slow nothing down."""
    numbers = sorted({int(name.partition(":")[0]) for name in plan.mesh.devices})
    return replace(cluster, nodes=tuple(cluster.nodes[number] for number in numbers))


def _check_against(graph: ModelGraph, candidate: Candidate, plan: Plan) -> None:
    """What an edited plan can contradict in the model."""
    if plan.model.parameters != graph.num_parameters:
        raise PlanError(
            f"model.parameters is {plan.model.parameters}, but the model has "
            f"{graph.num_parameters}; plan again"
        )
    tied = {p.names for p in graph.parameters if len(p.names) > 1}
    if {tuple(tie.parameters) for tie in plan.tied} != tied:
        named = "; ".join(" = ".join(names) for names in sorted(tied)) or "none"
        raise PlanError(f"tied must list the model's tied parameters once each: {named}")
    if candidate.tp > 1 and graph.tp_divides % candidate.tp:
        raise PlanError(
            f"candidate.tp is {candidate.tp}, which does not divide {graph.tp_divides} "
            "(the common divisor of the model's head counts)"
        )
    ends = {rule.modules: rule.heads for rule in plan.tensor_parallel if rule.style in STYLES}
    expected = {rule.module: rule.heads for rule in graph.vocabulary_parallel}
    if candidate.tp > 1 and ends != expected:
        named = ", ".join(f"{name} ({rows} rows)" for name, rows in expected.items()) or "none"
        raise PlanError(
            f"tensor_parallel must divide those tables and heads that planning divides: {named}"
        )
