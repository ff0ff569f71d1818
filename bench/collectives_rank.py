"""One rank of bench/collectives.py: a case's name to what it found, in `FOLDER/<case>.json`."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from collectives import CASES, Case

from claw_plan.executor.communication.algorithms import NAMES
from claw_plan.executor.communication.bucket_checks import BucketChecks
from claw_plan.executor.communication.checksum import checksum
from claw_plan.executor.communication.group import CollectiveGroup, create_group
from claw_plan.executor.communication.selector import Probe, Selector
from claw_plan.executor.communication.selector_options import SelectorOptions
from claw_plan.profiles.collective_algorithms import Links, time_ns
from claw_plan.profiles.collective_schedules import ALGORITHMS, node_sizes
from claw_plan.profiles.units import NS_PER_MS

WARM_UPS, IN_A_ROW = 1, 3
PATIENCE = 120
"""Steps in which a selector must have settled, or have seen a change."""


def main(name: str, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = create_group()
    assert group is not None
    case = CASES[name]
    if name == "checks":
        found = {"rows": [checks(group, size, case.repeats) for size in case.sizes]}
    elif name == "changed":
        found = changed(group, case, folder)
    else:
        found = sizes(group, case)
    if dist.get_rank() == 0:
        (folder / f"{name}.json").write_text(json.dumps(found, indent=1))
    dist.barrier()
    dist.destroy_process_group()


def sizes(group: CollectiveGroup, case: Case) -> dict[str, Any]:
    """All algorithms at all sizes, and what a selector settles on."""
    started = time.perf_counter()
    selector = Selector(group, SelectorOptions(check_interval_ns=1))
    probe_s = time.perf_counter() - started
    rows = [measure(selector.group, size, case.repeats, selector.links) for size in case.sizes]
    for size, row in zip(case.sizes, rows, strict=True):
        step(selector, [size], case.steps)
        row["selected"] = selector.algorithm(size)
    return {
        "nodes": node_sizes(group.nodes),
        "probe_s": probe_s,
        "latency_ns": selector.links.inter.latency_ns,
        "bytes_per_s": selector.links.inter.bytes_per_s,
        "rows": rows,
        "changes": changes(selector, min(case.sizes)),
    }


def measure(group: CollectiveGroup, size: int, repeats: int, links: Links) -> dict[str, Any]:
    """Medians in ms of each algorithm, in turns; the slowest rank counts."""
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    flat = torch.ones(size // 4)
    for repeat in range(WARM_UPS + repeats):
        for name in NAMES:
            one = group.using(name)
            spent = slowest_ms(lambda: one.all_reduce(flat))  # noqa: B023
            if repeat >= WARM_UPS:
                times[name].append(spent)
    places = node_sizes(group.nodes)
    return {
        "size": size,
        "ms": {name: statistics.median(spent) for name, spent in times.items()},
        "spread": {name: (min(spent), max(spent)) for name, spent in times.items()},
        "model_ms": {name: time_ns(name, size, places, links) / NS_PER_MS for name in ALGORITHMS},
    }


def slowest_ms(call: Callable[[], None]) -> float:
    dist.barrier()
    started = time.perf_counter_ns()
    call()
    spent = torch.tensor([float(time.perf_counter_ns() - started)])
    dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    return spent.item() / NS_PER_MS


def step(selector: Selector, buckets: Sequence[int], steps: int = 1) -> None:
    """Steps of a training with buckets of so many bytes."""
    for _ in range(steps):
        dist.barrier()
        for size in buckets:
            selector.all_reduce(torch.ones(size // 4))
        selector.step_ended()


def changes(selector: Selector, size: int) -> dict[str, float]:
    """What a change costs: the agreement, by one small all-reduce, and the first call after it.

    The latter beside the next call of the same algorithm, both of the median change.
    """
    flat = torch.ones(size // 4)
    agreeing, first, second = [], [], []
    for _ in range(3):
        for name in ALGORITHMS:
            one = selector.group.using(name)
            first.append(slowest_ms(lambda: one.all_reduce(flat)))  # noqa: B023
            second.append(slowest_ms(lambda: one.all_reduce(flat)))  # noqa: B023
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


def changed(group: CollectiveGroup, case: Case, folder: Path) -> dict[str, Any]:
    """A selector before and after one link has become slow."""
    selector = Selector(group, SelectorOptions(check_interval_ns=1))
    until(selector, case.sizes, lambda: settled(selector, case.sizes))
    step(selector, case.sizes, 12)  # so that it knows what each takes as a rule
    before = rows(selector, case)
    selector.take_events()
    if dist.get_rank() == 0:
        (folder / "changed.asked").touch()
    while not (folder / "changed.done").exists():
        time.sleep(0.01)
    dist.barrier()
    probes = until(
        selector, case.sizes, lambda: any(isinstance(one, Probe) for one in selector.events)
    )
    settles = until(selector, case.sizes, lambda: settled(selector, case.sizes))
    used: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(used, (selector.used(), [repr(one) for one in selector.events]))
    return {
        "before": before,
        "after": rows(selector, case),
        "steps_to_probe": probes,
        "steps_to_settle": probes + settles,
        "is_alike": all(one == used[0] for one in used),
        "events": used[0][1],
    }


def rows(selector: Selector, case: Case) -> list[dict[str, Any]]:
    return [
        measure(selector.group, size, case.repeats, selector.links)
        | {"selected": selector.algorithm(size)}
        for size in case.sizes
    ]


def settled(selector: Selector, buckets: Sequence[int]) -> bool:
    return all(selector.is_settled(size) for size in buckets)


def until(selector: Selector, buckets: Sequence[int], seen: Callable[[], bool]) -> int:
    """Steps until it is so; all ranks see it in the same one."""
    for steps in range(PATIENCE):
        if seen():
            return steps
        step(selector, buckets)
    raise SystemExit(f"the selector did not come to it in {PATIENCE} steps")


def checks(group: CollectiveGroup, size: int, repeats: int) -> dict[str, float]:
    """What checksums add to a ring on these links, and in processor time alone."""
    flat = torch.ones(size // 4)
    times: dict[str, list[float]] = {"plain": [], "checked": []}
    ring, compared = group.using("ring"), BucketChecks(group.process_group, group.device)

    def checked() -> None:
        """A step of one bucket; its sums travel beside the next."""
        ring.all_reduce(flat, compared.exchange(0))
        compared.arrived(0, flat)
        compared.step_ended(1)

    calls = {"plain": lambda: ring.all_reduce(flat), "checked": checked}
    for _ in range(repeats):
        for name, call in calls.items():
            # in a row, as in a run: the sums of one travel beside the next
            spent = [slowest_ms(call) for _ in range(WARM_UPS + IN_A_ROW)]
            times[name] += spent[WARM_UPS:]
        compared.settle()
    started = time.process_time_ns()
    for _ in range(repeats):
        checksum(flat)
    own_ms = (time.process_time_ns() - started) / repeats / NS_PER_MS
    medians = {name: statistics.median(spent) for name, spent in times.items()}
    return {"size": size} | medians | {"one_checksum": own_ms}


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
