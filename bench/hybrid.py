"""Hybrid parallelism against pure data parallelism: 10 billion parameters on 128 A100.

An article claims that hybrid splitting is 3.2 times as fast as pure data parallelism there, 60 %
of it by tensor parallelism found operator by operator. DDP keeps 16 bytes a parameter on every
device, 160 GB, and fits none; so the baseline is named: ZeRO-3 over all devices, with every block
run again or at its best. The gain is divided over the kinds of choices by Shapley values: the
mean, over all orders of allowing them, of what each adds to log speed-up; shares add up to the
whole.

Every time is the simulated step of a plan that a search has proven best under its pins. Three
networks show how the answer hangs on them.

Run: python bench/hybrid.py [--write]    (writes the tables into docs/hybrid.md)
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

from claw_plan.planner.model_source import load_model
from claw_plan.planner.planned import on_cluster
from claw_plan.planner.posing import costs_of
from claw_plan.planner.problem import Problem, Training
from claw_plan.planner.score import Scorer
from claw_plan.planner.search_space import Searched, search_closer, search_space
from claw_plan.planner.space import Space
from claw_plan.planner.trace import trace
from claw_plan.profiles.cluster import Cluster
from claw_plan.profiles.cluster_file import cluster_from_mapping
from claw_plan.profiles.units import format_ns

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "hybrid.md"
START, END = "<!-- tables -->", "<!-- end of tables -->"

BUILD = "GPT(GPTConfig(n_layer=48, n_head=32, n_embd=4096, block_size=2048))"
"""12 x 48 x 4096^2 + 50304 x 4096 and what is small: 9.9 billion parameters."""
INPUTS = "idx=int64[B,2048]<50304 targets=int64[B,2048]<50304"
GLOBAL_BATCH = 1024

NETWORKS = {
    "8 x HDR InfiniBand": None,
    "2 x 100 Gb/s Ethernet": {"type": "ethernet-100", "count": 2},
    "1 x 25 Gb/s Ethernet": {"type": "ethernet-25", "count": 1},
}
NOT_USED: Mapping[str, Mapping[str, Any]] = {
    "tensor": {"tp": 1},
    "pipeline": {"pp": 1},
    "sharding": {"dp_replicate": 1, "zero": 3, "reshard_ranks": 0, "blocks_per_group": 1},
    "recompute": {"recompute": "full", "recompute_blocks": 0},
}
"""What each kind of choice is pinned to while it is not allowed; the microbatch is always free."""


def cluster_of(nics: Mapping[str, Any] | None) -> Cluster:
    """16 nodes of eight A100 with 80 GB."""
    node: dict[str, Any] = {"count": 16, "type": "dgx-a100-80gb"}
    return cluster_from_mapping({"nodes": [node | ({"nics": nics} if nics else {})]}, "hybrid")


def posed(cluster: Cluster) -> Problem:
    """The model at its full size, traced on fake tensors."""
    model = load_model(ROOT / "examples" / "gpt.py", build=BUILD, inputs=INPUTS)
    graph = trace(model, seq_len=2048, dtype="bfloat16")
    training = Training(
        global_batch=GLOBAL_BATCH,
        seq_len=2048,
        precision="bfloat16",
        optimizer="adamw",
        memory_headroom=0.1,
    )
    return Problem(graph=graph, cluster=cluster, training=training, **costs_of(cluster, None))


def best(problem: Problem, allowed: frozenset[str]) -> Searched:
    """The best plan on all devices or fewer, where only these kinds of choices are made."""
    fix: dict[str, Any] = {}
    for kind, pins in NOT_USED.items():
        if kind not in allowed:
            fix |= pins
    scorer = Scorer(problem)
    return search_closer(scorer, search_space(scorer, Space(problem, fix)), fix)


def time_ns(found: Searched) -> float:
    """The best simulated time; infinite where nothing fits."""
    return float(found.times_ns[found.ranked[0][0]]) if found.ranked else math.inf


def shapley(speed: Mapping[frozenset[str], float]) -> dict[str, float]:
    """Each player's share of log(speed of all / speed of none); the shares add up to 1."""
    players = sorted(max(speed, key=len))
    whole = math.log(speed[frozenset(players)] / speed[frozenset()])
    shares = dict.fromkeys(players, 0.0)
    for player in players:
        others = [other for other in players if other != player]
        for size in range(len(players)):
            weight = (
                math.factorial(size)
                * math.factorial(len(others) - size)
                / math.factorial(len(players))
            )
            for group in combinations(others, size):
                before = frozenset(group)
                shares[player] += weight * math.log(speed[before | {player}] / speed[before])
    return {player: share / whole if whole else 0.0 for player, share in shares.items()}


def rows(problem: Problem) -> Iterator[str]:
    """A line of the table for each network."""
    kinds = list(NOT_USED)
    for name, nics in NETWORKS.items():
        on = on_cluster(problem, cluster_of(nics), None)
        found = {
            frozenset(group): best(on, frozenset(group))
            for size in range(len(kinds) + 1)
            for group in combinations(kinds, size)
        }
        speed = {group: 1 / time_ns(one) for group, one in found.items()}
        none, everything = frozenset[str](), frozenset(kinds)
        zero3 = frozenset({"recompute"})
        shares = shapley(speed)
        proven = all(one.report.optimal for one in found.values())
        cells = [
            name,
            format_ns(1 / speed[none]),
            format_ns(1 / speed[zero3]),
            f"{format_ns(1 / speed[everything])} ({found[everything].ranked[0][0].short()})",
            f"{speed[everything] / speed[none]:.2f} x",
            f"{speed[everything] / speed[zero3]:.2f} x",
            ", ".join(f"{kind} {share:.0%}" for kind, share in shares.items()),
            "yes" if proven else "no",
        ]
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    """Prints the table, or writes it into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    problem = posed(cluster_of(None))
    heading = [
        "| network | ZeRO-3, all blocks run again | ZeRO-3 at its best | best hybrid | over the "
        "first | over the second | shares of the first gain (Shapley) | proven |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines = []
    for line in rows(problem):
        print(line, flush=True)
        lines.append(line)
    if write:
        page = TARGET.read_text(encoding="utf-8")
        before, _, rest = page.partition(START)
        after = rest.partition(END)[2]
        table = "\n".join([*heading, *lines])
        TARGET.write_text(f"{before}{START}\n\n{table}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
