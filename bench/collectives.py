"""Our collectives beside gloo's on shaped hosts, and whether the selector finds the best.

Run (as root): python bench/collectives.py --folder FOLDER [--case NAME ...] [--write PAGE]

Every host has its own link of 200 Mbit/s to a switch, 1 ms away (bench/shaped). Cases `small`,
`large` and `nodes` time each algorithm at each size, in turns; then a selector runs the steps of a
training that has such buckets. `checks` times a ring with and without checksums, and `changed`
lets one host's link fall to 20 Mbit/s while a selector runs. What each case found is kept in the
folder; the tables of all that are there are printed, and put between the page's marks.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "shaped"))
from hosts import Hosts
from switch import Port

from claw_plan.executor.communication.algorithms import NATIVE
from claw_plan.profiles.files import write_atomic
from claw_plan.profiles.units import NS_PER_MS, format_bytes

RATE, SLOWER, DELAY_NS = 200_000_000, 20_000_000, NS_PER_MS
LOOKS_S = 0.05
MARK, END = "<!-- measured -->\n", "<!-- end -->"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Buffers of so many bytes are timed, each `repeats` times, then a selector runs `steps`."""

    hosts: int = 4
    ranks: int = 1
    sizes: tuple[int, ...]
    repeats: int
    steps: int = 0


CASES = {
    "small": Case(sizes=(4 << 10, 64 << 10, 1 << 20), repeats=5, steps=40),
    "large": Case(sizes=(4 << 20,), repeats=3, steps=26),
    "nodes": Case(hosts=3, ranks=2, sizes=(1 << 20,), repeats=5, steps=30),
    "checks": Case(sizes=(1 << 20, 4 << 20, 16 << 20), repeats=4),
    "changed": Case(sizes=(128 << 10, 1 << 20), repeats=9),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--case", nargs="*", default=list(CASES), choices=CASES)
    parser.add_argument("--write", type=Path, help="the page whose tables are replaced")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.case:
        run(name, CASES[name], options.folder)
    found = {
        name: json.loads(path.read_text())
        for name in CASES
        if (path := options.folder / f"{name}.json").exists()
    }
    lines = told(found)
    print("\n".join(lines))
    if options.write is not None:
        text = options.write.read_text(encoding="utf-8")
        before, _, rest = text.partition(MARK)
        _, _, after = rest.partition(END)
        write_atomic(options.write, "\n".join([before + MARK, *lines, "", END + after]))


def run(name: str, case: Case, folder: Path) -> None:
    """Leaves what was found in the folder."""
    for old in folder.glob(f"{name}.*"):
        old.unlink()
    rank = Path(__file__).with_name("collectives_rank.py")
    with Hosts([Port(bits_per_s=RATE, delay_ns=DELAY_NS)] * case.hosts) as hosts:
        ended = threading.Event()
        watcher = threading.Thread(target=_slow_down, args=(hosts, folder, ended))
        watcher.start()
        try:
            hosts.run([sys.executable, str(rank), name, str(folder)], case.ranks)
        finally:
            ended.set()
            watcher.join()


def _slow_down(hosts: Hosts, folder: Path, ended: threading.Event) -> None:
    """Lets the last host's link fall when a rank asks for it, and says when it has."""
    asked, done = folder / "changed.asked", folder / "changed.done"
    while not ended.wait(LOOKS_S):
        if asked.exists() and not done.exists():
            hosts.change(len(hosts.ports) - 1, Port(bits_per_s=SLOWER, delay_ns=DELAY_NS))
            done.touch()


def told(found: dict[str, Any]) -> list[str]:
    """The tables of what is there."""
    lines = []
    rows = [
        (found[name], row) for name in ("small", "large", "nodes") if name in found
        for row in found[name]["rows"]
    ]  # fmt: skip
    if rows:
        lines += _of_sizes(rows)
    if "small" in found:
        lines += ["", *_of_decisions(found["small"])]
    if "changed" in found:
        lines += ["", *_of_change(found["changed"])]
    if "checks" in found:
        lines += ["", *_of_checks(found["checks"])]
    return lines


def _of_sizes(rows: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> list[str]:
    names = list(rows[0][1]["ms"])
    return [
        f"| size | {' | '.join(names)} | selected | slower than the best |",
        "|---|" + "--:|" * len(names) + "---|--:|",
        *(
            f"| {_of_size(about, row)} | {' | '.join(_cell(row, name) for name in names)} | "
            f"{row['selected']} | {_regret(row):.1%} |"
            for about, row in rows
        ),
    ]


def _of_size(about: dict[str, Any], row: dict[str, Any]) -> str:
    each = about["nodes"][0]
    many = "" if each == 1 else f", {len(about['nodes'])} hosts of {each} ranks"
    return format_bytes(row["size"]) + many


def _cell(row: dict[str, Any], name: str) -> str:
    modelled = "" if name == NATIVE else f" ({row['model_ms'][name]:.1f})"
    return f"{row['ms'][name]:.1f}{modelled}"


def _regret(row: dict[str, Any]) -> float:
    return float(row["ms"][row["selected"]] / min(row["ms"].values()) - 1)


def _of_decisions(small: dict[str, Any]) -> list[str]:
    change = small["changes"]
    return [
        f"The selector probed {small['latency_ns'] / NS_PER_MS:.1f} ms and "
        f"{small['bytes_per_s'] / 1e6:.0f} MB/s in {small['probe_s']:.2f} s. A decision takes "
        f"{change['agreement']:.2f} ms; the first call of",
        f"another algorithm takes {change['first']:.2f} ms at 4 KiB, the call after it "
        f"{change['second']:.2f} ms.",
    ]


def _of_change(changed: dict[str, Any]) -> list[str]:
    lines = [
        "One host's link falls from 200 to 20 Mbit/s while a selector runs:",
        "",
        "| size | before | steps until links were probed again | until all were settled | after | "
        "slower than the best |",
        "|---|---|--:|--:|---|--:|",
    ]
    for before, after in zip(changed["before"], changed["after"], strict=True):
        lines.append(
            f"| {format_bytes(after['size'])} | {before['selected']} {_chosen(before)} | "
            f"{changed['steps_to_probe']} | {changed['steps_to_settle']} | "
            f"{after['selected']} {_chosen(after)} | {_regret(after):.1%} |"
        )
    alike = "alike" if changed["is_alike"] else "NOT alike"
    stayed = [
        after["ms"][before["selected"]] / min(after["ms"].values()) - 1
        for before, after in zip(changed["before"], changed["after"], strict=True)
    ]
    lines += [
        "",
        f"All ranks chose {alike}. What was used before would be "
        + " and ".join(f"{one:.1%}" for one in stayed)
        + " slower than the best now.",
    ]
    return lines


def _chosen(row: dict[str, Any]) -> str:
    return f"({row['ms'][row['selected']]:.1f} ms)"


def _of_checks(checks: dict[str, Any]) -> list[str]:
    return [
        "| a ring of | without checksums, ms | with | more | one checksum, processor time |",
        "|---|--:|--:|--:|--:|",
        *(
            f"| {format_bytes(row['size'])} | {row['plain']:.2f} | {row['checked']:.2f} | "
            f"{row['checked'] / row['plain'] - 1:.1%} | {row['one_checksum']:.2f} |"
            for row in checks["rows"]
        ),
    ]


if __name__ == "__main__":
    main()
