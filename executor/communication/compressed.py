"""The mean of a flat tensor over ranks, with codes on the wire instead of numbers.

Two phases, as 1-bit Adam has them: every rank encodes one chunk for each rank and sends it there;
who got a chunk decodes, takes the mean, encodes that and sends it to all. Every rank decodes the
same codes of the means, the sender as well, so all end with equal bits. What an encoding left out
is kept in a `TwoPhaseFeedback` for the next call, at the workers and at the server.

Under `hierarchical` the numbers travel whole inside nodes, and codes between them alone.

Source: Tang et al., "1-bit Adam", ICML 2021, section 4 and figure 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from claw_plan.executor.communication.algorithms import (
    NATIVE,
    all_to_all,
    flat_nodes,
    run_steps,
    schedule_of,
)
from claw_plan.kernels.codec import Codec
from claw_plan.kernels.error_feedback import ErrorFeedback
from claw_plan.profiles.coded_means import part_bounds, part_sizes
from claw_plan.profiles.collective_schedules import Nodes, inside_nodes


class TwoPhaseFeedback:
    """What the encodings of one bucket left out, as a worker and as the server of one chunk."""

    def __init__(self, codec: Codec) -> None:
        self.worker = ErrorFeedback(codec)
        self.server = ErrorFeedback(codec)

    def reset(self) -> None:
        """Forgets both, as when the ranks or the meaning of the buckets change."""
        self.worker.reset()
        self.server.reset()

    def state_dict(self) -> dict[str, Tensor]:
        """What must be saved, on this rank: no other rank can use it, nor another number of them.

        Empty before the first use.
        """
        return {
            f"{name}.{key}": value
            for name, feedback in self._named()
            for key, value in feedback.state_dict().items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes up what `state_dict` gave."""
        for name, feedback in self._named():
            own = f"{name}."
            feedback.load_state_dict(
                {key[len(own) :]: value for key, value in state.items() if key.startswith(own)}
            )

    def _named(self) -> tuple[tuple[str, ErrorFeedback], ...]:
        return ("worker", self.worker), ("server", self.server)


def compressed_mean(
    flat: Tensor,
    codec: Codec,
    feedback: TwoPhaseFeedback | None,
    group: dist.ProcessGroup,
    algorithm: str = NATIVE,
    nodes: Nodes | None = None,
) -> Tensor:
    """The mean over the group in `flat`'s dtype; `flat` is kept.

    Sums are made in float32, of float64 in float64. `algorithm` gathers the means: the backend's
    own collectives, the rounds of one of `ALGORITHMS` (those that cannot gather are replaced by
    `halving_doubling` or `ring`), or `hierarchical`. With one rank nothing is encoded.
    """
    if group.size() == 1:
        return flat.clone()
    dtype = torch.float64 if flat.dtype == torch.float64 else torch.float32
    if algorithm != "hierarchical":
        members = range(group.size())
        numbers = flat.to(dtype)
        return _two_phases(numbers, codec, feedback, group, algorithm, members).to(flat.dtype)
    numbers = flat.to(dtype, copy=True)
    nodes = nodes or flat_nodes(group)
    inside, elsewhere = inside_nodes(group.rank(), nodes)
    bounds = part_bounds(flat.numel(), inside.chunks)
    run_steps(numbers, inside.down, bounds, group)
    if elsewhere:
        own = numbers[bounds[inside.holds[0]] : bounds[inside.holds[1]]]
        own.mul_(len(nodes) / group.size())
        if len(elsewhere) > 1:
            own.copy_(_two_phases(own, codec, feedback, group, algorithm, elsewhere))
    run_steps(numbers, inside.up, bounds, group)
    return numbers.to(flat.dtype)


def compressed_reduce_scatter(
    flat: Tensor,
    codec: Codec,
    feedback: TwoPhaseFeedback | None,
    group: dist.ProcessGroup,
    algorithm: str = NATIVE,
    sizes: Sequence[int] | None = None,
) -> Tensor:
    """This rank's part of the mean: the first phase alone, nothing is gathered.

    For ranks that hold shards of what the mean is for. `sizes` are the elements of each rank's
    part, None: by `part_sizes`. The server's feedback is not used.
    """
    if group.size() == 1:
        return flat.clone()
    dtype = torch.float64 if flat.dtype == torch.float64 else torch.float32
    sizes = sizes or part_sizes(flat.numel(), group.size())
    numbers = flat.to(dtype)
    members = range(group.size())
    part = _part_of_mean(numbers, codec, feedback, group, algorithm, members, sizes)
    return part.to(flat.dtype)


