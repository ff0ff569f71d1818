from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from claw_plan.planner.model_source import load_model
from claw_plan.planner.split.choice import agreeing, best_split, beyond, block_flows, costs_on
from claw_plan.planner.split.costs import SplitCosts
from claw_plan.planner.split.graph import SplitGraph
from claw_plan.planner.split.ways import Setting
from claw_plan.planner.subject import Subject
from claw_plan.planner.tensor_parallel_search import find_rules

ROOT = Path(__file__).parents[3]
COMMON = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 32,
}  # fmt: skip
WORK = SplitCosts(
    op_ns=lambda work: 10 * work.flops + work.bytes,
    collective_ns=lambda op, size: 100,
    gradient_ns=lambda size: 100,
)
"""Kernels by their work and cheap messages: what can be divided well is."""


def subject_of(folder: Path, config: dict[str, object]) -> Subject:
    path = folder / "config.json"
    path.write_text(json.dumps(COMMON | config))
    model = load_model(path)
    return Subject.prepare(model, seq_len=model.seq_len(), dtype=torch.float32, fold=2)


def last_flow(subject: Subject) -> tuple[str, SplitGraph]:
    name, graph = list(block_flows(subject).items())[-1]
    assert isinstance(graph, SplitGraph), graph
    return name, graph


MODELS = {
    "llama": {"model_type": "llama", "num_key_value_heads": 2},
    "bert": {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_program_finds_what_the_data_flow_and_megatron_say(tmp_path: Path, name: str) -> None:
    subject = subject_of(tmp_path, MODELS[name])
    block, graph = last_flow(subject)
    split = best_split(block, graph, Setting(degree=2), WORK)
    batch = subject.batch(2)
    names = [n for n, m in subject.module.named_modules() if m is subject.blocks[-1]]
    with subject.world():
        finding = find_rules(subject.module, names, lambda: subject.forward(batch))
    style = {rule.module: rule.style for rule in finding.rules if rule.style != "region"}
    ours = dict.fromkeys((n.rpartition(".")[0] for n in split.columns), "colwise")
    ours |= dict.fromkeys((n.rpartition(".")[0] for n in split.rows), "rowwise")
    assert ours == style
    # Megatron-LM (Shoeybi et al. 2019): two all-reduces a layer in each pass.
    assert split.forward == split.backward == ("all_reduce",) * 2
    assert agreeing(split, finding.rules) == finding.rules and not beyond(split, style)


@pytest.mark.slow
def test_llama_is_divided_as_transformers_states(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    block, graph = last_flow(subject_of(tmp_path, MODELS["llama"]))
    split = best_split(block, graph, Setting(degree=2), WORK)
    stated = {
        name.removeprefix("layers.*."): style
        for name, style in LlamaConfig.base_model_tp_plan.items()
        if name.startswith("layers.*.") and style in ("colwise", "rowwise")
    }
    ours = dict.fromkeys((n.rpartition(".")[0] for n in split.columns), "colwise")
    ours |= dict.fromkeys((n.rpartition(".")[0] for n in split.rows), "rowwise")
    assert ours == stated


@pytest.mark.slow
def test_the_inner_size_of_experts_is_found_and_not_offered(tmp_path: Path) -> None:
    config = {"model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 4}
    block, graph = last_flow(subject_of(tmp_path, config))
    split = best_split(block, graph, Setting(degree=2), WORK)
    assert any("experts" in name for name in split.columns)
    assert any("experts" in name for name in split.rows)
    attention = {"self_attn.q_proj": "colwise", "self_attn.k_proj": "colwise"}
    assert "mlp.experts" in beyond(split, attention)


def test_grouped_keys_that_do_not_divide_leave_the_attention_whole(tmp_path: Path) -> None:
    block, graph = last_flow(subject_of(tmp_path, MODELS["llama"]))
    split = best_split(block, graph, Setting(degree=4), WORK)
    assert {name.partition(".")[0] for name in (*split.columns, *split.rows)} == {"mlp"}
    assert "mlp.gate_proj, mlp.up_proj by columns, mlp.down_proj by rows" in split.text()


def test_what_does_not_pay_is_told(tmp_path: Path) -> None:
    block, graph = last_flow(subject_of(tmp_path, MODELS["llama"]))
    slow = SplitCosts(
        op_ns=lambda work: work.flops,
        collective_ns=lambda op, size: 10**12,
        gradient_ns=lambda size: 0,
    )
    split = best_split(block, graph, Setting(degree=2), slow)
    assert split.time_ns == split.whole_ns and split.forward == ()
    assert split.text() == f"{block}: nothing is divided 2 ways, for none of it pays"


def test_prices_are_those_of_the_cluster() -> None:
    from claw_plan.planner.problem import Problem, Training
    from claw_plan.planner.trace import trace
    from claw_plan.profiles.cluster_file import load_cluster
    from claw_plan.profiles.cost_model import ClusterCostModel
    from claw_plan.profiles.work import CollectiveWork

    model = load_model(
        ROOT / "examples" / "gpt.py",
        build="GPT(GPTConfig(vocab_size=66, block_size=8, n_head=2, n_embd=16, n_layer=2))",
        inputs="idx=int64[B,8]<66 targets=int64[B,8]<66",
    )
    cluster = load_cluster("2xdgx-h100")
    problem = Problem(
        graph=trace(model, seq_len=8, dtype="float32"),
        cluster=cluster,
        cost=ClusterCostModel(cluster),
        training=Training(
            global_batch=8, seq_len=8, precision="float32", optimizer="adamw", memory_headroom=0.1
        ),
    )
    work = CollectiveWork(op="all_reduce", bytes=10**6, group_size=16, nodes=2)
    whole = problem.cost.collective(work)
    costs = costs_on(problem, 16)
    assert costs.collective_ns("all_reduce", 10**6) == whole.alone_ns
    assert costs.gradient_ns(10**6) == whole.alone_ns - whole.latency_ns
