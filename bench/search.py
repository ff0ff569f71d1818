"""How fast the search answers at scale, and whether its answer is the best: docs/search.md.

Three parts:

- scale: whole commands (start of Python, imports and trace included), their time and memory;
- brute: random small problems, the answer against every candidate simulated, with its evenest
  cut and, of those with a pipeline, with every cut;
- outside: problems whose answer is held against random valid plans, half of them outside the
  space that is searched (stages cut anywhere, schedules with stages and recompute that are only
  offered by --fix, other numbers of blocks run again or gathered together, other bucket sizes).

Run: python bench/search.py [--only scale|brute|outside] [--problems N] [--plans N] [--write]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

from claw_plan.planner.candidate import MESH_ORDER, Candidate
from claw_plan.planner.cut_search import search_cuts
from claw_plan.planner.graph import ModelGraph
from claw_plan.planner.group_opener import may_be_cut_otherwise
from claw_plan.planner.members import ORDERS, divisors
from claw_plan.planner.memory import make_fits
from claw_plan.planner.model_source import load_model
from claw_plan.planner.problem import Problem, Training
from claw_plan.planner.schedules import SCHEDULES, schedule_refusal
from claw_plan.planner.score import Scorer
from claw_plan.planner.search_space import Searched, search_space
from claw_plan.planner.space import Space
from claw_plan.planner.stage_path import Cuts
from claw_plan.planner.supported import ALGORITHMS, OFFLOAD, RECOMPUTE, refusal
from claw_plan.planner.trace import trace
from claw_plan.profiles.cluster_file import load_cluster
from claw_plan.profiles.cost_model import ClusterCostModel
from claw_plan.profiles.trainers import load_trainers

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "search.md"
GPT = ROOT / "examples" / "gpt.py"
COMMAND = Path(sys.executable).with_name("claw-plan")

LLAMA_405B = {
    "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126,
    "num_attention_heads": 128, "num_key_value_heads": 8,
}  # fmt: skip
"""What differs from examples/llama-3-70b (Llama Team 2024, arXiv 2407.21783, table 3)."""


@dataclass(frozen=True)
class Case:
    """A command at scale and the seconds it may take."""

    name: str
    model: str
    cluster: str
    limit_s: int
    options: tuple[str, ...] = ()


SCALE = (
    Case("Llama-3 70B, 256 H100", "llama-3-70b", "32xdgx-h100", 15),
    Case(
        "GPT-3 175B, 1,024 A100",
        "gpt",
        "128xdgx-a100-80gb",
        10,
        (
            "--build",
            "GPT(GPTConfig(vocab_size=51200, block_size=2048, n_layer=96, n_head=96, "
            "n_embd=12288))",
            "--inputs",
            "idx=int64[B,2048]<51200 targets=int64[B,2048]<51200",
            "--global-batch",
            "1536",
        ),
    ),
    Case(
        "Llama-3 405B, 1,024 H100", "llama-3-405b", "128xdgx-h100", 60,
        ("--global-batch", "2048"),
    ),
    Case(
        "Llama-3 405B, 16,384 H100", "llama-3-405b", "2048xdgx-h100", 60,
        ("--global-batch", "2048"),
    ),
    Case(
        "Llama-3 405B, 100,000 H100", "llama-3-405b", "12500xdgx-h100", 120,
        ("--global-batch", "2048"),
    ),
)  # fmt: skip


def model_path(name: str, folder: Path) -> Path:
    """The model's file; the 405B's is made from the 70B's."""
    if name == "gpt":
        return GPT
    known = ROOT / "examples" / "llama-3-70b" / "config.json"
    if name == "llama-3-70b":
        return known
    path = folder / name / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(json.loads(known.read_text()) | LLAMA_405B))
    return path


