"""Steps of an asynchronous pipeline: each begins before the last has ended (PipeDream-2BW).

`step` runs the rank's row of `planner.asynchronous` for one global batch: its forwards, and the
backwards of microbatches that have come back. A stage changes its weights as soon as the last
backward of a step has run there; what its microbatches in flight use stays (`weight_versions`).
`drain` runs the backwards that are left, after which nothing is in flight; it changes no result.

Nothing in a step waits for all ranks, or the bubble would be back. The loss of a step is summed
over the ranks while the next one runs. Where ranks must agree before they change weights (the
norm of all gradients, tied parameters), sums run likewise and the change waits until the first
microbatch needs it, one step later; the gradients are kept so long.

Messages forward and backward go over groups of their own, each in the order of microbatches: on
one group NCCL would run them in the order in which they are asked for, and stages could wait for
each other.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from claw_plan.executor.clipping import begin_norm
from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.pipeline import RecordedStage
from claw_plan.executor.sharding import DTYPES
from claw_plan.executor.torch_private import PipelineRuntime, pipeline_runtime
from claw_plan.executor.weight_versions import Gradient, WeightVersions, lower_inputs
from claw_plan.planner.actions import FORWARD, Action
from claw_plan.planner.asynchronous import drain_row, step_row
from claw_plan.planner.model_source import Batch
from claw_plan.planner.schedules import schedule_actions

if TYPE_CHECKING:
    from claw_plan.executor.parallel_model import ParallelModel

Settings = list[dict[str, Any]]
"""Of each group of an optimizer all that is no parameter."""


class Messages:
    """What a stage sends its neighbours and gets from them, each way in order.

    Messages to come are asked for one ahead, once it is certain that they come: `end` is the
    number of the first that is not.
    """

    def __init__(self, stage: RecordedStage, count: int, group: dist.ProcessGroup) -> None:
        self._stage, self._count = stage, count
        self.backward_group = _same_group(group)
        self._groups = {True: group, False: self.backward_group}
        self._asked: dict[bool, deque[list[dist.Work]]] = {True: deque(), False: deque()}
        self._next = {True: 0, False: 0}
        self.end = {True: 0, False: 0}
        self._sent: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def ask(self, *, forward: bool) -> None:
        """Asks for the next message, if it is certain to come and none is asked for yet."""
        if self._asked[forward] or self._next[forward] >= self.end[forward]:
            return
        chunk = self._next[forward] % self._count
        self._next[forward] += 1
        make = self._stage.get_fwd_recv_ops if forward else self._stage.get_bwd_recv_ops
        group = self._groups[forward]
        works = [dist.irecv(op.tensor, op.peer, group=group) for op in make(chunk)]
        self._asked[forward].append([work for work in works if work is not None])

    def take(self, *, forward: bool) -> None:
        """Waits for the next message, and asks for the one after it."""
        self.ask(forward=forward)
        for work in self._asked[forward].popleft():
            work.wait()
        self.ask(forward=forward)

    def send(self, chunk: int, *, forward: bool) -> None:
        """Sends what a pass has made. Long since sent messages are let go."""
        make = self._stage.get_fwd_send_ops if forward else self._stage.get_bwd_send_ops
        for op in make(chunk):
            work = dist.isend(op.tensor, op.peer, group=self._groups[forward])
            assert work is not None
            self._sent.append((work, op.tensor))
        while len(self._sent) > 4 * self._count:
            self._sent.popleft()[0].wait()

    def wait_until_sent(self) -> None:
        """Waits for all."""
        while self._sent:
            self._sent.popleft()[0].wait()

    def start_at(self, number: int) -> None:
        """Nothing is in flight; the next message is that of this microbatch."""
        for way in (True, False):
            self._next[way] = self.end[way] = number


def _same_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Another group of the same ranks; all ranks of the world call it."""
    own = tuple(dist.get_process_group_ranks(group))
    every = [own] * dist.get_world_size()
    dist.all_gather_object(every, own)
    made: dict[tuple[int, ...], dist.ProcessGroup] = {
        ranks: dist.new_group(list(ranks)) for ranks in dict.fromkeys(every)
    }
    return made[own]