def _two_phases(
    numbers: Tensor,
    codec: Codec,
    feedback: TwoPhaseFeedback | None,
    group: dist.ProcessGroup,
    algorithm: str,
    members: Sequence[int],
) -> Tensor:
    """The mean over `members` of the group, of which this rank is one."""
    sizes = part_sizes(numbers.numel(), len(members))
    mean = _part_of_mean(numbers, codec, feedback, group, algorithm, members, sizes)
    code = codec.encode(mean) if feedback is None else feedback.server.encode(mean)
    wires = [codec.wire_bytes(size) for size in sizes]
    codes = _gathered(code, wires, codec.has_fixed_size, group, algorithm, members)
    whole = torch.empty_like(numbers)
    for code, part in zip(codes, whole.split(sizes), strict=True):
        codec.decode_into(code, part)
    return whole


def _part_of_mean(
    numbers: Tensor,
    codec: Codec,
    feedback: TwoPhaseFeedback | None,
    group: dist.ProcessGroup,
    algorithm: str,
    members: Sequence[int],
    sizes: Sequence[int],
) -> Tensor:
    """The mean of what members sent of this rank's chunk."""
    own = sizes[list(members).index(group.rank())]
    if feedback is None:
        codes = [codec.encode(chunk) for chunk in numbers.split(list(sizes))]
    else:
        codes = feedback.worker.encode_chunks(numbers, sizes)
    came = _scattered(codes, codec, own, group, algorithm, members)
    mean, part = numbers.new_empty(own), numbers.new_empty(own)
    codec.decode_into(came[0], mean)
    for code in came[1:]:
        mean += codec.decode_into(code, part)
    return mean.div_(len(members))


def _scattered(
    codes: Sequence[Tensor],
    codec: Codec,
    numel: int,
    group: dist.ProcessGroup,
    algorithm: str,
    members: Sequence[int],
) -> list[Tensor]:
    """Each member's codes for this rank."""
    sizes = [codec.wire_bytes(numel)] * len(members)
    if not codec.has_fixed_size:
        lengths = [torch.tensor([code.numel()], device=code.device) for code in codes]
        told = all_to_all(lengths, [1] * len(members), group, members)
        sizes = [int(length) for length in torch.cat(told).tolist()]
    if algorithm != NATIVE:
        return all_to_all(codes, sizes, group, members)
    came = codes[0].new_empty(sum(sizes))
    sent = torch.cat(list(codes))
    dist.all_to_all_single(came, sent, sizes, [code.numel() for code in codes], group=group)
    return list(came.split(sizes))


def _gathered(
    code: Tensor,
    wires: Sequence[int],
    has_fixed_size: bool,
    group: dist.ProcessGroup,
    algorithm: str,
    members: Sequence[int],
) -> list[Tensor]:
    """Every member's codes, in buffers of one size."""
    place, count = list(members).index(group.rank()), len(members)
    sizes = list(wires)
    if not has_fixed_size:
        own = torch.tensor([code.numel()], device=code.device)
        sizes = [int(size) for size in all_to_all([own] * count, [1] * count, group, members)]
    largest = max(sizes)
    staged = code.new_zeros(count, largest)
    staged[place, : code.numel()] = code
    if algorithm == NATIVE:
        whole = torch.empty_like(staged)
        dist.all_gather_single(whole.view(-1), staged[place], group=group)
        staged = whole
    else:
        doubles = algorithm not in ("ring", "hierarchical") and count & (count - 1) == 0
        name = "halving_doubling" if doubles else "ring"
        schedule = schedule_of(name, group.rank(), (tuple(members),))
        order = _bit_reversed(count) if doubles else list(range(count))
        staged = staged[order]
        bounds = [largest * part for part in range(count + 1)]
        run_steps(staged.view(-1), schedule.up, bounds, group)
        staged = staged[order]
    return [row[:size] for row, size in zip(staged, sizes, strict=True)]


def _bit_reversed(count: int) -> list[int]:
    """Which chunk `halving_doubling` leaves with the rank of each place; its own inverse."""
    bits = count.bit_length() - 1
    return [int(format(place, f"0{bits}b")[::-1], 2) for place in range(count)]
