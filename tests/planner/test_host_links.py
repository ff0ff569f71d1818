"""Cores and NICs of CPU hosts, shared by ranks of several stages: closed forms."""

from __future__ import annotations

from dataclasses import replace

import pytest

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.host_links import host_links
from claw_plan.planner.problem import Problem
from claw_plan.planner.stage_streams import add_stage_streams, views_of
from claw_plan.profiles.cluster import Cluster
from claw_plan.profiles.cost import CollectiveCost
from claw_plan.simulator.engine import finish_times_ns
from claw_plan.simulator.task_graph import TaskGraphBuilder


def hosts(toys, count: int, machines: tuple[str, ...] = (), devices: int = 2) -> Problem:
    """Hosts of one core each, with one NIC of 100 kB/s."""
    cluster: Cluster = toys.cluster(nodes=count, devices=devices, kind="cpu")
    names = machines or ("",) * count
    nodes = [
        replace(n, cores=1, nic_count=1, machine=m)
        for n, m in zip(cluster.nodes, names, strict=True)
    ]
    return toys.problem(cluster=replace(cluster, nodes=tuple(nodes)))


def lasting(problem: Problem, candidate: Candidate, durations: list[int]) -> list[int]:
    """When each stage has computed so long, all starting at once."""
    builder = TaskGraphBuilder()
    for streams, duration in zip(
        add_stage_streams(builder, views_of(problem, candidate)), durations, strict=True
    ):
        streams.run("forward", "0F0", duration)
    return finish_times_ns(builder.build())[1].tolist()


@pytest.mark.parametrize(
    ("candidate", "durations", "expected"),
    [
        # Two ranks on a core of their host: each at half its speed, on both hosts alike.
        (Candidate(dp_replicate=4), [1000], [2000]),
        (Candidate(dp_replicate=2), [1000], [2000]),
        (Candidate(pp=1), [1000], [1000]),
        # Stages 0 and 1 on host 0, 2 and 3 on host 1: half speed until the shorter one is done.
        (Candidate(pp=4), [1000, 1000, 1000, 600], [2000, 2000, 1600, 1200]),
        # Stage 0 has two ranks on host 0 and one on host 1, stage 1 the other way round.
        (Candidate(pp=2, dp_replicate=2), [1000, 500], [2000, 1000]),
    ],
)
def test_ranks_divide_the_core_of_their_host(toys, candidate, durations, expected):
    assert lasting(hosts(toys, 2), candidate, durations) == expected


def test_the_rank_with_the_fullest_core_sets_the_pace_of_its_stage(toys):
    """Ranks 0-2 on hosts 0, 0, 1 and 3-5 on hosts 1, 2, 2: on host 1 both stages have one.

    Both go at half speed for 1000 ns of work, whichever core is asked.
    """
    assert lasting(hosts(toys, 3), Candidate(pp=2, dp_replicate=3), [1000, 1000]) == [2000, 2000]


def test_hosts_of_one_machine_divide_its_core(toys):
    """Stages on hosts 0, 1, 2; the first and the last on one machine: four ranks on its core."""
    problem = hosts(toys, 3, ("left", "right", "left"))
    candidate = Candidate(pp=3, dp_replicate=2)
    assert lasting(problem, candidate, [1000, 1000, 1000]) == [4000, 2000, 4000]
    assert lasting(hosts(toys, 3), candidate, [1000, 1000, 1000]) == [2000, 2000, 2000]


def test_equal_hosts_are_told_once(toys):
    """All 64 hosts have two ranks of the one stage: one core and one way out stand for all."""
    builder = TaskGraphBuilder()
    problem = hosts(toys, 64)
    [(cores, network)] = host_links(builder, views_of(problem, Candidate(dp_replicate=128)))
    assert (cores, network) == ((0, 0), (1, 1))


def test_stages_of_one_host_divide_its_way_out(toys):
    """100 kB/s: a message of 100 bytes lasts 1 ms alone, two at once of two stages 2 ms."""
    cost = CollectiveCost(
        latency_ns=0, bytes=100, rate_cap_bytes_per_s=1e5, link="inter", source="measured"
    )
    for senders, expected in (([0], [1_000_000]), ([0, 1], [2_000_000] * 2)):
        builder = TaskGraphBuilder()
        streams = add_stage_streams(builder, views_of(hosts(toys, 2), Candidate(pp=4)))
        for stage in senders:
            streams[stage].send(cost, "send")
        assert finish_times_ns(builder.build())[1].tolist() == expected
