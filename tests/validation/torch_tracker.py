"""Peak memory by torch's own tracker, of rank 0 of 64, with no cluster and no weights.

A fake process group makes every collective return at once, FakeTensorMode makes every tensor a
shape, and FSDPMemTracker follows storages through the real fully_shard. Run as a program:

    python tests/validation/torch_tracker.py --layers 32 --dp 8 --tp 8 --recompute

prints one JSON object: the peak in bytes and its parts as the tracker names them. Llama-3-8B's
shape, batch 1 of --seq tokens; stored in fp32, computed in bf16, reduced in fp32, AdamW.

--ddp computes in fp32 with whole parameters. DistributedDataParallel's reducer does not take fake
tensors, so its buckets, a flat copy of all gradients, are added by hand. --stages cuts the layers
into a pipeline, of which rank --stage runs its 1F1B actions on made-up neighbours.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from claw_plan.executor.torch_private import reshard_over
from claw_plan.planner.actions import FORWARD
from claw_plan.planner.graph import TensorParallelRule
from claw_plan.planner.schedules import schedule_actions
from claw_plan.planner.sequence_parallel import divide_sequence
from claw_plan.planner.tensor_parallel import apply_rules
from claw_plan.planner.tp_autograd import OverProcessGroup
from claw_plan.planner.vocabulary_parallel import EMBEDDING, HEAD, divide_vocabulary

SHAPE = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}


def build(layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM, masking_utils

    # The question whether rows are packed reads values, which fake tensors do not have; the
    # answer "no" keeps the program that real tensors would run.
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    config = LlamaConfig(num_hidden_layers=layers, use_cache=False, **SHAPE)
    return LlamaForCausalLM(config)


def llama_rules() -> list[TensorParallelRule]:
    def rule(module: str, style: str, heads: int) -> TensorParallelRule:
        dims = {"region": {}, "colwise": {"weight": 0}, "rowwise": {"weight": 1}}[style]
        return TensorParallelRule(module=module, style=style, heads=heads, weight_dims=dims)

    return [
        rule("self_attn", "region", 1),
        rule("self_attn.q_proj", "colwise", 32),
        rule("self_attn.k_proj", "colwise", 8),
        rule("self_attn.v_proj", "colwise", 8),
        rule("self_attn.o_proj", "rowwise", 32),
        rule("mlp", "region", 1),
        rule("mlp.gate_proj", "colwise", 14336),
        rule("mlp.up_proj", "colwise", 14336),
        rule("mlp.down_proj", "rowwise", 14336),
    ]


def vocabulary_rules() -> list[TensorParallelRule]:
    def rule(module: str, style: str) -> TensorParallelRule:
        vocabulary = SHAPE["vocab_size"]
        return TensorParallelRule(
            module=module, style=style, heads=vocabulary, weight_dims={"weight": 0}
        )

    return [rule("model.embed_tokens", EMBEDDING), rule("lm_head", HEAD)]


def join_meshes_for_real() -> None:
    """fully_shard reads the values of a mesh's ranks, which must not be fake."""
    original = DeviceMesh._concatenate

    def concatenate(meshes: list[DeviceMesh]) -> DeviceMesh:
        with unset_fake_temporarily():
            return original(meshes)

    DeviceMesh._concatenate = staticmethod(concatenate)


class Part(nn.Module):
    """The layers of one pipeline stage, with the embedding or the head at the ends."""

    def __init__(self, whole: nn.Module, stage: int, stages: int) -> None:
        super().__init__()
        each = len(whole.model.layers) // stages
        self.layers = whole.model.layers[stage * each : (stage + 1) * each]
        self.rotary = whole.model.rotary_emb
        self.embedding = whole.model.embed_tokens if stage == 0 else None
        self.norm = whole.model.norm if stage == stages - 1 else None
        self.head = whole.lm_head if stage == stages - 1 else None

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        positions = torch.arange(x.shape[1]).unsqueeze(0)
        angles = self.rotary(x, positions)
        for layer in self.layers:
            x = layer(x, position_embeddings=angles, position_ids=positions)
        if self.head is None:
            return x
        scores = self.head(self.norm(x))[:, :-1].float()
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels[:, 1:].flatten())


