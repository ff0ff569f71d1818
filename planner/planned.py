"""A plan file becomes what it was planned with: the problem, the candidate and its stages.

`simulate` scores it, `explain` looks at its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.context_search import with_context
from claw_plan.planner.gradient_times import with_recorded_gradients
from claw_plan.planner.plan import Plan, load_plan
from claw_plan.planner.plan_check import check_against_model, check_plan, model_of_plan
from claw_plan.planner.plan_stages import cuts_of_plan
from claw_plan.planner.posing import Progress, costs_of, pose_problem
from claw_plan.planner.problem import Problem, Training
from claw_plan.planner.score import Scored, Scorer
from claw_plan.planner.stage_path import Cuts
from claw_plan.profiles.cluster import Cluster
from claw_plan.profiles.cluster_file import cluster_from_mapping
from claw_plan.profiles.profile import Profile


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan on the nodes it uses; `cluster` is the whole one it was planned for."""

    plan: Plan
    problem: Problem
    cluster: Cluster
    candidate: Candidate
    cuts: Cuts

    @cached_property
    def scorer(self) -> Scorer:
        """Scores the plan's candidate and others on its nodes."""
        return Scorer(self.problem)

    @cached_property
    def scored(self) -> Scored:
        """The plan as it stands."""
        return self.scorer.score(self.candidate, self.cuts)

    def under(self, profile: Profile | None) -> Planned:
        """The same with times that rest on a profile."""
        return replace(self, problem=on_cluster(self.problem, self.problem.cluster, profile))


def on_cluster(problem: Problem, cluster: Cluster, profile: Profile | None) -> Problem:
    """The same model and training on another cluster, or with other times."""
    return Problem(
        graph=with_recorded_gradients(problem.graph, profile),
        cluster=cluster,
        training=problem.training,
        **costs_of(cluster, profile),
    )


def open_planned(
    path: Path, *, memory_headroom: float = 0.0, progress: Progress | None = None
) -> Planned:
    """Reads and traces a plan. Raises InputError or PlanError for what is wrong in the file."""
    plan = load_plan(path)
    candidate = check_plan(plan, path.name)
    model = model_of_plan(plan, path)
    whole = cluster_from_mapping(plan.cluster, f"{path.name}: cluster")
    training = training_of_plan(plan, memory_headroom)
    problem = pose_problem(model, _used(plan, whole), training, None, progress)
    problem = with_context(problem, model, candidate)
    check_against_model(problem.graph, candidate, plan)
    return Planned(
        plan=plan,
        problem=problem.for_ep(candidate.ep),
        cluster=whole,
        candidate=candidate,
        cuts=cuts_of_plan(plan, problem.graph),
    )


def training_of_plan(plan: Plan, memory_headroom: float) -> Training:
    """What a plan says of the training; how much memory stays free is not in it."""
    settings = plan.training
    return Training(
        global_batch=settings.global_batch,
        seq_len=settings.seq_len,
        precision=settings.precision,
        optimizer=settings.optimizer,
        memory_headroom=memory_headroom,
        seed=settings.seed,
        clip_norm=settings.clip_norm,
    )


def _used(plan: Plan, cluster: Cluster) -> Cluster:
    """The nodes whose devices the plan uses: slower ones that it leaves out slow nothing down."""
    numbers = sorted({int(name.partition(":")[0]) for name in plan.mesh.devices})
    return replace(cluster, nodes=tuple(cluster.nodes[number] for number in numbers))
