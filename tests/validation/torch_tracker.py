"""Peak memory by torch's own tracker, of rank 0 of 64, with no cluster and no weights.

A fake process group makes every collective return at once, FakeTensorMode makes every tensor a
shape, and FSDPMemTracker follows storages through the real fully_shard. Run as a program:

    python tests/validation/torch_tracker.py --layers 32 --dp 8 --tp 8 --recompute

prints one JSON object: the peak in bytes and its parts as the tracker names them. Llama-3-8B's
shape, batch 1 of --seq tokens; stored in fp32, computed in bf16, reduced in fp32, AdamW.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import warnings

import torch
import torch.distributed as dist
import torch.nn as nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from claw_plan.planner.graph import TensorParallelRule
from claw_plan.planner.tensor_parallel import apply_rules
from claw_plan.planner.tp_autograd import OverProcessGroup

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


def join_meshes_for_real() -> None:
    """fully_shard reads the values of a mesh's ranks, which must not be fake."""
    original = DeviceMesh._concatenate

    def concatenate(meshes: list[DeviceMesh]) -> DeviceMesh:
        with unset_fake_temporarily():
            return original(meshes)

    DeviceMesh._concatenate = staticmethod(concatenate)


def parallelize(model: nn.Module, mesh: DeviceMesh, recompute: bool) -> None:
    layers = model.model.layers
    if mesh["tp"].size() > 1:
        names = [f"model.layers.{index}" for index in range(len(layers))]
        ranks = OverProcessGroup(mesh.get_group("tp"))
        apply_rules(model, {name: llama_rules() for name in names}, ranks)
    if recompute:
        for index, layer in enumerate(layers):
            layers[index] = checkpoint_wrapper(layer)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    data = mesh["replicate", "dp"] if mesh["replicate"].size() > 1 else mesh["dp"]
    for layer in layers:
        fully_shard(layer, mesh=data, mp_policy=policy)
    fully_shard(model, mesh=data, mp_policy=policy, reshard_after_forward=False)


def peak_parts(options: argparse.Namespace) -> dict[str, int]:
    dist.init_process_group(
        "fake", rank=0, world_size=math.prod(_degrees(options)), store=FakeStore()
    )
    mesh = init_device_mesh("cpu", _degrees(options), mesh_dim_names=("replicate", "dp", "tp"))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = build(options.layers)
        parallelize(model, mesh, options.recompute)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        tokens = torch.zeros(1, options.seq, dtype=torch.long)

        def step() -> None:
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        step()  # the first step makes states and buffers that do not recur
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs((tokens,))
        with tracker:
            step()
            tracker.reset_mod_stats()
            step()
        (peak,) = tracker.get_tracker_snapshot("peak").values()
    dist.destroy_process_group()
    return {str(getattr(kind, "value", kind)): int(size) for kind, size in peak.items()}


def _degrees(options: argparse.Namespace) -> tuple[int, int, int]:
    return options.replicate, options.dp, options.tp


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--replicate", type=int, default=1, help="dp_replicate")
    parser.add_argument("--dp", type=int, default=64, help="dp_shard")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--recompute", action="store_true")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    parts = peak_parts(options)
    total = next(size for name, size in parts.items() if name.lower() == "total")
    print(json.dumps({"peak_bytes": total, "parts": parts}))


if __name__ == "__main__":
    main()
