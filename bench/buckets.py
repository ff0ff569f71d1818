"""What planned bucket boundaries leave exposed of the gradients' traffic, on links of any rate.

Run (as root): OMP_NUM_THREADS=1 setsid chrt -r 2 python bench/buckets.py --folder FOLDER
    [--mbit 500] [--batch 8 4] [--rounds 3] [--write docs/buckets.md]
(a minute a batch; real time, because other programs on the cores would be in every step)

Two hosts of `bench/shaped`, a rank on each, train a GPT. Each run measures the link and when its
gradients are ready, plans boundaries from that (`planner.bucket_plan`), and times steps with them
beside DistributedDataParallel's, which take turns. Runs are kept in the folder; the table is of
all that are there, so that it shows how far they differ.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "shaped"))
from hosts import SEGMENT, Hosts
from switch import Port

RANK = Path(__file__).parent / "shaped" / "bucket_rank.py"
CONFIG = {"vocab_size": 256, "block_size": 128, "n_layer": 12, "n_head": 4, "n_embd": 256}
DELAY_NS = 100_000
COUNTED = {
    "25 MB": "filled",
    "planned": "sizes",
    "planned, as the next forward needs them": "ordered",
}
"""What a run says of the ways whose buckets it knows."""

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
        return {"mbit": mbit, "hosts": hosts, "batch": batch, **found}


def table(runs: Sequence[dict[str, Any]]) -> list[str]:
    """What a step takes longer than without any traffic, way by way of each kind of run."""
    rows = [
        "| links | batch | buckets | number | exposed ms, predicted | measured | to 25 MB "
        "| step ms |",
        "|---|--:|---|--:|--:|--:|--:|--:|",
    ]
    kinds: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for run in runs:
        kinds.setdefault((-run["batch"], run["mbit"], run["hosts"]), []).append(run)
    for _, some in sorted(kinds.items()):
        rows += _rows(some)
    return rows


def _rows(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Of runs alike: medians over runs of each run's median step, and from least to most."""
    first = runs[0]
    links = f"{first['hosts']} hosts, {first['mbit']:g} Mbit/s | {first['batch']}"
    steps = {
        name: [statistics.median(run["samples_ms"][name]) for run in runs]
        for name in first["samples_ms"]
    }
    alone = steps.pop("alone")
    exposed = {
        name: [step - without for step, without in zip(each, alone, strict=True)]
        for name, each in steps.items()
    }
    predicted = {name: [run["exposed_ms"][name] for run in runs] for name in first["exposed_ms"]}
    rows = []
    for name, each in exposed.items():
        ratios = [ms / filled - 1 for ms, filled in zip(each, exposed["25 MB"], strict=True)]
        counts = [len(run[COUNTED[name]]) for run in runs] if name in COUNTED else []
        cells = [name, _spread(counts, ""), _spread(predicted.get(name, []), ".0f")]
        cells += [_spread(each, ".0f"), _spread(ratios, "+.0%"), _spread(steps[name], ".0f")]
        rows.append(f"| {links} | {' | '.join(cells)} |")
    return rows


def _spread(values: Sequence[float], form: str) -> str:
    """The median, and what lies around it."""
    if not values:
        return ""
    shown = [f"{value:{form}}" for value in (min(values), max(values))]
    middle = f"{statistics.median_low(values):{form}}"
    return middle if shown[0] == shown[1] else f"{middle} ({shown[0]} to {shown[1]})"


def _write(page: Path, rows: list[str]) -> None:
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(before + BEGIN + "\n".join(rows) + "\n" + END + after, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mbit", type=float, nargs="+", default=[500.0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--batch", type=int, nargs="*", default=[8, 4], help="of a rank")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the hosts are taken down on the way
    options.folder.mkdir(parents=True, exist_ok=True)
    for mbit, batch in product(options.mbit, options.batch):
        found = measure(mbit, options.hosts, batch, options.rounds)
        (options.folder / f"{time.time_ns()}.json").write_text(json.dumps(found))
        print(json.dumps({key: found[key] for key in found if key != "samples_ms"}), flush=True)
    rows = table([json.loads(path.read_text()) for path in sorted(options.folder.glob("*.json"))])
    print("\n".join(rows))
    if options.write:
        _write(options.write, rows)


if __name__ == "__main__":
    main()
