"""Groups, probes, a selector and checksums on four ranks of two hosts that are names only.

Started for each rank by tests as `python rank_group.py RANK WORLD_SIZE FOLDER`. Writes
`rank<r>.json`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import rank_script
import torch
import torch.distributed as dist
from torch import Tensor

from claw_plan.executor.communication import probe
from claw_plan.executor.communication.algorithms import NAMES, NATIVE, Exchange, exchange
from claw_plan.executor.communication.bucket_checks import BucketChecks, checked_all_reduce
from claw_plan.executor.communication.choice import REMEMBERED
from claw_plan.executor.communication.group import CollectiveGroup, create_group
from claw_plan.executor.communication.probe import probe_links, probe_pairs
from claw_plan.executor.communication.selector import Probe, Selector
from claw_plan.executor.communication.selector_options import parse_options
from claw_plan.executor.errors import ExecutionError
from claw_plan.kernels.codec import codec_of

HOSTS = ["a", "a", "b", "b"]
BUFFERS = (1000, 300_000)
STEPS = 150


def groups(rank: int) -> dict[str, Any]:
    group = create_group(strategy="hierarchical", intra_node=True, hosts=HOSTS)
    assert group is not None
    sums = {}
    for name in NAMES:
        flat = torch.full((5,), float(rank + 1))
        group.using(name).all_reduce(flat)
        sums[name] = flat.tolist()
    around = torch.full((5,), float(rank + 1))
    group.ordered([2, 0, 3, 1]).using("ring").all_reduce(around)
    part = group.reduce_scatter(torch.arange(8.0))
    apart = create_group("ring", ranks=[1, 3], intra_node=False)
    pair = torch.tensor([float(rank)])
    if apart is not None:
        apart.all_reduce(pair)
    return {
        "nodes": group.nodes,
        "sums": sums,
        "around": around.tolist(),
        "gathered": group.all_gather(part, 8).tolist(),
        "mean": group.compressed_mean(torch.tensor([rank, 2.0]), codec_of("none")).tolist(),
        "pair": pair.tolist() if apart is not None else None,
        "links": asdict(probe_links(group)),
        "pairs": probe_pairs(group, 1 << 12),
    }


def selects() -> dict[str, Any]:
    group = create_group(hosts=HOSTS)
    assert group is not None
    options = parse_options(
        {"bandwidth_threshold": "1TBps", "fallback_topology": "tree", "check_interval": "1ms"}
    )
    selector = Selector(group, options)
    used: list[list[str]] = []
    is_right = True
    selector.all_reduce(torch.ones(500))  # a size that comes once holds nothing up
    for step in range(STEPS):
        used.append([selector.algorithm(4 * numel) for numel in BUFFERS])
        for numel in BUFFERS:
            flat = torch.full((numel,), float(step))
            selector.all_reduce(flat)
            is_right &= bool((flat == 4 * step).all())
        selector.step_ended()
    return {
        "used": used,
        "is_right": is_right,
        "used at last": list(selector.used().values()),
        "events": [asdict(event) for event in selector.take_events()],
        "links": asdict(selector.links),
        "bandwidth": selector.bandwidth(4 * BUFFERS[1]) > 0,
    }


SLOW_BYTES_PER_S = 2e6
SLOWED_BYTES = 1 << 18


class SlowedGroup(CollectiveGroup):
    """From `since_s` on everything that the last rank sends and receives takes long."""

    since_s = math.inf

    def all_reduce(self, flat: Tensor, carry: Exchange | None = None) -> None:
        super().all_reduce(flat, carry or slowed)
        if self.strategy == NATIVE:
            wait_for(2 * flat.nbytes * (self.process_group.size() - 1) / self.process_group.size())


def wait_for(sent_bytes: float) -> None:
    if time.monotonic() > SlowedGroup.since_s and dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(sent_bytes / SLOW_BYTES_PER_S)


def slowed(
    sent: Sequence[Tensor],
    target: int,
    received: Sequence[Tensor],
    source: int,
    group: dist.ProcessGroup,
) -> None:
    exchange(sent, target, received, source, group)
    both = (sent if target >= 0 else (), received if source >= 0 else ())
    wait_for(max(sum(message.nbytes for message in way) for way in both))


def slows() -> dict[str, Any]:
    """A link that becomes slow while a selector runs."""
    group = create_group(intra_node=False)
    assert group is not None
    options = parse_options({"check_interval": "1ms", "fallback_topology": "tree"})
    fields = {"process_group": group.process_group, "nodes": group.nodes, "strategy": NATIVE}
    probe.exchange = slowed
    selector = Selector(SlowedGroup(**fields), options)
    before = selector.links

    def steps(has_ended: Callable[[], bool], in_a_row: int = 1) -> None:
        """Until something has been so for some steps, 300 at most."""
        row = 0
        for _ in range(300):
            selector.all_reduce(torch.ones(SLOWED_BYTES // 4))
            selector.step_ended()
            row = row + 1 if has_ended() else 0
            if row == in_a_row:
                return

    # As many as it takes to know what a call takes as a rule.
    steps(lambda: selector.is_settled(SLOWED_BYTES), in_a_row=REMEMBERED + 3)
    selector.take_events()
    SlowedGroup.since_s = time.monotonic()
    steps(lambda: any(isinstance(event, Probe) for event in selector.events))
    steps(lambda: selector.is_settled(SLOWED_BYTES))
    SlowedGroup.since_s, probe.exchange = math.inf, exchange
    return {
        "used": list(selector.used().values()),
        "before": before.intra.bytes_per_s,
        "after": selector.links.intra.bytes_per_s,
        "events": [asdict(event) for event in selector.take_events()],
    }


def flipped(
    sent: Sequence[Tensor],
    target: int,
    received: Sequence[Tensor],
    source: int,
    group: dist.ProcessGroup,
) -> None:
    """A card of rank 2 that turns one bit of what comes from rank 1 or 3."""
    exchange(sent, target, received, source, group)
    if group.rank() == 2 and source % 2 and received and received[0].numel() > 40:
        received[0].view(torch.int32)[37] ^= 1 << 20


def complaint(call: Callable[[], None]) -> str:
    try:
        call()
    except ExecutionError as error:
        return str(error)
    return ""


def steps(rank: int, last: int, *, settles: bool = False) -> None:
    """Two buckets a step; in the third a bit of rank 3's second result is turned."""
    group = dist.group.WORLD
    assert group is not None
    checks = BucketChecks(group, torch.device("cpu"))
    for step in range(1, last + 1):
        for bucket in range(2):
            flat = torch.arange(100.0)
            flat[7] += rank == 3 and step == 3 and bucket == 1
            checks.arrived(bucket, flat)
        checks.step_ended(step)
    if settles:
        checks.settle()


def checks(rank: int) -> dict[str, Any]:
    group = dist.group.WORLD
    assert group is not None
    numbers = torch.randn(500, generator=torch.Generator().manual_seed(rank))
    wrong = numbers.clone()
    found: dict[str, Any] = {"clean": {}, "flipped": {}}
    for name in NAMES:
        found["clean"][name] = complaint(lambda: checked_all_reduce(numbers, group, name))  # noqa: B023
        if name != NATIVE:
            found["flipped"][name] = complaint(
                lambda: checked_all_reduce(wrong, group, name, carry=flipped)  # noqa: B023
            )
    found["settled"] = complaint(lambda: steps(rank, 4, settles=True))
    found["unsettled"] = [complaint(lambda: steps(rank, last)) for last in (4, 5)]  # noqa: B023
    return found


def main(rank: int, world_size: int, folder: Path) -> None:
    found = {
        "groups": groups(rank),
        "selects": selects(),
        "slows": slows(),
        "checks": checks(rank),
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    rank_script.run(main)
