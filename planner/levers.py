"""What could be changed about a candidate that does not fit, and how far each change gets it.

One lever at a time: the knobs (`neighbours`), more devices, larger ones, and the headroom that is
kept free. Of each lever the smallest change that would do is told; where none does, what is still
missing after the most that it can save.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.memory import StageMemory
from claw_plan.planner.neighbours import Neighbour, neighbours
from claw_plan.planner.score import Scorer
from claw_plan.profiles.units import format_bytes

SHARDS = ("zero", "dp_replicate")
"""Knobs that shard the states of data-parallel ranks: one lever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """A change and what is missing after it; 0 bytes when it would do."""

    lever: str
    change: str
    missing_bytes: int

    def text(self) -> str:
        """'recompute=full would do', or what it leaves missing."""
        if not self.missing_bytes:
            return f"{self.change} would do"
        return f"{self.change} leaves {format_bytes(self.missing_bytes)} missing"


def levers(scorer: Scorer, candidate: Candidate, stage: StageMemory) -> list[Lever]:
    """A lever each, those that would do first; `stage` is the candidate's fullest."""
    found: dict[str, tuple[Neighbour, Lever]] = {}
    missing = stage.peak_bytes - stage.capacity_bytes
    for each in neighbours(scorer, candidate, timed=False):
        if each.refused or each.missing_bytes >= missing:
            continue
        name = "sharding" if each.knob in SHARDS else each.knob
        lever = Lever(lever=name, change=each.change, missing_bytes=each.missing_bytes)
        best = found.get(name)
        if best is None or _is_smaller(each, best[0], candidate):
            found[name] = each, lever
    told = [lever for _, lever in found.values()] + list(_outside(scorer, stage))
    return sorted(told, key=lambda lever: lever.missing_bytes)


def _is_smaller(new: Neighbour, old: Neighbour, candidate: Candidate) -> bool:
    """Whether the new one does what the old does not, or does it with less of a change."""
    if new.fits and old.fits:
        return _distance(new, candidate) < _distance(old, candidate)
    return new.missing_bytes < old.missing_bytes


def _distance(neighbour: Neighbour, candidate: Candidate) -> float:
    """How far the knob is turned: the ratio of degrees, 0 for knobs that have names."""
    own, value = getattr(candidate, neighbour.knob), neighbour.value
    if isinstance(own, str) or not own or not value:
        return 0.0
    return max(float(value / own), float(own / value))


def _outside(scorer: Scorer, stage: StageMemory) -> Iterator[Lever]:
    """Levers beside the knobs: the headroom where it is more than what is missing."""
    missing = stage.peak_bytes - stage.capacity_bytes
    kept = stage.device_bytes - stage.capacity_bytes
    if scorer.problem.training.memory_headroom and missing <= kept:
        share = max(0.0, 1 - stage.peak_bytes / stage.device_bytes)
        least = int(share * 1000) / 1000
        yield Lever(lever="headroom", change=f"--memory-headroom {least:.3f}", missing_bytes=0)
