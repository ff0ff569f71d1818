"""What a candidate's units and stages take on idle links, and the longest way through them.

`bound.Bounds` fills them in; `search_space` and the compiled `pipeline_bound` use the same
arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from claw_plan.planner.candidate import Candidate

Cuts = tuple[tuple[int, int], ...]


class UnitTime(NamedTuple):
    """A unit's forward, its whole backward and that in two parts, and what runs again before it.

    Where the schedule does not tell the parts apart, the first is the whole.
    """

    forward: int
    whole: int
    inputs: int
    weights: int
    again: int

    def balanced(self, candidate: Candidate) -> int:
        """What cuts are to divide evenly: all that runs, or where each stage runs some blocks
        again the rest.
        """
        work = self.forward + min(self.whole, self.inputs + self.weights)
        return work if candidate.recompute_blocks else work + self.again


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePath:
    """Per stage: forward and backward (recompute included) on idle links.

    `inputs_ns` and `weights_ns` are the two parts of the backward where the schedule runs it in
    two, else all of it and nothing; the stage before waits for the first. `ranks` are the stages
    of each rank.
    """

    cuts: Cuts
    forward_ns: tuple[int, ...]
    backward_ns: tuple[int, ...]
    inputs_ns: tuple[int, ...]
    weights_ns: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]

    def least_work_ns(self, stage: int) -> int:
        """A microbatch's forward and backward, whole or in parts."""
        parts_ns = self.inputs_ns[stage] + self.weights_ns[stage]
        return self.forward_ns[stage] + min(self.backward_ns[stage], parts_ns)

    def longest_ns(self, num_microbatches: int) -> int:
        """Longest way through a pipeline whose messages cost nothing."""
        longest = reached = drained = 0
        for rank, stages in enumerate(self.ranks):  # rank r's first stage is stage r
            early = sum(self.forward_ns[s] + self.inputs_ns[s] for s in stages)
            work = sum(self.least_work_ns(s) for s in stages)
            through = num_microbatches * early + drained
            longest = max(longest, reached + max(num_microbatches * work, through))
            reached += self.forward_ns[rank]
            drained += (self.inputs_ns if rank else self.backward_ns)[rank]
        return longest
