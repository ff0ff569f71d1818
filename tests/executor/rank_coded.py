"""Gradients through codecs, wherever they meet, beside the same plan without a codec.

Started for each rank by tests as `python rank_coded.py RANK WORLD_SIZE FOLDER PLAN...`; writes
what it found of each plan to `coded<r>.pt`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.hooks import RemovableHandle

from claw_plan.executor.batches import ExampleSource, own_slice
from claw_plan.executor.checkpoint import Checkpointer
from claw_plan.executor.checkpoint_folder import name_of
from claw_plan.executor.checkpoint_layout import divided_as
from claw_plan.executor.communication.hooks import GradientMean
from claw_plan.executor.communication.selector import Switch
from claw_plan.executor.communication.selector_options import SelectorOptions
from claw_plan.executor.gradients import local
from claw_plan.executor.opened_plan import open_plan
from claw_plan.executor.parallel_model import ParallelModel, compile_plan
from claw_plan.executor.replica_exchange import ExchangeOptions, without_codec
from claw_plan.executor.traffic import counting, traffic_counter
from claw_plan.planner.plan import load_plan
from claw_plan.planner.supported import OF_MOMENTUM

STEPS, SAVED, WINDOW, WARMUP = 6, 3, 3, 2


class Training:
    """A plan's model on this rank; the window of an fp16 scale is short, and so is a warm-up."""

    def __init__(
        self, path: Path, *, is_coded: bool = True, selector: SelectorOptions | None = None
    ) -> None:
        plan, loaded = open_plan(path)
        short = {"loss_scale_window": WINDOW, "codec_warmup_steps": WARMUP}
        training = plan.training.model_copy(update=short)
        plan = plan.model_copy(update={"training": training})
        plan = plan if is_coded else without_codec(plan)
        options = ExchangeOptions(selector=selector)
        self.compiled: ParallelModel = compile_plan(
            plan, loaded, torch.device("cpu"), exchange=options
        )
        self._source = ExampleSource(plan, loaded)

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        mesh, dp = self.compiled.mesh, self.compiled.knobs.dp
        return own_slice(self._source.global_batch(step), mesh.data_index, dp)

    def train(self, steps: range) -> list[float]:
        return [self.compiled.train_step(self.batch(step)) for step in steps]

    def first_gradients(self) -> torch.Tensor:
        """Of step 0, complete, this rank's parts; then they are forgotten."""
        self.compiled.forward_backward(self.batch(0))
        self.compiled.finish_gradients()
        found = [
            local(p.grad).reshape(-1) for p in self.compiled.trainable() if p.grad is not None
        ]
        self.compiled.optimizer.zero_grad()
        return torch.cat(found).double()

    def flat(self) -> torch.Tensor:
        parts = [local(p.detach()).reshape(-1) for p in self.compiled.parameters.values()]
        return torch.cat(parts).clone()

    def exponent(self) -> int | None:
        gradients = self.gradients
        scale = None if gradients is None else gradients.scale
        return None if scale is None else scale.exponent

    @property
    def gradients(self) -> GradientMean | None:
        """What sends gradients as codes; None where momentum travels."""
        assert self.compiled.exchange is not None
        return self.compiled.exchange.gradients

    def moved(self, steps: range) -> list[list[object]]:
        """What this rank moves in the last of these steps."""
        counter = traffic_counter(self.compiled)
        with counting(self.compiled, counter):
            for step in steps:
                counter.take()
                self.compiled.train_step(self.batch(step))
        return [[*kind, *amounts] for kind, amounts in counter.take().items()]


def error_of(path: Path, whole: Training) -> dict[str, float]:
    """Squares over all ranks: of the first gradients' error, and of what was encoded."""
    coded = Training(path)
    assert coded.gradients is not None
    means, sent = coded.gradients.means, [0.0]
    encode = means.compressed

    def counted(key: str, flat: torch.Tensor) -> torch.Tensor:
        sent[0] += float(flat.double().square().sum())
        return encode(key, flat)

    means.compressed = counted  # type: ignore[method-assign]
    true = whole.first_gradients()
    error = (coded.first_gradients() - true).square().sum()
    both = torch.stack([error, torch.tensor(sent[0]), true.square().sum()])
    dist.all_reduce(both)
    return dict(zip(("error", "sent", "true"), both.tolist(), strict=True))


