"""Deep Gradient Compression: error feedback without momentum, and the paper's masks with it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from claw_plan.kernels.codec import CodecError
from claw_plan.kernels.error_feedback import ErrorFeedback
from claw_plan.kernels.momentum_correction import MomentumCorrection
from claw_plan.kernels.sparse import Threshold, TopK


def test_without_momentum_it_is_error_feedback() -> None:
    codec = TopK(density=0.1)
    corrected, feedback = MomentumCorrection(codec, momentum=0.0), ErrorFeedback(codec)
    for _ in range(20):
        x = torch.randn(200)
        assert torch.equal(corrected.encode(x), feedback.encode(x))


def test_numpy_does_the_same() -> None:
    corrected = MomentumCorrection(TopK(density=0.05), momentum=0.9)
    u, v = np.zeros(400, np.float32), np.zeros(400, np.float32)
    for _ in range(30):
        x = torch.randn(400)
        u = np.float32(0.9) * u + x.numpy()
        v = v + u
        sent = np.argsort(-np.abs(v))[:20]
        codes = corrected.encode(x)
        np.testing.assert_array_equal(corrected.codec.indices(codes), np.sort(sent))
        np.testing.assert_allclose(corrected.codec.values(codes), v[np.sort(sent)], rtol=1e-5)
        u[sent] = v[sent] = 0


def test_what_is_not_sent_has_the_momentum_of_dense_training() -> None:
    # Nothing is above the threshold for two steps: v is then the sum of the momenta.
    corrected = MomentumCorrection(Threshold(threshold=10.0), momentum=0.5)
    for gradient in (4.0, 2.0):
        assert corrected.encode(torch.tensor([gradient])).numel() == 0
    # u = 4, 4; v = 4, 8. Then u = 0.5·4 + 1 = 3 and v = 11 goes out.
    codes = corrected.encode(torch.tensor([1.0]))
    assert corrected.codec.values(codes).tolist() == [11.0]
    assert corrected.velocity is not None and corrected.velocity.tolist() == [0.0]


def test_a_step_that_is_not_finite_is_sent_and_forgotten() -> None:
    corrected = MomentumCorrection(TopK(density=0.5))
    corrected.encode(torch.randn(10))
    assert corrected.velocity is not None and corrected.unsent is not None
    before = corrected.velocity.clone(), corrected.unsent.clone()
    bad = torch.randn(10)
    bad[4] = torch.inf
    assert not corrected.codec.decode(corrected.encode(bad), 10).isfinite().all()
    assert torch.equal(corrected.velocity, before[0])
    assert torch.equal(corrected.unsent, before[1])


def test_a_saved_state_goes_on_exactly() -> None:
    first, second = (MomentumCorrection(TopK(density=0.1)) for _ in range(2))
    first.encode(torch.randn(50))
    second.load_state_dict(first.state_dict())
    x = torch.randn(50)
    assert torch.equal(first.encode(x), second.encode(x))


def test_another_bucket_is_refused_until_reset() -> None:
    corrected = MomentumCorrection(TopK(density=0.1))
    corrected.encode(torch.randn(50))
    with pytest.raises(CodecError, match="of 50 elements got a bucket of 51"):
        corrected.encode(torch.randn(51))
    corrected.reset()
    assert corrected.state_dict() == {}
    corrected.encode(torch.randn(51))
