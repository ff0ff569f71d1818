"""A plan to the sentence that says whether compressing its gradients pays, and at what cost.

Told unasked where the step waits long for gradients, and always where codecs are named or one is
chosen. Every time is the scorer's; what a codec costs in convergence is its descriptor's figure,
measured on a small model (docs/compressed_training.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import isinf

from claw_plan.planner.averaging_choices import encodes_anywhere, training_refusal
from claw_plan.planner.break_even import (
    averaging_link,
    break_even_bytes_per_s,
    kernels_ns,
    with_codec,
)
from claw_plan.planner.memory_states import WHOLE, kind_of
from claw_plan.planner.score import Scored, Scorer
from claw_plan.planner.search_space import Choice
from claw_plan.planner.supported import CODECS, OF_MOMENTUM, refusal
from claw_plan.planner.zero_one import is_zero_one, longest_away
from claw_plan.profiles.codecs import LOW_RANK, describe_codec
from claw_plan.profiles.units import format_bits_per_s, format_ns

LARGE_SHARE = 0.15
"""Of a step that waits for gradients: of more it is told what compression would bring. The share
that the field takes for too much."""

EXPOSED = "dp_comm_exposed"

MEASURED = "docs/compressed_training.md"


def compression_said(scorer: Scorer, best: Scored, named: Sequence[str] = ()) -> Iterator[str]:
    """One sentence, or none where no codec is `named` and gradients are hardly waited for."""
    waits_ns, step_ns = best.parts_ns[EXPOSED], best.step_time_ns
    if best.candidate.codec != "none":
        yield _why_chosen(scorer, best)
        return
    if waits_ns < LARGE_SHARE * step_ns and not named:
        return
    waits = f"gradients wait {format_ns(waits_ns)} a step ({waits_ns / step_ns:.0%})"
    found = _best_codec(scorer, (best.candidate, best.cuts), named)
    if found is None:
        yield f"{waits}; no codec can be used here: {_why_none(scorer, best, named)}"
        return
    codec, codec_ns = found
    if _to_loss(codec, codec_ns) >= step_ns:
        yield f"{waits}; {_why_not(scorer, best, codec, codec_ns)}"
        return
    yield (
        f"{waits}; {codec} would make the step {format_ns(codec_ns)}, {step_ns / codec_ns:.2f} x "
        f"as fast, {_cost_said(codec)}{_edge_said(scorer, best, codec)}; allow it with --codecs "
        f"{codec}"
    )


def _why_not(scorer: Scorer, best: Scored, codec: str, codec_ns: int) -> str:
    """Where even the best codec is no gain: what it would save, and what it takes."""
    choice = (best.candidate, best.cuts)
    takes = format_ns(kernels_ns(scorer, choice, codec))
    step = f"a step of {format_ns(codec_ns)} instead of {format_ns(best.step_time_ns)}"
    return (
        f"compressing them does not pay: {codec}, the best, makes {step}, of which encoding and "
        f"decoding take {takes}, {_cost_said(codec)}{_edge_said(scorer, best, codec)}"
    )


def _why_chosen(scorer: Scorer, best: Scored) -> str:
    codec = best.candidate.codec
    plain_ns = scorer.step_time_ns(with_codec(best.candidate, "none"), best.cuts)
    ratio = plain_ns / best.step_time_ns
    verdict = "pays" if _to_loss(codec, best.step_time_ns) < plain_ns else "does not pay"
    step = f"{format_ns(best.step_time_ns)}{_kinds_said(scorer, best)}"
    return (
        f"{codec} {verdict}: a step takes {step}, without it "
        f"{format_ns(plain_ns)} ({ratio:.2f} x), {_cost_said(codec)}"
        f"{_edge_said(scorer, best, codec)}"
    )


def _kinds_said(scorer: Scorer, best: Scored) -> str:
    """What each kind of step takes, where replicas meet only now and then."""
    if not is_zero_one(best.candidate):
        return ""
    assert best.timeline is not None, "the best is scored in full"
    meeting, apart = best.timeline.step_time_ns, scorer.apart(best.candidate, best.cuts)
    return (
        f" on average ({format_ns(meeting)} where replicas meet, one of "
        f"{longest_away(best.candidate)} steps, and {format_ns(apart.step_time_ns)} apart)"
    )


def _edge_said(scorer: Scorer, best: Scored, codec: str) -> str:
    """Below which rate of the link it pays."""
    edge = break_even_bytes_per_s(scorer, (best.candidate, best.cuts), codec)
    link = averaging_link(scorer.problem, best.candidate)
    rate = f"{link.name} (here {format_bits_per_s(link.bytes_per_s)} a device)"
    if not edge or isinf(edge):
        return f"; it pays at {'any' if edge else 'no'} rate of {rate}"
    return f"; it pays below {format_bits_per_s(edge)} of {rate}"


def _best_codec(scorer: Scorer, choice: Choice, named: Sequence[str]) -> tuple[str, int] | None:
    """The one that is through first, and its step; of those named, else of all with defaults."""
    found = []
    for codec in named or [name for name in CODECS if name != "threshold"]:
        candidate = with_codec(choice[0], codec)
        usable = _trains(scorer, choice, codec) and not refusal(candidate)
        if usable and scorer.memory.fits(candidate, choice[1]):
            step_ns = scorer.step_time_ns(candidate, choice[1])
            found.append((_to_loss(codec, step_ns), codec, step_ns))
    return min(found)[1:] if found else None


def _why_none(scorer: Scorer, best: Scored, named: Sequence[str]) -> str:
    """The first reason against one of the named codecs, else against one that acts by default."""
    training, codecs = scorer.problem.training, named or [n for n in CODECS if n != "threshold"]
    refused = (
        training_refusal(training, codec)
        or refusal(replace(best.candidate, codec=codec, collective="auto"))
        for codec in codecs
    )
    return next(filter(None, refused), "what they keep does not fit in memory")


def _trains(scorer: Scorer, choice: Choice, codec: str) -> bool:
    """Whether the codec goes with precision, clipping and trainer, which no candidate says."""
    name, problem = codec.partition(":")[0], scorer.problem
    if training_refusal(problem.training, codec):
        return False
    if name in (LOW_RANK, *OF_MOMENTUM):
        return kind_of(problem, choice[0]) == WHOLE
    return encodes_anywhere(problem, codec)


def _to_loss(codec: str, step_ns: int) -> int:
    """The step times the steps to the same loss."""
    return int(step_ns * max(1.0, describe_codec(codec).step_penalty))


def _cost_said(codec: str) -> str:
    """Steps to the same loss, and where that was measured."""
    penalty = describe_codec(codec).step_penalty
    if penalty > 1.0:
        return f"and {penalty - 1:.1%} more steps to the same loss ({MEASURED})"
    return f"and as many steps to the same loss, as far as measured ({MEASURED})"
