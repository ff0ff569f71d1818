"""Running statistics of batch norms under data parallelism, equal to those of one process.

A microbatch is normalised on the rank that runs it, as one process would normalise it, so losses
and gradients need nothing. But each rank's running mean and variance see its own microbatches
only. One call of a batch norm with momentum m turns a statistic r into (1 - m) r + m s. After n
calls a rank that began with r holds (1 - m)^n r + c, where c depends on what it saw alone; the
whole batch in order is one rank's map after the other's:

    r' = f_R(... f_1(r)),   f_i(x) = (1 - m)^n_i x + c_i

With momentum None the statistic is a mean over all calls, and n r adds up instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from claw_plan.executor.mesh import Mesh
from claw_plan.planner.torch_private import BatchNorm

AXES = ("dp_shard", "dp_replicate")
"""From the inner to the outer: consecutive slices of the global batch lie on dp_shard."""


@dataclass(frozen=True, slots=True)
class _Start:
    """A module, and mean, variance and number of calls (in this order, flat) before a step."""

    module: BatchNorm
    values: torch.Tensor


class RunningStatistics:
    """Composes the running statistics of all ranks, in the order of the global batch.

    It notes where a step starts at the first forward. Modules that already speak to other ranks
    (SyncBatchNorm) are left alone.
    """

    def __init__(self, stages: Iterable[nn.Module], mesh: Mesh) -> None:
        self._groups = [mesh.group(axis) for axis in AXES if mesh.sizes[axis] > 1]
        self._starts: list[_Start] = []
        self._modules: list[BatchNorm] = []
        for stage in stages if self._groups else ():
            own = [module for module in stage.modules() if _keeps_statistics(module)]
            self._modules += own  # type: ignore[arg-type]
            if own:
                stage.register_forward_pre_hook(self._begin)

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to compose."""
        return bool(self._modules)

    def _begin(self, *_: Any) -> None:
        if not self._starts and torch.is_grad_enabled():
            self._starts = [
                _Start(module, _values(module)) for module in self._modules if module.training
            ]

    @torch.no_grad()
    def compose(self) -> None:
        """After the last forward of a step; all ranks of data parallelism call it."""
        starts, self._starts = self._starts, []
        if not starts:
            return
        maps = torch.cat([_own_map(start) for start in starts], dim=1)
        for group in self._groups:
            gathered = [torch.empty_like(maps) for _ in range(dist.get_world_size(group))]
            dist.all_gather(gathered, maps, group=group)
            maps = gathered[0]
            for slopes, offsets in gathered[1:]:
                maps = torch.stack([slopes * maps[0], slopes * maps[1] + offsets])
        parts = maps.split([len(start.values) for start in starts], dim=1)
        for start, found in zip(starts, parts, strict=True):
            _set(start, found)


def _keeps_statistics(module: nn.Module) -> bool:
    is_norm = isinstance(module, BatchNorm) and not isinstance(module, nn.SyncBatchNorm)
    return is_norm and module.running_mean is not None


def _buffers(module: BatchNorm) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    mean, variance, calls = module.running_mean, module.running_var, module.num_batches_tracked
    assert mean is not None and variance is not None and calls is not None
    return mean, variance, calls


def _values(module: BatchNorm) -> torch.Tensor:
    return torch.cat([buffer.reshape(-1).double() for buffer in _buffers(module)])


def _own_map(start: _Start) -> torch.Tensor:
    """Slopes and offsets of what this rank's calls did; of the number of calls, too."""
    before, after = start.values, _values(start.module)
    slopes = torch.ones_like(before)
    if start.module.momentum is None:
        return torch.stack([slopes, _summed(after) - _summed(before)])
    calls = after[-1] - before[-1]
    slopes[:-1] = (1 - start.module.momentum) ** calls
    return torch.stack([slopes, after - slopes * before])


def _summed(values: torch.Tensor) -> torch.Tensor:
    """Means over all calls as sums over them."""
    return torch.cat([values[:-1] * values[-1], values[-1:]])


def _set(start: _Start, found: torch.Tensor) -> None:
    """Applies all ranks' maps to what the statistics were."""
    slopes, offsets = found
    cumulative = start.module.momentum is None
    values = slopes * (_summed(start.values) if cumulative else start.values) + offsets
    if cumulative:
        values[:-1] /= values[-1].clamp(min=1)
    buffers = _buffers(start.module)
    for buffer, value in zip(buffers, values.split([b.numel() for b in buffers]), strict=True):
        buffer.copy_(value.view(buffer.shape))


class WithoutStatistics:
    """Around a forward that recompute runs again: batch norms must not count it twice."""

    def __init__(self, block: nn.Module) -> None:
        self._modules = [m for m in block.modules() if _keeps_statistics(m)]
        self._kept: list[torch.Tensor] = []

    def __enter__(self) -> None:
        self._kept = [buffer.clone() for module in self._modules for buffer in _buffers(module)]  # type: ignore[arg-type]

    def __exit__(self, *_: object) -> None:
        buffers = [buffer for module in self._modules for buffer in _buffers(module)]  # type: ignore[arg-type]
        with torch.no_grad():
            for buffer, value in zip(buffers, self._kept, strict=True):
                buffer.copy_(value)
