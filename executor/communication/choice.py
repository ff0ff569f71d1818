"""Modelled and measured times of one collective to the algorithm to use next.

No rank, no message, no clock: given the same times every rank chooses the same. First each
algorithm that the model holds for near the best is tried a few times, then the fastest is used;
it is left for one that is clearly faster. What was not tried is judged by the model, times the
ratio that measured and modelled times have where both are known.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from claw_plan.profiles.units import ms_from_ns

TRIALS = 3
"""Measured so often, an algorithm's median is believed, unless its calls differ much."""

REMEMBERED = 9
"""The last times of each: a changed network is seen after half of them."""

NEAR = 2.0
"""Tried is what the model takes for at most so many times the best: it errs by less, where
messages are not so short that starting them is all."""

HYSTERESIS = 0.05
"""Another must be faster by so much: a change costs nothing, but noise would cause it."""

DRIFT = 1.5
"""A median that has changed by such a factor says that the network has."""


@dataclass(slots=True)
class Choice:
    """The state of one size of buffer. Algorithms without a modelled time are always tried."""

    modelled_ns: Mapping[str, float]
    """Of the candidates that a model knows."""

    current: str
    unmodelled: frozenset[str] = frozenset()
    measured_ns: dict[str, deque[float]] = field(default_factory=dict)
    is_settled: bool = False
    """Whether all trials are over."""

    is_trying: bool = False
    """Whether the current one is used to learn what it takes."""

    reason: str = ""
    """Why the last decision was made, with the times it rests on."""

    usual_ns: float = 0.0
    """What the current one takes as a rule, once it was used often enough; 0 before."""

    def observe(self, algorithm: str, time_ns: float) -> None:
        """One call took so long."""
        self.measured_ns.setdefault(algorithm, deque(maxlen=REMEMBERED)).append(time_ns)

    def estimate_ns(self, algorithm: str) -> float:
        """What a call would take; 0 for what nobody knows anything of."""
        if times := self.measured_ns.get(algorithm):
            return statistics.median(times)
        return self.modelled_ns.get(algorithm, 0.0) * self._correction()

    def next(self, wanted: str = "") -> str:
        """Decides; `wanted` is tried even if the model thinks little of it."""
        candidates = (*self.modelled_ns, *sorted(self.unmodelled))
        known = [self.estimate_ns(name) for name in self.modelled_ns]
        limit = NEAR * min(known)
        for name in candidates:
            worth = name in self.unmodelled or name == wanted or self.estimate_ns(name) <= limit
            if worth and len(self.measured_ns.get(name, ())) < TRIALS:
                return self._try(name)
        if not self.is_settled and (rival := self._rival(candidates)):
            return self._try(rival)
        self.is_trying = False
        best = min(candidates, key=self.estimate_ns)
        faster = self.estimate_ns(best) < (1 - HYSTERESIS) * self.estimate_ns(self.current)
        if faster or not self.is_settled:
            by_time = sorted(self.measured_ns, key=self.estimate_ns)
            self.reason = "fastest; " + ", ".join(map(self._told, by_time))
            self.current, self.usual_ns = best, 0.0
        self.is_settled = True
        times = self.measured_ns[self.current]
        if not self.usual_ns and len(times) == REMEMBERED:
            self.usual_ns = statistics.median(times)
        return self.current

    def _try(self, name: str) -> str:
        self.current, self.reason = name, f"on trial; {self._told(name)}"
        self.is_trying = True
        return name

    def _rival(self, candidates: Sequence[str]) -> str:
        """One whose fastest call beats the best median: too few calls to tell; '' if none is.

        On a network where now and then a call takes long, a median of three is no judgement.
        """
        best_ns = min(map(self.estimate_ns, candidates))
        for name in candidates:
            times = self.measured_ns.get(name, ())
            if self.estimate_ns(name) > best_ns > min(times, default=best_ns):
                if len(times) < REMEMBERED:
                    return name
        return ""

    @property
    def has_drifted(self) -> bool:
        """Whether what is used now has come to take another time than it used to."""
        if not self.usual_ns:
            return False
        ratio = self.estimate_ns(self.current) / self.usual_ns
        return not 1 / DRIFT < ratio < DRIFT

    def forget(self, modelled_ns: Mapping[str, float]) -> None:
        """Begins anew with other modelled times; goes on with what is used now until then."""
        self.modelled_ns = modelled_ns
        self.measured_ns.clear()
        self.is_settled, self.usual_ns = False, 0.0

    def _told(self, name: str) -> str:
        """The algorithm and what is known of its time."""
        calls, time_ns = len(self.measured_ns.get(name, ())), self.estimate_ns(name)
        if not time_ns:
            return f"{name} not modelled"
        known = f"median of {calls}" if calls else "modelled"
        return f"{name} {ms_from_ns(time_ns):.3g} ms ({known})"

    def _correction(self) -> float:
        ratios = [
            statistics.median(times) / self.modelled_ns[name]
            for name, times in self.measured_ns.items()
            if self.modelled_ns.get(name)
        ]
        return statistics.median(ratios) if ratios else 1.0
