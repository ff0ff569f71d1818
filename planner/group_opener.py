"""Opens a group of candidates, all cut alike: closer and closer bounds, then each simulated.

`search_space` opens groups so with their evenest cuts, `cut_search` with any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.group_table import Group
from claw_plan.planner.memory import make_fits
from claw_plan.planner.score import Scorer
from claw_plan.planner.search import Branch, Evaluated
from claw_plan.planner.space import Space
from claw_plan.planner.stage_path import Cuts, StagePath

Choice: TypeAlias = tuple[Candidate, Cuts]

PLAYED, PLAYED_WITH_TRAFFIC, SIMULATED = 2, 4, 120
"""Microseconds that a stage's microbatch took when its schedule was played, with traffic, and when
its step was simulated: GPT-3 175B and Llama-3 405B on one core (bench/search.py's problems)."""


class GroupOpener:
    """Makes the branches; keeps what explanations need.

    `recuts` is whether a candidate whose cut does not fit gets the best that does. `spent` counts
    microseconds by what was done, not by a clock: the same on every run.
    """

    def __init__(self, scorer: Scorer, space: Space, *, recuts: bool) -> None:
        self._scorer, self._space, self._recuts = scorer, space, recuts
        self.looked_at: dict[Choice, int] = {}
        self.pruned: list[Choice] = []
        self.spent = 0

    def add_up(self, group: Group, path: StagePath) -> Iterator[Branch[Choice]]:
        """The group once more, with all that its ranks compute."""
        bound = self._scorer.bounds.work_ns(group.base, path)
        yield Branch(bound, order_of(group.base), group.size, partial(self._play, group, path))

    def _play(self, group: Group, path: StagePath) -> Iterator[Branch[Choice]]:
        """The group once more, its schedule played."""
        bases = [replace(group.base, schedule=name) for name in self._space.schedules(group)]
        bounds = [self._scorer.bounds.schedule_ns(base, path) for base in bases]
        self.spent += PLAYED * len(bases) * _passes(path, group.microbatches)
        opens = partial(self._members, group, path)
        yield Branch(min(bounds), order_of(group.base), group.size, opens)

    def _members(self, group: Group, path: StagePath) -> Iterator[Branch[Choice]]:
        for candidate in self._space.members(group):
            yield self._leaf(candidate, path, recuts=self._recuts)

    def _leaf(self, candidate: Candidate, path: StagePath, *, recuts: bool) -> Branch[Choice]:
        """A candidate under the bound of its streams; what opens it plays the step first."""
        bounds, order = self._scorer.bounds, order_of(candidate)
        count = candidate.num_microbatches(self._scorer.problem.training.global_batch)
        passes = _passes(path, count)

        def look_closer() -> Evaluated[Choice] | Iterable[Branch[Choice]]:
            if self._scorer.memory.fits(*choice):
                closer = max(bound, bounds.candidate_ns(candidate, path))
                self.spent += PLAYED_WITH_TRAFFIC * passes
                self.looked_at[choice] = closer
                return [Branch(closer, order, 1, simulate)]
            if recuts and may_be_cut_otherwise(candidate):
                fits = make_fits(self._scorer.memory, candidate)
                other = bounds.stage_path(candidate, fits)
                if other is not None:
                    return [self._leaf(candidate, other, recuts=False)]
            self.pruned.append(choice)
            return Evaluated(choice, None)

        def simulate() -> Evaluated[Choice]:
            self.spent += SIMULATED * passes
            return Evaluated(choice, self._scorer.step_time_ns(*choice))

        choice = (candidate, path.cuts)
        bound = bounds.streams_ns(candidate, path)
        return Branch(bound, order, 1, look_closer)


def _passes(path: StagePath, microbatches: int) -> int:
    return len(path.cuts) * microbatches


def may_be_cut_otherwise(candidate: Candidate) -> bool:
    """Whether a candidate whose best cut does not fit gets the best that does.

    Not with several stages a rank, whose memory is not that of any one; nor where some blocks of
    each stage run again, which the best cut does not balance, so that another may be faster; nor
    where gathering takes more memory than it must.
    """
    gathers_plainly = not candidate.reshard_ranks and candidate.blocks_per_group == 1
    is_whole = gathers_plainly and not candidate.recompute_blocks
    return candidate.pp > 1 and candidate.stages_per_rank == 1 and is_whole


def order_of(candidate: Candidate) -> tuple[object, ...]:
    """Of equal bounds: fewer devices first, then simpler splits, then less recompute."""
    return (
        candidate.num_devices, candidate.pp, candidate.tp, candidate.recompute != "none",
        candidate.sequence_parallel, candidate.dp_shard, candidate.offload != "none",
        candidate.microbatch_size, candidate.stages_per_rank, candidate.schedule,
        -candidate.zero,
    )  # fmt: skip
