"""`compressed_mean` against exact means: the composition matrix of codecs and collectives."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from claw_plan.executor.communication.compressed import TwoPhaseFeedback
from claw_plan.kernels.codec import codec_of
from claw_plan.profiles.coded_means import part_bounds

RANK = Path(__file__).with_name("rank_compressed.py")
sys.path.insert(0, str(RANK.parent))
from rank_compressed import (  # noqa: E402
    CALLS,
    CODECS,
    COLLECTIVES,
    LENGTH,
    SIZES,
    gradient,
    momentum,
)

MATRIX = [(size, codec, name) for size in SIZES for codec in CODECS for name in COLLECTIVES]

NODES = {3: ((0,), (1, 2)), 4: ((0, 1), (2, 3))}
SLICES = {
    3: {0: (0, LENGTH), 1: (0, LENGTH)},
    4: {0: (0, 504), 2: (0, 504), 1: (504, LENGTH), 3: (504, LENGTH)},
}
"""What each rank encodes under `hierarchical`: 1003 elements are 126 units of 8, halved 63."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of four ranks saw."""
    folder = tmp_path_factory.mktemp("compressed")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANK), str(rank), "4", str(folder)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(4)
    ]
    assert [rank.wait(timeout=280) for rank in ranks] == [0] * 4
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(4)]


def exact_mean(size: int, call: int) -> Tensor:
    return torch.stack([gradient(rank, call).double() for rank in range(size)]).mean(0)


def ends_everywhere_with(found: list[dict[str, Any]], key: str, size: int) -> dict[str, Any]:
    assert all(ranks[key]["bits"] == found[0][key]["bits"] for ranks in found[:size]), key
    return dict(found[0][key])


@pytest.mark.slow
def test_every_codec_over_every_collective_is_within_its_bound(
    found: list[dict[str, Any]],
) -> None:
    for size, text, name in MATRIX:
        seen = ends_everywhere_with(found, f"{size}/{text}/{name}", size)
        for call, result in enumerate(seen["plain"]):
            error = (result.double() - exact_mean(size, call)).norm().item()
            assert error <= error_bound(text, size, name, call), (size, text, name)


def error_bound(text: str, size: int, name: str, call: int) -> float:
    """|mean - result| for encodings that err by at most √c |x|, twice: at workers and servers.

    Workers send chunks of their gradients, or of their node's mean; servers chunks of the mean of
    what came. Codecs without a c below one still never err by more than they were given.
    """
    codec = codec_of(text)
    part = math.sqrt(1.0 if codec.contraction is None else codec.contraction)
    own = [gradient(rank, call).double() for rank in range(size)]
    if name == "hierarchical":
        own = [torch.stack([own[one] for one in node]).sum(0) for node in NODES[size]]
        own = [numbers * len(own) / size for numbers in own]
    at_workers = part * sum(numbers.norm().item() for numbers in own) / len(own)
    came = torch.stack(own).mean(0).norm().item() + at_workers
    return at_workers + part * came + 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["gradient", "momentum"])
def test_what_was_not_sent_is_in_the_residuals(found: list[dict[str, Any]], policy: str) -> None:
    """Σ sent = Σ means - mean of the workers' residuals - the servers' residuals."""
    for size, text, name in MATRIX:
        key = f"{size}/{text}/{name}"
        sent = ends_everywhere_with(found, key, size)[policy]
        wanted = torch.zeros(LENGTH, dtype=torch.float64)
        for call in range(CALLS):
            mean = exact_mean(size, call)
            if policy == "momentum":
                before = sent[call - 1] if call else torch.zeros(LENGTH)
                mean = momentum(before.double(), mean)
            wanted += mean
        slices, encoders = dict.fromkeys(range(size), (0, LENGTH)), size
        if name == "hierarchical":
            slices, encoders = SLICES[size], len(NODES[size])
        for rank, (begin, end) in slices.items():
            state = found[rank][key]["residuals"][policy]
            wanted[begin:end] -= state["worker.residual"].double() / encoders
            place = [r for r in slices if slices[r] == (begin, end)].index(rank)
            edges = part_bounds(end - begin, encoders)
            low, high = list(pairwise(edges))[place]
            wanted[begin + low : begin + high] -= state["server.residual"].double()
        error = (torch.stack(sent).double().sum(0) - wanted).abs().max()
        assert error <= 2e-6 * CALLS, key


@pytest.mark.slow
def test_a_part_of_the_mean_keeps_its_account_too(found: list[dict[str, Any]]) -> None:
    for size, text, name in MATRIX:
        if name == "hierarchical":
            continue
        seen = [ranks[f"{size}/{text}/{name}"] for ranks in found[:size]]
        wanted = torch.stack([exact_mean(size, call) for call in range(CALLS)]).sum(0)
        for one in seen:
            wanted -= one["residuals"]["part"]["worker.residual"].double() / size
        edges = part_bounds(LENGTH, size)
        for one, (low, high) in zip(seen, pairwise(edges), strict=True):
            sent = torch.stack(one["part"]).double().sum(0)
            assert (sent - wanted[low:high]).abs().max() <= 2e-6 * CALLS, (size, text, name)


@pytest.mark.slow
def test_one_bit_sends_a_32nd(found: list[dict[str, Any]]) -> None:
    # 2 phases x 3 other ranks x (32,768 bits + a scale), against a ring of fp32
    sent = [(ranks["sent/none"], ranks["sent/one_bit"]) for ranks in found]
    assert sent == [(786_432, 24_600)] * 4


@pytest.mark.slow
def test_saved_feedback_goes_on_as_if_never_saved(found: list[dict[str, Any]]) -> None:
    for ranks in found:
        assert torch.equal(ranks["resumed"], ranks["uninterrupted"])
        assert not torch.equal(ranks["forgotten"], ranks["uninterrupted"])


def test_feedback_saves_nothing_before_its_first_use() -> None:
    feedback = TwoPhaseFeedback(codec_of("one_bit"))
    assert feedback.state_dict() == {}
    feedback.worker.encode(torch.tensor([3.0, -1.0]))
    state = feedback.state_dict()
    assert {name: value.tolist() for name, value in state.items()} == {
        "worker.residual": [1.0, 1.0]
    }
    feedback.reset()
    feedback.load_state_dict(state)
    assert feedback.state_dict().keys() == state.keys()
