"""Refines the best enumerated plan where nothing can be enumerated: stage cuts and small knobs.

The enumerated search cuts stages by one rule and leaves some knobs at a few values. Here each cut
may move, each of those knobs take more, and all at once (`PlanChoices`); a searcher of `samplers`
looks for something faster, and `Scorer` alone judges. What is found runs, for the knobs are the
candidate's own. `layer_gain` says beside it what choosing block by block would bring.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.choices import Assignment, Features, Scores
from claw_plan.planner.errors import PlanError
from claw_plan.planner.memory_states import WHOLE, kind_of
from claw_plan.planner.per_layer_costs import layer_choices
from claw_plan.planner.per_layer_costs import refusal as layer_refusal
from claw_plan.planner.samplers import search_choices
from claw_plan.planner.score import Scorer
from claw_plan.planner.stage_path import Cuts
from claw_plan.planner.supported import RECOMPUTE, refusal
from claw_plan.profiles.units import format_ns
from claw_plan.simulator.task_graph import Int

FURTHEST = 3
"""Legal places by which a cut may move to either side."""

EVALUATIONS = 200
"""Budget of a refinement: most are simulated, which takes milliseconds to tenths of a second."""

LAYER_EVALUATIONS = 1000
"""Budget of `layer_gain`, whose evaluations take microseconds."""

BUCKETS = (5_000_000, 10_000_000, 25_000_000, 50_000_000, 100_000_000)
GROUPS = (1, 2, 4)
"""Values of bucket_bytes and blocks_per_group."""

EIGHTHS = 8
"""Parts of a stage's blocks, of which some are recomputed."""

Choice = tuple[Candidate, Cuts]
Knobs = tuple[tuple[str, Any], ...]
"""One option: what it sets."""


@dataclass(frozen=True)
class SearchSettings:
    """What `--search`, `--storage`, `--policy` and `--seed` say; no searcher, no refinement.

    The storage keeps the refinement's study; the policy has learned to choose block by block.
    """

    searcher: str | None = None
    storage: str | None = None
    policy: Path | None = None
    seed: int = 0


