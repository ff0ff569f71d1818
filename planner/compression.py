"""A plan to the sentence that says whether compressing its gradients pays, and at what cost.

Told unasked where the step waits long for gradients, and always where a codec is chosen. Every
time is the scorer's; what a codec costs in convergence is its descriptor's figure, measured on a
small model (docs/compressed_training.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.memory_states import WHOLE, kind_of
from claw_plan.planner.score import Scored, Scorer
from claw_plan.planner.search_space import Choice
from claw_plan.planner.supported import CODECS, OF_MOMENTUM, refusal
from claw_plan.profiles.codecs import LOW_RANK, describe_codec
from claw_plan.profiles.units import format_ns

LARGE_SHARE = 0.15
"""Of a step that waits for gradients: of more it is told what compression would bring. The share
that the field takes for too much."""

EXPOSED = "dp_comm_exposed"


def compression_said(scorer: Scorer, best: Scored) -> Iterator[str]:
    """One sentence, or none where gradients are hardly waited for."""
    waits_ns, step_ns = best.parts_ns[EXPOSED], best.step_time_ns
    if best.candidate.codec != "none":
        yield _why_chosen(scorer, best)
        return
    if waits_ns < LARGE_SHARE * step_ns:
        return
    waits = f"gradients wait {format_ns(waits_ns)} a step ({waits_ns / step_ns:.0%})"
    found = _best_codec(scorer, (best.candidate, best.cuts))
    if found is None:
        yield f"{waits}; no codec can be used here: {_why_none(scorer, best)}"
        return
    codec, codec_ns = found
    if _to_loss(codec, codec_ns) >= step_ns:
        yield f"{waits}; no codec pays: the best, {codec}, would make it {format_ns(codec_ns)}"
        return
    yield (
        f"{waits}; {codec} would make the step {format_ns(codec_ns)}, {step_ns / codec_ns:.2f} x "
        f"as fast, {_cost_said(codec)}; {_how(scorer, best.candidate, codec)}"
    )


def _how(scorer: Scorer, candidate: Candidate, codec: str) -> str:
    """How to get it: searches try codecs only where their bounds know of them."""
    if candidate.reduces_in_backward and kind_of(scorer.problem, candidate) == WHOLE:
        return f"allow it with --codecs {codec}"
    return f"write candidate.codec: {codec} into the plan, which no search does here"


def _why_chosen(scorer: Scorer, best: Scored) -> str:
    codec = best.candidate.codec
    plain_ns = scorer.step_time_ns(replace(best.candidate, codec="none"), best.cuts)
    ratio = plain_ns / best.step_time_ns
    verdict = "pays" if _to_loss(codec, best.step_time_ns) < plain_ns else "does not pay"
    return (
        f"{codec} {verdict}: a step takes {format_ns(best.step_time_ns)}, without it "
        f"{format_ns(plain_ns)} ({ratio:.2f} x), {_cost_said(codec)}"
    )


def _best_codec(scorer: Scorer, choice: Choice) -> tuple[str, int] | None:
    """Of those with their default parameters the one that is through first, and its step."""
    found = []
    for name in CODECS:
        if name == "threshold" or not _trains(scorer, name):
            continue
        candidate = replace(choice[0], codec=name, collective="auto", buckets=(), bucket_order=())
        if not refusal(candidate) and scorer.memory.fits(candidate, choice[1]):
            step_ns = scorer.step_time_ns(candidate, choice[1])
            found.append((_to_loss(name, step_ns), name, step_ns))
    return min(found)[1:] if found else None


def _why_none(scorer: Scorer, best: Scored) -> str:
    if scorer.problem.training.precision == "float16":
        return "what one has not sent would be in units of a loss scale that moves"
    refused = (refusal(replace(best.candidate, codec=n, collective="auto")) for n in CODECS)
    return next(filter(None, refused), "what they keep does not fit in memory")


def _trains(scorer: Scorer, codec: str) -> bool:
    """Whether the codec goes with the precision and with clipping, which no candidate says."""
    training = scorer.problem.training
    if codec in OF_MOMENTUM:
        return training.precision == "float32" and training.clip_norm is None
    if codec == LOW_RANK:
        return training.precision == "float32"
    return training.precision != "float16"


def _to_loss(codec: str, step_ns: int) -> int:
    """The step times the steps to the same loss."""
    return int(step_ns * max(1.0, describe_codec(codec).step_penalty))


def _cost_said(codec: str) -> str:
    penalty = describe_codec(codec).step_penalty
    if penalty > 1.0:
        return f"and {penalty - 1:.1%} more steps to the same loss"
    return "and training changes (docs/compressed_training.md)"
