"""Plans written by hand for small models, so that the executor is tested without the planner."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from claw_plan.executor.ranks import Rank
from claw_plan.planner.candidate import Candidate
from claw_plan.planner.expert_parallel import find_experts
from claw_plan.planner.expert_tensor_parallel import tensor_rule, with_inner_size
from claw_plan.planner.graph import ModelGraph
from claw_plan.planner.model_source import load_model
from claw_plan.planner.plan import Plan, candidate_mapping, load_plan, save_plan
from claw_plan.planner.plan_check import model_of_plan
from claw_plan.planner.plan_stages import stage_spans
from claw_plan.planner.problem import Problem, Training
from claw_plan.planner.schedules import rank_of_stage
from claw_plan.planner.shards import ShardSizes
from claw_plan.planner.tensor_parallel_search import find_rules
from claw_plan.planner.trace_context import trace_context
from claw_plan.planner.traffic import Kind, Moved, predict_traffic
from claw_plan.planner.vocabulary_parallel_search import find_vocabulary
from claw_plan.profiles.cluster_file import cluster_from_mapping
from claw_plan.profiles.cost_model import ClusterCostModel

EXAMPLES = Path(__file__).parents[2] / "examples"


def found_rules(model: Path, blocks: list[str], **naming: str | None) -> list[dict[str, Any]]:
    """The tensor-parallel rules that the planner finds, as they stand in a plan."""
    loaded = load_model(model, **naming)
    module, batch = loaded.build(), loaded.example_batch(2)

    def forward() -> torch.Tensor:
        return loaded.loss(module(**loaded.inputs_of(module, batch)), batch)

    finding = find_rules(module, blocks, forward)
    pattern = blocks[0].rpartition(".")[0] + "[*]"
    found = [(f"{pattern}.{rule.module}".rstrip("."), rule) for rule in finding.rules]
    vocabulary = find_vocabulary(module, blocks, forward, finding.tp_divides)
    found += [(rule.module, rule) for rule in vocabulary.rules]
    experts = find_experts(module, blocks, forward, 2)
    for block, rules in experts.rules.items():
        for rule in rules:
            name = f"{block}.{rule.module}"
            held, call = module.get_submodule(name), experts.calls[name]
            divided = with_inner_size(rule, held, call, finding.tp_divides)
            found += [(name, tensor_rule(divided))] if divided.inner else []
    return [
        {
            "modules": modules,
            "style": rule.style,
            "heads": rule.heads,
            "parts": rule.parts,
            "weight_dims": dict(rule.weight_dims),
        }
        for modules, rule in found
    ]


def write_plan(
    folder: Path,
    name: str,
    model: Path,
    blocks: list[str],
    *,
    global_batch: int = 8,
    seq_len: int | None = None,
    precision: str = "float32",
    build: str | None = None,
    inputs: str | None = None,
    rules: list[dict[str, Any]] | None = None,
    experts: list[dict[str, Any]] | None = None,
    cuts: list[int] | None = None,
    clip_norm: float | None = None,
    vocabulary_rows: str = "",
    hosts: int = 1,
    **knobs: Any,
) -> Path:
    """A plan with the given knobs over `blocks`, cut evenly unless `cuts` says where.

    Its ranks fill so many hosts alike.
    """
    candidate = Candidate(**knobs)
    plan = Plan.model_validate(
        {
            "version": 1,
            "model": {
                "file": str(model),
                "sha256": hashlib.sha256(model.read_bytes()).hexdigest(),
                "build": build,
                "inputs": inputs,
                "parameters": 1,
            },
            "training": {
                "global_batch": global_batch,
                "seq_len": seq_len,
                "precision": precision,
                "optimizer": "adamw",
                "learning_rate": 1e-3,
                "clip_norm": clip_norm,
            },
            **_placed(candidate, hosts),
            "candidate": candidate_mapping(candidate),
            "schedule": {
                "name": candidate.schedule,
                "stages_per_rank": candidate.stages_per_rank,
                "num_microbatches": candidate.num_microbatches(global_batch),
            },
            "blocks": blocks,
            "stages": _stages(candidate, blocks, cuts),
            "tensor_parallel": rules or [],
            "vocabulary_rows": vocabulary_rows,
            "expert_parallel": experts or [],
        }
    )
    path = folder / f"{name}.yaml"
    save_plan(plan, path)
    return path


def _placed(candidate: Candidate, hosts: int) -> dict[str, Any]:
    """The cluster, and the ranks on it."""
    each = 8 if hosts == 1 else candidate.num_devices // hosts
    nodes = [{"count": hosts, "devices": {"type": "cpu", "count": each}}]
    return {
        "cluster": {"name": "here", "nodes": nodes},
        "mesh": {
            "axes": {axis: getattr(candidate, axis) for axis in candidate.mesh_order},
            "devices": [f"{i // each}:{i % each}" for i in range(candidate.num_devices)],
        },
    }


def _stages(
    candidate: Candidate, blocks: list[str], cuts: list[int] | None
) -> list[dict[str, Any]]:
    count = candidate.pp * candidate.stages_per_rank
    edges = [0, *(cuts or [len(blocks) * i // count for i in range(1, count)]), len(blocks)]
    return [
        {
            "rank_group": rank_of_stage(candidate.schedule, index, candidate.pp),
            "modules": blocks[edges[index] : edges[index + 1]],
        }
        for index in range(count)
    ]


@pytest.fixture(scope="session")
def write_any() -> Callable[..., Path]:
    """Writes a plan for any model beside its file: `write_any(model, name, blocks, tp=2, …)`."""
    return lambda model, name, blocks, **options: write_plan(
        model.parent, name, model, blocks, **options
    )


TINY_GPT = {
    "build": "GPT(GPTConfig(vocab_size=61, block_size=16, n_layer=4, n_head=4, n_embd=32))",
    "inputs": "idx=int64[B,16]<61 targets=int64[B,16]<61",
}
"""The example's GPT, tied head and fused q, k, v included, small enough to train in a blink."""

