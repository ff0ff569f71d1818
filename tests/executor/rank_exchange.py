"""Trains plans whose replicas exchange something else than whole gradients, saves and goes on.

Started for each rank by tests as `python rank_exchange.py RANK WORLD_SIZE FOLDER PLAN...`; writes
what it found of each plan to `rank<r>.pt`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from claw_plan.executor.batches import ExampleSource, own_slice
from claw_plan.executor.bucket_times import record_gradients
from claw_plan.executor.checkpoint import Checkpointer
from claw_plan.executor.checkpoint_folder import name_of
from claw_plan.executor.communication.reducer import Replicas
from claw_plan.executor.opened_plan import open_plan
from claw_plan.executor.parallel_model import ParallelModel, compile_plan
from claw_plan.executor.traffic import counting, traffic_counter
from claw_plan.profiles.codecs import LOW_RANK, ZERO_ONE

STEPS, SAVED, WARMUP = 8, 5, 3

SGD = "sgd"
"""Also what the plan is called whose steps are looked at one by one."""

MET = 6
"""Steps after which replicas of 0/1 Adam have met: two apart, and after the warm-up's first."""


class Training:
    """A plan's model on this rank, with a short warm-up."""

    def __init__(self, path: Path) -> None:
        plan, loaded = open_plan(path)
        short: dict[str, Any] = {
            "codec_warmup_steps": WARMUP,
            "variance_repeats": 1,
            "meeting_repeats": 1,
        }
        if plan.training.optimizer == SGD:
            short |= {"learning_rate": 0.1}
        training = plan.training.model_copy(update=short)
        plan = plan.model_copy(update={"training": training})
        self.compiled: ParallelModel = compile_plan(plan, loaded, torch.device("cpu"))
        self._source = ExampleSource(plan, loaded)

    def train(self, steps: range) -> list[float]:
        batches = [self.batch(step) for step in steps]
        return [self.compiled.train_step(batch) for batch in batches]

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        mesh, dp = self.compiled.mesh, self.compiled.knobs.dp
        return own_slice(self._source.global_batch(step), mesh.data_index, dp)

    def flat(self) -> torch.Tensor:
        self.compiled.settle()
        return torch.cat([p.detach().reshape(-1) for p in self.compiled.parameters.values()])


def found_of(path: Path, folder: Path) -> dict[str, Any]:
    first = Training(path)
    losses = first.train(range(SAVED))
    if first.compiled.knobs.codec == "none" and first.compiled.next_forward is None:
        losses += first.train(range(SAVED, STEPS))
        return {"losses": losses, "flat": first.flat(), "ready": ready(first)}
    first.compiled.settle()
    checkpointer = Checkpointer(first.compiled, folder)
    checkpointer.save(SAVED)
    failed = checkpointer.finish()
    assert not failed, failed
    losses += first.train(range(SAVED, STEPS))
    second = Training(path)
    reader = Checkpointer(second.compiled, None)
    reader.load(folder / name_of(SAVED))
    second.train(range(SAVED, STEPS))
    found = {"losses": losses, "flat": first.flat(), "resumed": second.flat(), "note": reader.note}
    if first.compiled.knobs.codec.startswith(LOW_RANK):
        found["low_rank"] = first_factored(path)
    if path.stem == SGD:
        found["steps"] = corrected(path)
    if first.compiled.knobs.codec.startswith(ZERO_ONE):
        found["apart"] = met_and_apart(path, folder / "met")
    exchange = first.compiled.exchange
    if exchange is not None and exchange.gradients is not None:
        found["skipped"] = skipped(first)
    found["ready"] = ready(first)
    return found


def ready(training: Training) -> dict[str, int]:
    """When gradients are complete, as a run records it at its end."""
    compiled = training.compiled
    return record_gradients(compiled, compiled.microbatches_of(training.batch(0))[0])


