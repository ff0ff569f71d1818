"""What planned bucket boundaries leave exposed of the gradients' traffic, on links of any rate.

Run (as root): OMP_NUM_THREADS=1 setsid chrt -r 2 python bench/buckets.py [--mbit 500]
    [--batch 8 4] [--rounds 3] [--write docs/buckets.md]
(a minute a batch; real time, because other programs on the cores would be in every step)

Two hosts of `bench/shaped`, a rank on each, train a GPT. Each run measures the link and when its
gradients are ready, plans boundaries from that (`planner.bucket_plan`), and times steps with them
beside DistributedDataParallel's, which take turns.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "shaped"))
from hosts import SEGMENT, Hosts
from switch import Port

RANK = Path(__file__).parent / "shaped" / "bucket_rank.py"
CONFIG = {"vocab_size": 256, "block_size": 128, "n_layer": 12, "n_head": 4, "n_embd": 256}
DELAY_NS = 100_000
BEGIN, END = "<!-- measured -->\n", "<!-- end -->\n"


def measure(mbit: float, hosts: int, batch: int, rounds: int) -> dict[str, Any]:
    """One run on hosts with such links."""
    ports = [Port(bits_per_s=int(mbit * 1e6), delay_ns=DELAY_NS)] * hosts
    with tempfile.TemporaryDirectory() as folder, Hosts(ports, SEGMENT) as shaped:
        result = Path(folder) / "result.json"
        command = [sys.executable, str(RANK), "--result", str(result), "--batch", str(batch)]
        command += ["--config", json.dumps(CONFIG), "--rounds", str(rounds)]
        shaped.run(command, ranks_per_host=1)
        found: dict[str, Any] = json.loads(result.read_text())
        return found


def lines(mbit: float, hosts: int, batch: int, found: dict[str, Any]) -> list[str]:
    """Rows of the table: what a step takes longer than without any traffic."""
    medians = {name: statistics.median(each) for name, each in found["samples_ms"].items()}
    alone = medians.pop("alone")
    exposed = {name: median - alone for name, median in medians.items()}
    buckets = {
        "planned": len(found["sizes"]),
        "25 MB": len(found["filled"]),
        "planned, as the next forward needs them": len(found["ordered"]),
    }
    return [
        f"| {hosts} hosts, {mbit:g} Mbit/s | {batch} | {name} | {buckets.get(name, '')} "
        f"| {_rounded(found['exposed_ms'].get(name))} | {exposed[name]:.0f} "
        f"| {exposed[name] / exposed['25 MB'] - 1:+.0%} | {_spread(found['samples_ms'][name])} |"
        for name in medians
    ]


def _rounded(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def _spread(samples: list[float]) -> str:
    return f"{statistics.median(samples):.0f} ({min(samples):.0f} to {max(samples):.0f})"


def _write(page: Path, table: list[str]) -> None:
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(before + BEGIN + "\n".join(table) + "\n" + END + after, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mbit", type=float, nargs="+", default=[500.0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 4], help="of a rank")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the hosts are taken down on the way
    table = [
        "| links | batch | buckets | number | exposed ms, predicted | measured | to 25 MB "
        "| step ms |",
        "|---|--:|---|--:|--:|--:|--:|--:|",
    ]
    for mbit, batch in product(options.mbit, options.batch):
        found = measure(mbit, options.hosts, batch, options.rounds)
        table += lines(mbit, options.hosts, batch, found)
        print(json.dumps({key: found[key] for key in found if key != "samples_ms"}), flush=True)
    print("\n".join(table))
    if options.write:
        _write(options.write, table)


if __name__ == "__main__":
    main()
