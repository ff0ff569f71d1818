"""`claw-plan export`: a plan as a plain torch script."""

from __future__ import annotations

from pathlib import Path

import click

from claw_plan.cli.options import FILE, check_can_write
from claw_plan.cli.progress import ProgressBar
from claw_plan.cli.streams import say, stdout_kept_clean
from claw_plan.profiles.files import write_atomic

# The executor is imported when a command needs it: it brings torch, and --help must not wait.


@click.command()
@click.argument("plan_file", metavar="PLAN", type=FILE)
@click.option(
    "--to",
    "target",
    type=click.Choice(["torch"]),
    default="torch",
    show_default=True,
    help="What the script is written for.",
)
@click.option(
    "--output", "-o", type=FILE, metavar="SCRIPT", help="The script.  [default: standard output]"
)
def export(plan_file: Path, target: str, output: Path | None) -> None:
    """Write PLAN as a plain torch script that trains without claw-plan.

    The script needs torch and the model's file, and trains on the same batches and weights as
    'claw-plan run'. What plain torch cannot be told in readable lines is refused, with what to
    plan instead.
    """
    check_can_write(output, inputs=(plan_file,))
    with stdout_kept_clean(), ProgressBar() as progress:
        progress("loading", 0.0)
        from claw_plan.executor.export import export_plan

        text = export_plan(plan_file, output or Path("train.py"))
    if output is None:
        click.echo(text, nl=False)
        return
    write_atomic(output, text)
    say(f"wrote {output}; its first lines say how to start it")
