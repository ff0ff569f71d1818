"""Chooses the algorithm of every all-reduce by what it costs on this network, again and again.

    selector = Selector(create_group(), parse_options({"check_interval": "500ms"}))
    selector.all_reduce(bucket)          # in every step, the same buckets on every rank
    selector.step_ended()                # changes happen here and nowhere else

A short probe gives each size a modelled time for every algorithm; `choice` tries what is near the
best and settles. At the end of a step all ranks take the longest time that any of them saw of each
call and so decide alike. The ways are open since the group was made and the times travel beside
the next step: a change costs a lookup. Sums have other last bits after it, so `events` keeps all
changes with their steps and reasons, for a log and for whoever plays a run again.

Not told apart: what a call takes, and how much later than others some rank came to it. The latter
lengthens all algorithms alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from claw_plan.executor.benchmark_rates import gigabytes_per_s
from claw_plan.executor.communication.algorithms import NATIVE, Exchange
from claw_plan.executor.communication.choice import Choice
from claw_plan.executor.communication.group import CollectiveGroup
from claw_plan.executor.communication.probe import probe_links
from claw_plan.executor.communication.selector_options import SelectorOptions
from claw_plan.profiles.collective_algorithms import Links, time_ns
from claw_plan.profiles.collective_schedules import ALGORITHMS, node_sizes
from claw_plan.profiles.units import NS_PER_MS, NS_PER_S, ms_from_ns

CALLS = 256
"""So many calls are compared at the end of a step; later ones are not timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """After `step` buffers of this size went by another algorithm, or trials ended with the same.

    `reason` holds the times that were compared; `is_trial` says that more are wanted.
    """

    step: int
    size_bytes: int
    before: str
    after: str
    reason: str
    is_trial: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """After `step` the links were measured, and why; the links between nodes, else inside."""

    step: int
    reason: str
    latency_ns: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    size_bytes: int
    algorithm: str
    elapsed_ns: Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """Calls, and their times on the way to being the slowest rank's."""

    calls: tuple[_Call, ...]
    times_ns: Tensor
    work: dist.Work | None


Modelled = Callable[[int, tuple[int, ...], Links], dict[str, float]]
"""(Bytes of a buffer, sizes of the nodes, links) to what each algorithm takes that may be used."""

Found = TypeVar("Found")


def all_reduces(size_bytes: int, sizes: tuple[int, ...], links: Links) -> dict[str, float]:
    """Of whole numbers."""
    return {name: time_ns(name, size_bytes, sizes, links) for name in ALGORITHMS}


