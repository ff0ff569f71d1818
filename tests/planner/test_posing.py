"""What times rest on: a profile, a trainer's constants, or neither on CPUs."""

from __future__ import annotations

from claw_plan.planner.posing import costs_of
from claw_plan.profiles.cluster_file import load_cluster
from claw_plan.profiles.profile import Profile
from claw_plan.profiles.trainer import NEUTRAL
from claw_plan.profiles.trainers import DEFAULT


def test_gpus_without_a_profile_take_the_default_trainer():
    assert costs_of(load_cluster("dgx-h100"), None)["trainer"].name == DEFAULT
    assert costs_of(load_cluster("dgx-h100"), Profile(name="empty"))["trainer"].name == DEFAULT


def test_cpus_take_none():
    assert costs_of(load_cluster("cpu"), None)["trainer"] is NEUTRAL
