"""Options of `claw-plan run` that say where and how the ranks start, and what they print.

`launch_options` adds them to a command; `take_launch` makes a `Launch` of what came; `told_only`
prints a command line or writes a batch script instead of starting anything.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from claw_plan.cli.options import FILE
from claw_plan.cli.streams import say

if TYPE_CHECKING:
    from claw_plan.executor.launch import Launch

Command = TypeVar("Command", bound=Callable[..., Any])

_ONLY_TELL = ("--slurm", "--print-command")


def launch_options(command: Command) -> Command:
    """Adds the options, last one first, as click wants them."""
    for option in (
        click.option(
            "--print-command", is_flag=True, help="Print torchrun's command lines and end."
        ),
        click.option(
            "--slurm",
            is_flag=True,
            help="Write a batch script for Slurm beside the plan, say what to type, and end.",
        ),
        click.option(
            "--nvtx",
            is_flag=True,
            help="Name passes, stages' actions, blocks and the optimizer for profilers "
            "(docs/profilers.md).",
        ),
        click.option(
            "--check-buckets",
            is_flag=True,
            help="Compare checksums of all buckets of gradients between ranks, and end the run "
            "where bits changed.",
        ),
        click.option(
            "--selector",
            metavar="OPTIONS",
            help="Let each all-reduce of gradients go by the algorithm that is fastest here, "
            "looked at every check_interval: check_interval=500ms,bandwidth_threshold=50MBps,"
            "fallback_topology=tree, or a YAML file with some of these (docs/collectives.md).",
        ),
        click.option(
            "--preflight/--no-preflight",
            default=True,
            help="Compare versions, memory and network of all ranks with the plan first.  "
            "[default: preflight]",
        ),
        click.option(
            "--timeout",
            type=click.FloatRange(min=1.0, max=86400.0),
            default=600.0,
            show_default=True,
            metavar="S",
            help="Seconds that ranks wait for one that does not come, or stands still.",
        ),
        click.option(
            "--hostfile",
            type=FILE,
            metavar="F",
            help="Start the ranks by ssh on the hosts of this file, a line each: node1 slots=8.",
        ),
    ):
        command = option(command)
    return command


def take_launch(options: dict[str, Any]) -> Launch:
    """Takes what belongs to the launch out of a command's options."""
    from claw_plan.executor.communication.selector_options import read_options
    from claw_plan.executor.launch import Launch

    selector = options.pop("selector")
    return Launch(
        selector=None if selector is None else read_options(selector),
        checks_buckets=options.pop("check_buckets"),
        hostfile=options.pop("hostfile"),
        timeout_s=options.pop("timeout"),
        preflight=options.pop("preflight"),
        nvtx=options.pop("nvtx"),
        say=say,
    )


def told_only(plan_file: Path, options: Mapping[str, Any]) -> bool:
    """Does what --slurm and --print-command ask; whether one of them came."""
    if not (options["slurm"] or options["print_command"]):
        return False
    from claw_plan.executor.launch_hosts import hosts_for
    from claw_plan.executor.opened_plan import device_type_of
    from claw_plan.executor.placement import ranks_per_node
    from claw_plan.executor.slurm import sbatch_text
    from claw_plan.executor.torchrun import torchrun_lines
    from claw_plan.planner.plan import load_plan
    from claw_plan.profiles.files import write_atomic

    plan = load_plan(plan_file)
    counts = ranks_per_node(plan)
    if options["slurm"]:
        script = plan_file.with_suffix(".sbatch")
        text = sbatch_text(
            plan_file.stem, counts, _own_command(), gpus=device_type_of(plan) != "cpu"
        )
        write_atomic(script, text)
        click.echo(f"wrote {script}; look through it, then type: sbatch {script}")
    if options["print_command"]:
        hosts = hosts_for(plan, options["hostfile"]) if options["hostfile"] else []
        names = [placed.host.name for placed in hosts]
        for host, line in torchrun_lines(counts, _own_command(), names):
            click.echo(f"# on {host}:\n{line}")
    return True


def _own_command() -> list[str]:
    """This command as every rank runs it: a starter has taken over what --hostfile did."""
    arguments = [word for word in sys.argv[1:] if word not in _ONLY_TELL]
    if "--hostfile" in arguments:
        place = arguments.index("--hostfile")
        del arguments[place : place + 2]
    arguments = [word for word in arguments if not word.startswith("--hostfile=")]
    program = shutil.which(sys.argv[0]) or "claw-plan"
    return [program, *arguments]
