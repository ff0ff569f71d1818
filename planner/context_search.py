"""How many ranks share each sequence: searched where cp is pinned, else where sequences are long.

Every degree and kind has a graph of its own, for which the model is traced once more, so cp is not
multiplied into the table of the whole space. Unpinned it is offered where nothing fits without,
where sequences are long, or where the batch has fewer samples than there are devices: powers of
two, and all of them, since 8 may fit where 2 does not. What is best at one degree and kind is
proven for these two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from claw_plan.planner.candidate import ALL_GATHER, ALL_TO_ALL, Candidate
from claw_plan.planner.context_parallel_division import PIECES
from claw_plan.planner.errors import PlanError
from claw_plan.planner.model_source import LoadedModel
from claw_plan.planner.objective import Objective
from claw_plan.planner.problem import Problem
from claw_plan.planner.score import Scorer
from claw_plan.planner.search_space import Searched, search_space
from claw_plan.planner.space import Space
from claw_plan.planner.supported import refusal
from claw_plan.planner.trace_context import trace_context

LONG_SEQUENCE = 16_384
"""Tokens from which on cp is looked at unpinned. Llama 3 trained with it at 131,072 and without at
8,192 (arXiv 2407.21783, table 4)."""

MOST_UNPINNED = 16
"""The largest degree that is looked at unpinned; Llama 3's at 131,072 tokens. Each costs two
traces and searches."""


def with_context(problem: Problem, model: LoadedModel, candidate: Candidate) -> Problem:
    """The problem of ranks that share sequences as the candidate says; raises PlanError."""
    graph, cp, kind = problem.graph, candidate.cp, candidate.cp_comm_type
    if cp == graph.cp and (cp == 1 or kind == graph.cp_comm_type):
        return problem
    training = problem.training
    traced = trace_context(
        model, seq_len=training.seq_len, dtype=training.precision, cp=cp, kind=kind
    )
    return replace(problem, graph=traced)


def pinned_context(problem: Problem, model: LoadedModel, fix: Mapping[str, Any]) -> Problem:
    """The problem with as many ranks sharing sequences as are pinned; raises PlanError."""
    if fix.get("cp", 1) == 1:
        return problem
    kind = fix.get("cp_comm_type", ALL_GATHER)
    try:
        return with_context(problem, model, Candidate(cp=fix["cp"], cp_comm_type=kind))
    except PlanError as error:
        raise PlanError(f"--fix cp={fix['cp']}: {error}") from None


@dataclass(kw_only=True)
class ContextSearch:
    """Looks for better plans of a model in which ranks share sequences."""

    model: LoadedModel
    fix: Mapping[str, Any]
    objective: Objective | None = None
    codecs: Sequence[str] = ()
    refused: list[str] = field(default_factory=list)
    looked_at: int = 0

    def search(self, scorer: Scorer, found: Searched) -> tuple[Scorer, Searched]:
        """The best with shared sequences and its scorer, where it is better than what was found.

        A pinned degree without a kind is tried with both.
        """
        if scorer.problem.graph.cp > 1:
            return self._other_kind(scorer, found)
        if "cp" in self.fix or not self._may_gain(scorer.problem, found):
            return scorer, found
        tried, said = list[int](), found.said
        for degree in self._degrees(scorer.problem):
            better = self._better(scorer, found, degree)
            tried.append(degree)
            scorer, found = better or (scorer, found)
        return scorer, replace(found, said=(*said, *self._said(scorer.problem, tried)))

    def _said(self, problem: Problem, tried: Sequence[int]) -> Iterator[str]:
        """What was looked at, for people."""
        degrees = ", ".join(map(str, tried))
        if self.refused and not self.looked_at:
            yield f"context parallelism: {self.refused[0]}"
        elif problem.graph.cp > 1:
            yield (
                f"context parallelism: cp={degrees} were looked at, each with a proof of its own; "
                "other degrees were not"
            )
        elif tried:
            yield f"context parallelism: no way with cp={degrees} is better"

    def _other_kind(self, scorer: Scorer, found: Searched) -> tuple[Scorer, Searched]:
        if "cp_comm_type" in self.fix:
            return scorer, found
        graph = scorer.problem.graph
        return self._better(scorer, found, graph.cp, (ALL_TO_ALL,)) or (scorer, found)

    def _may_gain(self, problem: Problem, found: Searched) -> bool:
        """Whether it is worth the traces; and whether the pinned knobs can go with it at all."""
        graph, training = problem.graph, problem.training
        if graph.seq_len is None or graph.ep > 1 or self._refusal():
            return False
        is_narrow = training.global_batch < problem.cluster.num_devices
        return not found.ranked or graph.seq_len >= LONG_SEQUENCE or is_narrow

    def _refusal(self) -> str:
        names = ("pp", "tp", "dp_replicate", "dp_shard", "ep")
        pinned = {name: self.fix[name] for name in names if name in self.fix}
        return refusal(Candidate(**pinned, cp=2))

    def _degrees(self, problem: Problem) -> Iterator[int]:
        """Powers of two that divide the sequence into chunks."""
        length, cp = problem.graph.seq_len or 1, 2
        most = min(problem.cluster.num_devices, MOST_UNPINNED)
        while cp <= most and length % (PIECES[ALL_GATHER] * cp) == 0:
            yield cp
            cp *= 2

    def _better(
        self,
        scorer: Scorer,
        found: Searched,
        degree: int,
        kinds: Sequence[str] = (ALL_GATHER, ALL_TO_ALL),
    ) -> tuple[Scorer, Searched] | None:
        """The best of a degree, if it is better than what was found."""
        best: tuple[Scorer, Searched] | None = None
        pinned = self.fix.get("cp_comm_type")
        for kind in kinds if pinned is None else (pinned,):
            try:
                problem = with_context(
                    scorer.problem, self.model, Candidate(cp=degree, cp_comm_type=kind)
                )
            except PlanError as error:
                self.refused.append(str(error))
                continue
            self.looked_at += 1
            known = found if best is None else best[1]
            other = self._search(problem, known)
            is_first = other[1].ranked and not known.ranked
            if is_first or (other[1].ranked and self._value(other[1]) < self._value(known)):
                best = other
        return best

    def _search(self, problem: Problem, known: Searched) -> tuple[Scorer, Searched]:
        scorer = Scorer(problem)
        limit = None
        if known.ranked and self.objective is None:
            limit = known.times_ns[known.ranked[0][0]]
        space = Space(problem, self.fix, self.codecs)
        found = search_space(scorer, space, limit_ns=limit, objective=self.objective)
        return scorer, found

    def _value(self, found: Searched) -> float:
        choice = found.ranked[0]
        time_ns = found.times_ns[choice[0]]
        return time_ns if self.objective is None else self.objective.value(*choice, time_ns)
