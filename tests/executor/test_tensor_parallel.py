"""Untouched models over real gloo processes, against one process; this file is also the worker."""

import os
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from claw_plan.executor.tensor_parallel import rules_of
from claw_plan.planner.errors import PlanError
from claw_plan.planner.plan import PlanTensorParallel
from claw_plan.planner.sequence_parallel import divide_sequence
from claw_plan.planner.tensor_parallel import apply_rules
from claw_plan.planner.tensor_parallel_search import find_rules
from claw_plan.planner.tp_autograd import OverProcessGroup

VOCAB, BATCH, SEQ, LAYERS = 61, 4, 8, 2
EXAMPLES = Path(__file__).parents[2] / "examples"


class HandWritten(nn.Module):
    """Attention without torch's own, in a block with names of its own, recomputed in backward."""

    class Block(nn.Module):
        class Mixer(nn.Module):
            def __init__(self, width, heads):
                super().__init__()
                self.heads = heads
                self.w1, self.w2, self.w3, self.w4 = (nn.Linear(width, width) for _ in range(4))

            def forward(self, h):
                b, s, d = h.shape
                q, k, v = (
                    w(h).view(b, s, self.heads, d // self.heads).transpose(1, 2)
                    for w in (self.w1, self.w2, self.w3)
                )
                scores = q @ k.transpose(-2, -1) / (d // self.heads) ** 0.5
                hidden = torch.ones(s, s, dtype=torch.bool).triu(1)
                weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
                return self.w4((weights @ v).transpose(1, 2).reshape(b, s, d))

        def __init__(self, width=32, heads=4):
            super().__init__()
            self.a, self.b = nn.LayerNorm(width), nn.LayerNorm(width)
            self.mixer = self.Mixer(width, heads)
            self.ff = nn.Sequential(nn.Linear(width, 64), nn.Tanh(), nn.Linear(64, width))

        def forward(self, h):
            h = h + self.mixer(self.a(h))
            return h + self.ff(self.b(h))

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 32)
        self.stack = nn.ModuleList(self.Block() for _ in range(LAYERS))
        self.head = nn.Linear(32, VOCAB)

    def forward(self, idx):
        h = self.embed(idx)
        for block in self.stack:
            h = checkpoint(block, h, use_reentrant=False)
        return self.head(h)


def example_gpt():
    sys.path.insert(0, str(EXAMPLES))
    from gpt import GPT, GPTConfig

    return GPT(GPTConfig(vocab_size=VOCAB, block_size=SEQ, n_layer=LAYERS, n_head=4, n_embd=32))


def hugging_face(kind):
    import transformers

    if kind == "llama":
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": LAYERS}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        config = transformers.LlamaConfig(vocab_size=VOCAB, **sizes, **heads)
        return transformers.LlamaForCausalLM(config)
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = transformers.GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=LAYERS, n_head=4, **off)
    return transformers.GPT2LMHeadModel(config)


MODELS = {
    "gpt": (example_gpt, "transformer.h", lambda m, idx, targets: m(idx, targets)[0]),
    "llama": (lambda: hugging_face("llama"), "model.layers", lambda m, idx, _: m(idx).logits),
    "gpt2": (lambda: hugging_face("gpt2"), "transformer.h", lambda m, idx, _: m(idx).logits),
    "hand written": (HandWritten, "stack", lambda m, idx, _: m(idx)),
}


def build(name):
    torch.manual_seed(0)
    return MODELS[name][0]().double()


def batch():
    tokens = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(3))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_of(name, model, idx, targets):
    logits = MODELS[name][2](model, idx, targets)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Counting(OverProcessGroup):
    def __init__(self, group):
        super().__init__(group)
        self.calls = Counter()

    def all_reduce(self, tensor, where):
        self.calls["all_reduce"] += 1
        return super().all_reduce(tensor, where)

    def all_gather(self, tensor, where):
        self.calls["all_gather"] += 1
        return super().all_gather(tensor, where)

    def reduce_scatter(self, tensor, where):
        self.calls["reduce_scatter"] += 1
        return super().reduce_scatter(tensor, where)


