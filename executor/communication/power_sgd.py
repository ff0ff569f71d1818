"""PowerSGD: each gradient matrix as a product of two thin ones, whose means are all that travels.

    M_i = G_i + E_i,   P = orth(mean(M_i Q)),   Q = mean(M_iᵀ P),   G = P Qᵀ,   E_i = M_i - P Qᵀ

Kept are, for each parameter, this rank's error E_i and the Q to go on from, so buckets may change
and a training may be saved and resumed exactly. Torch's own hook (powerSGD_hook) does the same
arithmetic and is as good where neither matters: it keys its state by bucket and lets the first
backwards pass whole so that buckets are final. Vectors, and matrices that two thin ones would not
make smaller, travel whole.

Both factors may travel through a codec (`codec`): what it does to P only turns the basis, the
same on all ranks, and a rank of 16 in int8 sends what a rank of 4 sends whole. Errors then are
what this rank's own factor leaves out, E_i = M_i - P Q_iᵀ. Their mean is the same but for the
rounding, whereas those of the article differ from rank to rank by sums of all that ever differed,
which grow without end and would take the codes' precision.

Source: Vogels et al., "PowerSGD", arXiv 1905.13727, algorithms 1 and 2.
"""

# DistributedDataParallel reads a hook's annotations, so they must not be text here.
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from claw_plan.executor.communication.algorithms import NATIVE
from claw_plan.executor.communication.group_mean import GroupMean, bucket_key
from claw_plan.executor.communication.hooks import arrived
from claw_plan.kernels.codec import codec_of
from claw_plan.kernels.error_feedback import restore_unless_finite
from claw_plan.kernels.low_rank import (
    back_project,
    first_factor,
    orthonormal,
    product,
    project,
    unit_columns,
)
from claw_plan.profiles.codecs import matrix_shape, pays
from claw_plan.profiles.collective_schedules import Nodes

ERROR, FACTOR = "error", "factor"


class LowRankMean:
    """Rank-`rank` means of tensors that each keep their number from call to call.

    `codec` is that of the factors, one that trains without error feedback: fp16, int8, fp8. With
    `keeps_errors` off what the rank leaves out is forgotten, for callers that remember it.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        rank: int,
        *,
        codec: str = "none",
        keeps_errors: bool = True,
        algorithm: str = NATIVE,
        nodes: Nodes | None = None,
    ) -> None:
        self.means = GroupMean(
            group, codec_of(codec), algorithm=algorithm, nodes=nodes, keeps_errors=False
        )
        self._rank, self._keeps_errors = rank, keeps_errors
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
        sums = [self._with_error(number, gradient) for number, gradient in matrices]
        factors = [
            self._factor(number, matrix)
            for (number, _), matrix in zip(matrices, sums, strict=True)
        ]
        lefts = list(map(project, sums, factors))
        self._average_factors(lefts, dense)
        lefts = [orthonormal(left) for left in lefts]
        rights = list(map(back_project, sums, lefts))
        if not self.means.sends_whole:
            # Before the means take their place.
            own = map(product, lefts, rights)
            sums = [matrix.sub_(part) for matrix, part in zip(sums, own, strict=True)]
        self._average_factors(rights)
        for (number, gradient), *made in zip(matrices, sums, factors, lefts, rights, strict=True):
            self._take(number, gradient, *made)

    def _take(
        self,
        number: int,
        gradient: torch.Tensor,
        matrix: torch.Tensor,
        before: torch.Tensor,
        left: torch.Tensor,
        right: torch.Tensor,
    ) -> None:
        """Puts the mean in place; keeps what it leaves out, unless something overflowed."""
        gradient.copy_(product(left, right))
        if self.means.sends_whole:
            rest, factor = matrix.sub_(gradient), right.contiguous()
        else:
            rest, factor = matrix, unit_columns(right)
        restore_unless_finite(factor, before, factor)
        self._factors[number] = factor
        if self._keeps_errors:
            last = self._errors.get(number)
            restore_unless_finite(rest, rest.new_zeros(()) if last is None else last, gradient)
            self._errors[number] = rest

    def _average_factors(
        self, factors: Sequence[torch.Tensor], dense: Sequence[torch.Tensor] = ()
    ) -> None:
        """In place, and what is dense as it is; elements of a column lie together on the wire."""
        columns = [factor.mT for factor in factors]
        if self.means.sends_whole:
            _average([*dense, *columns], self.means.whole)
        else:
            _average(dense, self.means.whole)
            _average(columns, partial(self.means.compressed, "factors"))

    def _with_error(self, number: int, gradient: torch.Tensor) -> torch.Tensor:
        error = self._errors.get(number)
        return gradient.clone() if error is None else error + gradient

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


def _average(
    tensors: Sequence[torch.Tensor], mean: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """In one vector, back into the tensors."""
    if tensors:
        flat = mean(torch.cat([tensor.reshape(-1) for tensor in tensors]))
        parts = flat.split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


class LowRankBuckets(GroupMean):
    """The same of flat buckets, once `lay_out` has said what they consist of."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        rank: int,
        *,
        algorithm: str = NATIVE,
        nodes: Nodes | None = None,
    ) -> None:
        super().__init__(group, codec_of("none"), algorithm=algorithm, nodes=nodes)
        self._means = LowRankMean(group, rank, algorithm=algorithm, nodes=nodes)
        self._held: dict[str, tuple[range, Sequence[torch.Size]]] = {}

    @property
    def sends_whole(self) -> bool:
        """Never."""
        return False

    def lay_out(self, buckets: Sequence[Sequence[torch.Size]]) -> None:
        """The shapes of each bucket's tensors, the same ones at every step."""
        first = 0
        for index, shapes in enumerate(buckets):
            self._held[bucket_key(index)] = range(first, first + len(shapes)), shapes
            first += len(shapes)

    def compressed(self, key: str, flat: torch.Tensor) -> torch.Tensor:
        """The mean of a bucket, in place."""
        numbers, shapes = self._held[key]
        parts = flat.split([shape.numel() for shape in shapes])
        pairs = zip(parts, shapes, strict=True)
        self._means.average(numbers, [part.view(shape) for part, shape in pairs])
        return flat

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Errors and factors of this rank."""
        return self._means.rank_state()

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Takes up what the same rank of as many saved."""
        self._means.load_rank_state(state)


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