def first_factored(path: Path) -> dict[str, Any]:
    """Of the first step after the warm-up: this rank's gradients, what became of them, traffic."""
    training = Training(path)
    training.train(range(WARMUP))
    compiled, module = training.compiled, training.compiled.module
    assert isinstance(module, Replicas) and compiled.exchange is not None
    parameters = [p for bucket in module.buckets for p in bucket.parameters]
    with module.no_sync():
        compiled.forward_backward(training.batch(WARMUP))
    own = [p.grad.clone() for p in parameters if p.grad is not None]
    compiled.optimizer.zero_grad()
    compiled.forward_backward(training.batch(WARMUP))
    means = [p.grad.clone() for p in parameters if p.grad is not None]
    compiled.optimizer.zero_grad()
    state = {name: kept.clone() for name, kept in compiled.exchange.state.rank_state().items()}
    counter = traffic_counter(compiled)
    with counting(compiled, counter):
        training.train(range(WARMUP, WARMUP + 1))
    moved = [(*kind, *amounts) for kind, amounts in counter.take().items()]
    return {"own": own, "means": means, "state": state, "moved": moved}


def corrected(path: Path) -> list[dict[str, torch.Tensor]]:
    """Of each step this rank's gradients, in the order of its one bucket, and the parameters."""
    training, steps = Training(path), []
    module = training.compiled.module
    assert isinstance(module, Replicas)
    (bucket,) = module.buckets

    def flat(tensors: Iterable[torch.Tensor | None]) -> torch.Tensor:
        return torch.cat([one.detach().reshape(-1) for one in tensors if one is not None])

    for step in range(STEPS):
        with module.no_sync():
            training.compiled.forward_backward(training.batch(step))
        own = flat(p.grad for p in bucket.parameters)
        training.compiled.optimizer.zero_grad()
        before = flat(bucket.parameters)
        training.train(range(step, step + 1))
        steps.append({"own": own, "moved": before - flat(bucket.parameters)})
    return steps


def met_and_apart(path: Path, folder: Path) -> dict[str, Any]:
    """Parameters after each step, whether they are called equal, traffic, and a resumed run."""
    training = Training(path)
    compiled, flats, equal, moved = training.compiled, [], [], []
    exchange, counter = compiled.exchange, traffic_counter(compiled)
    assert exchange is not None
    checkpointer = Checkpointer(compiled, folder)
    for step in range(STEPS):
        with counting(compiled, counter):
            training.train(range(step, step + 1))
        moved.append([(*kind, *amounts) for kind, amounts in counter.take().items()])
        flats.append(torch.cat([p.detach().reshape(-1) for p in compiled.parameters.values()]))
        equal.append((exchange.replicas_are_equal, exchange.phase))
        if step + 1 == MET:
            checkpointer.save(MET)
            assert not checkpointer.finish()
    again = Training(path)
    Checkpointer(again.compiled, None).load(folder / name_of(MET))
    again.train(range(MET, STEPS))
    return {"flats": flats, "equal": equal, "moved": moved, "again": again.flat()}


def skipped(training: Training) -> dict[str, Any]:
    """A step in which one rank's gradient overflowed, and one afterwards."""
    compiled, before = training.compiled, training.flat().clone()
    poisoned = compiled.trainable()[0].register_hook(
        lambda gradient: gradient * (torch.inf if dist.get_rank() == 1 else 1.0)
    )
    training.train(range(STEPS, STEPS + 1))
    poisoned.remove()
    kept = training.flat().clone()
    loss = training.train(range(STEPS + 1, STEPS + 2))[0]
    return {"before": before, "kept": kept, "loss": loss, "after": training.flat()}


def main(rank: int, world_size: int, folder: Path, plans: list[Path]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    found = {path.stem: found_of(path, folder / path.stem) for path in plans}
    other = Training(plans[-1])
    reader = Checkpointer(other.compiled, None)
    reader.load(folder / plans[1].stem / name_of(SAVED))
    found["other"] = {"note": reader.note}
    torch.save(found, folder / f"rank{rank}.pt")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # threads of gloo may still run


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), [Path(p) for p in sys.argv[4:]])