def parallelize(model: nn.Module, layers: nn.ModuleList, mesh: DeviceMesh, options: Any) -> Any:
    if mesh["tp"].size() > 1:
        names = [f"model.layers.{index}" for index in range(len(layers))]
        ranks = OverProcessGroup(mesh.get_group("tp"))
        rules = {name: llama_rules() for name in names}
        divided = apply_rules(model, rules, ranks, sequence_parallel=options.sequence)
        divide_vocabulary(model, vocabulary_rules(), divided)
        if options.sequence:
            divide_sequence(list(layers), rules, ranks)
    if options.recompute:
        for index, layer in enumerate(layers[: options.recompute_blocks or None]):
            layers[index] = checkpoint_wrapper(layer)
    if options.ddp:
        return model
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    data = mesh["replicate", "dp"] if mesh["replicate"].size() > 1 else mesh["dp"]
    reshard = not options.keep_gathered
    for start in range(0, len(layers), options.group):
        group = list(layers[start : start + options.group])
        fully_shard(group, mesh=data, mp_policy=policy, reshard_after_forward=reshard)
        if options.reshard:
            reshard_over(group[0], options.near)
    return fully_shard(model, mesh=data, mp_policy=policy, reshard_after_forward=False)


def run_stage(model: Any, options: argparse.Namespace, before: Callable[[], None]) -> None:
    """The stage's actions of one step; neighbours' tensors are empty."""
    row = schedule_actions("1F1B", options.stages, options.microbatches)[options.stage]
    outputs: dict[int, torch.Tensor] = {}
    tokens = torch.zeros(1, options.seq, dtype=torch.long)
    for action in row:
        if action.kind == FORWARD:
            x = tokens
            if options.stage:
                x = torch.empty(1, options.seq, SHAPE["hidden_size"], dtype=torch.bfloat16)
                x.requires_grad_()
            before()  # the tracker follows one forward of a module at a time
            outputs[action.microbatch] = model(x, tokens)
            continue
        is_last = action.microbatch == options.microbatches - 1
        model.set_is_last_backward(is_last)
        model.set_requires_gradient_sync(is_last)
        model.set_reshard_after_backward(is_last)
        output = outputs.pop(action.microbatch)
        output.backward(torch.empty_like(output))


def peak_parts(options: argparse.Namespace) -> dict[str, int]:
    dist.init_process_group(
        "fake", rank=0, world_size=math.prod(_degrees(options)), store=FakeStore()
    )
    mesh = init_device_mesh("cpu", _degrees(options), mesh_dim_names=("replicate", "dp", "tp"))
    if options.reshard:
        sizes = options.replicate * options.dp // options.reshard, options.reshard, options.tp
        near = init_device_mesh("cpu", sizes, mesh_dim_names=("apart", "near", "inside"))
        options.near = near["apart", "near"]
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = build(options.layers)
        layers = model.model.layers
        if options.stages > 1:
            model = Part(model, options.stage, options.stages)
            layers = model.layers
        model = parallelize(model, layers, mesh, options)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        tokens = torch.zeros(1, options.seq, dtype=torch.long)

        def step(before: Callable[[], None]) -> None:
            if options.stages > 1:
                run_stage(model, options, before)
            else:
                model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        step(lambda: None)  # the first step makes states and buffers that do not recur
        if options.ddp:
            tracker = MemTracker()
            tracker.track_external(model, optimizer, tokens)
        else:
            tracker = FSDPMemTracker(model, optimizer)
            tracker.track_inputs((tokens,))
        with tracker:
            step(tracker.reset_mod_stats)
            tracker.reset_mod_stats()
            step(tracker.reset_mod_stats)
        (peak,) = tracker.get_tracker_snapshot("peak").values()
    dist.destroy_process_group()
    parts = {str(getattr(kind, "value", kind)): int(size) for kind, size in peak.items()}
    if options.ddp:
        parts["Total"] += sum(p.nbytes for p in model.parameters())
    return parts


def _degrees(options: argparse.Namespace) -> tuple[int, int, int]:
    return options.replicate, options.dp, options.tp


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--replicate", type=int, default=1, help="dp_replicate")
    parser.add_argument("--dp", type=int, default=64, help="dp_shard")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--stage", type=int, default=0)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--recompute-blocks", type=int, default=0, help="the first; 0 for all")
    parser.add_argument("--group", type=int, default=1, help="layers gathered together")
    parser.add_argument("--reshard", type=int, default=0, help="ranks that keep parameters")
    for name in ("--recompute", "--sequence", "--keep-gathered", "--ddp"):
        parser.add_argument(name, action="store_true")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    parts = peak_parts(options)
    total = next(size for name, size in parts.items() if name.lower() == "total")
    print(json.dumps({"peak_bytes": total, "parts": parts}))


if __name__ == "__main__":
    main()
