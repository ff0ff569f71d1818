"""Tables, heads and losses divided over an uneven vocabulary train like one process.

257 words lie on 2 ranks as 129 and 128, on 4 as 65, 64, 64, 64. Tied and untied ends, on one
stage and on two, with sharded and replicated data, with the sequence divided, recomputed, and with
the losses that people write; all plans of one size are verified in one set of processes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from claw_plan.executor.verify import VerifyResult, verify_plans

pytestmark = [pytest.mark.slow, pytest.mark.sweep]

EXAMPLES = Path(__file__).parents[2] / "examples"
WORDS = 257
SP, FULL = {"sequence_parallel": True}, {"recompute": "full"}
TP, TP4 = {"tp": 2}, {"tp": 4}

TIED = {
    "build": f"GPT(GPTConfig(vocab_size={WORDS}, block_size=16, n_layer=4, n_head=4, n_embd=32))",
    "inputs": f"idx=int64[B,16]<{WORDS} targets=int64[B,16]<{WORDS}",
}
UNTIED = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 16,
}
LOSSES = '''
import torch, torch.nn as nn, torch.nn.functional as F

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(16), nn.Sequential(
            nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x):
        return x + self.mlp(self.norm(x))

class Model(nn.Module):
    """A padded table, a head whose bias has two names, two losses of its scores."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(257, 16, padding_idx=200)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(16, 257)
        self.bias = self.head.bias

    def forward(self, ids):
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        scores = 20 * torch.tanh(self.head(x) / 20)
        labels = F.pad(ids[:, 1:], (0, 1), value=-100)
        smooth = F.cross_entropy(scores.transpose(1, 2), labels, label_smoothing=0.1)
        likely = F.log_softmax(scores[:, :-1], dim=-1)
        return smooth + F.nll_loss(likely.reshape(-1, 257), ids[:, 1:].reshape(-1))

def build_model():
    return Model()

def example_batch(batch_size):
    ids = torch.randint(0, 257, (batch_size, 8), generator=torch.Generator().manual_seed(0))
    ids[:, 2] = 200
    return {"ids": ids}
'''

PLANS: dict[int, list[tuple[str, dict[str, Any]]]] = {
    2: [
        ("tied", TP),
        ("tied", TP | SP | FULL),
        ("tied", TP | {"precision": "bfloat16"}),
        ("untied", TP | SP | {"microbatch_size": 2}),
        ("losses", TP),
    ],
    4: [
        ("tied", TP4),
        ("tied", TP | {"pp": 2}),
        ("tied", TP | SP | {"dp_shard": 2}),
        ("tied", TP | {"dp_replicate": 2}),
        ("untied", TP | SP | {"pp": 2}),
        ("untied", TP4),
        ("losses", TP4),
        ("losses", TP | {"dp_shard": 2, "zero": 2}),
    ],
    8: [("tied", TP | SP | {"pp": 2, "dp_shard": 2, "zero": 1})],
}
CASES = [(size, index) for size, plans in PLANS.items() for index in range(len(plans))]


def name_of(case: tuple[int, int]) -> str:
    kind, knobs = PLANS[case[0]][case[1]]
    return "-".join([kind, f"on={case[0]}", *(f"{knob}={value}" for knob, value in knobs.items())])


@pytest.fixture(scope="module")
def paths(
    model_plan: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[int, int], Path]:
    """The plan of every case."""
    folder = tmp_path_factory.mktemp("vocabulary")
    models = {
        "tied": (folder / "gpt.py", (EXAMPLES / "gpt.py").read_text(), "transformer.h", TIED),
        "untied": (folder / "llama.json", json.dumps(UNTIED), "model.layers", {}),
        "losses": (folder / "losses.py", LOSSES, "blocks", {}),
    }

    def written() -> Iterator[tuple[tuple[int, int], Path]]:
        for model, text, _, _ in models.values():
            model.write_text(text)
        for size, index in CASES:
            kind, knobs = PLANS[size][index]
            model, _, chain, naming = models[kind]
            blocks = [f"{chain}.{layer}" for layer in range(4)]
            yield (
                (size, index),
                model_plan(model, blocks, name_of((size, index)), **naming, **knobs),
            )

    return dict(written())


@pytest.fixture(scope="module")
def verified(
    paths: dict[tuple[int, int], Path],
) -> Callable[[int], dict[tuple[int, int], VerifyResult]]:
    """The results of all plans of a size, found when the first of them is asked for."""

    @lru_cache
    def of_size(size: int) -> dict[tuple[int, int], VerifyResult]:
        cases = [case for case in paths if case[0] == size]
        results = verify_plans([paths[case] for case in cases], steps=5)
        return dict(zip(cases, results, strict=True))

    return of_size


def test_all_of_these_plans_divide_the_ends(paths: dict[tuple[int, int], Path]) -> None:
    for path in paths.values():
        rules = yaml.safe_load(path.read_text())["tensor_parallel"]
        ends = {rule["style"]: rule["heads"] for rule in rules if rule["heads"] == WORDS}
        assert ends == {"embedding": WORDS, "head": WORDS}


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_trains_like_one_process(
    case: tuple[int, int],
    verified: Callable[[int], dict[tuple[int, int], VerifyResult]],
) -> None:
    result = verified(case[0])[case]
    assert result.ok, result
    assert result.fp64_max_loss_diff < 1e-10 and result.fp64_max_param_diff < 1e-10
    assert result.fp32_max_loss_diff < 1e-5
