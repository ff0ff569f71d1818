"""Planning on several kinds of devices: against brute force, at scale, and how well they are used.

Three parts, for docs/mixed.md:

- brute: random small problems of two or three kinds, the best pipeline over them against every
  order, cut, division and recomputation, simulated;
- scale: a whole command for three kinds with 256 GPUs each, its time and memory;
- use: the utilisation of A100s and H100s together, and what each kind does alone.

Run: python bench/mixed.py [--only brute|scale|use] [--problems N]
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
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path

from claw_plan.planner.graph import ModelGraph
from claw_plan.planner.mixed.cut import arrangements
from claw_plan.planner.mixed.kinds import MixedProblem, kinds_of
from claw_plan.planner.mixed.plan import MixedCandidate
from claw_plan.planner.mixed.score import MixedScorer
from claw_plan.planner.mixed.search import search_mixed
from claw_plan.planner.mixed.space import RECOMPUTE, MixedSpace, Way
from claw_plan.planner.model_source import load_model
from claw_plan.planner.problem import Problem, Training
from claw_plan.planner.shards import ShardSizes
from claw_plan.planner.trace import trace
from claw_plan.profiles.cluster_file import cluster_from_mapping
from claw_plan.profiles.cost_model import ClusterCostModel
from claw_plan.profiles.trainers import load_trainers

ROOT = Path(__file__).parents[1]
GPT = ROOT / "examples" / "gpt.py"
COMMAND = Path(sys.executable).with_name("claw-plan")
KINDS = ("a100-sxm-80gb", "h100-sxm-80gb", "a100-sxm-40gb", "h100-pcie-80gb")
INPUTS = "idx=int64[B,{0}]<50304 targets=int64[B,{0}]<50304"


def gpt(layers: int, width: int, heads: int, context: int) -> tuple[str, str]:
    """--build and --inputs of a GPT of examples/gpt.py."""
    build = (
        f"GPT(GPTConfig(vocab_size=50304, block_size={context}, n_layer={layers}, "
        f"n_head={heads}, n_embd={width}))"
    )
    return build, INPUTS.format(context)


def graph_of(layers: int) -> ModelGraph:
    """A small GPT, traced."""
    build, inputs = gpt(layers, 512, 2, 256)
    return trace(load_model(GPT, build=build, inputs=inputs), seq_len=256, dtype="bfloat16")


def random_space(rng: random.Random, graphs: dict[int, ModelGraph]) -> MixedSpace:
    """Two kinds of up to two devices, or three of one; memory that may be hardly enough."""
    several = rng.choice([2, 2, 3])
    nodes = [
        {
            "count": 1,
            "devices": {
                "type": kind,
                "count": 1 if several == 3 else rng.choice([1, 2]),
                "memory": f"{rng.choice([80, 2.6, 2.4, 2.2])} GiB",
            },
            "intra": {"type": "nvlink3"},
            "nics": {"type": rng.choice(["ib-hdr", "ib-ndr"]), "count": 1},
        }
        for kind in rng.sample(KINDS, several)
    ]
    cluster = cluster_from_mapping({"name": "random", "nodes": nodes}, "bench")
    layers = rng.randint(2, 3 if several == 3 else 6)
    if layers not in graphs:
        graphs[layers] = graph_of(layers)
    whole = Problem(
        graph=graphs[layers],
        cluster=cluster,
        cost=ClusterCostModel(cluster, with_launches=False),
        training=Training(
            global_batch=rng.choice([1, 2, 4]),
            seq_len=256,
            precision="bfloat16",
            optimizer="adamw",
            memory_headroom=0.0,
        ),
        trainer=load_trainers()["torch"],
    )
    kinds = kinds_of(whole, partial(ClusterCostModel, with_launches=False))
    return MixedSpace(MixedScorer(MixedProblem(whole=whole, kinds=kinds), ShardSizes(whole.graph)))


def every_pipeline(space: MixedSpace) -> Iterator[MixedCandidate]:
    """All orders, cuts and recomputations of all ways, whether they fit or not."""
    for microbatch, divisions in space.rows()[0]:
        for sharing in space.sharings(divisions):
            way = Way(microbatch, divisions, sharing)
            for one in arrangements(space.chain(way, limited=False)):
                for again in product(range(len(RECOMPUTE)), repeat=len(one)):
                    chosen = (
                        run._replace(recompute=how) for run, how in zip(one, again, strict=True)
                    )
                    yield space.mixed(way, tuple(chosen))


def brute(problems: int) -> None:
    """Every fitting pipeline simulated; the search must answer the same."""
    rng, graphs = random.Random(0), dict[int, ModelGraph]()
    equal = infeasible = simulated = looked_at = 0
    for _ in range(problems):
        space = random_space(rng, graphs)
        scorer = space.scorer
        times = [
            scorer.step_time_ns(mixed) for mixed in every_pipeline(space) if scorer.fits(mixed)
        ]
        found = search_mixed(space)
        answer = found.ranked[0][0] if found.ranked else None
        equal += answer == min(times, default=None)
        infeasible += not times
        simulated += len(times)
        looked_at += len(found.ranked)
    print(f"| {problems} | {equal} | {infeasible} | {simulated:,} | {looked_at:,} |", flush=True)


def plan(nodes: Sequence[tuple[int, str]], model: tuple[str, str], *options: str) -> None:
    """A whole command; prints its CPU time and answer."""
    listed = "".join(f"  - {{count: {count}, type: {name}}}\n" for count, name in nodes)
    with tempfile.TemporaryDirectory() as folder:
        cluster = Path(folder) / "cluster.yaml"
        cluster.write_text(f"name: mixed\nnodes:\n{listed}")
        build, inputs = model
        command = [
            str(COMMAND), str(GPT), "--cluster", str(cluster), "--build", build,
            "--inputs", inputs, "--json", *options,
        ]  # fmt: skip
        start = time.perf_counter()
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        output = child.communicate()[0]
        used = os.times()
    answer = json.loads(output)
    lines = answer["plan"]["mixed"] if answer["plan"] else []
    print(
        json.dumps(
            {
                "nodes": listed.split("\n"),
                "cpu_s": round(used.children_user + used.children_system, 1),
                "wall_s": round(time.perf_counter() - start, 1),
                "step_ms": answer["step_time_ms"],
                "mfu": answer["mfu"],
                "gap": answer["search"] and answer["search"]["gap"],
                "pipelines": [
                    (line["batch"], line["num_microbatches"], len(line["ranks"])) for line in lines
                ],
                "others_ms": {
                    name: other.get("step_time_ms", other.get("reason"))
                    for name, other in answer["baselines"].items()
                },
            },
            indent=1,
        ),
        flush=True,
    )


def main() -> None:
    """Runs the parts asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=["brute", "scale", "use"])
    parser.add_argument("--problems", type=int, default=100)
    asked = parser.parse_args()
    if asked.only in (None, "brute"):
        brute(asked.problems)
    if asked.only in (None, "scale"):
        three = [(32, "dgx-a100-80gb"), (32, "dgx-h100"), (32, "dgx1-v100")]
        plan(three, gpt(40, 5120, 40, 2048), "--precision", "fp16", "--global-batch", "1536")
    if asked.only in (None, "use"):
        two = [(4, "dgx-a100-80gb"), (4, "dgx-h100")]
        plan(two, gpt(40, 5120, 40, 2048), "--global-batch", "512")


if __name__ == "__main__":
    main()
