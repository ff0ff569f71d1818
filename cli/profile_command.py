"""`claw-plan profile MODEL`: measures the model's kernels on this machine, for better plans."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from claw_plan.cli.options import FILE, SAMPLES, check_can_write
from claw_plan.cli.progress import ProgressBar
from claw_plan.cli.streams import say, stdout_kept_clean
from claw_plan.profiles.work import PRECISIONS

if TYPE_CHECKING:
    from claw_plan.planner.model_source import LoadedModel
    from claw_plan.profiles.measurement import Measurement


@click.command()
@click.argument("model", metavar="MODEL", type=FILE)
@click.option(
    "--batch",
    "batches",
    type=SAMPLES,
    multiple=True,
    default=(1, 2, 4),
    show_default=True,
    metavar="B",
    help="Samples of one forward; may be given several times.",
)
@click.option(
    "--gpus",
    "ranks",
    type=click.IntRange(min=1, max=4096),
    default=1,
    show_default=True,
    metavar="N",
    help="Measure the model divided over N devices here too (processes where no GPU is).",
)
@click.option("--seq-len", type=click.IntRange(min=1), metavar="N", help="Tokens of a sample.")
@click.option(
    "--precision",
    type=click.Choice(list(PRECISIONS)),
    default="fp32",
    show_default=True,
    metavar="P",
    help="bf16, fp16 or fp32, in which kernels compute.",
)
@click.option("--build", metavar="EXPR", help="Expression that makes the model in its own file.")
@click.option("--inputs", metavar="TEXT", help='The inputs, as in "idx=int64[B,1024]<50304".')
@click.option(
    "--output",
    "-o",
    type=FILE,
    metavar="FILE",
    help="Profile to add to, made if it is not there.  [default: MODEL's name with .profile]",
)
def profile(
    model: Path,
    batches: tuple[int, ...],
    ranks: int,
    seq_len: int | None,
    precision: str,
    build: str | None,
    inputs: str | None,
    output: Path | None,
) -> None:
    """Measure how long MODEL's kernels take on this machine's device.

    Runs forward and backward at a few batch sizes; planning with --profile then rests on the
    measured times. With --gpus also divided over several devices, collectives included.
    """
    output = output or Path(model.stem + ".profile")
    check_can_write(output, inputs=[model])
    settings: dict[str, Any] = {"precision": precision, "seq_len": seq_len}
    count, device = 0, "this device"
    with stdout_kept_clean(), ProgressBar() as progress:
        progress("loading", 0.0)
        from claw_plan.planner.model_source import load_model
        from claw_plan.profiles.profile import append_profile

        loaded = load_model(model, build=build, inputs=inputs)
        for measured in _measure(loaded, sorted(set(batches)), ranks, settings, progress):
            append_profile(output, measured)  # at once, so that a later failure loses nothing
            count += len(measured)
            device = measured[0].device.partition("/")[0] if measured else device
    say(
        f"wrote {count} measurements on {device} to {output}; plan with: claw-plan "
        f"{model} --profile {output} --cluster ..."
    )


def _measure(
    loaded: LoadedModel,
    batches: list[int],
    ranks: int,
    settings: dict[str, Any],
    progress: ProgressBar,
) -> Iterator[list[Measurement]]:
    """The whole model's on one device where it fits, then those of its parts on all."""
    from claw_plan.executor.errors import ExecutionError
    from claw_plan.executor.profile_model import profile_model
    from claw_plan.executor.profile_ranks import profile_ranks

    try:
        yield profile_model(loaded, batches, progress=progress, **settings)
    except ExecutionError as error:
        if ranks == 1:
            raise
        say(str(error))
    if ranks > 1:
        yield from profile_ranks(loaded, batches, ranks, progress=progress, say=say, **settings)
