"""`PassTime`: how long one forward or backward of a unit takes, and what the time consists of.

Kernels run one after the other on the device while the host launches them: a pass lasts as long as
the slower of the two, with a soft corner where both take about as long,

    pass = (device^6 + host^6)^(1/6)

(the form of a fit to 426 published training steps and 793 A100 iterations; a hard maximum is the
limit of large exponents). Both are counted for a whole unit: launches run ahead of kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from claw_plan.planner.graph import Exchange, Op, UnitCost
from claw_plan.profiles.cost import CollectiveCost
from claw_plan.profiles.trainer import Trainer
from claw_plan.profiles.work import OpWork

CORNER = 6
"""The exponent of the soft maximum."""

INPUTS, WEIGHTS = "inputs", "weights"
"""The two parts of a backward: gradients of the unit's input, and of its weights."""

HOST = "host"
"""The part of a pass in which the device waits for the host."""

Groups = tuple[tuple[str, int, int], ...]
"""(axis, ranks, nodes) of the groups a pass exchanges over."""

RECOMPUTED_KINDS = {"attention": ("attention", "bmm", "baddbmm", "_softmax", "mul")}
"""Operators that Megatron's selective recomputation runs again: the core of the attention."""

MOE_SHARE = 0.15
"""Of a forward, run again where norms and expert activations are recomputed (ACCURACY: fitted by
hand on published mixture-of-experts runs)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTime:
    """A forward or backward of one unit: computations, each followed by an exchange or None.

    `source_ns` sums the computation by what its cost rests on, `parts_ns` by what it is: 'host',
    or the kind of kernel (`kernel_part`). `axes` names the axis of each exchange, in order.
    """

    steps: tuple[tuple[int, CollectiveCost | None], ...]
    source_ns: dict[str, int]
    parts_ns: Mapping[str, float] = field(default_factory=dict)
    axes: tuple[str, ...] = ()

    @property
    def compute_ns(self) -> int:
        """Kernels alone, and waiting for the host."""
        return sum(compute for compute, _ in self.steps)

    @property
    def exchange_ns(self) -> int:
        """Collectives alone, on idle links."""
        return sum(exchange.alone_ns for _, exchange in self.steps if exchange is not None)

    @property
    def total_ns(self) -> int:
        """Both, one after the other."""
        return self.compute_ns + self.exchange_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Passes one after the other as the stream sees them: kernels, then exchanges.

    `source` is what most of the kernels' time rests on. `exchange` joins the collectives as one
    that lasts as long alone, None without any; `axes` names the axis of each.
    """

    compute_ns: int
    source: str
    parts_ns: Mapping[str, float]
    exchange: CollectiveCost | None
    exchange_parts_ns: Mapping[str, float]
    axes: tuple[str, ...] = ()


def stretch_of(passes: Sequence[PassTime]) -> Stretch:
    """The passes together."""
    sources: dict[str, float] = {}
    parts: dict[str, float] = {}
    exchanges: dict[str, float] = {}
    costs: list[CollectiveCost] = []
    axes: list[str] = []
    for one in passes:
        _add(sources, one.source_ns)
        _add(parts, one.parts_ns)
        own = [cost for _, cost in one.steps if cost is not None]
        for axis, cost in zip(one.axes, own, strict=False):
            _add(exchanges, {axis: cost.alone_ns})
        costs += own
        axes += one.axes
    return Stretch(
        compute_ns=sum(one.compute_ns for one in passes),
        source=max(sources, key=sources.__getitem__, default=""),
        parts_ns=parts,
        exchange=merge(costs) if costs else None,
        exchange_parts_ns=exchanges,
        axes=tuple(axes),
    )


def _add(total: dict[str, float], more: Mapping[str, float]) -> None:
    for name, ns in more.items():
        total[name] = total.get(name, 0.0) + ns


def merge(costs: Sequence[CollectiveCost]) -> CollectiveCost:
    """Collectives one after the other as one that lasts as long alone, on their common link."""
    sizes = sum(cost.bytes for cost in costs)
    seconds = sum(cost.bytes / cost.rate_cap_bytes_per_s for cost in costs if cost.bytes)
    return CollectiveCost(
        latency_ns=sum(cost.latency_ns for cost in costs),
        bytes=sizes,
        rate_cap_bytes_per_s=sizes / seconds if sizes else 1.0,
        link=costs[0].link,
        source=costs[0].source,
        moves=tuple(work for cost in costs for work in cost.moves),
    )