def local(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def work(name, dp, folder):
    """One rank of dp x 2: once without and once with the sequence divided."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dp, 2), mesh_dim_names=("dp", "tp"))
    results = [train_step(name, mesh, sequence) for sequence in (False, True)]
    torch.save(results, Path(folder) / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


def train_step(name, mesh, sequence_parallel):
    """Loss and gradients; those of divided weights are this rank's part."""
    dp = mesh["dp"].size()
    ranks = Counting(mesh["tp"].get_group())
    model, (idx, targets) = build(name), batch()
    blocks = [f"{MODELS[name][1]}.{i}" for i in range(LAYERS)]
    rules = find_rules(model, blocks, lambda: loss_of(name, model, idx, targets)).by_block()
    divided = apply_rules(model, rules, ranks, sequence_parallel=sequence_parallel)
    if sequence_parallel:
        divide_sequence([model.get_submodule(block) for block in blocks], rules, ranks)
    if dp > 1:
        for block in blocks:
            fully_shard(model.get_submodule(block), mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    own = (t.chunk(dp)[mesh["dp"].get_local_rank()] for t in (idx, targets))
    loss = loss_of(name, model, *own)
    forward = Counter(ranks.calls)
    loss.backward()
    calls = {"forward": dict(forward), "backward": dict(ranks.calls - forward)}
    gradients = {n: local(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    for parameter in divided.sequence_parallel_parameters:
        ranks.all_reduce(gradients[parameter], "")
    sharded = {n: (how.dim, how.parts) for n, how in divided.sharded.items()}
    dist.all_reduce(loss.detach())
    mean = loss.item() / dist.get_world_size()
    return {"loss": mean, "gradients": gradients, "sharded": sharded, "calls": calls}


def results_of(folder, name, dp=1):
    """The results of all ranks, without and with the sequence divided."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = 2 * dp
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, name, str(dp), str(folder)],
            env=os.environ
            | {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
            | {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(world)
    ]
    assert [process.wait(timeout=120) for process in processes] == [0] * world
    return zip(*(torch.load(folder / f"{rank}.pt") for rank in range(world)), strict=True)


def check(name, results):
    from claw_plan.planner.head_shard import join_piecewise

    model = build(name)
    loss = loss_of(name, model, *batch())
    loss.backward()
    sharded = results[0]["sharded"]
    for parameter_name, parameter in model.named_parameters():
        each = [result["gradients"][parameter_name] for result in results[:2]]
        if parameter_name in sharded:
            dim, parts = sharded[parameter_name]
            each = [join_piecewise(each, dim, parts=parts)]
        for gradient in each:
            torch.testing.assert_close(gradient, parameter.grad, rtol=0, atol=1e-12)
    assert len(sharded) >= 6 * LAYERS or name == "llama"
    assert all(abs(result["loss"] - loss.item()) < 1e-12 for result in results)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_two_processes_train_like_one_with_two_collectives_a_pass_and_layer(name, tmp_path):
    plain, divided_sequence = results_of(tmp_path, name)
    check(name, plain)
    check(name, divided_sequence)
    calls = plain[0]["calls"]
    assert calls["forward"] == {"all_reduce": 2 * LAYERS}
    recomputed = 2 * LAYERS if name == "hand written" else 0  # its blocks run again in backward
    assert 0 <= calls["backward"]["all_reduce"] - 2 * LAYERS <= recomputed
    calls = divided_sequence[0]["calls"]
    assert calls["forward"] == {"all_gather": 2 * LAYERS + 1, "reduce_scatter": 2 * LAYERS}


@pytest.mark.slow
def test_fully_sharded_blocks_on_top_train_like_one(tmp_path):
    for results in results_of(tmp_path, "gpt", dp=2):
        check("gpt", results)


def test_a_rule_that_is_for_no_block_is_refused():
    model = nn.ModuleDict({"h": nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(2))})

    def plan(*modules):
        rules = [
            PlanTensorParallel(modules=name, style="colwise", heads=2, weight_dims={})
            for name in modules
        ]
        return SimpleNamespace(blocks=["h.0", "h.1"], tensor_parallel=rules)

    assert rules_of(plan("h[*].0"), model, ["h.0", "h.1"]).keys() == {"h.0", "h.1"}
    assert rules_of(plan("h.1.0"), model, ["h.0"]) == {}  # it is for another stage
    with pytest.raises(PlanError, match=r"tensor_parallel names h\.1\.net, which is in none"):
        rules_of(plan("h[*].0", "h.1.net"), model, ["h.0", "h.1"])


if __name__ == "__main__":
    work(sys.argv[1], int(sys.argv[2]), sys.argv[3])
