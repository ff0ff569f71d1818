"""Our collectives beside gloo's on shaped hosts, and whether the selector finds the best.

Run (as root): python bench/collectives.py --folder FOLDER [--mbit 200 200 200 200] [--delay-ms 1]

Every host has its own link to a switch (bench/shaped) and one rank, or `--ranks` of them. First
each algorithm is timed at each size, in turns; then a selector runs the steps of a training that
has such buckets. Prints docs/collectives.md's table: the medians, what the model says with links
fitted by the selector's probe, what the selector settled on, and what changes and checksums cost.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent / "shaped"))
from hosts import Hosts
from switch import Port

from claw_plan.executor.communication.algorithms import NAMES, NATIVE
from claw_plan.executor.communication.bucket_checks import BucketChecks
from claw_plan.executor.communication.checksum import checksum
from claw_plan.executor.communication.group import CollectiveGroup, create_group
from claw_plan.executor.communication.selector import Selector
from claw_plan.executor.communication.selector_options import SelectorOptions
from claw_plan.profiles.collective_algorithms import Links, time_ns
from claw_plan.profiles.collective_schedules import ALGORITHMS, node_sizes
from claw_plan.profiles.units import NS_PER_MS, format_bytes

SIZES = (4 << 10, 64 << 10, 1 << 20, 4 << 20)
WARM_UPS = 1


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--mbit", type=float, nargs="+", default=[200.0] * 4, help="per host")
    parser.add_argument("--delay-ms", type=float, default=1.0, help="one way, host to switch")
    parser.add_argument("--ranks", type=int, default=1, help="on each host")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="bytes")
    parser.add_argument("--algorithms", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="of the selector")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        _rank(options)
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    ports = [
        Port(bits_per_s=int(rate * 1e6), delay_ns=int(options.delay_ms * NS_PER_MS))
        for rate in options.mbit
    ]
    with Hosts(ports) as hosts:
        hosts.run([sys.executable, __file__, "--rank", *sys.argv[1:]], options.ranks)
    found = json.loads((options.folder / "found.json").read_text())
    print("\n".join(table(found)))


def _rank(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = create_group()
    assert group is not None
    started = time.perf_counter()
    selector = Selector(group, SelectorOptions(check_interval_ns=1))
    probe_s = time.perf_counter() - started
    rows = [measure(group, size, options, selector.links) for size in options.sizes]
    for size, row in zip(options.sizes, rows, strict=True):
        row["selected"] = select(selector, size, options.steps)
    found = {
        "nodes": node_sizes(group.nodes),
        "probe_s": probe_s,
        "latency_ns": selector.links.inter.latency_ns,
        "bytes_per_s": selector.links.inter.bytes_per_s,
        "rows": rows,
        "changes": changes(selector, min(options.sizes)),
        "checks": checks(group, max(options.sizes), options.repeats),
    }
    if dist.get_rank() == 0:
        (options.folder / "found.json").write_text(json.dumps(found, indent=1))
    dist.barrier()
    dist.destroy_process_group()


def measure(
    group: CollectiveGroup, size: int, options: argparse.Namespace, links: Links
) -> dict[str, Any]:
    """Medians in ms of each algorithm, in turns; the slowest rank counts."""
    times: dict[str, list[float]] = {name: [] for name in options.algorithms}
    flat = torch.ones(size // 4)
    for repeat in range(WARM_UPS + options.repeats):
        for name in options.algorithms:
            one = group.using(name)
            spent = slowest_ms(group, lambda: one.all_reduce(flat))  # noqa: B023
            if repeat >= WARM_UPS:
                times[name].append(spent)
    sizes = node_sizes(group.nodes)
    return {
        "size": size,
        "ms": {name: statistics.median(spent) for name, spent in times.items()},
        "spread": {name: (min(spent), max(spent)) for name, spent in times.items()},
        "model_ms": {name: time_ns(name, size, sizes, links) / NS_PER_MS for name in ALGORITHMS},
    }


def slowest_ms(group: CollectiveGroup, call: Any) -> float:
    dist.barrier()
    started = time.perf_counter_ns()
    call()
    spent = torch.tensor([float(time.perf_counter_ns() - started)])
    dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    return spent.item() / NS_PER_MS


def select(selector: Selector, size: int, steps: int) -> str:
    """What a run of so many steps settles on."""
    flat = torch.ones(size // 4)
    for _ in range(steps):
        dist.barrier()
        selector.all_reduce(flat)
        selector.step_ended()
    return selector.algorithm(flat.nbytes)


def changes(selector: Selector, size: int) -> dict[str, float]:
    """What a change costs: the agreement, by one small all-reduce, and the first call after it.

    The latter beside the next call of the same algorithm, both of the median change.
    """
    flat = torch.ones(size // 4)
    agreeing, first, second = [], [], []
    for _ in range(3):
        for name in ALGORITHMS:
            one = selector.group.using(name)
            first.append(slowest_ms(selector.group, lambda: one.all_reduce(flat)))  # noqa: B023
            second.append(slowest_ms(selector.group, lambda: one.all_reduce(flat)))  # noqa: B023
            selector.all_reduce(flat)
            dist.barrier()
            started = time.perf_counter_ns()
            selector.step_ended()
            agreeing.append((time.perf_counter_ns() - started) / NS_PER_MS)
    return {
        "agreement": statistics.median(agreeing),
        "first": statistics.median(first),
        "second": statistics.median(second),
    }


def checks(group: CollectiveGroup, size: int, repeats: int) -> dict[str, float]:
    """What checksums add to an all-reduce on these links, and in processor time alone."""
    flat = torch.ones(size // 4)
    times: dict[str, list[float]] = {"plain": [], "checked": []}
    ring, compared = group.using("ring"), BucketChecks(group.process_group, group.device)

    def checked() -> None:
        """A step of one bucket; its sums travel beside the next."""
        ring.all_reduce(flat, compared.exchange(0))
        compared.arrived(0, flat)
        compared.step_ended(1)

    calls = {"plain": lambda: ring.all_reduce(flat), "checked": checked}
    for repeat in range(WARM_UPS + repeats):
        for name, call in calls.items():
            spent = slowest_ms(group, call)
            if repeat >= WARM_UPS:
                times[name].append(spent)
    started = time.process_time_ns()
    for _ in range(repeats):
        checksum(flat)
    own_ms = (time.process_time_ns() - started) / repeats / NS_PER_MS
    medians = {name: statistics.median(spent) for name, spent in times.items()}
    return medians | {"one_checksum": own_ms}


def table(found: dict[str, Any]) -> list[str]:
    """Rows of sizes; times in ms, the model's in brackets, and the selector's regret."""
    changes, checks = found["changes"], found["checks"]
    names = list(found["rows"][0]["ms"])
    lines = [
        f"- links as probed in {found['probe_s']:.2f} s: {found['latency_ns'] / NS_PER_MS:.2f} ms "
        f"and {found['bytes_per_s'] / 1e6:.1f} MB/s; ranks by host {found['nodes']}",
        f"- a decision takes {changes['agreement']:.2f} ms; the first call of another algorithm "
        f"{changes['first']:.2f} ms, its second {changes['second']:.2f} ms",
        f"- a ring of the largest takes {checks['plain']:.1f} ms, with checksums "
        f"{checks['checked']:.1f} ms; one checksum {checks['one_checksum']:.2f} ms",
        "",
        "| size | " + " | ".join(names) + " | selected | slower than the best |",
        "|---|" + "--:|" * len(names) + "---|--:|",
    ]
    for row in found["rows"]:
        best = min(row["ms"].values())
        cells = [
            f"{row['ms'][name]:.1f}"
            + (f" ({row['model_ms'][name]:.1f})" if name != NATIVE else "")
            for name in names
        ]
        regret = row["ms"].get(row["selected"], best) / best - 1
        lines.append(
            f"| {format_bytes(row['size'])} | {' | '.join(cells)} | {row['selected']} "
            f"| {regret:.1%} |"
        )
    return lines


if __name__ == "__main__":
    main()
