"""Runs a model's forward and backward here and keeps how long each kernel took.

`claw-plan profile` calls `profile_model`. The Measurements carry the keys that planning looks up,
so a plan for this device rests on them wherever its shapes are the same or lie between. Nothing
is trained: weights do not change.
"""

from __future__ import annotations

import datetime
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch

from claw_plan.executor.benchmark import CPU_DEVICE
from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.recorder import MOST_SAMPLES, StepRecorder
from claw_plan.executor.whole_model import cast_floats, loss_of
from claw_plan.planner.model_source import LoadedModel
from claw_plan.profiles.device_names import catalogue_name
from claw_plan.profiles.measurement import Measurement
from claw_plan.profiles.work import PRECISIONS, CollectiveWork, OpWork

_WARM_UPS = 1

Samples = dict[OpWork | CollectiveWork, list[int]]
Progress = Callable[[str, float], None]


def profile_model(
    loaded: LoadedModel,
    batch_sizes: Sequence[int],
    *,
    device: torch.device | None = None,
    precision: str = "fp32",
    seq_len: int | None = None,
    repeats: int = 3,
    progress: Progress = lambda *_: None,
) -> list[Measurement]:
    """Measurements of every kernel at every batch size, on a GPU if there is one.

    On CPUs one thread computes, as for a rank. Raises ExecutionError when the model does not fit
    the device, naming the largest batch that did.
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, PRECISIONS[precision])
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    samples: Samples = defaultdict(list)
    done: list[int] = []
    try:
        model = loaded.build().to(device=device, dtype=dtype)
        for place, size in enumerate(batch_sizes):
            progress(f"batch of {size}", place / len(batch_sizes))
            batch = cast_floats(loaded.example_batch(size, seq_len), dtype)
            batch = {name: value.to(device) for name, value in batch.items()}
            for index in range(_WARM_UPS + repeats):
                found = _one_step(loaded, model, batch, device)
                if index >= _WARM_UPS:
                    for work, times in found.items():
                        samples[work] = (samples[work] + times)[:MOST_SAMPLES]
            done.append(size)
    except torch.OutOfMemoryError:
        fitted = f"a batch of {done[-1]} did" if done else "no batch tried did"
        raise ExecutionError(
            f"the model with a batch of {batch_sizes[len(done)]} does not fit {device}; {fitted}; "
            "give smaller ones with --batch, or divide it over several devices with --gpus"
        ) from None
    finally:
        torch.set_num_threads(threads)
    return _measurements(samples, device)


def _one_step(
    loaded: LoadedModel,
    model: torch.nn.Module,
    batch: dict[str, torch.Tensor],
    device: torch.device,
) -> Samples:
    recorder = StepRecorder(0, device, {}, {}, times_work=True)
    call = loss_of(loaded)
    with recorder:
        with recorder.span("forward", "model"):
            loss = call(model, batch)
        with recorder.span("backward", "model"):
            loss.backward()
    model.zero_grad(set_to_none=True)
    return recorder.samples


def _measurements(samples: Samples, device: torch.device) -> list[Measurement]:
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    provenance = {"when": now, "torch": torch.__version__, "command": "claw-plan profile"}
    name = device_name(device)
    return [
        Measurement(device=name, work=work, samples_ns=tuple(times), provenance=provenance)
        for work, times in samples.items()
    ]


def device_name(device: torch.device) -> str:
    """The catalogue's name of a device of this machine; the driver's where it has none."""
    if device.type == "cpu":
        return CPU_DEVICE
    theirs = torch.cuda.get_device_name(device)
    return catalogue_name(theirs) or theirs
