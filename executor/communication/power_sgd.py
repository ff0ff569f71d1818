"""PowerSGD: each gradient matrix as a product of two thin ones, whose means are all that travels.

    M_i = G_i + E_i,   P = orth(mean(M_i Q)),   Q = mean(M_iᵀ P),   G = P Qᵀ,   E_i = M_i - P Qᵀ

Kept are, for each parameter, this rank's error E_i and the Q to go on from, so buckets may change
and a training may be saved and resumed exactly. Torch's own hook (powerSGD_hook) does the same
arithmetic and is as good where neither matters: it keys its state by bucket and lets the first
backwards pass whole so that buckets are final. Vectors, and matrices that two thin ones would not
make smaller, travel whole.

Source: Vogels et al., "PowerSGD", arXiv 1905.13727, algorithms 1 and 2.
"""

# DistributedDataParallel reads a hook's annotations, so they must not be text here.
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from claw_plan.executor.communication.algorithms import NATIVE
from claw_plan.executor.communication.group_mean import GroupMean
from claw_plan.executor.communication.hooks import arrived
from claw_plan.kernels.codec import codec_of
from claw_plan.kernels.low_rank import (
    back_project,
    first_factor,
    matrix_shape,
    orthonormal,
    pays,
    product,
    project,
)
from claw_plan.profiles.collective_schedules import Nodes

ERROR, FACTOR = "error", "factor"


class LowRankMean:
    """Rank-`rank` means of tensors that each keep their number from call to call."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        rank: int,
        *,
        algorithm: str = NATIVE,
        nodes: Nodes | None = None,
    ) -> None:
        self.means = GroupMean(group, codec_of("none"), algorithm=algorithm, nodes=nodes)
        self._rank = rank
        self._errors: dict[int, torch.Tensor] = {}
        self._factors: dict[int, torch.Tensor] = {}

    def average(self, numbers: Sequence[int], gradients: Sequence[torch.Tensor]) -> None:
        """Replaces this rank's gradients by what all ranks take for their mean."""
        dense, matrices = [], []
        for number, gradient in zip(numbers, gradients, strict=True):
            shape = matrix_shape(gradient.shape)
            if pays(shape, self._rank):
                matrices.append((number, gradient.view(shape)))
            else:
                dense.append(gradient)
        self._average_whole(dense)
        sums = [self._with_error(number, gradient) for number, gradient in matrices]
        lefts = [
            project(matrix, self._factor(number, matrix))
            for (number, _), matrix in zip(matrices, sums, strict=True)
        ]
        self._average_whole(lefts)
        lefts = [orthonormal(left) for left in lefts]
        rights = [back_project(matrix, left) for matrix, left in zip(sums, lefts, strict=True)]
        self._average_whole(rights)
        for (number, gradient), matrix, left, right in zip(
            matrices, sums, lefts, rights, strict=True
        ):
            gradient.copy_(product(left, right))
            self._errors[number] = matrix.sub_(gradient)
            self._factors[number] = right

    def _average_whole(self, tensors: Sequence[torch.Tensor]) -> None:
        """In one vector, back into the tensors."""
        if tensors:
            flat = self.means.whole(torch.cat([tensor.reshape(-1) for tensor in tensors]))
            parts = flat.split([tensor.numel() for tensor in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.copy_(part.view_as(tensor))

    def _with_error(self, number: int, gradient: torch.Tensor) -> torch.Tensor:
        error = self._errors.get(number)
        return gradient.clone() if error is None else error.add_(gradient)

    def _factor(self, number: int, matrix: torch.Tensor) -> torch.Tensor:
        factor = self._factors.get(number)
        shape = (matrix.shape[0], matrix.shape[1])
        return first_factor(shape, self._rank, number, matrix) if factor is None else factor

    def rank_state(self) -> dict[str, torch.Tensor]:
        """Errors, which this rank alone has, and factors, by the tensors' numbers."""
        errors = {f"{ERROR}.{number}": error for number, error in self._errors.items()}
        return errors | {f"{FACTOR}.{number}": right for number, right in self._factors.items()}

    def load_rank_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Takes up the `rank_state` of the same rank of as many; nothing for none."""
        self._errors, self._factors = {}, {}
        for name, tensor in state.items():
            kind, _, number = name.partition(".")
            kept = self._errors if kind == ERROR else self._factors
            kept[int(number)] = tensor.clone()


def attach_power_sgd(
    model: DistributedDataParallel, means: LowRankMean, *, whole_backwards: int = 0
) -> None:
    """Sends the model's gradients so, after as many backwards that send them whole."""
    numbers = {id(parameter): number for number, parameter in enumerate(model.parameters())}
    backwards = 0

    def hook(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        nonlocal backwards
        flat = bucket.buffer()
        backwards += bucket.index() == 0
        with torch.no_grad():
            if backwards <= whole_backwards:
                means.means.whole(flat)
            else:
                held = [numbers[id(parameter)] for parameter in bucket.parameters()]
                means.average(held, bucket.gradients())
        return arrived(flat)

    model.register_comm_hook(None, hook)
