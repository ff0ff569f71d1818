"""What replicas' gradients become in backward, under DistributedDataParallel or `Replicas`.

A `Mean` takes a bucket's number and its gradients on this rank, and answers with what all ranks
go on with. `GradientMean` sends gradients at every step, through a codec or by a given algorithm;
optimizers that compress something else have a `Mean` of their own.
"""

# DistributedDataParallel reads a hook's annotations, so they must not be text here.
from collections.abc import Callable, Mapping

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from claw_plan.executor.communication.group_mean import GroupMean

Mean = Callable[[int, torch.Tensor], torch.Tensor]


def attach(model: DistributedDataParallel, mean: Mean) -> None:
    """Lets `mean` say what the buckets of a model become; they change after its first backward."""

    def hook(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        with torch.no_grad():
            return arrived(mean(bucket.index(), bucket.buffer()))

    model.register_comm_hook(None, hook)


def arrived(flat: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """What a hook answers with when its bucket is there already, or is on its stream."""
    devices: list[int | str | torch.device] | None
    devices = None if flat.device.type == "cpu" else [flat.device]
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
    done.set_result(flat)
    return done


class GradientMean:
    """The mean of all ranks' gradients through `means`, with one error for each bucket.

    `whole_backwards` first ones send gradients as they are: until a DistributedDataParallel has
    laid out its buckets for good, errors would belong to other elements (torch's PowerSGD hook
    begins as late).
    """

    def __init__(self, means: GroupMean, *, whole_backwards: int = 0) -> None:
        self.means = means
        self._whole_backwards = whole_backwards
        self._backwards = 0
        self._sends_whole = means.codec.name == "none"
        self._is_finite: torch.Tensor | None = None

    def __call__(self, index: int, flat: torch.Tensor) -> torch.Tensor:
        """The mean of a bucket; buckets of a backward come in the order of their numbers."""
        self._backwards += index == 0
        if self._sends_whole or self._backwards <= self._whole_backwards:
            return self.means.whole(flat)
        mean = self.means.compressed(f"bucket{index}", flat)
        finite = mean.isfinite().all()
        self._is_finite = finite if self._is_finite is None else self._is_finite & finite
        return mean

    def take_finite(self) -> bool:
        """Whether all means since it was last asked were finite; equal on all ranks, as they are.

        What is not finite on any rank no codec hides, so all can leave the same step out.
        """
        finite, self._is_finite = self._is_finite, None
        return finite is None or bool(finite)

    def rank_state(self) -> dict[str, torch.Tensor]:
        """The errors, which this rank alone has."""
        return self.means.state_dict()

    def load_rank_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Takes up the `rank_state` of the same rank of as many; nothing for none."""
        self.means.load_state_dict(state)


def compress_gradients(model: DistributedDataParallel, means: GroupMean) -> GradientMean:
    """Sends the model's gradients through a codec from its second backward on."""
    mean = GradientMean(means, whole_backwards=1)
    attach(model, mean)
    return mean
