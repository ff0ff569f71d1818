"""How close searchers come to the best per-layer choices: the table of docs/samplers.md.

Each problem is a traced model on a cluster; every block chooses recompute and resharding
(`planner.per_layer`), and memory lies between the least and the most that choices take: tight at a
fifth of the way, loose at three fifths. The ratio is to the optimum, which dynamic programming
proves. *Cold* starts with all blocks at their least memory; *warm* with the best of those
assignments in which all blocks choose alike, which is what the enumerated search finds.

Runs are kept in --results, one line each, and not repeated; so the study can be done in slices.

Run: nice -n 10 python bench/samplers.py --results samplers.jsonl [--seconds S] [--write]
"""

from __future__ import annotations

import argparse
import json
import pickle
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.choices import Evaluations, Scores, rank
from claw_plan.planner.graph import ModelGraph
from claw_plan.planner.model_source import load_model
from claw_plan.planner.per_layer import LayerChoices
from claw_plan.planner.per_layer_costs import layer_choices
from claw_plan.planner.per_layer_exact import solve_layers
from claw_plan.planner.policy_search import pretrain, save_policy
from claw_plan.planner.problem import Problem, Training
from claw_plan.planner.samplers import searcher_of
from claw_plan.planner.score import Scorer
from claw_plan.planner.trace import trace
from claw_plan.profiles.cluster_file import load_cluster
from claw_plan.profiles.cost_model import ClusterCostModel
from claw_plan.profiles.trainers import load_trainers

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "samplers.md"
UNEVEN = ROOT / "bench" / "uneven_models.py"
BUDGETS = (200, 1000)
CHEAP, OPTUNA = ("exact", "anneal", "rl"), ("random", "nsga2", "cmaes", "tpe")
"""Optuna takes about 60 us for each variable of a trial, TPE ten times that. So TPE is asked for
200 evaluations alone, and so are all four on models of more than 40 blocks."""

SHARES = {"tight": 0.2, "loose": 0.6}
PRETRAIN_ROUNDS = 150


@dataclass(frozen=True, kw_only=True)
class Model:
    """What is trained, and on what. `inputs` None is a config.json."""

    file: str | dict[str, object]
    cluster: str
    microbatch: int
    seq_len: int | None = 1024
    build: str | None = None
    inputs: str | None = None


def gpt(layers: int, heads: int, width: int, **where: object) -> Model:
    size = f"n_layer={layers}, n_head={heads}, n_embd={width}"
    return Model(
        file="examples/gpt.py",
        build=f"GPT(GPTConfig(vocab_size=50304, block_size=1024, {size}))",
        inputs="idx=int64[B,1024]<50304 targets=int64[B,1024]<50304",
        **where,  # type: ignore[arg-type]
    )


LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000,
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 2048,
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "vocab_size": 32000,
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 8, "num_local_experts": 8,
    "num_experts_per_tok": 2, "max_position_embeddings": 2048,
}  # fmt: skip

MODELS = {
    "GPT, 24 layers": gpt(24, 16, 1024, cluster="1xdgx-a100-40gb", microbatch=16),
    "Llama, 32 layers": Model(file=LLAMA, cluster="2xdgx-h100", microbatch=2),
    "ViT, 32 layers": Model(
        file="bench/uneven_models.py",
        build="Vit(32, 1280, 16)",
        inputs="image=float32[B,3,224,224] label=int64[B]<1000",
        cluster="2xg5.48xlarge",
        microbatch=32,
        seq_len=None,
    ),
    "MoE, 24 layers": Model(file=MIXTRAL, cluster="4xdgx-a100-80gb", microbatch=2),
    "T5-like, 24 layers": Model(
        file="bench/uneven_models.py",
        build="TwoParts(24, 1024, 16)",
        inputs="tokens=int64[B,1024]<32128 targets=int64[B,128]<32128",
        cluster="2xp4d.24xlarge",
        microbatch=8,
        seq_len=None,
    ),
    "U-Net-like, 30 layers": Model(
        file="bench/uneven_models.py",
        build="Levels(6, 64)",
        inputs="image=float32[B,3,128,128] target=float32[B,3,128,128]",
        cluster="2xdgx1-v100",
        microbatch=8,
        seq_len=None,
    ),
    "Llama, 80 layers": Model(
        file=LLAMA | {"num_hidden_layers": 80}, cluster="4xdgx-h100", microbatch=2
    ),
    "GPT, 200 layers": gpt(200, 16, 2048, cluster="1xdgx-a100-40gb", microbatch=4),
}
DEEP_MODELS = ("Llama, 80 layers", "GPT, 200 layers")


def graph_of(name: str, precision: str) -> ModelGraph:
    """The model, traced."""
    model = MODELS[name]
    with tempfile.TemporaryDirectory() as folder:
        if isinstance(model.file, dict):
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(model.file))
        else:
            path = ROOT / model.file
        loaded = load_model(path, build=model.build, inputs=model.inputs)
        return trace(loaded, seq_len=model.seq_len, dtype=precision)


@cache
def base_of(name: str, folder: Path) -> LayerChoices:
    """The model's choices with memory for all of them, traced once and kept in the folder."""
    kept = folder / f"{name}.pickle"
    if kept.exists():
        found: LayerChoices = pickle.loads(kept.read_bytes())
        return found
    choices = traced_choices(name)
    kept.write_bytes(pickle.dumps(choices))
    return choices


