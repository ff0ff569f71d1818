"""Cases of tensor parallelism that users of other trainers reported, with their right outcomes.

Sources are the public issues named beside each test. Heads that a degree does not divide (52 on
3 ranks; 2 of keys and values on 4) are in `test_reported_cases`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn as nn

from claw_plan.executor.verify import verify_plans
from claw_plan.planner.graph import PLAIN, TENSOR, ModelGraph, TensorParallelRule
from claw_plan.planner.lower import lower
from claw_plan.planner.model_source import load_model
from claw_plan.planner.plan import save_plan
from claw_plan.planner.planning import PlanningRequest, PlanningResult, make_plan
from claw_plan.planner.problem import Problem, Training
from claw_plan.planner.score import Scorer
from claw_plan.planner.shards import ShardSizes, local_numel
from claw_plan.planner.tensor_parallel import TensorParallelModel
from claw_plan.planner.tp_autograd import StandIn
from claw_plan.planner.trace import trace
from claw_plan.planner.vocabulary_parallel import EMBEDDING, HEAD, divide_vocabulary
from claw_plan.profiles.cost_model import ClusterCostModel

GIB = 2**30

TOWERS = """
import torch, torch.nn as nn, torch.nn.functional as F

class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        b, s, d = x.shape
        h = self.norm(x)
        q, k, v = (
            f(h).view(b, s, self.heads, d // self.heads).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(1, 2).reshape(b, s, d))

class Text(Layer):
    pass

class Towers(nn.Module):
    def __init__(self, vision_heads):
        super().__init__()
        self.patches, self.words = nn.Linear(27, 48), nn.Embedding(99, 80)
        self.vision = nn.ModuleList(Layer(48, vision_heads) for _ in range(2))
        self.text = nn.ModuleList(Text(80, 40) for _ in range(2))
        self.join, self.head = nn.Linear(48, 80), nn.Linear(80, 99)

    def forward(self, image, ids):
        seen = self.patches(image)
        for layer in self.vision:
            seen = layer(seen)
        read = self.words(ids) + self.join(seen.mean(1, keepdim=True))
        for layer in self.text:
            read = layer(read)
        return F.cross_entropy(self.head(read).flatten(0, 1), ids.flatten())
"""


@pytest.mark.slow
@pytest.mark.parametrize("vision_heads", [1, 3])
def test_a_tower_with_few_heads_does_not_forbid_the_other(
    vision_heads: int, tmp_path: Path
) -> None:
    """heads-from-vision-config, gpustack/gpustack#2642: 40 heads of text, 1 value of vision."""
    (tmp_path / "towers.py").write_text(TOWERS)
    model = load_model(
        tmp_path / "towers.py",
        build=f"Towers({vision_heads})",
        inputs="image=float32[B,4,27] ids=int64[B,8]<99",
    )
    graph = trace(model, seq_len=None, dtype="float32")
    assert (graph.tp_divides, graph.no_tensor_parallel) == (40, "")
    divided = {p.name for p in graph.parameters if p.tp_dim is not None}
    assert {f"text.{i}.{name}.weight" for i in (0, 1) for name in ("q", "k", "v", "out")} < divided
    assert not any(name.startswith("vision") for name in divided)


VOCABULARY = 250_682


def test_an_uneven_vocabulary_keeps_its_true_size() -> None:
    """vocab-250682, vllm-project/vllm#440: 250682 rows on TP=8 are not to be cut to 250680."""
    rules = [
        TensorParallelRule(module=module, style=style, heads=VOCABULARY, weight_dims={"weight": 0})
        for module, style in (("table", EMBEDDING), ("head", HEAD))
    ]
    torch.manual_seed(0)
    whole = nn.Embedding(VOCABULARY, 2).weight.detach()
    parts = []
    for rank in range(8):
        model = nn.ModuleDict(
            {"table": nn.Embedding(VOCABULARY, 2), "head": nn.Linear(2, VOCABULARY, bias=False)}
        )
        model["table"].weight = model["head"].weight
        model["table"].weight.data.copy_(whole)
        divided = TensorParallelModel(ranks=StandIn(8, rank))
        divide_vocabulary(model, rules, divided)
        scores = model["head"](torch.zeros(1, 2))
        assert scores.shape == (1, VOCABULARY)  # what the model's own code sees
        parts.append(model["table"].weight.detach())
    assert [len(part) for part in parts] == [31336, 31336, *[31335] * 6]
    assert divided.sharded["table.weight"].shape == (VOCABULARY, 2)
    assert torch.equal(divided.full_parameter("table.weight", parts), whole)


def config(folder: Path, **entries: object) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(entries))
    return folder


def decoder(folder: Path, model_type: str, **entries: object) -> Path:
    sizes = {
        "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8,
        "num_key_value_heads": 8, "num_hidden_layers": 2, "vocab_size": 1003,
        "max_position_embeddings": 32,
    }  # fmt: skip
    return config(folder, model_type=model_type, **(sizes | entries))


def llama_graph(folder: Path) -> ModelGraph:
    return trace(load_model(decoder(folder / "llama", "llama")), seq_len=32, dtype="float32")


@pytest.mark.slow
def test_norms_and_their_states_are_whole_on_every_rank(tmp_path: Path) -> None:
    """mem-layernorm-not-tp-sharded, cli99/llm-analysis#28: a decoder on TP=8."""
    graph = llama_graph(tmp_path)
    norms = [p for p in graph.parameters if len(p.shape) == 1]
    assert len(norms) == 5 and all(local_numel(norm, 8) == 64 for norm in norms)
    # One block: attention 4 x 64 x 64, MLP 3 x 64 x 128, two norms of 64; 16 bytes each of
    # weight, gradient and two moments in fp32.
    groups = ShardSizes(graph).groups(0, 4, 8, 1)
    matrices = 4 * 64 * 64 + 3 * 64 * 128
    assert groups[1].trainable_whole == matrices // 8 + 2 * 64
    # The ends: an embedding and a head of 1003 rows, 126 on the first rank, and the last norm.
    assert groups[-1].trainable_whole == 2 * 126 * 64 + 64


CHUNKED = """
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))

class Model(nn.Module):
    def __init__(self, chunk):
        super().__init__()
        self.chunk, self.words = chunk, nn.Embedding(151936, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(64, 151936, bias=False)

    def loss(self, x, labels):
        scores = self.head(x).float()
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum")

    def forward(self, ids):
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        pairs = zip(x.split(self.chunk, 1), ids.split(self.chunk, 1))
        losses = [checkpoint(self.loss, *pair, use_reentrant=False) for pair in pairs]
        return sum(losses) / ids.numel()
"""


@pytest.mark.slow
def test_a_loss_in_chunks_lowers_the_estimate(tmp_path: Path) -> None:
    """mem-ce-chunk, ISEEKYAN/Megatron-LM#132: 8192 tokens of 151936 words in fp32.

    4.64 GiB of scores and as much of their softmax; in chunks of 1024 tokens an eighth.
    """
    (tmp_path / "chunked.py").write_text(CHUNKED)

    def peak_gib(chunk: int, variant: str, tp: int = 1) -> float:
        model = load_model(
            tmp_path / "chunked.py",
            build=f"Model({chunk})",
            inputs="ids=int64[B,8192]<151936",
        )
        graph = graphs.setdefault(chunk, trace(model, seq_len=None, dtype="bfloat16"))
        cost = graph.cost(len(graph.units) - 1, variant)
        return cost.forward_peak_bytes.at(1, tp) / GIB

    graphs: dict[int, ModelGraph] = {}
    scores = 8192 * 151936 * 4 / GIB
    assert scores == pytest.approx(4.64, abs=0.01)
    assert peak_gib(8192, PLAIN) == pytest.approx(2 * scores, rel=0.01)
    assert peak_gib(1024, PLAIN) == pytest.approx(2 * scores / 8, rel=0.01)
    # Divided over 2 ranks each has half the words.
    assert peak_gib(8192, TENSOR, 2) == pytest.approx(scores, rel=0.01)
    assert peak_gib(1024, TENSOR, 2) == pytest.approx(scores / 8, rel=0.01)


def planned(model: Path, folder: Path, sequence_parallel: bool) -> tuple[Path, PlanningResult]:
    """A plan for two ranks of tensor parallelism, and what it was made of."""
    cluster = folder / "cluster.yaml"
    cluster.write_text("name: here\nnodes:\n- devices: {type: cpu, cores: 2, count: 2}\n")
    result = make_plan(
        PlanningRequest(
            model=model,
            cluster=str(cluster),
            global_batch=4,
            seq_len=16,
            precision="float32",
            fix={"tp": 2, "pp": 1, "recompute": "none", "sequence_parallel": sequence_parallel},
            output_folder=folder,
        )
    )
    path = folder / f"sequence-{sequence_parallel}.yaml"
    save_plan(result.plan, path)
    return path, result


@pytest.mark.slow
def test_norms_of_heads_and_of_parts_of_the_sequence_are_summed(tmp_path: Path) -> None:
    """qk-norm-tp, NVIDIA-NeMo/RL#3716; sp-norm-te, NVIDIA/TransformerEngine#435.

    Weights that every rank holds and uses on its heads, or on its part of the sequence, have a
    part of their gradient on each rank. Who sums them: the heads' norms an all-reduce in the
    backward pass of each block, the others one task after the last.
    """
    model = decoder(tmp_path / "qwen3", "qwen3", head_dim=8)
    heads, divided = planned(model, tmp_path, sequence_parallel=False)
    parts, sequence = planned(model, tmp_path, sequence_parallel=True)
    results = verify_plans([heads, parts], steps=3)
    assert all(result.ok for result in results), results
    norms = [p for p in divided.graph.parameters if p.name.endswith("q_norm.weight")]
    assert len(norms) == 2 and all(norm.tp_dim is None for norm in norms)
    backward = divided.graph.cost(1, TENSOR).backward
    small = [e for e in backward if getattr(e, "op", "") == "all_reduce" and e.bytes.at(1) == 32]
    assert len(small) == 2  # 8 numbers in fp32 each for q_norm and k_norm
    assert task_names(sequence).count("sequence-parallel gradients") == 1
    assert "sequence-parallel gradients" not in task_names(divided)


def task_names(result: PlanningResult) -> list[str]:
    """The tasks of the best plan's step."""
    problem = Problem(
        graph=result.graph,
        cluster=result.cluster,
        cost=ClusterCostModel(result.cluster, None),
        training=Training(
            global_batch=4, seq_len=16, precision="float32", optimizer="adamw", memory_headroom=0.1
        ),
    )
    tasks = lower(problem, Scorer(problem).shards, result.best.candidate, result.best.cuts)
    return list(tasks.graph.name)