def scale_rows(folder: Path) -> Iterator[str]:
    """Runs each command in a process of its own."""
    yield (
        "| problem | candidates | simulated | gap | search | CPU, all | wall, all | limit | "
        "memory |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for case in SCALE:
        command = [COMMAND, model_path(case.model, folder), "--cluster", case.cluster, "--json"]
        start = time.perf_counter()
        with tempfile.TemporaryFile() as out:
            process = subprocess.Popen([*command, *case.options], stdout=out)
            _, status, usage = os.wait4(process.pid, 0)
            wall_s = time.perf_counter() - start
            out.seek(0)
            found = json.loads(out.read())["search"] if status == 0 else {}
        cpu_s = usage.ru_utime + usage.ru_stime
        yield (
            f"| {case.name} | {found.get('space', 0):,} | {found.get('simulated', '-')} | "
            f"{found.get('gap', '-')} | {found.get('seconds', 0.0):.1f} s | {cpu_s:.1f} s | "
            f"{wall_s:.1f} s | {case.limit_s} s | {usage.ru_maxrss / (1 << 20):.2f} GiB |"
        )
        print(json.dumps(found.get("space_per_knob", {})), flush=True)


@cache
def graph_of(layers: int, heads: int, width: int) -> ModelGraph:
    """The example's GPT at a small size, traced."""
    config = f"vocab_size=512, block_size=256, n_layer={layers}, n_head={heads}, n_embd={width}"
    model = load_model(
        GPT,
        build=f"GPT(GPTConfig({config}))",
        inputs="idx=int64[B,256]<512 targets=int64[B,256]<512",
    )
    return trace(model, seq_len=256, dtype="bfloat16")


CODECS = ("one_bit", "int8")
"""Codecs that are offered where they act, in fp32."""

CLUSTERS = ("1xdgx-h100", "2xdgx-a100-80gb", "1xdgx1-v100", "2xg5.48xlarge", "2xdgx-h100")


def random_problem(rng: random.Random, batches: tuple[int, ...]) -> Problem:
    """A small model on a small cluster whose memory may be short; a third train in fp32."""
    graph = graph_of(rng.choice((2, 4, 6)), rng.choice((2, 4, 6)), rng.choice((192, 768)))
    name = rng.choice(CLUSTERS)
    cluster = load_cluster(name)
    halves = "float16" if "v100" in name else "bfloat16"
    training = Training(
        global_batch=rng.choice(batches),
        seq_len=256,
        precision=rng.choice((halves, halves, "float32")),
        optimizer="adamw",
        # What is left of the device is what binds: everything, or hardly more than the context.
        memory_headroom=rng.choice((0.1, 0.1, 0.9, 0.94)),
    )
    trainer = load_trainers()["torch"]
    cost = ClusterCostModel(cluster, None, with_launches=False)
    return Problem(graph=graph, cluster=cluster, cost=cost, training=training, trainer=trainer)


def cut_that_fits(scorer: Scorer, candidate: Candidate) -> Cuts | None:
    """The candidate's best cut, or the best that fits, as the search has it; None for none."""
    path = scorer.bounds.stage_path(candidate)
    if path is None or scorer.memory.fits(candidate, path.cuts):
        return path.cuts if path is not None else None
    if not may_be_cut_otherwise(candidate):
        return None
    path = scorer.bounds.stage_path(candidate, make_fits(scorer.memory, candidate))
    return path.cuts if path is not None else None


def all_cuts(scorer: Scorer, candidate: Candidate) -> Iterator[Cuts]:
    """Every cut with which the candidate fits."""
    edges = scorer.problem.graph.edges
    for inner in combinations(edges[1:-1], candidate.pp * candidate.stages_per_rank - 1):
        cuts = tuple(pairwise((0, *inner, edges[-1])))
        if scorer.memory.fits(candidate, cuts):
            yield cuts


def brute_rows(problems: int) -> Iterator[str]:
    """Every candidate of each problem simulated, with its evenest cut and with all cuts."""
    rng, equal, of_all, better, simulated, infeasible = random.Random(1), 0, 0, 0, 0, 0
    for _ in range(problems):
        problem = random_problem(rng, (4, 6, 8))
        scorer, space = Scorer(problem), Space(problem, random_fix(rng, problem), CODECS)
        even_ns: list[int] = []
        any_ns: list[int] = []
        for group in space.groups():
            for candidate in space.members(group):
                own = cut_that_fits(scorer, candidate)
                for cuts in {own, *all_cuts(scorer, candidate)} - {None}:
                    simulated += 1
                    any_ns.append(scorer.step_time_ns(candidate, cuts))
                    if cuts == own:
                        even_ns.append(any_ns[-1])
        even = search_space(scorer, space)
        found = search_cuts(scorer, even)
        equal += answer_of(even) == min(even_ns, default=None)
        of_all += answer_of(found) == min(any_ns, default=None)
        better += min(any_ns, default=0) < min(even_ns, default=0)
        infeasible += not any_ns
    yield (
        "| random problems | equal to brute force | equal with all cuts | another cut is better | "
        "nothing fits | steps simulated |"
    )
    yield "|---|---|---|---|---|---|"
    yield f"| {problems} | {equal} | {of_all} | {better} | {infeasible} | {simulated:,} |"


def answer_of(found: Searched) -> int | None:
    """The best step time; None where nothing fits."""
    return found.times_ns[found.ranked[0][0]] if found.ranked else None


def random_fix(rng: random.Random, problem: Problem) -> dict[str, Any]:
    """Pins that keep a space small enough to simulate whole; every fourth has all mesh orders."""
    most = min(3, len(problem.graph.blocks))
    order = {"mesh_order": rng.choice(ORDERS)} if rng.random() < 0.75 else {}
    return order | {
        "pp": rng.randint(1, most),
        "microbatch_size": rng.choice((1, 2)),
        "offload": rng.choice(OFFLOAD),
    }


def random_plan(rng: random.Random, scorer: Scorer, space: Space) -> tuple[Candidate, Cuts] | None:
    """A random candidate with a random cut, half of them outside the space; None if invalid."""
    members = space.members(space.group(rng.randrange(len(space.table))))
    candidate = rng.choice(members)
    if rng.random() < 0.5:
        candidate = moved_outside(rng, candidate)
    problem = scorer.problem
    count = candidate.num_microbatches(problem.training.global_batch)
    if refusal(candidate) or (
        candidate.pp > 1
        and schedule_refusal(candidate.schedule, candidate.pp, count, candidate.stages_per_rank)
    ):
        return None
    units = len(problem.graph.units)
    starts = [u for u in range(2, units - 1) if u not in problem.graph.cut_refused]
    stages = candidate.pp * candidate.stages_per_rank
    if stages - 1 > len(starts):
        return None
    path = scorer.bounds.stage_path(candidate)
    if path is None:
        return None
    cuts = path.cuts
    if rng.random() < 0.5:
        edges = [0, *sorted(rng.sample(starts, stages - 1)), units]
        cuts = tuple(pairwise(edges))
    return (candidate, cuts) if scorer.memory.fits(candidate, cuts) else None


def moved_outside(rng: random.Random, candidate: Candidate) -> Candidate:
    """With knobs that the search does not turn, or not together."""
    recompute = rng.choice(RECOMPUTE)
    sharded = candidate.dp_shard > 1
    inner = [d for d in divisors(candidate.dp_shard) if 1 < d < candidate.dp_shard]
    changed = replace(
        candidate,
        recompute=recompute,
        recompute_blocks=rng.randint(0, 5) if recompute != "none" else 0,
        reshard_ranks=rng.choice([0, *inner]) if candidate.zero == 3 else 0,
        blocks_per_group=rng.choice((1, 2, 3, 5)) if sharded else 1,
        bucket_bytes=rng.choice((1_000_000, 5_000_000, 100_000_000)),
        mesh_order=tuple(rng.sample(MESH_ORDER, len(MESH_ORDER))),
        collective=rng.choice(("auto", *ALGORITHMS)) if candidate.reduces_in_backward else "auto",
    )
    if candidate.pp == 1:
        return changed
    name = rng.choice(tuple(SCHEDULES))
    fewest, most = SCHEDULES[name].fewest_stages, SCHEDULES[name].most_stages
    return replace(changed, schedule=name, stages_per_rank=rng.randint(fewest, most or 4))


def outside_rows(problems: int, plans: int) -> Iterator[str]:
    """Random valid plans against the answer."""
    yield "| problem | answer | valid plans | better | best of them | outside the space |"
    yield "|---|---|---|---|---|---|"
    rng = random.Random(2)
    for index in range(problems):
        problem = random_problem(rng, (8, 12, 16))
        scorer, space = Scorer(problem), Space(problem, {})
        found = search_cuts(scorer, search_space(scorer, space))
        if not found.ranked:
            yield f"| {index} | nothing fits | - | - | - | - |"
            continue
        answer = found.times_ns[found.ranked[0][0]]
        offered = {c for group in space.groups() for c in space.members(group)}
        valid = better = outside = 0
        best: tuple[int, Candidate, Cuts] | None = None
        while valid < plans:
            plan = random_plan(rng, scorer, space)
            if plan is None:
                continue
            valid += 1
            path = scorer.bounds.stage_path(plan[0])
            assert path is not None, "a random plan has a cut"
            outside += plan[0] not in offered or plan[1] != path.cuts
            time_ns = scorer.step_time_ns(*plan)
            better += time_ns < answer
            best = min(best or (time_ns, *plan), (time_ns, *plan))
        assert best is not None, "there are plans"
        nodes, layers = problem.cluster.name, len(problem.graph.blocks)
        if better:
            print(found.ranked[0], best, flush=True)
        yield (
            f"| {nodes}, {layers} layers, batch {problem.training.global_batch} | "
            f"{answer / 1e6:.3f} ms | {valid:,} | {better} | {best[0] / answer - 1:+.2%} | "
            f"{outside:,} |"
        )


def main() -> None:
    """Prints the tables; with --write docs/search.md holds them between its marks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("scale", "brute", "outside"))
    parser.add_argument("--problems", type=int)
    parser.add_argument("--plans", type=int, default=10_000)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        parts = {
            "scale": lambda: scale_rows(Path(folder)),
            "brute": lambda: brute_rows(given.problems or 200),
            "outside": lambda: outside_rows(given.problems or 10, given.plans),
        }
        for name, rows in parts.items():
            if given.only in (None, name):
                lines = []
                for line in rows():
                    print(line, flush=True)
                    lines.append(line)
                if given.write:
                    put(name, lines)


def put(name: str, lines: list[str]) -> None:
    """Replaces what the page has between the marks of a part."""
    text = TARGET.read_text()
    head, rest = text.split(f"<!-- {name} -->\n")
    _, tail = rest.split(f"<!-- /{name} -->\n")
    table = "\n".join(lines)
    TARGET.write_text(f"{head}<!-- {name} -->\n{table}\n<!-- /{name} -->\n{tail}")


if __name__ == "__main__":
    main()