def traced_choices(name: str) -> LayerChoices:
    """The choices of the model as it is traced now."""
    model = MODELS[name]
    cluster = load_cluster(model.cluster)
    precision = "float16" if "v100" in model.cluster else "bfloat16"
    graph = graph_of(name, precision)
    problem = Problem(
        graph=graph,
        cluster=cluster,
        cost=ClusterCostModel(cluster, None, with_launches=False),
        training=Training(
            global_batch=2 * model.microbatch * cluster.num_devices,
            seq_len=graph.seq_len,
            precision=precision,
            optimizer="adamw",
            memory_headroom=0.1,
        ),
        trainer=load_trainers()["torch"],
    )
    candidate = Candidate(dp_shard=cluster.num_devices, microbatch_size=model.microbatch)
    return layer_choices(Scorer(problem), candidate)


def choices_of(name: str, share: str, folder: Path) -> LayerChoices:
    """With so much of the memory between the least and the most that uniform choices take."""
    base = base_of(name, folder)
    alike = np.array([(o,) * base.num_blocks for o in range(len(base.options))], np.int64)
    peaks = replace(base, capacity_bytes=0).scores(alike).excess_bytes
    low, high = int(peaks.min()), int(peaks.max())
    return replace(base, capacity_bytes=low + int(SHARES[share] * (high - low)))


def warm_start(choices: LayerChoices) -> tuple[int, ...]:
    """The best assignment in which all blocks choose alike."""
    alike = np.array([(o,) * choices.num_blocks for o in range(len(choices.options))], np.int64)
    return tuple(alike[rank(choices.scores(alike))[0]].tolist())


def one_of(choices: LayerChoices, assignment: tuple[int, ...]) -> Scores:
    return choices.scores(np.array([assignment], np.int64))


Key = tuple[str, str, str, str, int, int]
"""Problem, share of the memory, searcher, start, seed, budget."""


def runs(seeds: int) -> Iterator[Key]:
    """All that the tables show, what costs little and tells much first."""
    shallow, starts = [name for name in MODELS if name not in DEEP_MODELS], ("cold", "warm")
    parts = [
        (shallow, CHEAP, starts, BUDGETS),
        (shallow, OPTUNA, ("cold",), (200,)),
        (shallow, ("rl, pre-trained",), starts, BUDGETS),
        (DEEP_MODELS, (*CHEAP, "rl, pre-trained"), starts, BUDGETS),
        (shallow, OPTUNA, ("warm",), (200,)),
        (DEEP_MODELS, OPTUNA, ("cold",), (200,)),
        (DEEP_MODELS, OPTUNA, ("warm",), (200,)),
        (shallow, OPTUNA[:-1], starts, (1000,)),
    ]
    for names, searchers, begins, budgets in parts:
        for name, share, searcher, start in product(names, SHARES, searchers, begins):
            is_exact = searcher == "exact"
            for seed in range(1 if is_exact or searcher in OPTUNA else seeds):
                for budget in (0,) if is_exact else budgets:
                    yield name, share, searcher, start, seed, budget


def run(key: Key, folder: Path) -> dict[str, object]:
    """One search: its best time, None where nothing fits, and its CPU time."""
    name, share, searcher, start, seed, budget = key
    choices = choices_of(name, share, folder)
    begins = choices.start if start == "cold" else warm_start(choices)
    policy = None
    if searcher == "rl, pre-trained":
        policy, searcher = policy_for(name, folder), "rl"
    begun = time.process_time()
    if searcher == "exact":
        solved = solve_layers(choices)
        assert solved is not None and solved.is_proven, key
        time_ns: int | None = int(one_of(choices, solved.assignment).time_ns[0])
    else:
        evaluations = Evaluations(choices, budget)
        evaluations.ask([choices.start, begins][: 1 + (start == "warm")])
        searcher_of(searcher, None, policy)(evaluations, seed)
        time_ns = evaluations.best.time_ns if evaluations.best.fits else None
    return {
        "time_ns": time_ns,
        "start_ns": int(one_of(choices, begins).time_ns[0]),
        "cpu_s": time.process_time() - begun,
    }


def policy_for(name: str, folder: Path) -> Path:
    """A policy pre-trained on the choices of the other models that are not deep."""
    path = folder / f"{name}.policy.json"
    if not path.exists():
        others = [n for n in MODELS if n != name and n not in DEEP_MODELS]
        problems = [choices_of(other, share, folder) for other in others for share in SHARES]
        save_policy(pretrain(problems, PRETRAIN_ROUNDS, 0), path)
    return path


def study(results: Path, seconds: float, seeds: int, only: str) -> None:
    """Does what is missing of the study, of problems named so, for so many CPU seconds."""
    done = {tuple(line["key"]) for line in load(results)}
    folder = results.parent
    for key in runs(seeds):
        if time.process_time() > seconds:
            break
        if key not in done and only in f"{key[0]}, {key[1]}":
            line = {"key": key, **run(key, folder)}
            with results.open("a") as out:
                out.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)


def load(results: Path) -> list[dict[str, object]]:
    if not results.exists():
        return []
    return [json.loads(line) for line in results.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=900.0)
    parser.add_argument("--seeds", type=int, default=3, help="of annealing and RL")
    parser.add_argument("--only", default="", help="a part of the problems' names")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    study(options.results, options.seconds, options.seeds, options.only)
    if options.write:
        from sampler_tables import write_tables

        write_tables(TARGET, load(options.results))


if __name__ == "__main__":
    main()
