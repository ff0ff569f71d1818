from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from claw_plan.planner.attention_op import fused_operators
from claw_plan.planner.model_source import load_model
from claw_plan.planner.recorder import BACKWARD, FORWARD, RecordedOp, Recorder, Recording
from claw_plan.planner.torch_private import FakeTensorMode, storage_key

ROOT = Path(__file__).parents[2]
GPT = "GPT(GPTConfig(vocab_size=64, block_size=16, n_layer=3, n_head=2, n_embd=8))"
INPUTS = "idx=int64[B,16]<64 targets=int64[B,16]<64"
ROW = 2 * 16 * 8 * 4
"""Bytes of one hidden state of two sequences."""


def gpt(fake: FakeTensorMode | None = None) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    model = load_model(ROOT / "examples" / "gpt.py", build=GPT, inputs=INPUTS)
    batch = model.example_batch(2)
    if fake is None:
        return model.build(), batch
    with fake:
        module = model.build()
    return module, {name: fake.from_tensor(tensor) for name, tensor in batch.items()}


def record(
    module: nn.Module, blocks: list[nn.Module], batch: dict[str, torch.Tensor]
) -> Recording:
    names = {id(part): name for name, part in module.named_modules()}
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    with fused_operators(), Recorder(names, blocks, tensors, batch) as recorder:
        output = module(**batch)
        loss = output[1] if isinstance(output, tuple) else output
        del output
        recorder.backward(loss)
    return recorder.recording


def record_gpt() -> Recording:
    fake = FakeTensorMode()
    module, batch = gpt(fake)
    with fake:
        return record(module, list(module.transformer["h"]), batch)


class CallCounter(TorchDispatchMode):
    """How often each operator ran."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.calls[f"{func.namespace}.{func.overloadpacket.__name__}"] += 1
        return func(*args, **(kwargs or {}))


def flops(recording: Recording, unit: int, phase: str) -> int:
    ops = (op for op in recording.ops if isinstance(op, RecordedOp))
    return sum(op.work.flops for op in ops if op.unit == unit and op.phase == phase)


def test_every_unit_has_its_flops_in_both_passes() -> None:
    recording = record_gpt()
    tokens, dim = 2 * 16, 8
    products, attention = 2 * tokens * 12 * dim**2, 4 * 2 * 16 * 16 * dim
    for unit in (1, 2, 3):
        assert flops(recording, unit, FORWARD) == products + attention
        assert flops(recording, unit, BACKWARD) == 2 * products + attention * 5 // 2
    head = 2 * tokens * 64 * dim
    assert (flops(recording, 4, FORWARD), flops(recording, 4, BACKWARD)) == (head, 2 * head)
    assert flops(recording, 0, FORWARD) == flops(recording, 0, BACKWARD) == 0


def test_backward_operators_belong_to_the_module_of_their_forward() -> None:
    recording = record_gpt()
    ops = [op for op in recording.ops if isinstance(op, RecordedOp)]
    for phase, target, count in ((FORWARD, "aten.addmm", 1), (BACKWARD, "aten.mm", 2)):
        for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
            found = [
                op
                for op in ops
                if (op.phase, op.target, op.module) == (phase, target, f"transformer.h.1.{name}")
            ]
            assert len(found) == count


def test_backward_follows_the_graph_not_the_calls() -> None:
    class Twice(nn.Module):
        """Reads `late`'s parameters first and runs `arange` right after a product."""

        def __init__(self) -> None:
            super().__init__()
            self.early, self.late = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.early(x)
            torch.arange(3)
            return (self.late(x) * y).sum()

    recording = record(Twice(), [], {"x": torch.randn(2, 4, requires_grad=True)})
    ops = [op for op in recording.ops if isinstance(op, RecordedOp) and op.work.flops]
    assert [(op.module, op.phase) for op in ops[:2]] == [("early", FORWARD), ("late", FORWARD)]
    assert sorted(op.module for op in ops[2:]) == ["early"] * 2 + ["late"] * 2


def test_saved_bytes_are_those_counted_on_real_tensors() -> None:
    module, batch = gpt()
    own = {storage_key(t) for t in [*module.parameters(), *batch.values()]}
    held: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if storage_key(tensor) not in own:
            held[storage_key(tensor)] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = module(**batch)
    expected = sum(tensor.untyped_storage().nbytes() for tensor in held.values())
    del output
    fake = record_gpt()
    real = record(module, list(module.transformer["h"]), batch)
    for recording in (fake, real):
        units = sum(recording.saved_bytes(unit) for unit in range(5))
        assert units + sum(recording.boundary_bytes.values()) == expected
    assert [fake.saved_bytes(u) for u in range(5)] == [real.saved_bytes(u) for u in range(5)]


