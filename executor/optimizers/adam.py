"""`Adam(params, compress=True, compression="1bit")`: the optimizer for a script of one's own.

    net = DistributedDataParallel(net)
    optimizer = Adam(net.parameters(), lr=3e-4, compress=True, warmup_steps=300)
    optimizer.attach(net)

Without DistributedDataParallel leave `attach` out: the optimizer then averages what the gradients
need itself.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.optimizers.compressed import CompressedOptimizer, Parameters
from claw_plan.executor.optimizers.one_bit_adam import OneBitAdam
from claw_plan.executor.optimizers.power_sgd_adam import PowerSgdAdam
from claw_plan.executor.optimizers.zero_one_adam import ZeroOneAdam

ONE_BIT, ZERO_ONE, LOW_RANK = "1bit", "0/1", "low_rank"


def Adam(  # noqa: N802  # called like the class of torch that it stands for
    params: Parameters,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    compress: bool = False,
    compression: str = ONE_BIT,
    warmup_steps: int | None = None,
    group: dist.ProcessGroup | None = None,
    **options: Any,
) -> torch.optim.AdamW | CompressedOptimizer:
    """Torch's AdamW, or with `compress` one whose ranks exchange compressed momentum.

    `compression` is '1bit' (1-bit Adam), '0/1' (0/1 Adam), 'low_rank:16' (PowerSGD of rank 16), or
    a codec of the momentum such as 'top_k:0.001'. `warmup_steps` first steps exchange whole
    gradients. Weights decay apart from the gradient; without decay AdamW is Adam. `group` are the
    replicas, None: all ranks.

    Raises ExecutionError for parameters that are sharded, ranks with other parameters, and a
    warm-up that is not given.
    """
    if not compress:
        return torch.optim.AdamW(params, lr, betas, eps, weight_decay)
    if warmup_steps is None:
        raise ExecutionError(
            "compress=True needs warmup_steps, the first steps that exchange whole gradients: "
            "15 to 25 % of all steps"
        )
    if compression.partition(":")[0] == LOW_RANK:
        options |= {"rank": _rank_of(compression), "warmup_steps": warmup_steps, "group": group}
        return PowerSgdAdam(params, lr, betas, eps, weight_decay, **options)
    kind = ZeroOneAdam if compression == ZERO_ONE else OneBitAdam
    codec = "one_bit" if compression in (ONE_BIT, ZERO_ONE) else compression
    return kind(
        params, lr, betas, eps, weight_decay,
        codec=codec, warmup_steps=warmup_steps, group=group, **options,
    )  # fmt: skip


def _rank_of(compression: str) -> int:
    _, _, rank = compression.partition(":")
    if not rank.isdigit() or int(rank) < 1:
        raise ExecutionError(
            f"compression={compression!r}: say of which rank, at least 1, as in 'low_rank:16'"
        )
    return int(rank)
