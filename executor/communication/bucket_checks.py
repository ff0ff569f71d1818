"""Checksums of every bucket to the rank, bucket and step whose bits were changed, or to silence.

    checks = BucketChecks(group, device)
    all_reduce(flat, group, "ring", carry=checks.exchange(bucket))
    checks.arrived(bucket, flat)
    checks.step_ended(step)              # raises two steps later, on all ranks alike
    checks.settle()                      # at once; before state is kept

Two things are compared: each message's sums where it leaves and where it arrives, and the sums of
the result on all ranks, where a collective of the backend's shows no messages. Results are equal
to the bit; what was changed before the backend's collective added it in is not seen so.

Nothing waits for a check. The sums of a step travel beside the next one, what a rank found beside
the one after: on a network of milliseconds each round trip within a step would be seen in it. So
up to two optimizer steps may follow a changed bit; nothing is kept of them, because `settle` comes
before every checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from claw_plan.executor.communication.algorithms import Exchange, all_reduce, exchange
from claw_plan.executor.communication.checksum import checksum, fold, outvoted
from claw_plan.executor.errors import ExecutionError
from claw_plan.profiles.collective_schedules import Nodes

ON_THE_WAY, IN_RESULT = 1, 2
"""What a finding is of; 0 is none."""

Finding = tuple[int, int, int, int]
"""What, bucket, rank of the sender or -1 for a result's, rank where it was seen or -1 for all."""

NONE: Finding = (0, 0, -1, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sums:
    """A step's, on their way: what others say they sent, what came, and every rank's results."""

    step: int
    told: Tensor
    came: Tensor
    results: Tensor
    works: Sequence[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What each rank found of a step, on its way to all."""

    step: int
    findings: Tensor
    work: Any


class BucketChecks:
    """Sums of one rank's buckets. `carry` moves the messages."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, carry: Exchange = exchange
    ) -> None:
        self._group, self._device, self._carry = group, device, carry
        self._sent: dict[int, Tensor] = {}
        self._came: dict[int, Tensor] = {}
        self._results: dict[int, Tensor] = {}
        self._told: _Sums | None = None
        self._found: _Found | None = None

    def exchange(self, bucket: int) -> Exchange:
        """Moves messages of the bucket and remembers their sums."""
        sent_sums = self._sent.setdefault(bucket, self._zeros())
        came_sums = self._came.setdefault(bucket, self._zeros())

        def checked(
            sent: Sequence[Tensor],
            target: int,
            received: Sequence[Tensor],
            source: int,
            group: dist.ProcessGroup,
        ) -> None:
            for message in sent:
                if message.numel():
                    fold(sent_sums[target], message)
            self._carry(sent, target, received, source, group)
            for message in received:
                if message.numel():
                    fold(came_sums[source], message)

        return checked

    def arrived(self, bucket: int, flat: Tensor) -> None:
        """What the bucket became on this rank."""
        self._results[bucket] = checksum(flat)

    def step_ended(self, step: int) -> None:
        """Raises ExecutionError if two steps ago a bit was changed; sends this step's sums."""
        self._raise_found()
        self._compare()
        self._tell(step)

    def settle(self) -> None:
        """Raises ExecutionError if in any step so far a bit was changed. Waits for two rounds."""
        self._raise_found()
        self._compare()
        self._raise_found()

    def _zeros(self) -> Tensor:
        return torch.zeros(self._group.size(), 2, dtype=torch.int64, device=self._device)

    def _tell(self, step: int) -> None:
        if not self._results:
            return
        numbers = sorted(self._results)
        ranks, zeros = self._group.size(), self._zeros()
        sent = torch.stack([self._sent.get(number, zeros) for number in numbers], 1).contiguous()
        came = torch.stack([self._came.get(number, zeros) for number in numbers], 1)
        results = torch.cat([self._results[number] for number in numbers])
        told, everywhere = torch.empty_like(sent), results.new_empty(ranks * len(results))
        works = [
            dist.all_to_all_single(told, sent, group=self._group, async_op=True),
            dist.all_gather_single(everywhere, results, group=self._group, async_op=True),
        ]
        by_rank = everywhere.view(ranks, len(numbers), 2)
        self._told = _Sums(step=step, told=told, came=came, results=by_rank, works=works)
        self._sent, self._came, self._results = {}, {}, {}

    def _compare(self) -> None:
        """Finds what differs on this rank, and begins to tell all of it."""
        sums, self._told = self._told, None
        if sums is None:
            return
        for work in sums.works:
            work.wait()
        own = torch.tensor(self._first(sums), device=self._device)
        everywhere = own.new_empty(self._group.size() * len(own))
        work = dist.all_gather_single(everywhere, own, group=self._group, async_op=True)
        findings = everywhere.view(-1, len(own))
        self._found = _Found(step=sums.step, findings=findings, work=work)

    def _first(self, sums: _Sums) -> Finding:
        """Messages before results: they say between whom."""
        changed = (sums.told != sums.came).any(-1).nonzero().tolist()
        if changed:
            sender, bucket = changed[0]
            return (ON_THE_WAY, bucket, sender, self._group.rank())
        for bucket, found in enumerate(sums.results.transpose(0, 1).tolist()):
            wrong = outvoted([tuple(one) for one in found])
            if wrong:
                return (IN_RESULT, bucket, -1, wrong[0] if len(wrong) < len(found) else -1)
        return NONE

    def _raise_found(self) -> None:
        found, self._found = self._found, None
        if found is None:
            return
        found.work.wait()
        findings = {tuple(finding) for finding in found.findings.tolist()} - {NONE}
        if findings:
            first = min(findings)
            same = [finding for finding in sorted(findings) if finding[0] == first[0]]
            said = " and ".join(dict.fromkeys(self._said(*finding) for finding in same))
            raise ExecutionError(
                f"step {found.step}: {said}: a card, its memory or what lies between is broken; "
                "leave that host out, and resume from the last checkpoint"
            )

    def _said(self, what: int, bucket: int, sender: int, seen: int) -> str:
        world = dist.get_process_group_ranks(self._group)
        if what == ON_THE_WAY:
            return (
                f"bits of bucket {bucket} changed on the way from rank {world[sender]} to rank "
                f"{world[seen]}"
            )
        if seen < 0:
            return f"bucket {bucket} differs between the ranks, no majority says on which"
        return f"bucket {bucket} of rank {world[seen]} differs from that of the others"


def checked_all_reduce(
    flat: Tensor,
    group: dist.ProcessGroup,
    algorithm: str,
    nodes: Nodes | None = None,
    carry: Exchange = exchange,
) -> None:
    """As `all_reduce`, checked at once. Raises ExecutionError on all ranks alike."""
    checks = BucketChecks(group, flat.device, carry)
    all_reduce(flat, group, algorithm, nodes, checks.exchange(0))
    checks.arrived(0, flat)
    checks.step_ended(1)
    checks.settle()