def test_what_a_block_keeps() -> None:
    # ln_1's output, q, k, v, attention's output, the sum, ln_2's output, 4 before and 4 after
    # gelu; logsumexp of 2 heads; mean and deviation of two norms. Its input is not among them.
    tokens = 2 * 16
    assert record_gpt().saved_bytes(2) == 15 * ROW + 2 * tokens * 4 + 4 * tokens * 4


def test_memory_alive_in_the_passes_of_a_block() -> None:
    recording = record_gpt()
    lines = recording.timelines()
    # Forward: mlp.c_proj's output and the sum, the block's output.
    assert max(lines[2, FORWARD]) == 2 * ROW
    # Backward: the gradient that comes in and gelu's two of four times its size, when c_proj's
    # saved input is freed; 4 bytes are the loss's own gradient.
    assert max(lines[2, BACKWARD]) == (1 + 4 + 4 - 4) * ROW + 4


def test_a_tied_weights_gradient_is_not_counted_as_activation() -> None:
    lines = record_gpt().timelines()
    table = 64 * 8 * 4
    assert max(lines[3, BACKWARD]) == max(lines[1, BACKWARD])
    # The embedding's own gradient is made beside the head's and added to it.
    assert table <= max(lines[0, BACKWARD]) < 2 * table + 2 * ROW


def test_parameters_are_noted_where_they_are_used() -> None:
    used = record_gpt().used
    assert used["transformer.wte.weight"] == {0, 4}
    assert used["transformer.wpe.weight"] == {0}
    assert used["transformer.h.2.mlp.c_fc.bias"] == {3}


def test_outermost_modules_of_the_ends() -> None:
    assert record_gpt().modules == {
        0: ["transformer.wte", "transformer.wpe"],
        4: ["transformer.ln_f", "lm_head"],
    }


def test_recomputation_runs_in_backward_and_saves_less() -> None:
    from torch.utils.checkpoint import checkpoint

    class Net(nn.Module):
        def __init__(self, recompute: bool) -> None:
            super().__init__()
            self.recompute = recompute
            self.mlp = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.recompute:
                return checkpoint(self.mlp, x, use_reentrant=False).sum()
            return self.mlp(x).sum()

    x = torch.randn(8, 4, requires_grad=True)
    plain, again = record(Net(False), [], {"x": x}), record(Net(True), [], {"x": x})
    product = 2 * 8 * 4 * 16
    assert flops(plain, 0, BACKWARD) == 4 * product
    # Recomputation stops early: the last product's result is not needed.
    assert flops(again, 0, BACKWARD) in (5 * product, 6 * product)
    assert again.saved_bytes(0) < plain.saved_bytes(0)
    ops = [op for op in again.ops if isinstance(op, RecordedOp) and op.work.flops]
    assert {op.module for op in ops} == {"mlp.0", "mlp.2"}


def test_exchanges_stand_where_they_happen() -> None:
    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, tell):  # type: ignore[no-untyped-def]
            ctx.tell = tell
            tell("all_gather", 8, "m")
            return x * 2

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            ctx.tell("reduce_scatter", 8, "m")
            return grad * 2, None

    class Block(nn.Linear):
        tell: object = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Sum.apply(F.linear(x, self.weight), self.tell)

    module = nn.Sequential(Block(4, 4), Block(4, 4))
    names = {id(part): name for name, part in module.named_modules()}
    recorder = Recorder(names, list(module), dict(module.named_parameters()), {})
    for block in module:
        block.tell = recorder.exchange
    with recorder:
        recorder.backward(module(torch.randn(2, 4)).sum())
    found = [op for op in recorder.recording.ops if not isinstance(op, RecordedOp)]
    assert [(op.unit, op.phase, op.op) for op in found] == [
        (1, FORWARD, "all_gather"),
        (2, FORWARD, "all_gather"),
        (2, BACKWARD, "reduce_scatter"),
        (1, BACKWARD, "reduce_scatter"),
    ]


def test_checkpointing_runs_again_what_torch_runs_again() -> None:
    """All but the last product and the residual addition, whose results nothing keeps."""
    recording = record_gpt()
    for unit in (1, 2, 3):
        ops = [op for op in recording.ops if op.unit == unit and op.phase == FORWARD]
        left = ops[recording.num_recomputed(unit) :]
        assert [op.target for op in left if isinstance(op, RecordedOp)] == [
            "aten.addmm",
            "aten.add",
        ]

    counts = CallCounter()
    block = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    output = checkpoint(block, torch.randn(2, 8), use_reentrant=False)
    with counts:
        output.sum().backward()
    assert counts.calls["aten.addmm"] == 1  # of the two
