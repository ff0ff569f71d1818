"""What compressed training costs in loss: a small GPT on real text over four gloo ranks.

The text is Python's own documentation as Python ships it (pydoc_data.topics, 466 kB, bytes as
tokens; the last tenth is kept for validation), the model examples/gpt.py with two blocks of width
64. Every method sees the same batches, the same learning rates (linear warm-up, then cosine down
to a tenth) and the same number of steps; losses are validation losses, the mean of the last five
evaluations. Bytes are those a rank's calls of torch.distributed send, by the algorithms' formulas.

Each run's result goes into a JSON file at once, and what is there is not run again. Runs of a wave
share the processes, each on a thread with a group of its own, so that one computes while others
wait for their peers; what a run computes does not depend on its neighbours.

Run: OMP_NUM_THREADS=1 python bench/convergence.py RESULTS.json [--methods adam,one_bit_adam]
     [--seeds 0,1,2] [--steps 2000] [--wave 9]
     OMP_NUM_THREADS=1 python bench/convergence.py RESULTS.json --methods adam --steps 1000
     python bench/convergence.py RESULTS.json --write docs/compressed_training.md
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from convergence_methods import METHODS
from convergence_table import table_of, write_table

from claw_plan.executor.traffic import TrafficCounter
from claw_plan.profiles.files import write_atomic

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from gpt import GPT, GPTConfig

RANKS, ROWS, SEQ_LEN = 4, 4, 64
"""Ranks, and each one's samples a step."""

RAMP_STEPS, LAST_RATE = 100, 0.1
"""Steps of linear warm-up, and what of the learning rate is left at the end."""

EVALUATIONS, EVALUATION_EVERY, EVALUATION_ROWS = 5, 20, 64
"""Evaluations that count, steps between them, and rows of each on each rank."""

SENT_SHARE = {"all_reduce": 2.0, "all_gather": 1.0, "all_to_all": 1.0, "broadcast": 1.0}
"""What a rank sends of a full buffer, in units of (n - 1) / n: the ring's and the direct ways'."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """Bytes numbered by their first use in the sorted alphabet."""

    train: torch.Tensor
    validation: torch.Tensor
    alphabet: int


def read_text() -> Text:
    data = "".join(topics[name] for name in sorted(topics)).encode()
    numbers = {byte: number for number, byte in enumerate(sorted(set(data)))}
    tokens = torch.tensor([numbers[byte] for byte in data])
    cut = len(tokens) * 9 // 10
    return Text(train=tokens[:cut], validation=tokens[cut:], alphabet=len(numbers))


def rows_of(tokens: torch.Tensor, count: int, generator: torch.Generator) -> list[torch.Tensor]:
    starts = torch.randint(0, len(tokens) - SEQ_LEN - 1, (count,), generator=generator)
    rows = torch.stack([tokens[start : start + SEQ_LEN + 1] for start in starts.tolist()])
    return [rows[:, :-1].contiguous(), rows[:, 1:].contiguous()]


def rate_at(step: int, steps: int, peak: float) -> float:
    """The learning rate of a step, counted from 1."""
    cosine = (1 + math.cos(math.pi * step / steps)) / 2
    return peak * min(1.0, step / RAMP_STEPS) * (LAST_RATE + (1 - LAST_RATE) * cosine)


@torch.no_grad()
def validation_loss(net: nn.Module, text: Text, group: dist.ProcessGroup) -> float:
    """Of rows that are the same at every evaluation of every run, a part of them on each rank."""
    generator = torch.Generator().manual_seed(99 + dist.get_rank())
    loss = net(*rows_of(text.validation, EVALUATION_ROWS, generator))[1]
    dist.all_reduce(loss, op=dist.ReduceOp.AVG, group=group)
    return loss.item()


@dataclass(kw_only=True)
class Run:
    """One training on one rank."""

    name: str
    peak_rate: float
    net: nn.Module
    model: nn.Module
    optimizer: torch.optim.Optimizer
    group: dist.ProcessGroup
    generator: torch.Generator
    counter: TrafficCounter

    def sent_bytes(self) -> float:
        """What this rank sent so far, evaluations included."""
        share = (RANKS - 1) / RANKS
        return sum(
            SENT_SHARE[kind.op] * share * moved.bytes
            for kind, moved in self.counter.seen().items()
            if kind.axis == str(self.group.group_name)
        )

    def train(self, steps: int, text: Text) -> dict[str, Any]:
        """The loss at the end, the bytes a rank sent, and its thread's processor time."""
        began, losses, sent = time.thread_time(), [], [self.sent_bytes()]
        for step in range(1, steps + 1):
            for group in self.optimizer.param_groups:
                group["lr"] = rate_at(step, steps, self.peak_rate)
            self.model(*rows_of(text.train, ROWS, self.generator))[1].backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            sent.append(self.sent_bytes())
            if step > steps - EVALUATIONS * EVALUATION_EVERY and (steps - step) % 20 == 0:
                losses.append(validation_loss(self.net, text, self.group))
        return {
            "loss": statistics.mean(losses), "evaluations": losses,
            "parameters": sum(p.numel() for p in self.net.parameters()),
            "sent_bytes": sent[-1] - sent[0], "last_step_sent_bytes": sent[-1] - sent[-2],
            "thread_time_s": time.thread_time() - began,
        }  # fmt: skip


