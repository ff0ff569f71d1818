"""What replicas' gradients become in backward, under DistributedDataParallel or `Replicas`.

A `Mean` takes a bucket's number and its gradients on this rank, and answers with what all ranks
go on with. `GradientMean` sends gradients at every step, through a codec or by a given algorithm;
optimizers that compress something else have a `Mean` of their own.
"""

# DistributedDataParallel reads a hook's annotations, so they must not be text here.
from collections.abc import Callable, Mapping, Sequence

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from claw_plan.executor.communication.group_mean import GroupMean, bucket_key
from claw_plan.executor.gradients import buckets, local_gradient
from claw_plan.kernels.error_feedback import largest_magnitude
from claw_plan.kernels.fp16_scale import Fp16Scale

Mean = Callable[[int, torch.Tensor], torch.Tensor]

SCALE = "fp16_scale"
"""The scale among what a rank saves: exponent, clean steps, largest magnitude."""


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
    begins as late). With a `scale` gradients are sent as its codec says, a power of two times
    their fp16. `meets` are the ranks that take or leave out a step together, where others than
    those of `means` hold parts of the gradients.
    """

    def __init__(
        self,
        means: GroupMean,
        *,
        whole_backwards: int = 0,
        scale: Fp16Scale | None = None,
        meets: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        self.means, self.scale = means, scale
        self._meets = meets
        self.backwards = 0
        """Those so far, of the runs before this one too."""
        self._whole_backwards = whole_backwards
        self._is_finite: torch.Tensor | None = None
        self._largest: torch.Tensor | None = None

    @property
    def is_steady(self) -> bool:
        """Whether the last backward sent what all later ones do."""
        return self.backwards > self._whole_backwards

    def __call__(self, index: int, flat: torch.Tensor) -> torch.Tensor:
        """The mean of a bucket; those of DistributedDataParallel come in order."""
        self.backwards += index == 0
        is_early = 0 < self.backwards <= self._whole_backwards
        if self.means.sends_whole or is_early:
            return self.means.whole(flat)
        if self.scale is not None:
            self.means.codec = self.scale.codec
            largest = largest_magnitude(flat.detach()).float()
            self._largest = largest if self._largest is None else largest.maximum(self._largest)
        mean = self.means.compressed(bucket_key(index), flat)
        finite = largest_magnitude(mean).isfinite()
        self._is_finite = finite if self._is_finite is None else self._is_finite & finite
        return mean

    def take_finite(self) -> bool:
        """Whether all means since it was last asked were finite, the same for all that meet.

        What is not finite on any rank no codec hides, so the ranks of a mean need not ask each
        other, and all can leave the same step out. A scale moves here.
        """
        finite, self._is_finite = self._is_finite, None
        largest, self._largest = self._largest, None
        if self.scale is None and self._meets is None:
            return finite is None or bool(finite)
        agreed = self._agreed(finite, largest)
        overflow, amax = agreed.tolist()
        if self.scale is not None:
            self.scale.update(overflow=bool(overflow), amax=amax)
        return not overflow

    def _agreed(self, finite: torch.Tensor | None, largest: torch.Tensor | None) -> torch.Tensor:
        """Whether anything overflowed on any rank, and the largest finite magnitude of all."""
        group = self._meets or self.means.group
        none = torch.zeros((), device=_device_of(group))
        flag = none if finite is None else 1.0 - finite.float()
        seen = none if largest is None else largest.where(largest.isfinite(), none)
        both = torch.stack([flag, seen])
        torch.distributed.all_reduce(both, torch.distributed.ReduceOp.MAX, group=group)
        return both

    def rank_state(self) -> dict[str, torch.Tensor]:
        """The errors, which this rank alone has, and the scale, which all have alike."""
        state = self.means.state_dict()
        if self.scale is not None:
            values = list(self.scale.state_dict().values())
            state[SCALE] = torch.tensor(values, dtype=torch.float64)
        return state

    def load_rank_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Takes up the `rank_state` of the same rank of as many; nothing for none."""
        errors = dict(state)
        saved = errors.pop(SCALE, None)
        if self.scale is not None and saved is not None:
            names = self.scale.state_dict()
            self.scale.load_state_dict(dict(zip(names, saved.tolist(), strict=True)))
        self.means.load_state_dict(errors)


def mean_once(
    parameters: Sequence[torch.nn.Parameter],
    mean: Mean,
    group: torch.distributed.ProcessGroup,
    bucket_bytes: int,
) -> None:
    """What complete gradients become where nothing averaged them during backward.

    They go in buckets of about that size, of this rank's shards where there are shards. What no
    rank's backward reached has no gradient afterwards either.
    """
    if not parameters:
        return
    reached = [float(parameter.grad is not None) for parameter in parameters]
    flags = torch.tensor(reached, device=parameters[0].device)
    torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX, group=group)
    gradients = [local_gradient(parameter) for parameter in parameters]
    for index, bucket in enumerate(buckets(gradients, bucket_bytes)):
        flat = mean(index, torch.cat([gradient.reshape(-1) for gradient in bucket]))
        parts = flat.split([gradient.numel() for gradient in bucket])
        for gradient, part in zip(bucket, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
    for parameter, flag in zip(parameters, flags.tolist(), strict=True):
        if not flag:
            parameter.grad = None


def _device_of(group: torch.distributed.ProcessGroup) -> torch.device:
    """Where tensors lie that the group's backend takes."""
    is_nccl = torch.distributed.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")


def compress_gradients(model: DistributedDataParallel, means: GroupMean) -> GradientMean:
    """Sends the model's gradients through a codec from its second backward on."""
    mean = GradientMean(means, whole_backwards=1)
    attach(model, mean)
    return mean