class OverlappingSteps:
    """Runs the steps of a rank of an asynchronous pipeline.

    With `lowers` kernels run in the plan's precision.
    `losses` are those known so far, in order; `after_update` is called with the number of each
    step whose update has been made, while the parameters are at that version. `first_step` steps
    were done before.
    """

    def __init__(self, model: ParallelModel, *, lowers: bool) -> None:
        precision = DTYPES[model.plan.training.precision]
        lowered = precision if lowers and precision is not torch.float32 else None
        _refuse(model, lowered)
        [self._stage] = model.pipeline_stages
        self._model = model
        schedule = model.plan.schedule
        self._count, self._ranks = schedule.num_microbatches, self._stage.group_size
        self._rank = self._stage.stage_index
        self.versions = WeightVersions(model.trainable(), lowered)
        if lowered is not None:
            names = model.plan.stages[self._rank].modules
            [stage] = model.stages
            lower_inputs([stage, *map(stage.model.get_submodule, names)], lowered)
        self._messages = Messages(self._stage, self._count, model.mesh.group("pp"))
        rows = schedule_actions(schedule.name, self._ranks, self._count)
        texts = [[str(action) for action in row] for row in rows]
        # Torch's runtime only makes the stages ready; it cannot overlap steps.
        self._runtime: PipelineRuntime = pipeline_runtime(
            [self._stage],
            texts,
            self._count,
            lambda loss, _: model.share_of_loss(loss, self._count),
        )
        self._is_ready = False
        self._fed, self._fills = 0, True
        self._shares: dict[int, torch.Tensor] = {}
        self._seen: list[torch.Tensor] = []
        self._loss: tuple[dist.Work, torch.Tensor] | None = None
        self._settings: dict[int, Settings] = {}
        self._waiting: tuple[int, list[Gradient], Callable[[], torch.Tensor | None]] | None = None
        self.losses: list[float] = []
        self.after_update: Callable[[int], None] = lambda step: None

    @property
    def backward_group(self) -> dist.ProcessGroup:
        """The ranks of the pipeline once more, for the messages of backward passes."""
        return self._messages.backward_group

    def step(self, microbatches: Sequence[Batch]) -> float:
        """Feeds a step's microbatches; what has come back of it and the one before is done.

        Answers with the newest loss that is known, that of the step before; nan for none.
        """
        step, self._fed = self._fed, self._fed + 1
        self._make_ready(step, microbatches[0])
        self._settings[step] = _settings_of(self._model.optimizer)
        self._seen = []
        end = self._fed * self._count
        self._messages.end[True] = end if self._rank else 0
        row = step_row(self._rank, self._ranks, self._count, step, fills=self._fills)
        self._fills = False
        self._messages.ask(forward=True)
        for action in row:
            self._run(action, microbatches)
        self._know_loss()
        self._sum_loss()
        self.versions.show_newest()
        return self.losses[-1] if self.losses else math.nan

    def drain(self) -> None:
        """Runs all that is left; the weights are then those after the last step fed."""
        if self._fills:
            return
        for action in drain_row(self._rank, self._ranks, self._count, self._fed - 1):
            self._run(action, ())
        self._make_waiting_update()
        self._messages.wait_until_sent()
        self._know_loss()
        self.versions.show_newest()
        self._fills = True

    def resume(self, step: int) -> None:
        """Goes on after so many steps, whose weights the parameters and `older` have."""
        assert self._fills, "nothing may be in flight"
        self._fed = self.versions.updates = step
        self._messages.start_at(step * self._count)

    def _make_ready(self, step: int, microbatch: Batch) -> None:
        if not self._is_ready:
            self.versions.use(step)  # in the precision of the kernels
            self._stage.remember_buffers()
            self._runtime.prepare(microbatch)
            self._is_ready = True

    def _run(self, action: Action, microbatches: Sequence[Batch]) -> None:
        step, chunk = divmod(action.microbatch, self._count)
        if action.kind == FORWARD:
            if chunk == 0:
                self._make_waiting_update()
            self.versions.use(step)
            self._forward(chunk, microbatches[chunk])
            return
        self.versions.use(step)
        self._backward(chunk)
        if chunk == self._count - 1:
            self._end_step(step)

    def _forward(self, chunk: int, microbatch: Batch) -> None:
        stage = self._stage
        if not stage.is_first:
            self._messages.take(forward=True)
            for received in stage.args_recv_info[chunk]:
                if received.buffer is not None:
                    received.buffer.grad = None
        with self._model.recorder or nullcontext():
            output = stage.forward_one_chunk(chunk, (), microbatch, save_forward_output=False)
        if stage.is_last:
            self._seen.append(output.detach())
            self._shares[chunk] = self._model.share_of_loss(output, self._count)
            return
        self._messages.send(chunk, forward=True)
        self._messages.end[False] += 1
        self._messages.ask(forward=False)

    def _backward(self, chunk: int) -> None:
        stage = self._stage
        if not stage.is_last:
            self._messages.take(forward=False)
        with self._model.recorder or nullcontext():
            stage.backward_one_chunk(chunk, loss=self._shares.pop(chunk, None))
        if not stage.is_first:
            self._messages.send(chunk, forward=False)

    def _end_step(self, step: int) -> None:
        """All gradients of a step are there: an update, or what it has to wait for."""
        self._make_waiting_update()
        self.versions.show(self.versions.take_gradients())
        with self._model.recorder or nullcontext():
            self._model.finish_gradients(ties=False)
        agree = _agreeing(self._model)
        gradients = self.versions.take_shown()
        if agree is None:
            self._update(step, gradients)
        else:
            self._waiting = (step, gradients, agree)

    def _make_waiting_update(self) -> None:
        if self._waiting is None:
            return
        step, gradients, agree = self._waiting
        self._waiting = None
        running = self.versions.take_gradients()
        self._update(step, gradients, agree())
        self.versions.give_gradients(running)

    def _update(
        self, step: int, gradients: Sequence[Gradient], norm: torch.Tensor | None = None
    ) -> None:
        model, now = self._model, _settings_of(self._model.optimizer)
        self.versions.show(gradients)
        if norm is not None:
            model.clip_to(norm)
        fed = self._settings.pop(step)
        _set(model.optimizer, fed)
        with model.recorded_optimizer():
            self.versions.update(model.optimizer.step)
        _set_back(model.optimizer, fed, now)
        self.after_update(step)

    def _sum_loss(self) -> None:
        """Begins to add up what the ranks of the last stage saw."""
        seen = torch.zeros(1, dtype=torch.float64)
        if self._seen:
            seen += (torch.stack(self._seen).double().sum() / self._count).cpu()
        work = dist.all_reduce(seen, async_op=True)
        assert work is not None
        self._loss = (work, seen)

    def _know_loss(self) -> None:
        if self._loss is None:
            return
        work, total = self._loss
        self._loss = None
        work.wait()
        self.losses.append(self._model.mean_of_ranks(total.item()))


