from __future__ import annotations

import torch
import torch.nn as nn

from claw_plan.executor.rank_stages import TiedCopy


def test_a_copy_gives_its_gradient_once_and_takes_the_value() -> None:
    original, copy = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    tied = TiedCopy(copy, original)
    copy.grad = torch.tensor([1.0, 2.0])
    tied.give_gradient()  # the original had none
    assert copy.grad is None and original.grad is not None
    copy.grad = torch.tensor([10.0, 20.0])
    tied.give_gradient()
    tied.give_gradient()  # nothing is left to give
    assert original.grad.tolist() == [11.0, 22.0]
    with torch.no_grad():
        original.sub_(0.5)
    tied.take_value()
    assert copy.tolist() == [0.5, 0.5]