def train_wave(wave: Sequence[tuple[str, int]], steps: int, text: Text, results: Path) -> None:
    groups = [dist.new_group(backend="gloo") for _ in wave]
    names = {str(group.group_name): str(group.group_name) for group in groups}
    counter, written = TrafficCounter(names), threading.Lock()
    config = GPTConfig(
        vocab_size=text.alphabet, block_size=SEQ_LEN, n_layer=2, n_head=4, n_embd=64
    )
    runs = []
    with counter.counting(sees_reducer=False):
        for (name, seed), group in zip(wave, groups, strict=True):
            torch.manual_seed(seed)
            net = GPT(config)
            model, optimizer = METHODS[name].make(net, group, steps)
            generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
            runs.append(Run(name=f"{name} {seed} {steps}", net=net, model=model,
                            peak_rate=METHODS[name].rate, group=group, optimizer=optimizer,
                            generator=generator, counter=counter))  # fmt: skip

        def train(run: Run) -> None:
            found = run.train(steps, text)
            if dist.get_rank() == 0:
                with written:
                    known = json.loads(results.read_text()) if results.exists() else {}
                    write_atomic(results, json.dumps(known | {run.name: found}, indent=1))
                print(f"{run.name}: {found['loss']:.4f}", flush=True)

        with ThreadPoolExecutor(len(runs)) as threads:
            for done in [threads.submit(train, run) for run in runs]:
                done.result()


def train_on_rank(
    rank: int, folder: str, waves: Sequence[Sequence[tuple[str, int]]], steps: int, results: Path
) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    text = read_text()
    for wave in waves:
        train_wave(wave, steps, text, results)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--wave", type=int, default=9)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    known = json.loads(options.results.read_text()) if options.results.exists() else {}
    runs = [
        (name, int(seed))
        for seed in options.seeds.split(",")
        for name in options.methods.split(",")
        if f"{name} {seed} {options.steps}" not in known
    ]
    if options.write is None:
        sys.exit(train_all(runs, options))
    write_table(options.write, table_of(known, options.steps))


def train_all(runs: Sequence[tuple[str, int]], options: argparse.Namespace) -> int:
    """Starts the ranks; their worst exit code."""
    waves = [runs[first : first + options.wave] for first in range(0, len(runs), options.wave)]
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        ranks = [
            context.Process(
                target=train_on_rank, args=(rank, folder, waves, options.steps, options.results)
            )
            for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    return max(process.exitcode or 0 for process in ranks)


if __name__ == "__main__":
    main()