def _refuse(model: ParallelModel, lowered: torch.dtype | None) -> None:
    """What has no place in overlapping steps is told before they begin."""
    said = f"schedule={model.plan.schedule.name}"
    if model.statistics is not None and model.statistics.is_needed:
        raise ExecutionError(
            f"{said}: running statistics of batch norms are composed over replicas at the end of "
            "a step, when forwards of the next one have run; use dp_replicate=1, or schedule=1F1B"
        )
    if lowered is not None and len(model.trainable()) < len(model.parameters):
        raise ExecutionError(
            f"{said} in {lowered} trains all parameters, but some are frozen; use "
            "--precision float32, or schedule=1F1B"
        )


def _agreeing(model: ParallelModel) -> Callable[[], torch.Tensor | None] | None:
    """Begins the sums over stages that an update needs; None where it needs none.

    The call waits for them, and answers with the norm of all gradients where they are clipped. Of
    stages that share a parameter the first, whose gradient counts in the norm, ends a step last:
    it finds what the others have sent.
    """
    tied = [] if model.tied is None else model.tied.begin()
    clips = model.plan.training.clip_norm is not None
    if not tied and not clips:
        return None
    for sums in tied if clips else ():
        if sums.is_first:
            sums.work.wait()
    norm = begin_norm(model.counted, model.device) if clips else None

    def agree() -> torch.Tensor | None:
        for sums in tied:
            sums.work.wait()
        return norm() if norm is not None else None

    return agree


def _settings_of(optimizer: torch.optim.Optimizer) -> Settings:
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def _set(optimizer: torch.optim.Optimizer, settings: Settings) -> None:
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        group.update(values)


def _set_back(optimizer: torch.optim.Optimizer, fed: Settings, now: Settings) -> None:
    """What a schedule has set since, unless the optimizer itself has changed it."""
    for group, before, after in zip(optimizer.param_groups, fed, now, strict=True):
        group.update({key: after[key] for key in before if group[key] is before[key]})
