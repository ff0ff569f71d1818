"""Model, cluster and settings become a `Problem`: trace the model, choose what times rest on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from claw_plan.planner.gradient_times import with_recorded_gradients
from claw_plan.planner.model_source import LoadedModel
from claw_plan.planner.problem import Problem, Training
from claw_plan.planner.trace import trace
from claw_plan.profiles.cluster import Cluster
from claw_plan.profiles.cost_model import ClusterCostModel
from claw_plan.profiles.profile import Profile
from claw_plan.profiles.trainer import NEUTRAL
from claw_plan.profiles.trainers import DEFAULT as DEFAULT_TRAINER
from claw_plan.profiles.trainers import load_trainers

Progress = Callable[[str, float], None]


def pose_problem(
    model: LoadedModel,
    cluster: Cluster,
    training: Training,
    profile: Profile | None,
    progress: Progress | None,
) -> Problem:
    """The model, traced at the training's sizes, on the cluster."""
    say = progress or (lambda what, done: None)
    graph = trace(
        model,
        seq_len=training.seq_len,
        dtype=training.precision,
        progress=lambda what: say(what, 0.1),
    )
    return Problem(
        graph=with_recorded_gradients(graph, profile),
        cluster=cluster,
        training=replace(training, seq_len=graph.seq_len),
        **costs_of(cluster, profile),
    )


def costs_of(cluster: Cluster, profile: Profile | None) -> dict[str, Any]:
    """The cost model, and what software adds to it: as published runs tell, or as a profile does.

    On CPUs only a profile tells, and a collective there stops the computation anyway.
    """
    is_known = profile is not None and bool(profile.measurements)
    if cluster.backend == "gloo" or is_known:
        return {"cost": ClusterCostModel(cluster, profile), "trainer": NEUTRAL}
    trainer = load_trainers()[DEFAULT_TRAINER]
    return {"cost": ClusterCostModel(cluster, profile, with_launches=False), "trainer": trainer}
