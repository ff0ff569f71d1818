"""Ready times of buckets and when the next forward needs each become the order they leave in.

A bucket j can leave at r_j, travels p_j while all others wait, and after it has arrived the next
forward still takes q_j: the updates and blocks from its first use on. The step whose forward ends
first orders the buckets so that

    max over j of  (when j has arrived) + q_j

is least. That is one machine with heads r and tails q; `order_buckets` finds the optimum by J.
Carlier's branch and bound ("The one-machine sequencing problem", European Journal of Operational
Research 11, 1982), which begins with the rule of P3 and ByteScheduler: of what is ready, what is
needed first. With first come, first served the last bucket of the backward, the first that
the forward needs, waits behind all others.

From one beginning of a last backward to the next nothing else is on its way, since a forward has
waited for every bucket before its backward begins. So this is the whole of a steady step, in the
model: one link, buckets that take turns, and computation that no traffic slows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from claw_plan.planner.bucket_plan import (
    Cost,
    Gradients,
    check_sizes,
    filled_buckets,
    plan_buckets,
)
from claw_plan.planner.candidate import Candidate

MOST_PAIRS = 100_000
"""Pairs of buckets that the branch and bound looks at, after which the best order so far is taken:
some 20 ms. Of up to 10 buckets it has then looked at over 1,000 orders."""

WORTH = 0.02
"""Of the step, which more buckets must save: each costs the processors of its ranks something,
which the model leaves out (37 instead of 13 buckets, 0.1 s less by the model, made a step of 1.4 s
on two cores no shorter)."""

SEPARABLE = ("adamw", "sgd")
"""Planned optimizers that update each parameter by its own gradient and state alone."""

Times = Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderedBuckets:
    """Numbers of gradients in each bucket, the order in which buckets leave, and when the next
    forward has then ended, in ns from the same moment as the gradients' ready times.
    """

    sizes: tuple[int, ...]
    order: tuple[int, ...]
    finish_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NextStep:
    """What follows the backward: `needed_ns` is how long after its beginning the next forward
    needs each gradient's parameter, `forward_ns` how long it takes, `update_ns` how long the
    optimizer takes for each.
    """

    needed_ns: tuple[int, ...]
    update_ns: tuple[int, ...]
    forward_ns: int

    @property
    def alone_ns(self) -> int:
        """Updates and forward, once all has arrived."""
        return sum(self.update_ns) + self.forward_ns


def order_refusals(candidate: Candidate, clip_norm: float | None) -> Iterator[str]:
    """Why the next forward cannot wait for buckets one by one; nothing where it can."""
    if (candidate.codec, candidate.collective) != ("none", "auto"):
        yield "candidate.bucket_order acts with codec none and collective auto"
    if candidate.num_devices != candidate.dp_replicate or candidate.offload != "none":
        yield "candidate.bucket_order acts where dp_replicate is all there is, without offload"
    if clip_norm is not None:
        yield (
            "candidate.bucket_order updates parameters before all gradients are there, whose norm "
            "training.clip_norm bounds; leave one of them out"
        )


def ordered_buckets(gradients: Gradients, following: NextStep, cost: Cost) -> OrderedBuckets:
    """The best of some boundaries, each with its best order; of nearly equal ones, few buckets.

    Boundaries and order together are not searched exactly: those whose last bucket arrives first,
    buckets filled to halves, quarters, ... of all, and what is needed at one moment alone.
    """
    total = sum(gradients.numels)
    tried = {
        plan_buckets(gradients, cost).sizes,
        _runs(following.needed_ns),
        *(filled_buckets(gradients.numels, -(-total // 2**k)) for k in range(8)),
    }
    found = [order_buckets(gradients, following, sizes, cost) for sizes in sorted(tried, key=len)]
    limit_ns = (1 + WORTH) * min(one.finish_ns for one in found)
    return next(one for one in found if one.finish_ns <= limit_ns)


def order_buckets(
    gradients: Gradients, following: NextStep, sizes: Sequence[int], cost: Cost
) -> OrderedBuckets:
    """The order of these buckets with which the next forward ends first."""
    heads, costs, tails = _machine(gradients, following, sizes, cost)
    # Updates and forward wait for the backward's own end, too, whatever has arrived.
    least = max(gradients.ready_ns) + following.alone_ns
    order = _carlier(heads, costs, tails)
    return OrderedBuckets(
        sizes=tuple(sizes), order=order, finish_ns=max(least, _ends(order, heads, costs, tails))
    )


def forward_end_ns(
    gradients: Gradients, following: NextStep, buckets: OrderedBuckets, cost: Cost
) -> int:
    """When the next forward ends with these buckets in this order."""
    heads, costs, tails = _machine(gradients, following, buckets.sizes, cost)
    least = max(gradients.ready_ns) + following.alone_ns
    return max(least, _ends(buckets.order, heads, costs, tails))


def _runs(values: Times) -> tuple[int, ...]:
    """How many neighbours are alike, run by run."""
    sizes: list[int] = []
    for index, value in enumerate(values):
        if index and value == values[index - 1]:
            sizes[-1] += 1
        else:
            sizes.append(1)
    return tuple(sizes)


def _machine(
    gradients: Gradients, following: NextStep, sizes: Sequence[int], cost: Cost
) -> tuple[list[int], list[int], list[int]]:
    """r, p and q of each bucket."""
    check_sizes(sizes, len(gradients.numels))
    ends = list(accumulate(sizes))
    parts = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    elements = np.array([sum(gradients.numels[part]) for part in parts], dtype=np.int64)
    needed = [min(following.needed_ns[part]) for part in parts]
    updates = [sum(following.update_ns[part]) for part in parts]
    # Of buckets needed at one moment the first is waited for first, and so updated.
    places = list(zip(needed, range(len(needed)), strict=True))
    tails = [
        following.forward_ns
        - place[0]
        + sum(update for update, other in zip(updates, places, strict=True) if other >= place)
        for place in places
    ]
    heads = [max(gradients.ready_ns[part]) for part in parts]
    return heads, [int(one) for one in cost(elements)], tails


def _ends(order: Sequence[int], heads: Times, costs: Times, tails: Times) -> int:
    arrived, longest = 0, 0
    for number in order:
        arrived = max(arrived, heads[number]) + costs[number]
        longest = max(longest, arrived + tails[number])
    return longest


def _most_urgent_first(heads: Times, costs: Times, tails: Times) -> list[int]:
    """Schrage's rule: whenever the link is free, of what is ready the longest tail."""
    left, order, now = set(range(len(heads))), list[int](), 0
    while left:
        now = max(now, min(heads[number] for number in left))
        ready = [number for number in left if heads[number] <= now]
        chosen = max(ready, key=lambda number: (tails[number], -number))
        now += costs[chosen]
        order.append(chosen)
        left.remove(chosen)
    return order


