"""What weights one step old cost in loss: a small GPT on real text, plain and delayed.

Text, model, batches and learning rates are those of bench/convergence.py, in one process with all
rows of a step. The delayed runs compute the recursion of docs/asynchronous.md, which pipelines
of PipeDream2BW equal bit by bit (tests/executor/test_overlapping_steps.py).

Each run's result goes into a JSON file at once, and what is there is not run again.

Run: OMP_NUM_THREADS=1 python bench/asynchronous.py RESULTS.json [--seeds 0,1,2] [--steps 1000]
     python bench/asynchronous.py RESULTS.json --write docs/asynchronous.md
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch
from convergence import (
    EVALUATION_EVERY,
    EVALUATIONS,
    RANKS,
    ROWS,
    SEQ_LEN,
    Text,
    rate_at,
    read_text,
    rows_of,
    write_table,
)

from claw_plan.executor.reference import Versions
from claw_plan.profiles.files import write_atomic

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from gpt import GPT, GPTConfig

EVALUATION_ROWS = 256

SETTINGS = {"AdamW": 1.0, "AdamW, a third of the rate": 1 / 3}
"""Learning rates in units of bench/convergence.py's."""


@torch.no_grad()
def validation_loss(net: GPT, text: Text) -> float:
    generator = torch.Generator().manual_seed(99)
    return float(net(*rows_of(text.validation, EVALUATION_ROWS, generator))[1])


def trained(setting: str, seed: int, steps: int, text: Text, *, delays: bool) -> float:
    """The mean of the last validation losses."""
    torch.manual_seed(seed)
    net = GPT(
        GPTConfig(vocab_size=text.alphabet, block_size=SEQ_LEN, n_layer=2, n_head=4, n_embd=64)
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.0)
    versions = Versions(net) if delays else None
    generator = torch.Generator().manual_seed(1000 * seed)
    losses = []
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = SETTINGS[setting] * rate_at(step, steps)
        if versions is not None:
            versions.show_before()
        net(*rows_of(text.train, RANKS * ROWS, generator))[1].backward()
        if versions is not None:
            versions.show_newest()
        optimizer.step()
        optimizer.zero_grad()
        counts = step > steps - EVALUATIONS * EVALUATION_EVERY
        if counts and (steps - step) % EVALUATION_EVERY == 0:
            losses.append(validation_loss(net, text))
    return statistics.mean(losses)


def table_of(known: dict[str, float], steps: int) -> str:
    """One row a setting: the seeds that were run both ways."""
    lines = [
        "| optimizer | seeds | final loss | with weights one step old | gap |",
        "|---|---|---|---|---|",
    ]
    for setting in SETTINGS:
        pairs = [
            (known[plain], known[delayed])
            for seed in range(100)
            if (plain := key_of(setting, seed, steps, delays=False)) in known
            and (delayed := key_of(setting, seed, steps, delays=True)) in known
        ]
        if pairs:
            plain_mean, delayed_mean = map(statistics.mean, zip(*pairs, strict=True))
            cells = [
                f"{mean:.4f} ({min(losses):.4f} to {max(losses):.4f})"
                for mean, losses in zip(
                    (plain_mean, delayed_mean), zip(*pairs, strict=True), strict=True
                )
            ]
            gap = delayed_mean / plain_mean - 1
            lines.append(f"| {setting} | {len(pairs)} | {' | '.join(cells)} | {gap:+.2%} |")
    return "\n".join(lines)


def key_of(setting: str, seed: int, steps: int, *, delays: bool) -> str:
    return f"{setting} | {'delayed' if delays else 'plain'} | {seed} | {steps}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    known = json.loads(given.results.read_text()) if given.results.exists() else {}
    if given.write:
        write_table(given.write, table_of(known, given.steps))
        return
    torch.set_num_threads(1)
    text = read_text()
    for setting in SETTINGS:
        for seed in map(int, given.seeds.split(",")):
            for delays in (False, True):
                key = key_of(setting, seed, given.steps, delays=delays)
                if key not in known:
                    known[key] = trained(setting, seed, given.steps, text, delays=delays)
                    write_atomic(given.results, json.dumps(known, indent=1))
                    print(f"{key}: {known[key]:.4f}", flush=True)


if __name__ == "__main__":
    main()