TINY_BLOCKS = [f"transformer.h.{index}" for index in range(4)]


@pytest.fixture(scope="session")
def model_plan() -> Callable[..., Path]:
    """Writes a plan beside a model, with the rules that the planner finds for it.

    `model_plan(model, blocks, name, build=…, inputs=…, tp=2, …)`.
    """
    rules: dict[tuple[Path, str | None], list[dict[str, Any]]] = {}

    def write(model: Path, blocks: list[str], name: str, **options: Any) -> Path:
        naming = {key: options.pop(key, None) for key in ("build", "inputs")}
        key = (model, naming["build"])
        if key not in rules:
            rules[key] = found_rules(model, blocks, **naming)
        options.setdefault("rules", rules[key])
        return write_plan(model.parent, name, model, blocks, **naming, **options)

    return write


@pytest.fixture(scope="session")
def tiny_plan(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a plan for the tiny GPT: `tiny_plan(name, dp_shard=2, …)`."""
    folder = tmp_path_factory.mktemp("tiny-gpt")
    model = EXAMPLES / "gpt.py"
    rules = found_rules(model, TINY_BLOCKS, **TINY_GPT)

    def write(name: str, **options: Any) -> Path:
        options.setdefault("rules", rules)
        return write_plan(folder, name, model, TINY_BLOCKS, **TINY_GPT, **options)

    return write


PLAIN_MODEL = Path(__file__).with_name("plain_model.py")
PLAIN_BLOCKS = [f"blocks.{index}" for index in range(8)]


@pytest.fixture(scope="session")
def plain_plan(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a plan for plain_model.py: `plain_plan(name, tp=2, …)`."""
    folder = tmp_path_factory.mktemp("plain")
    rules = found_rules(PLAIN_MODEL, PLAIN_BLOCKS)

    def write(name: str, **options: Any) -> Path:
        options.setdefault("rules", rules)
        return write_plan(folder, name, PLAIN_MODEL, PLAIN_BLOCKS, **options)

    return write


DEEP_GPT = TINY_GPT | {
    "build": "GPT(GPTConfig(vocab_size=61, block_size=16, n_layer=8, n_head=2, n_embd=16))",
}
DEEP_BLOCKS = [f"transformer.h.{index}" for index in range(8)]


@pytest.fixture(scope="session")
def deep_plan(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a plan for a GPT of eight thin blocks, enough for many stages."""
    folder = tmp_path_factory.mktemp("deep-gpt")
    model = EXAMPLES / "gpt.py"
    rules = found_rules(model, DEEP_BLOCKS, **DEEP_GPT)

    def write(name: str, **options: Any) -> Path:
        options.setdefault("rules", rules)
        return write_plan(folder, name, model, DEEP_BLOCKS, **DEEP_GPT, **options)

    return write


@pytest.fixture(scope="session")
def config_plan(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a plan for a small Hugging Face model: `config_plan("gpt2", name, tp=2, …)`."""
    folder = tmp_path_factory.mktemp("configs")
    rules: dict[str, list[dict[str, Any]]] = {}

    def write(family: str, name: str, **options: Any) -> Path:
        model, (prefix, config) = folder / f"{family}.json", CONFIGS[family]
        blocks = [f"{prefix}.{index}" for index in range(4)]
        if family not in rules:
            model.write_text(json.dumps(config))
            rules[family] = found_rules(model, blocks)
        options.setdefault("rules", rules[family])
        return write_plan(folder, f"{family}-{name}", model, blocks, **options)

    return write


CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "model.layers",
        {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 61,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 16,
        },
    ),
    "gpt2": (
        "transformer.h",
        {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "vocab_size": 61,
            "n_embd": 32,
            "n_layer": 4,
            "n_head": 4,
            "n_positions": 16,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
    ),
}
"""Container of the blocks and config.json of untouched Hugging Face models; GPT-2's head is tied
and its dropout modules stand at 0.1."""


@pytest.fixture(scope="session")
def predicted_traffic() -> Callable[[Path], list[dict[Kind, Moved]]]:
    """What planning says that each rank of a plan file moves in a step."""
    return partial(_predicted, graphs={})


def _predicted(path: Path, graphs: dict[str, ModelGraph]) -> list[dict[Kind, Moved]]:
    """`graphs` are those of models that were traced before."""
    plan = load_plan(path)
    settings, knobs = plan.training, plan.knobs()
    way = f"{knobs.cp} {knobs.cp_comm_type}"
    key = f"{plan.model.file} {plan.model.build} {settings.precision} {way}"
    if key not in graphs:
        model, kind = model_of_plan(plan, path), knobs.cp_comm_type
        graphs[key] = trace_context(
            model, seq_len=model.seq_len(), dtype=settings.precision, cp=knobs.cp, kind=kind
        )
    graph, cluster = graphs[key], cluster_from_mapping(plan.cluster, "cluster")
    training = Training(
        global_batch=settings.global_batch,
        seq_len=graph.seq_len,
        precision=settings.precision,
        optimizer=settings.optimizer,
        memory_headroom=0.0,
        clip_norm=settings.clip_norm,
    )
    cost = ClusterCostModel(cluster)
    problem = Problem(graph=graph, cluster=cluster, cost=cost, training=training)
    return predict_traffic(problem, ShardSizes(graph), knobs, _cuts_of(plan, graph))


def _cuts_of(plan: Plan, graph: ModelGraph) -> tuple[tuple[int, int], ...]:
    spans = stage_spans(plan)
    starts = [0, *(start + 1 for start, _ in spans[1:])]
    return tuple(zip(starts, [*starts[1:], len(graph.units)], strict=True))


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Rank]:
    """This process as the only rank of an initialised process group."""
    store = tmp_path / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield Rank(rank=0, world_size=1, local_rank=0, local_world_size=1)
    dist.destroy_process_group()
