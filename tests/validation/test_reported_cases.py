"""Cases that users of other planners reported, each with the outcome its engineers wanted.

Sources are the public issues named beside each test.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from claw_plan.planner.errors import InfeasiblePlan, PlanError
from claw_plan.planner.planning import PlanningRequest, PlanningResult, make_plan

GPT = Path(__file__).parents[2] / "examples" / "gpt.py"

EAGER = """
import torch, torch.nn as nn, torch.nn.functional as F

class Block(nn.Module):
    def __init__(self, dim=1280, heads=20):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        b, s, d = x.shape
        q, k, v = self.qkv(self.ln_1(x)).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = F.dropout((q @ k.transpose(-1, -2) / 8).softmax(-1), 0.1, self.training)
        x = x + self.proj((scores @ v).transpose(1, 2).reshape(b, s, d))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(50304, 1280)
        self.h = nn.ModuleList(Block() for _ in range(36))
        self.scale = nn.Parameter(torch.ones(1280))
        self.head = nn.Linear(1280, 50304, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, idx, targets):
        x = self.wte(idx)
        for block in self.h:
            x = block(x)
        logits = self.head(x * self.scale)
        return F.cross_entropy(logits.float().view(-1, 50304), targets.view(-1))

def build_model():
    return Model()

def example_batch(n):
    return {name: torch.randint(0, 50304, (n, 1024)) for name in ("idx", "targets")}
"""


def gpt(cluster: str, *, heads: int = 12, layers: int = 12, **settings: object) -> PlanningResult:
    """The example's GPT with other sizes, 64 sequences of 64 tokens."""
    size = f"n_layer={layers}, n_head={heads}, n_embd={8 * heads}"
    return make_plan(
        PlanningRequest(
            model=GPT,
            build=f"GPT(GPTConfig(vocab_size=512, block_size=64, {size}))",
            inputs="idx=int64[B,64]<512 targets=int64[B,64]<512",
            cluster=cluster,
            **({"global_batch": 64} | settings),  # type: ignore[arg-type]
        )
    )


def test_the_nearest_batches_of_seven_ranks_are_named() -> None:
    """OpenRLHF/OpenRLHF#346: batch 256 in microbatches of 2 over dp=7."""
    with pytest.raises(PlanError, match=r"256 is not a multiple of .* = 14; nearest: 252 or 266"):
        gpt("dgx-h100", global_batch=256, fix={"dp_replicate": 7, "microbatch_size": 2})


@pytest.mark.slow
def test_three_stages_on_eight_devices_use_six_and_say_so() -> None:
    """hpcaitech/ColossalAI#6202: 8 is not divisible by pp=3."""
    result = gpt("dgx-h100", fix={"pp": 3, "dp_replicate": 1, "dp_shard": 2, "tp": 1})
    assert result.best.candidate.num_devices == 6
    assert any(reason.startswith("2 of 8 devices are not used") for reason in result.reasons)


@pytest.mark.parametrize(
    "heads, tp, valid", [(52, 3, "1, 2, 4, 13, 26, 52"), (64, 3, "1, 2, 4, 8, 16, 32, 64")]
)
def test_heads_that_do_not_divide_name_the_degrees_that_do(
    heads: int, tp: int, valid: str
) -> None:
    """vllm-project: 52 heads on 3 GPUs; 64 heads with TP=3."""
    with pytest.raises(
        PlanError, match=f"--fix tp={tp}: the model's heads divide by {valid} only"
    ):
        gpt("dgx-h100", heads=heads, layers=2, fix={"tp": tp})


@pytest.mark.slow
def test_key_and_value_heads_limit_tensor_parallelism(tmp_path: Path) -> None:
    """pytorch/torchtitan#2574: 16 heads, 2 of keys and values, TP=4."""
    config = {
        "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
        "num_attention_heads": 16, "num_key_value_heads": 2, "num_hidden_layers": 2,
        "vocab_size": 512, "max_position_embeddings": 64,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    whole = make_plan(PlanningRequest(model=tmp_path, cluster="dgx-h100", fix={"tp": 4}))
    divided = {rule.module for rule in whole.graph.rules_at(4) if rule.weight_dims}
    assert divided == {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
    with pytest.raises(PlanError, match=r"heads divide by 1, 2 only; .* or tp=4, "):
        make_plan(PlanningRequest(model=tmp_path, cluster="dgx-h100", fix={"tp": 3}))


@pytest.mark.slow
@pytest.mark.parametrize("layers, pp", [(30, 4), (27, 2)])
def test_layers_that_stages_do_not_divide_stand_once_each(layers: int, pp: int) -> None:
    """30 layers on PP=4 (7,7,7,7 drops two); DeepSeek's 27 on an even PP."""
    result = gpt("dgx-h100", layers=layers, fix={"pp": pp, "tp": 1, "dp_replicate": 1})
    spans = [range(*cut) for cut in result.best.cuts]
    assert [unit for span in spans for unit in span] == list(range(layers + 2))
    blocks = [len(span) - (span[0] == 0) - (span[-1] == layers + 1) for span in spans]
    assert sum(blocks) == layers and min(blocks) >= 1  # uneven on purpose: the head weighs more


def test_attention_scores_and_logits_are_seen_to_overflow_a_v100(tmp_path: Path) -> None:
    """NVIDIA/Megatron-LM#525: GPT-2 large, microbatch 4, no flash attention, 32 GB.

    Scores alone keep 5 a s^2 b bytes a layer: 36 x 5 x 20 x 1024^2 x 4 = 14.1 GiB.
    """
    (tmp_path / "eager.py").write_text(EAGER)
    (tmp_path / "one.yaml").write_text("nodes: [{devices: {type: v100-sxm-32gb, count: 1}}]\n")
    fix = {"microbatch_size": 4, "recompute": "none"}
    request = PlanningRequest(
        model=tmp_path / "eager.py",
        cluster=str(tmp_path / "one.yaml"),
        global_batch=4,
        precision="float16",
        fix=fix,
    )
    with pytest.raises(InfeasiblePlan, match=r"needs .* GiB on stage 0 \(activations"):
        make_plan(request)


def test_a_parameter_of_the_root_module_is_counted_and_tied_ones_once(tmp_path: Path) -> None:
    """A `scale` directly on the root; wte and head share one weight."""
    (tmp_path / "eager.py").write_text(EAGER)
    result = make_plan(
        PlanningRequest(model=tmp_path / "eager.py", cluster="dgx-h100", global_batch=8)
    )
    block = 12 * 1280**2 + 13 * 1280
    assert result.graph.num_parameters == 50304 * 1280 + 36 * block + 1280
    assert "scale" in {parameter.name for parameter in result.graph.parameters}
