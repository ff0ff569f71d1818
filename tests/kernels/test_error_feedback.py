"""Error feedback: nothing is lost over time, on one worker and through the second phase."""

from __future__ import annotations

import pytest
import torch

from claw_plan.kernels.codec import CodecError, codec_of
from claw_plan.kernels.error_feedback import ErrorFeedback, largest_magnitude

TEXTS = (
    "one_bit",
    "one_bit:l2",
    "top_k:0.05",
    "threshold:1.5",
    "fp16",
    "fp8",
    "int8",
    "int4:16,stochastic",
)


@pytest.mark.parametrize("text", TEXTS)
def test_the_sums_telescope(text: str) -> None:
    feedback = ErrorFeedback(codec_of(text))
    given = torch.zeros(1003, dtype=torch.float64)
    sent = torch.zeros(1003, dtype=torch.float64)
    for _ in range(50):
        x = torch.randn(1003)
        given += x
        sent += feedback.codec.decode(feedback.encode(x), 1003)
    assert feedback.residual is not None
    assert (sent + feedback.residual - given).norm() <= 1e-6 * given.norm()


def test_two_phases_telescope_by_the_mean_and_the_servers_residual() -> None:
    workers = [ErrorFeedback(codec_of("one_bit")) for _ in range(4)]
    server = ErrorFeedback(codec_of("one_bit"))
    true, sent = torch.zeros(640).double(), torch.zeros(640).double()
    for _ in range(30):
        gradients = [torch.randn(640) for _ in workers]
        true += torch.stack(gradients).double().mean(0)
        arrived = [
            w.codec.decode(w.encode(g), 640) for w, g in zip(workers, gradients, strict=True)
        ]
        sent += server.codec.decode(server.encode(torch.stack(arrived).mean(0)), 640)
    kept = torch.stack([w.residual for w in workers if w.residual is not None]).mean(0)
    assert server.residual is not None
    assert (true - kept - server.residual - sent).norm() <= 1e-6 * true.norm()


def test_residuals_stay_bounded_where_the_codec_contracts() -> None:
    # |e| <= sqrt(c)/(1 - sqrt(c)) · max |x|, from |e'| <= sqrt(c) (|e| + |x|).
    feedback = ErrorFeedback(codec_of("top_k:0.25"))
    bound = 0.75**0.5 / (1 - 0.75**0.5)
    for _ in range(100):
        x = torch.randn(256)
        feedback.encode(x / x.norm())
        assert feedback.residual is not None and feedback.residual.norm() <= bound


def test_chunks_are_encoded_each_by_itself() -> None:
    feedback = ErrorFeedback(codec_of("one_bit"))
    x = torch.randn(30)
    codes = feedback.encode_chunks(x, [10, 20])
    assert torch.equal(codes[0], feedback.codec.encode(x[:10]))
    assert torch.equal(codes[1], feedback.codec.encode(x[10:]))
    with pytest.raises(CodecError, match="not a bucket of 30"):
        feedback.encode_chunks(x, [10, 10])


def test_a_step_that_is_not_finite_does_not_stay_in_the_residual() -> None:
    feedback = ErrorFeedback(codec_of("one_bit"))
    feedback.encode(torch.randn(20))
    assert feedback.residual is not None
    before = feedback.residual.clone()
    x = torch.randn(20)
    x[2] = torch.nan
    first, second = feedback.encode_chunks(x, [10, 10])
    assert feedback.codec.decode(first, 10).isnan().all()
    assert feedback.codec.decode(second, 10).isfinite().all()
    assert torch.equal(feedback.residual[:10], before[:10])
    assert not torch.equal(feedback.residual[10:], before[10:])


def test_a_saved_residual_goes_on_exactly() -> None:
    first, second = (ErrorFeedback(codec_of("one_bit")) for _ in range(2))
    first.encode(torch.randn(33))
    second.load_state_dict(first.state_dict())
    x = torch.randn(33)
    assert torch.equal(first.encode(x), second.encode(x))


def test_a_reset_forgets() -> None:
    feedback = ErrorFeedback(codec_of("one_bit"))
    feedback.encode(torch.randn(8))
    feedback.reset()
    assert feedback.state_dict() == {}
    x = torch.randn(9)
    assert torch.equal(feedback.encode(x), feedback.codec.encode(x))


def test_another_bucket_is_refused() -> None:
    feedback = ErrorFeedback(codec_of("one_bit"))
    feedback.encode(torch.randn(8))
    with pytest.raises(CodecError, match="of 8 elements got a bucket of 9"):
        feedback.encode(torch.randn(9))


def test_fp64_buckets_keep_fp64_residuals() -> None:
    feedback = ErrorFeedback(codec_of("one_bit"))
    feedback.encode(torch.randn(8, dtype=torch.float64))
    assert feedback.residual is not None and feedback.residual.dtype == torch.float64


@pytest.mark.parametrize(
    ("elements", "expected"),
    [([], 0.0), ([-3.0, 2.0], 3.0), ([1.0, -torch.inf], torch.inf), ([torch.inf, 0.0], torch.inf)],
)
def test_the_largest_magnitude(elements: list[float], expected: float) -> None:
    assert largest_magnitude(torch.tensor(elements)) == expected
    assert largest_magnitude(torch.tensor([*elements, torch.nan])).isnan()
