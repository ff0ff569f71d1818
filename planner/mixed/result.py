"""The whole way from a request to a plan, whatever devices the cluster has.

On equal devices it is `planning.make_plan`. On several kinds that plan, in which the slowest
counts for all, is compared with what the kinds can do alone and unlike (`planning`), and the
fastest is the answer. Unlike plans are simulated, but the executor cannot train with them yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from claw_plan.planner.errors import InfeasiblePlan
from claw_plan.planner.mixed.alike import kept_apart, slowest_for_all
from claw_plan.planner.mixed.kinds import Kind, MixedProblem, kinds_of
from claw_plan.planner.mixed.planning import (
    Alone,
    MixedAnswer,
    plan_alone,
    plan_mixed,
    report_of,
)
from claw_plan.planner.mixed.score import MixedScored, MixedScorer
from claw_plan.planner.mixed.share_bound import ShareBounds
from claw_plan.planner.mixed.utilisation import USEFUL, in_tenths
from claw_plan.planner.mixed.writer import mixed_of_plan, write_mixed_plan
from claw_plan.planner.plan import Plan, load_plan
from claw_plan.planner.plan_check import model_of_plan
from claw_plan.planner.plan_writer import predict, write_plan
from claw_plan.planner.planned import training_of_plan
from claw_plan.planner.planning import (
    PlanningRequest,
    PlanningResult,
    Posed,
    make_plan,
    pose,
    simulate_plan,
)
from claw_plan.planner.posing import costs_of, pose_problem
from claw_plan.planner.score import Scored, Scorer
from claw_plan.planner.search import SearchReport
from claw_plan.planner.shards import ShardSizes
from claw_plan.planner.vocabulary_parallel_balance import read_counts, with_balanced_rows
from claw_plan.profiles.cluster import Cluster
from claw_plan.profiles.cluster_file import cluster_from_mapping
from claw_plan.profiles.cost import CostModel
from claw_plan.profiles.profile import Profile, load_profile
from claw_plan.profiles.units import format_ns

ALIKE = "all divided alike"


def plan_request(request: PlanningRequest) -> PlanningResult:
    """Plans a model. Raises InputError, TraceError, PlanError or InfeasiblePlan."""
    if request.token_frequencies is None:
        return _planned(request)
    counts = read_counts(request.token_frequencies)
    result = _planned(request)
    plan, sentence = with_balanced_rows(result.plan, counts)
    return replace(result, plan=plan, reasons=(sentence, *result.reasons))


def _planned(request: PlanningRequest) -> PlanningResult:
    posed = pose(request)
    problem, make_cost = posed.problem, partial(_cost_of, posed.profile)
    if problem.is_uniform:
        return make_plan(request, posed)
    several = len(kinds_of(problem, make_cost)) > 1
    apart = kept_apart(problem, request.fix) if several else problem
    slowest = replace(posed, problem=slowest_for_all(apart))
    options = _options(request)
    if options or not several:
        return _on_own_nodes(make_plan(request, slowest), posed, options if several else ())
    alone = plan_alone(problem, make_cost)
    alike = _alike(request, slowest, posed, alone)
    answer = plan_mixed(
        alone,
        known_ns=alike.best.step_time_ns if isinstance(alike, PlanningResult) else None,
        time_limit_s=request.time_limit_s,
    )
    return _result(request, posed, alike, answer)


def _alike(
    request: PlanningRequest, slowest: Posed, posed: Posed, alone: Alone
) -> PlanningResult | str:
    """All divided alike, or why there is nothing of use: it may be slower than one kind alone."""
    least_ns = ShareBounds(slowest.problem).least_ns(posed.problem.training.global_batch)
    fastest = alone.fastest
    if fastest is not None and least_ns >= fastest[1].step_time_ns:
        least, name = format_ns(least_ns), fastest[0].name
        return f"{least} a step at least, which is longer than {name} alone"
    try:
        return _on_own_nodes(make_plan(request, slowest), posed)
    except InfeasiblePlan as error:
        return str(error)


def _options(request: PlanningRequest) -> Sequence[str]:
    """What was asked for that only plans for equal devices can answer."""
    asked = {
        "--fix": request.fix,
        "--baseline": request.baseline,
        "--search": request.search,
        "--objective": request.objective != "step_time",
    }
    return [name for name, value in asked.items() if value]


def _on_own_nodes(
    result: PlanningResult, posed: Posed, options: Sequence[str] = ()
) -> PlanningResult:
    """A plan found as if every device were the slowest, scored with each rank where it lies."""
    scorer = Scorer(posed.problem)

    def again(scored: Scored) -> Scored:
        return scorer.score(scored.candidate, scored.cuts)

    best, given = again(result.best), result.given
    if given is not None and given.scored is not None:
        given = replace(given, scored=again(given.scored))
    search, trainer = asdict(result.search), posed.problem.trainer
    prediction = predict(best, posed.profile_name, search, trainer)
    said = (
        f"several kinds of devices: with {' and '.join(options)} only plans that divide all of "
        "them alike are looked at, as fast as the slowest",
    )
    return replace(
        result,
        best=best,
        plan=result.plan.model_copy(update={"prediction": prediction}),
        alternatives=tuple(sorted(map(again, result.alternatives), key=lambda s: s.step_time_ns)),
        baselines={
            name: found if isinstance(found, str) else again(found)
            for name, found in result.baselines.items()
        },
        given=given,
        assumptions=(*(said if options else ()), *result.assumptions),
    )


def _cost_of(profile: Profile | None, cluster: Cluster) -> CostModel:
    cost: CostModel = costs_of(cluster, profile)["cost"]
    return cost


def _result(
    request: PlanningRequest, posed: Posed, given: PlanningResult | str, answer: MixedAnswer
) -> PlanningResult:
    """The fastest of all; of equal ones what runs today."""
    alike, refused = (None, given) if isinstance(given, str) else (given, "")
    alone = answer.alone.fastest
    choices: list[tuple[int, int, Scored]] = []
    if alike is not None:
        choices.append((alike.best.step_time_ns, 0, alike.best))
    if alone is not None:
        choices.append((alone[1].step_time_ns, 1, alone[1]))
    if answer.mixed is not None:
        choices.append((answer.mixed.step_time_ns, 2, answer.mixed))
    if not choices:
        raise InfeasiblePlan(refused)
    choices.sort(key=lambda entry: entry[:2])
    best = choices[0][2]
    report = report_of(answer, alike.search if alike else _NOTHING, best.step_time_ns)
    if alike is not None and best is alike.best:
        plan = alike.plan
    else:
        kind = None if alone is None or best is not alone[1] else alone[0]
        plan = _plan(request, posed, answer.problem, best, kind, report)
    others = [scored for _, _, scored in choices[1:]]
    named = {answer.problem.names[index]: found for index, found in answer.alone.found.items()}
    return PlanningResult(
        plan=plan,
        best=best,
        alternatives=tuple(others + list(alike.alternatives if alike else ()))[: request.top],
        baselines={
            ALIKE: alike.best if alike else refused,
            **{f"{name} alone": found for name, found in named.items()},
            **(alike.baselines if alike else {}),
        },
        search=report,
        graph=posed.problem.graph,
        cluster=posed.problem.cluster,
        assumptions=(*posed.assumed, *_assumed(posed, best), *posed.problem.graph.assumptions),
        reasons=(*_reasons(answer, best, others), *(alike.reasons if alike else ())),
    )


_NOTHING = SearchReport(
    space=0, space_per_knob={}, bound_pruned=0, memory_pruned=0, simulated=0, seconds=0.0, gap=0.0
)


def _plan(
    request: PlanningRequest,
    posed: Posed,
    problem: MixedProblem,
    best: Scored,
    kind: Kind | None,
    report: SearchReport,
) -> Plan:
    settings: dict[str, Any] = {
        "folder": request.output_folder,
        "profile": posed.profile_name,
        "search": asdict(report),
    }
    if isinstance(best, MixedScored):
        return write_mixed_plan(problem, best, posed.model, **settings)
    assert kind is not None
    plan = write_plan(kind.problem, best, posed.model, **settings)
    devices = kind.device_names()[: best.num_devices]
    return plan.model_copy(update={"mesh": plan.mesh.model_copy(update={"devices": devices})})


def _assumed(posed: Posed, best: Scored) -> Sequence[str]:
    if isinstance(best, MixedScored):
        return (
            "every device computes at its own rate; what unlike devices do together is as slow "
            "as the slowest link and device of them",
        )
    return posed.problem.cost.assumptions


def _reasons(answer: MixedAnswer, best: Scored, others: Sequence[Scored]) -> list[str]:
    """What unlike devices bring, and what cannot be run yet."""
    found = []
    if isinstance(best, MixedScored):
        runs = [scored for scored in others if not isinstance(scored, MixedScored)]
        today = (
            f"the fastest that runs today takes {format_ns(runs[0].step_time_ns)}: "
            f"{runs[0].short} (plan for a cluster of those nodes alone)"
            if runs
            else "no plan that runs today fits"
        )
        found.append(
            f"this plan is planned and simulated, but 'claw-plan run' cannot execute plans on "
            f"unlike devices yet; {today}"
        )
        found.append(_where_speed_went(best))
        unused = answer.problem.whole.cluster.num_devices - best.num_devices
        if unused:
            found.append(f"{unused} devices are left out: with them no faster plan was found")
    elif answer.mixed is not None:
        slower = answer.mixed.step_time_ns / best.step_time_ns - 1
        found.append(f"unlike devices together are {slower:.1%} slower: {answer.mixed.short}")
    else:
        found.append("no way of using unlike devices together may be faster")
    return found


def _where_speed_went(best: MixedScored) -> str:
    shares = in_tenths(best.shares_of_speed)
    useful = shares.pop(USEFUL)
    lost = sorted(((share, name) for name, share in shares.items() if share), reverse=True)
    return (
        f"utilisation {useful:g} % of what all devices could compute if none ever waited (the "
        "batch over the sum of their speeds, over the step); lost to "
        + ", ".join(f"{name} {share:g} %" for share, name in lost)
    )


def simulate_file(path: Path, profile: Path | None = None) -> Scored:
    """Scores a plan file as it stands. Raises InputError or PlanError for what is wrong in it."""
    plan = load_plan(path)
    if not plan.mixed:
        return simulate_plan(path, profile)
    measured = load_profile(profile) if profile is not None else None
    cluster = cluster_from_mapping(plan.cluster, f"{path.name}: cluster")
    training = training_of_plan(plan, 0.0)
    problem = pose_problem(model_of_plan(plan, path), cluster, training, measured, None)
    kinds = kinds_of(problem, partial(_cost_of, measured))
    unlike = MixedProblem(whole=problem, kinds=kinds)
    return MixedScorer(unlike, ShardSizes(problem.graph)).score(mixed_of_plan(plan, unlike))