def makes_weights(item: Op | Exchange) -> bool:
    """Whether a backward's kernel makes gradients of weights alone: its result is of one size
    however many samples there are. One that makes both kinds counts with the inputs'.
    """
    if not isinstance(item, Op):
        return False
    written = item.written_bytes
    return not written.per_sample and not written.split_per_sample


class PassTimer:
    """Adds up one pass, kernel by kernel."""

    def __init__(self, *, host_ns: float) -> None:
        self._host_ns = host_ns
        self._launches = 0.0
        self._steps: list[tuple[float, CollectiveCost | None]] = []
        self._open = 0.0
        self._sources: dict[str, float] = {}
        self._parts: dict[str, float] = {}
        self._axes: list[str] = []
        self._exchanged_ns = 0

    def kernel(self, ns: float, part: str, source: str, share: float = 1.0) -> None:
        """One kernel, or a share of one."""
        self._open += ns
        self._launches += share
        self._sources[source] = self._sources.get(source, 0.0) + ns
        self._parts[part] = self._parts.get(part, 0.0) + ns

    def exchange(self, cost: CollectiveCost, axis: str) -> None:
        """A collective after the kernels so far."""
        self._steps.append((self._open, cost))
        self._axes.append(axis)
        self._exchanged_ns += cost.alone_ns
        self._launches += 1
        self._open = 0.0

    def time(self) -> PassTime:
        """All of it, with what the host adds behind the last kernel."""
        compute = sum(self._parts.values())
        device = compute + self._exchanged_ns
        host = self._host_ns * self._launches
        parts = self._parts
        if host > 0 and device > 0:
            total = (device**CORNER + host**CORNER) ** (1 / CORNER)
            added = max(0.0, total - device)  # a root of sums may round below the device
            self._open += added
            # By Euler's theorem for the homogeneous sum: how the total grows with the host's time.
            by_host = min(compute + added, total * (host / total) ** CORNER)
            rest = (compute + added - by_host) / compute if compute else 0.0
            parts = {name: ns * rest for name, ns in parts.items()} | {HOST: by_host}
        steps = [*self._steps, (self._open, None)]
        return PassTime(
            steps=tuple((round(ns), cost) for ns, cost in steps),
            source_ns={name: round(ns) for name, ns in self._sources.items()},
            parts_ns=parts,
            axes=tuple(self._axes),
        )


def items_of(cost: UnitCost, kind: str, trainer: Trainer) -> Iterator[tuple[Op | Exchange, float]]:
    """What a pass runs, each with the share of it.

    Kinds are 'forward', 'backward' or its two parts, and the recompute modes.
    """
    if kind == "backward":
        yield from ((item, 1.0) for item in cost.backward)
        return
    if kind in (INPUTS, WEIGHTS):
        yield from ((i, 1.0) for i in cost.backward if makes_weights(i) == (kind == WEIGHTS))
        return
    again = cost.forward[: cost.num_recomputed] if trainer.recompute_stops_early else cost.forward
    if kind == "full":
        yield from ((item, 1.0) for item in again)
    elif kind == "forward":
        yield from ((item, 1.0) for item in cost.forward)
    elif kind in RECOMPUTED_KINDS:
        names = RECOMPUTED_KINDS[kind]
        for item in cost.forward:
            if isinstance(item, Op) and item.target.rpartition(".")[2] in names:
                yield item, 1.0
    else:
        share = trainer.half_recompute if kind == "half" else MOE_SHARE
        yield from ((item, share) for item in cost.forward if isinstance(item, Op))
        if kind == "half" and trainer.repeats_exchanges:
            yield from ((item, 1.0) for item in again if isinstance(item, Exchange))


def kernel_part(work: OpWork) -> str:
    """What a kernel counts as: 'gemm:bfloat16', 'grouped:bfloat16', 'attention', 'memory', …"""
    if work.kind != "gemm":
        return work.kind
    return f"{'grouped' if 'grouped' in work.target else 'gemm'}:{work.dtype}"


def kernel_scale(trainer: Trainer, part: str) -> float:
    """The trainer's factor on a kernel of that part."""
    if part == "memory":
        return trainer.memory_scale
    if part == "attention":
        return trainer.attention_scale
    return trainer.grouped_scale if part.startswith("grouped") else 1.0


def exchange_scale(trainer: Trainer, axis: str) -> float:
    """The trainer's factor on a collective of that axis."""
    return {"cp": trainer.cp_scale, "ep": trainer.ep_scale}.get(axis, trainer.tp_scale)