def found_of(path: Path, folder: Path) -> dict[str, Any]:
    whole = Training(path, is_coded=False)
    sends_gradients = load_plan(path).knobs().codec.partition(":")[0] not in OF_MOMENTUM
    found: dict[str, Any] = {"squares": error_of(path, whole)} if sends_gradients else {}
    found["whole"] = whole.train(range(STEPS))
    first = Training(path)
    losses = first.train(range(SAVED))
    checkpointer = Checkpointer(first.compiled, folder)
    checkpointer.save(SAVED)
    failed = checkpointer.finish()
    assert not failed, failed
    found["losses"] = losses + first.train(range(SAVED, STEPS))
    second = Training(path)
    Checkpointer(second.compiled, None).load(folder / name_of(SAVED))
    found["moved"] = second.moved(range(SAVED, STEPS))
    found |= {"flat": first.flat(), "resumed": second.flat()}
    found["exponents"] = [first.exponent(), second.exponent()]
    mesh = first.compiled.mesh
    found["place"] = {axis: mesh.index(axis) for axis in mesh.sizes}
    found["alike"] = alike_over_tp(first.compiled)
    if first.compiled.knobs.collective == "ring":
        found["selected"] = selected(path)
    return found | ({"skipped": skipped(first)} if sends_gradients else {})


def selected(path: Path) -> dict[str, Any]:
    """The same steps by what a selector chooses, which compares after each of them."""
    training = Training(path, selector=SelectorOptions(check_interval_ns=1))
    exchange = training.compiled.exchange
    assert exchange is not None
    events = []
    for step in range(STEPS):
        training.train(range(step, step + 1))
        events += exchange.step_ended(step)
    changes = [(each.before, each.after) for each in events if isinstance(each, Switch)]
    used = [*sum(changes, ()), *exchange.algorithms().values()]
    return {"flat": training.flat(), "used": used}


def alike_over_tp(compiled: ParallelModel) -> torch.Tensor | None:
    """What all tensor-parallel ranks hold, this rank's; None without tensor parallelism."""
    if compiled.tensor_parallel is None:
        return None
    held = [
        local(parameter.detach()).reshape(-1)
        for name, parameter in compiled.parameters.items()
        if divided_as(compiled, name) is None
    ]
    return torch.cat(held).clone()


def poison(compiled: ParallelModel) -> RemovableHandle:
    """Lets rank 1's backward overflow, whatever holds its parameters."""
    norms = (m for m in compiled.stages[0].modules() if isinstance(m, nn.LayerNorm))

    def forward(_: nn.Module, __: object, out: torch.Tensor) -> None:
        if dist.get_rank() == 1:
            out.register_hook(lambda gradient: gradient * torch.inf)

    return next(norms).register_forward_hook(forward)


def skipped(training: Training) -> dict[str, Any]:
    """A step in which one rank's gradient overflowed, and some afterwards."""
    before, exponents = training.flat(), [training.exponent()]
    poisoned = poison(training.compiled)
    training.train(range(STEPS, STEPS + 1))
    poisoned.remove()
    kept = training.flat()
    exponents.append(training.exponent())
    training.train(range(STEPS + 1, STEPS + 1 + WINDOW))
    exponents.append(training.exponent())
    after = training.flat()
    return {"before": before, "kept": kept, "after": after, "exponents": exponents}


def main(rank: int, world_size: int, folder: Path, plans: list[Path]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    found = {path.stem: found_of(path, folder / path.stem) for path in plans}
    torch.save(found, folder / f"coded{rank}.pt")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # threads of gloo may still run


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), [Path(p) for p in sys.argv[4:]])
