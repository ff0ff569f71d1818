"""The same training in one process, without any wrapping: what every plan must equal."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as functional

from claw_plan.executor.batches import Source
from claw_plan.executor.optimizer import make_optimizer
from claw_plan.executor.whole_model import DOUBLE, build_whole, cast_floats, loss_of
from claw_plan.planner.errors import PlanError
from claw_plan.planner.model_source import Batch, LoadedModel
from claw_plan.planner.plan import Plan
from claw_plan.planner.schedules import ASYNCHRONOUS

FUNCTIONAL_DROPOUTS = (
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_alpha_dropout",
)
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


def without_dropout(loaded: LoadedModel) -> LoadedModel:
    """The same model with the probability of its dropout modules at 0.

    Ranks draw their random numbers in another order than one process; without dropout there is
    nothing to draw.
    """

    def make() -> nn.Module:
        model: nn.Module = loaded.make()
        for module in model.modules():
            if isinstance(module, DROPOUTS):
                module.p = 0.0
            elif isinstance(module, nn.RNNBase):
                module.dropout = 0.0  # between its layers, inside the kernel
        return model

    return dataclasses.replace(loaded, make=make)


@contextmanager
def without_functional_dropout() -> Iterator[None]:
    """The same for models that call torch.nn.functional's dropouts, or attention's, themselves."""
    attention = functional.scaled_dot_product_attention

    @wraps(attention)
    def attend(
        query: Any, key: Any, value: Any, attn_mask: Any = None, *rest: Any, **kw: Any
    ) -> Any:
        if "dropout_p" in kw:
            kw["dropout_p"] = 0.0
        return attention(query, key, value, attn_mask, *((0.0, *rest[1:]) if rest else ()), **kw)

    changed: dict[str, Any] = dict.fromkeys(FUNCTIONAL_DROPOUTS, lambda input, *a, **kw: input)
    changed["scaled_dot_product_attention"] = attend
    originals = {name: getattr(functional, name) for name in changed}
    try:
        for name, value in changed.items():
            setattr(functional, name, value)
        yield
    finally:
        for name, value in originals.items():
            setattr(functional, name, value)


def batch_for(source: Source, step: int, precision: str) -> Batch:
    """The global batch of a step in the precision of the comparison."""
    batch = source.global_batch(step)
    return cast_floats(batch, torch.float64) if precision == DOUBLE else batch


class Versions:
    """The weights of a model and those of one step before."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [*model.parameters()]
        self._before = self._newest = [p.detach().clone() for p in self._parameters]

    def show_before(self) -> None:
        """The coming step's gradients are found here."""
        self._newest = [parameter.detach().clone() for parameter in self._parameters]
        self._set(self._before)

    def show_newest(self) -> None:
        """The optimizer changes these."""
        self._before = self._newest
        self._set(self._newest)

    @torch.no_grad()
    def _set(self, values: list[torch.Tensor]) -> None:
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.copy_(value)


def reference_steps(
    plan: Plan, loaded: LoadedModel, source: Source, steps: int, precision: str
) -> Iterator[tuple[float, dict[str, torch.Tensor]]]:
    """After each step on the source's batches their loss and every parameter.

    Gradients of an asynchronous plan are found at the weights of one step before
    (`planner.asynchronous`).

    Raises PlanError when the model's forward draws random numbers. In fp64 it is to be called
    inside a DoubleMode.
    """
    model = build_whole(plan, loaded, precision)
    optimizer = make_optimizer(
        plan.training, loaded, [p for p in model.parameters() if p.requires_grad]
    )
    call = loss_of(loaded)
    size = plan.knobs().microbatch_size
    versions = Versions(model) if plan.schedule.name in ASYNCHRONOUS else None
    for step in range(steps):
        batch = batch_for(source, step, precision)
        if versions is not None:
            versions.show_before()
        count = plan.training.global_batch // size
        total = 0.0
        for index in range(count):
            rows = slice(index * size, (index + 1) * size)
            random_state = torch.get_rng_state()
            loss = call(model, {name: value[rows] for name, value in batch.items()})
            if not torch.equal(random_state, torch.get_rng_state()):
                raise PlanError(
                    f"{loaded.path}: the forward draws random numbers (dropout that is no "
                    "nn.Dropout?), so no two ways of training it are equal; switch it off in the "
                    "model and verify again"
                )
            (loss / count).backward()
            total += loss.item() / count
        if versions is not None:
            versions.show_newest()
        if plan.training.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), plan.training.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        yield total, {name: p.detach().clone() for name, p in model.named_parameters()}