class Selector:
    """All-reduces of one group, or what else `modelled` speaks of.

    Every rank calls everything, in the same order.
    """

    def __init__(
        self,
        group: CollectiveGroup,
        options: SelectorOptions | None = None,
        modelled: Modelled = all_reduces,
    ) -> None:
        self.group, self.options = group, options or SelectorOptions()
        self._modelled = modelled
        self.events: list[Switch | Probe] = []
        self._step, self._next_check, self._checked_step = 0, 1, 0
        self.links = self._probe("before the first step")
        self._choices: dict[int, Choice] = {}
        self._calls: list[_Call] = []
        self._slow: set[int] = set()
        self._suspects: set[int] = set()  # whose fallback gets a trial
        self._told: _Told | None = None
        self._checked_ns = time.perf_counter_ns()

    def algorithm(self, size_bytes: int) -> str:
        """What buffers of so many bytes go by now."""
        return self._choice(size_bytes).current

    def used(self) -> dict[int, str]:
        """What each size that came goes by now."""
        return {size: choice.current for size, choice in sorted(self._choices.items())}

    def is_settled(self, size_bytes: int) -> bool:
        """Whether all trials of buffers of so many bytes are over."""
        return self._choice(size_bytes).is_settled

    def take_events(self) -> list[Switch | Probe]:
        """What happened since it was last asked."""
        taken, self.events = self.events, []
        return taken

    def all_reduce(self, flat: Tensor, carry: Exchange | None = None) -> None:
        """Replaces `flat` by the sum, and notes how long that took; `carry` moves messages."""
        self.timed(flat, lambda name: self.group.using(name).all_reduce(flat, carry))

    def timed(self, flat: Tensor, call: Callable[[str], Found]) -> Found:
        """What is called of `flat` by the algorithm of the moment; notes how long it took."""
        name = self.algorithm(flat.nbytes)
        found, elapsed = _timed(lambda: call(name), flat.device)
        if len(self._calls) < CALLS:
            self._calls.append(_Call(size_bytes=flat.nbytes, algorithm=name, elapsed_ns=elapsed))
        return found

    def step_ended(self) -> None:
        """Every `check_interval`, counted in steps so that ranks agree: compares and decides.

        While algorithms are on trial, after every step. Times travel during the step that
        follows, so a decision is made one step after its last time.
        """
        self._step += 1
        if self._told is not None:
            self._decide_all(self._told)
            self._told = None
        if self._step >= self._next_check and self._calls:
            self._told = self._tell()

    def _decide_all(self, told: _Told) -> None:
        step_ns = self._observe(told)
        # A trial may be of something slow, and new links would end it; both wait for its end, yet
        # not for sizes that no longer come: DistributedDataParallel makes its buckets anew once.
        coming = {call.size_bytes for call in told.calls}
        if not self._is_on_trial(coming):
            slow = {size for size in self._choices if self._is_slow(size)}
            self._suspects |= slow
            if reason := self._why_probe(slow - self._slow):
                self.links = self._probe(reason)
                for size, choice in self._choices.items():
                    choice.forget(self._modelled_ns(size))
                self._suspects |= set(self._choices)
            self._slow = slow
        for size in self._choices:
            self._decide(size)
        pause = max(1, round(self.options.check_interval_ns / step_ns))
        self._next_check = self._step + (0 if self._is_on_trial(coming) else pause)

    def _why_probe(self, newly_slow: set[int]) -> str:
        """Why the links should be measured again; '' where they should not."""
        if newly_slow:
            size = min(newly_slow)
            threshold = gigabytes_per_s(self.options.bandwidth_threshold_bytes_per_s)
            found = gigabytes_per_s(self.bandwidth(size))
            return f"buffers of {size} bytes fell to {found}, below {threshold}"
        drifted = next((size for size, one in self._choices.items() if one.has_drifted), None)
        if drifted is None:
            return ""
        usual, choice = self._choices[drifted].usual_ns, self._choices[drifted]
        return (
            f"{choice.current} of {drifted} bytes took {ms_from_ns(usual):.3g} ms as a rule, and "
            f"now {ms_from_ns(choice.estimate_ns(choice.current)):.3g} ms"
        )

    def _probe(self, reason: str) -> Links:
        links = probe_links(self.group)
        self.group = replace(self.group, half_bytes=links.half_bytes(len(self.group.nodes)))
        hop = links.inter
        self.events.append(
            Probe(
                step=self._step,
                reason=reason,
                latency_ns=round(hop.latency_ns),
                bytes_per_s=hop.bytes_per_s,
            )
        )
        return links

    def _decide(self, size: int) -> None:
        choice = self._choices[size]
        before, was_settled = choice.current, choice.is_settled
        after = choice.next(self.options.fallback_topology if size in self._suspects else "")
        if before != after or (choice.is_settled and not was_settled):
            self.events.append(
                Switch(
                    step=self._step,
                    size_bytes=size,
                    before=before,
                    after=after,
                    reason=choice.reason,
                    is_trial=choice.is_trying,
                )
            )

    def bandwidth(self, size_bytes: int) -> float:
        """Bytes a second that every rank sends, by the last times; 0 before any."""
        choice = self._choice(size_bytes)
        ranks = self.group.process_group.size()
        spent_ns = choice.estimate_ns(choice.current) if choice.measured_ns else 0.0
        # what an all-reduce has to send at least, as nccl-tests' bus bandwidth
        return 2 * (ranks - 1) / ranks * size_bytes * NS_PER_S / spent_ns if spent_ns else 0.0

    def _choice(self, size_bytes: int) -> Choice:
        if size_bytes not in self._choices:
            modelled = self._modelled_ns(size_bytes)
            choice = Choice(modelled, NATIVE, frozenset({NATIVE}))
            choice.next()
            self._choices[size_bytes] = choice
        return self._choices[size_bytes]

    def _modelled_ns(self, size_bytes: int) -> dict[str, float]:
        return self._modelled(size_bytes, node_sizes(self.group.nodes), self.links)

    def _tell(self) -> _Told:
        """Begins to agree on the times of the calls since the last check, and on a step's."""
        now_ns, steps = time.perf_counter_ns(), self._step - self._checked_step
        step_ns = (now_ns - self._checked_ns) / steps
        calls, self._calls = tuple(self._calls), []
        times = torch.tensor(
            [*(call.elapsed_ns() for call in calls), step_ns],
            dtype=torch.float64,
            device=self.group.device,
        )
        process_group = self.group.process_group
        work = dist.all_reduce(times, dist.ReduceOp.MAX, process_group, async_op=True)
        self._checked_ns, self._checked_step = now_ns, self._step
        return _Told(calls=calls, times_ns=times, work=work)

    def _observe(self, told: _Told) -> float:
        """Takes up what was agreed on; answers with a step's nanoseconds."""
        if told.work is not None:
            told.work.wait()
        *longest, step_ns = told.times_ns.tolist()
        for call, spent_ns in zip(told.calls, longest, strict=True):
            self._choices[call.size_bytes].observe(call.algorithm, spent_ns)
        return float(step_ns)

    def _is_on_trial(self, sizes: Collection[int]) -> bool:
        return any(not self._choices[size].is_settled for size in sizes)

    def _is_slow(self, size_bytes: int) -> bool:
        threshold = self.options.bandwidth_threshold_bytes_per_s
        return 0 < self.bandwidth(size_bytes) < threshold


def _timed(call: Callable[[], Found], device: torch.device) -> tuple[Found, Callable[[], float]]:
    """Calls; its answer, and what tells the nanoseconds later, when a GPU has come so far."""
    if device.type != "cuda":
        started = time.perf_counter_ns()
        found = call()
        spent = float(time.perf_counter_ns() - started)
        return found, lambda: spent
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    found = call()
    end.record()

    def elapsed_ns() -> float:
        end.synchronize()
        return float(begin.elapsed_time(end)) * NS_PER_MS

    return found, elapsed_ns