@dataclass(frozen=True)
class PlanChoices:
    """The plans around one. Knobs that are pinned, or cannot act, are no variables.

    What is not offered, and cuts that cross, miss all the memory there is. What does not fit is
    not simulated and counts with the base's time, what cannot be the best with its lower bound.
    """

    scorer: Scorer
    base: Choice
    fix: Mapping[str, Any] = field(default_factory=dict)
    _known: dict[Choice, tuple[int, int]] = field(default_factory=dict)

    @cached_property
    def knobs(self) -> tuple[tuple[Knobs, ...], ...]:
        """The options of each variable that sets knobs, the base's own among them."""
        base = self.base[0]
        offered: list[list[Knobs]] = [
            [(("recompute", mode), ("recompute_blocks", n)) for mode, n in self._recomputes()],
            [(("reshard_ranks", ranks),) for ranks in self._reshard_ranks()],
            [(("blocks_per_group", blocks),) for blocks in GROUPS],
            [(("bucket_bytes", size),) for size in BUCKETS if self._has_buckets()],
        ]
        found = []
        for options in offered:
            if not options or any(name in self.fix for name, _ in options[0]):
                continue
            own = tuple((name, getattr(base, name)) for name, _ in options[0])
            legal = [o for o in options if o == own or not refusal(replace(base, **dict(o)))]
            found.append(tuple(dict.fromkeys([own, *legal])))
        return tuple(options for options in found if len(options) > 1)

    def _recomputes(self) -> list[tuple[str, int]]:
        most = max(stop - start for start, stop in self.base[1])
        parts = sorted({max(1, most * part // EIGHTHS) for part in range(1, EIGHTHS)})
        modes = [mode for mode in RECOMPUTE if mode != "none"]
        return [("none", 0), *((mode, n) for mode in modes for n in (*parts, 0))]

    def _reshard_ranks(self) -> list[int]:
        candidate, per_node = self.base[0], self.scorer.problem.devices_per_node
        ranks = per_node // candidate.tp
        divides = 1 < ranks < candidate.dp_shard and candidate.dp_shard % ranks == 0
        return [0, ranks] if divides else [0]

    def _has_buckets(self) -> bool:
        candidate = self.base[0]
        is_whole = kind_of(self.scorer.problem, candidate) == WHOLE
        return is_whole and candidate.dp_replicate > 1 and candidate.pp == 1

    @property
    def edges(self) -> tuple[int, ...]:
        """Units at which a stage may start, the ends among them."""
        return self.scorer.problem.graph.edges

    @property
    def sizes(self) -> tuple[int, ...]:
        """The knobs' options, then the places of each cut."""
        cuts = len(self.base[1]) - 1
        return (*map(len, self.knobs), *(2 * FURTHEST + 1,) * cuts)

    @property
    def start(self) -> Assignment:
        """The base."""
        return (*(0,) * len(self.knobs), *(FURTHEST,) * (len(self.base[1]) - 1))

    @property
    def capacity_bytes(self) -> int:
        """Of the base's ranks."""
        return self.scorer.memory.capacity_bytes(self.base[0])

    @cached_property
    def base_ns(self) -> int:
        """The base's simulated step."""
        return self.scorer.step_time_ns(*self.base)

    @cached_property
    def features(self) -> Features:
        """Which variable moves a cut, and how far an option is from the base."""
        sizes, start = self.sizes, self.start
        most = max(sizes)
        table = np.zeros((len(sizes), most, 3), np.float32)
        table[:, :, 0] = np.abs(np.arange(most) - np.array(start)[:, None]) / most
        table[len(self.knobs) :, :, 1] = 1.0
        table[:, :, 2] = np.linspace(0.0, 1.0, len(sizes))[:, None]
        return table

    def choice(self, assignment: Sequence[int]) -> Choice | None:
        """The plan of an assignment; None where it is not offered or its cuts cross."""
        places = len(self.knobs)
        chosen = zip(self.knobs, assignment[:places], strict=True)
        settings = {name: value for options, index in chosen for name, value in options[index]}
        candidate = replace(self.base[0], **settings)
        firsts = [self.edges.index(start) for start, _ in self.base[1]]
        for stage, moved in enumerate(assignment[places:], start=1):
            firsts[stage] += int(moved) - FURTHEST
        bounds = [*firsts, len(self.edges) - 1]
        if any(stop <= start for start, stop in pairwise(bounds)) or refusal(candidate):
            return None
        return candidate, tuple(pairwise(self.edges[bound] for bound in bounds))

    def scores(self, assignments: Int) -> Scores:
        """Of each row; what fits and may be the best is simulated."""
        found = [self._score(self.choice(row)) for row in assignments.tolist()]
        columns = np.array(found, np.int64).reshape(-1, 2)
        return Scores(columns[:, 0], columns[:, 1])

    def _score(self, choice: Choice | None) -> tuple[int, int]:
        if choice is None:
            return self.base_ns, self.capacity_bytes
        if choice not in self._known:
            self._known[choice] = self._judge(choice)
        return self._known[choice]

    def _judge(self, choice: Choice) -> tuple[int, int]:
        """A plan whose lower bound is no better than the best so far is not simulated."""
        ranks = self.scorer.memory.stages(*choice)
        missing = max(0, *(rank.peak_bytes - rank.capacity_bytes for rank in ranks))
        if missing:
            return self.base_ns, missing
        best = min((ns for ns, short in self._known.values() if not short), default=self.base_ns)
        path = self.scorer.bounds.path_of(*choice)
        bound = self.scorer.bounds.candidate_ns(choice[0], path)
        return (bound if bound >= best else self.scorer.step_time_ns(*choice)), 0

    def solve(self) -> Assignment | None:
        """No exact method is known."""
        return None


@dataclass(frozen=True, kw_only=True)
class Refined:
    """The plan to take, no slower than the one that was refined, and what to say of it."""

    choice: Choice
    sentences: tuple[str, ...]


def refine(
    scorer: Scorer, base: Choice, fix: Mapping[str, Any], settings: SearchSettings
) -> Refined:
    """Looks for something faster around the best enumerated plan."""
    searcher = settings.searcher
    if searcher is None:
        if settings.storage is not None or settings.policy is not None:
            raise PlanError("--storage and --policy belong to a --search; name one, as tpe or rl")
        return Refined(choice=base, sentences=())
    choices = PlanChoices(scorer, base, fix)
    if settings.policy is not None and searcher != "rl":
        raise PlanError(f"--policy is read by --search rl, but --search is {searcher}")
    if not choices.sizes:
        said = f"--search {searcher}: the plan has no cut or knob to refine"
        return Refined(choice=base, sentences=(said, *layer_gain(scorer, base, settings)))
    answer = search_choices(
        choices,
        searcher,
        budget=EVALUATIONS,
        seed=settings.seed,
        storage=settings.storage,
    )
    before = choices.base_ns
    better = choices.choice(answer.assignment)
    found = better if better is not None and answer.fits else base
    said = _said(searcher, len(choices.sizes), base, found, before, answer.time_ns)
    return Refined(choice=found, sentences=(said, *layer_gain(scorer, found, settings)))


def _said(
    searcher: str, variables: int, base: Choice, found: Choice, before_ns: int, after_ns: int
) -> str:
    what = f"--search {searcher}: {variables} variables around the enumerated best"
    if found == base:
        return f"{what}: nothing faster"
    changed = [
        f"{name}={getattr(found[0], name)}"
        for name in ("recompute", "recompute_blocks", "reshard_ranks", "blocks_per_group",
                     "bucket_bytes")
        if getattr(found[0], name) != getattr(base[0], name)
    ]  # fmt: skip
    if found[1] != base[1]:
        changed.append("stages from unit " + ", ".join(str(start) for start, _ in found[1]))
    saved = 1 - after_ns / before_ns
    return f"{what}: {saved:.2%} faster with {', '.join(changed)}"


def layer_gain(scorer: Scorer, base: Choice, settings: SearchSettings) -> tuple[str, ...]:
    """What choosing recompute and resharding block by block would save of the step.

    Both are scored on idle links, as `per_layer` has them. No plan holds such choices: a stage's
    blocks are all treated alike but for `recompute_blocks`.
    """
    candidate = replace(base[0], recompute_blocks=0, reshard_ranks=0, blocks_per_group=1)
    searcher, why = settings.searcher, layer_refusal(scorer, candidate)
    if why:
        return (f"--policy was not used: {why}",) if settings.policy is not None else ()
    choices = layer_choices(scorer, candidate)
    alike = [(option,) * choices.num_blocks for option in range(len(choices.options))]
    answer = search_choices(
        choices,
        searcher if searcher and searcher != "exhaustive" else "auto",
        budget=LAYER_EVALUATIONS,
        seed=settings.seed,
        policy=settings.policy,
        known=alike,
    )
    if not answer.fits:
        return ()
    scores = choices.scores(np.array(alike, np.int64))
    fits = scores.time_ns[scores.excess_bytes == 0]
    own = int(fits.min()) if len(fits) else None
    gain = "" if own is None else f", {1 - answer.time_ns / own:.2%} less than all alike"
    return (
        f"recompute and resharding chosen block by block would take "
        f"{format_ns(answer.time_ns)}{gain}; no plan holds that, so it is not run",
    )
