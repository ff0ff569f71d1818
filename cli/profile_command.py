"""`claw-plan profile MODEL`: measures the model's kernels on this machine, for better plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from claw_plan.cli.json_output import json_text
from claw_plan.cli.options import FILE, SAMPLES, check_can_write
from claw_plan.cli.progress import ProgressBar
from claw_plan.cli.streams import say, stdout_kept_clean
from claw_plan.profiles.work import PRECISIONS, OpWork

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
@click.option("--json", "as_json", is_flag=True, help="Print what was measured as JSON.")
def profile(
    model: Path,
    batches: tuple[int, ...],
    ranks: int,
    seq_len: int | None,
    precision: str,
    build: str | None,
    inputs: str | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Measure how long MODEL's kernels take on this machine's device.

    Runs forward and backward at a few batch sizes; planning with --profile then rests on the
    measured times. With --gpus also divided over several devices, collectives included.
    """
    output = output or Path(model.stem + ".profile")
    check_can_write(output, inputs=[model])
    settings: dict[str, Any] = {"precision": precision, "seq_len": seq_len}
    found: list[Measurement] = []
    said: list[str] = []
    with stdout_kept_clean(), ProgressBar() as progress:
        progress("loading", 0.0)
        from claw_plan.planner.model_source import load_model
        from claw_plan.profiles.profile import append_profile

        loaded = load_model(model, build=build, inputs=inputs)
        sizes = sorted(set(batches))
        for measured in _measure(loaded, sizes, ranks, settings, progress, said.append):
            append_profile(output, measured)  # at once, so that a later failure loses nothing
            found += measured
    for sentence in said:
        say(sentence)
    if as_json:
        click.echo(json_text(_object(output, found, said)), nl=False)
    devices = ", ".join(_devices(found)) or "this device"
    say(
        f"wrote {len(found)} measurements on {devices} to {output}; plan with: claw-plan "
        f"{model} --profile {output} --cluster ..."
    )


def _devices(found: list[Measurement]) -> list[str]:
    """What was measured; the device of a link counts as its own."""
    return list(dict.fromkeys(one.device.partition("/")[0] for one in found))


def _object(output: Path, found: list[Measurement], said: list[str]) -> dict[str, Any]:
    kernels = sum(isinstance(one.work, OpWork) for one in found)
    return {
        "profile": str(output),
        "devices": _devices(found),
        "kernels": kernels,
        "collectives": len(found) - kernels,
        "warnings": said,
    }


def _measure(
    loaded: LoadedModel,
    batches: list[int],
    ranks: int,
    settings: dict[str, Any],
    progress: ProgressBar,
    warn: Callable[[str], None],
) -> Iterator[list[Measurement]]:
    """The whole model's on one device where it fits, then those of its parts on all."""
    from claw_plan.executor.errors import ExecutionError
    from claw_plan.executor.profile_model import profile_model
    from claw_plan.executor.profile_ranks import local_cluster, profile_ranks

    if ranks > 1:
        local_cluster(ranks)  # says that there are too few devices before anything is measured
    try:
        yield profile_model(loaded, batches, progress=progress, **settings)
    except ExecutionError as error:
        if ranks == 1:
            raise
        warn(str(error))
    if ranks > 1:
        yield from profile_ranks(loaded, batches, ranks, progress=progress, say=warn, **settings)
