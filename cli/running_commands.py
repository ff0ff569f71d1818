"""`claw-plan run`, `verify` and `learn`: training, and what is learned from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from claw_plan.cli.checkpoint_command import checkpoint_options
from claw_plan.cli.json_output import json_text, run_object, verification_object
from claw_plan.cli.launch_options import launch_options, take_launch, told_only
from claw_plan.cli.options import COUNT, FILE, check_can_write
from claw_plan.cli.progress import ProgressBar
from claw_plan.cli.run_report import print_learned, print_run, print_verification
from claw_plan.cli.streams import DONE, NO_PLAN, say, stdout_kept_clean

# The executor is imported when a command needs it: it brings torch, and --help must not wait.

PLAN = click.argument("plan_file", metavar="PLAN", type=FILE)
JSON = click.option(
    "--json", "as_json", is_flag=True, help="Print the result as JSON (docs/json.md)."
)


@click.command()
@PLAN
@click.option(
    "--steps",
    type=COUNT,
    default=20,
    show_default=True,
    metavar="N",
    help="Optimizer steps, counted from the beginning of the training.",
)
@click.option(
    "--data",
    type=FILE,
    metavar="FILE",
    help="Train on the bytes of this file.  [default: the model file's train_data, else random "
    "batches]",
)
@click.option(
    "--runs",
    type=FILE,
    default=Path("runs"),
    show_default=True,
    metavar="DIR",
    help="Folder in which the run gets a folder of its own.",
)
@launch_options
@checkpoint_options
@JSON
def run(
    plan_file: Path, steps: int, data: Path | None, runs: Path, as_json: bool, **options: Any
) -> None:
    """Train with PLAN on this machine, on the hosts of a file or of a Slurm job, or on the ranks
    that torchrun, srun or mpirun started.

    Leaves a folder with the losses, the measured step, the measurements that 'claw-plan learn'
    reads, and the log of every rank.
    """
    if told_only(plan_file, options):
        return
    del options["slurm"], options["print_command"]
    with stdout_kept_clean(), ProgressBar() as progress:
        progress("starting the ranks", 0.0)
        from claw_plan.executor.checkpoint_options import CheckpointOptions
        from claw_plan.executor.run import run_plan

        def on_step(line: Mapping[str, Any]) -> None:
            done = int(line["step"])
            progress(
                f"step {done} of {steps}, loss {line['loss']:.4f}, {line['step_time_ms']:.0f} ms",
                done / steps,
            )
            if "note" in line:
                say(line["note"])

        launch = take_launch(options)
        result = run_plan(
            plan_file,
            steps,
            data=data,
            runs=runs,
            checkpoints=CheckpointOptions(**options),
            on_step=on_step,
            launch=launch,
        )
    if result is None:  # one of the other ranks that torchrun or srun started
        return
    if as_json:
        click.echo(json_text(run_object(result)), nl=False)
    else:
        print_run(result)


@click.command()
@PLAN
@click.option(
    "--steps", type=COUNT, default=5, show_default=True, metavar="N", help="Steps to compare."
)
@click.option(
    "--data",
    type=FILE,
    metavar="FILE",
    help="Compare on the bytes of this file.  [default: as for 'claw-plan run']",
)
@JSON
def verify(plan_file: Path, steps: int, data: Path | None, as_json: bool) -> int:
    """Check that PLAN trains exactly like one process.

    Losses and parameters are compared in fp64, where only rounding may differ, then losses in
    fp32. A model too large for one process here is compared with fewer blocks. Exit code 1 says
    that they differ.
    """
    with stdout_kept_clean(), ProgressBar() as progress:
        progress("training with the plan and in one process", 0.0)
        from claw_plan.executor.verify import verify_plan

        result = verify_plan(plan_file, steps, data=data)
    if as_json:
        click.echo(json_text(verification_object(result)), nl=False)
    else:
        print_verification(result)
    if result.codec != "none":
        say(f"compared without codec={result.codec}, which changes what is trained")
    if result.blocks is not None:
        say(f"too large for one process here: compared with {result.blocks} of its blocks")
    if not result.ok:
        say(f"the plan does not train like one process: {result.first_difference}")
    return DONE if result.ok else NO_PLAN


@click.command()
@click.argument("runs", metavar="RUN...", type=FILE, nargs=-1, required=True)
@click.option(
    "--profile",
    type=FILE,
    metavar="F",
    help="Profile to write, made if it is not there.  [default: CLUSTER.profile]",
)
def learn(runs: tuple[Path, ...], profile: Path | None) -> None:
    """Make predictions better with what RUNs measured.

    RUN is a folder that 'claw-plan run' wrote, as in runs/*. Shows predicted against measured
    steps before and after; the next plan uses the profile.
    """
    check_can_write(profile)
    with stdout_kept_clean(), ProgressBar() as progress:
        progress("loading", 0.0)
        from claw_plan.executor.learn import learn as learn_from

        learned = learn_from(runs, profile, progress)
    for folder in learned.skipped:
        say(f"left out {folder}: no finished run")
    for run in learned.runs:
        if run.unlike_plan:
            say(f"learnt only what kernels take from {run.run}: {run.unlike_plan}")
    print_learned(learned)