def _bound(heads: Times, costs: Times, tails: Times) -> int:
    """Jackson's: the same rule, but the link may be taken away from a bucket at any time."""
    left = dict(enumerate(costs))
    now, longest = 0, 0
    coming = sorted(set(heads))
    while left:
        ready = [number for number in left if heads[number] <= now]
        later = next((head for head in coming if head > now), None)
        if not ready:
            assert later is not None
            now = later
            continue
        chosen = max(ready, key=lambda number: tails[number])
        spent = left[chosen] if later is None else min(left[chosen], later - now)
        now += spent
        left[chosen] -= spent
        if not left[chosen]:
            del left[chosen]
            longest = max(longest, now + tails[chosen])
    return longest


def _carlier(heads: Times, costs: Times, tails: Times) -> tuple[int, ...]:
    """Branches on the bucket that delays the critical ones: before or after all of them."""
    best = _most_urgent_first(heads, costs, tails)
    best_ns = _ends(best, heads, costs, tails)
    waiting = [(list(heads), list(tails))]
    for _ in range(MOST_PAIRS // len(heads) ** 2 + 1):
        if not waiting:
            break
        own_heads, own_tails = waiting.pop()
        if _bound(own_heads, costs, own_tails) >= best_ns:
            continue
        order = _most_urgent_first(own_heads, costs, own_tails)
        ends_ns = _ends(order, heads, costs, tails)
        if ends_ns < best_ns:
            best, best_ns = order, ends_ns
        split = _critical(order, own_heads, costs, own_tails)
        if split is None:
            continue
        one, rest = split
        work = sum(costs[number] for number in rest)
        before, after = list(own_tails), list(own_heads)
        before[one] = max(before[one], work + min(own_tails[number] for number in rest))
        after[one] = max(after[one], work + min(own_heads[number] for number in rest))
        waiting += [(own_heads, before), (after, own_tails)]
    return tuple(best)


def _critical(
    order: Sequence[int], heads: Times, costs: Times, tails: Times
) -> tuple[int, list[int]] | None:
    """The last on the critical path that is less urgent than its end, and what follows there."""
    now, starts = 0, list[int]()
    for number in order:
        starts.append(max(now, heads[number]))
        now = starts[-1] + costs[number]
    ends = [start + costs[number] for start, number in zip(starts, order, strict=True)]
    longest = max(end + tails[number] for end, number in zip(ends, order, strict=True))
    last = max(
        place for place, number in enumerate(order) if ends[place] + tails[number] == longest
    )
    first = last
    while first and starts[first] == ends[first - 1]:
        first -= 1
    for place in range(last - 1, first - 1, -1):
        if tails[order[place]] < tails[order[last]]:
            return order[place], list(order[place + 1 : last + 1])
    return None
