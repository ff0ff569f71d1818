"""The program `claw-plan`: finds the command, runs it, answers with an exit code.

The commands are functions of `planning_commands` (plan, simulate), `running_commands` (run,
verify, learn), and of a module each for the others. `claw-plan MODEL …`
means `claw-plan plan MODEL …`.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

from claw_plan.cli.analyze_command import analyze
from claw_plan.cli.checkpoint_command import checkpoint
from claw_plan.cli.detect_command import detect
from claw_plan.cli.explain_command import explain
from claw_plan.cli.export_command import export
from claw_plan.cli.garbage import collect_rarely
from claw_plan.cli.planning_commands import plan, simulate
from claw_plan.cli.profile_command import profile
from claw_plan.cli.replay_command import replay
from claw_plan.cli.running_commands import learn, run, verify
from claw_plan.cli.streams import end_at_once, exit_code, open_closed_streams
from claw_plan.cli.topology_command import topology
from claw_plan.cli.validate_command import validate
from claw_plan.profiles.errors import Interrupted, near_matches

HELP = """Finds the best way to train a PyTorch model on a cluster, says why, and trains with it.

\b
Give it a model and a cluster:
  claw-plan model.py --cluster 2xdgx-h100 -o plan.yaml
It answers with a plan: how to split the training over the devices, the time of a step, the
memory on every device, and why not the other ways. No GPU is needed to plan. Then:
  claw-plan run plan.yaml          trains with the plan on this machine's devices
  claw-plan learn runs/*           makes the next prediction better

\b
'claw-plan MODEL ...' is short for 'claw-plan plan MODEL ...';
'claw-plan plan --help' lists what can be set.
"""


class CommandLine(click.Group):
    """The group of commands, with `plan` as the one that need not be named."""

    def main(  # type: ignore[override]  # always ends the process, as click's own does
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        **settings: Any,
    ) -> None:
        """Runs the command line; every error becomes one line and an exit code."""
        open_closed_streams()
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):  # a terminal without Unicode must not stop us
                stream.reconfigure(errors="replace")
        settings["standalone_mode"] = False
        run = super().main
        sys.exit(exit_code(lambda: run(args, prog_name or "claw-plan", **settings)))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Puts `plan` first unless a command, or an option of the group, stands there.

        Without any argument the help is shown.
        """
        args = args or ["--help"]
        own = {"--help", "-h", "--version"}
        if args[0] not in self.commands and args[0] not in own:
            self._refuse_misspelt_command(args[0], ctx)
            args = ["plan", *args]
        return super().parse_args(ctx, args)

    def _refuse_misspelt_command(self, word: str, ctx: click.Context) -> None:
        near = near_matches(word, self.commands)
        if word.isalpha() and near.startswith("did you mean") and not Path(word).exists():
            raise click.UsageError(
                f"there is neither a command nor a model file {word!r}; {near}", ctx
            )


@click.group(
    cls=CommandLine,
    help=HELP,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(version("claw-plan"), prog_name="claw-plan")
def cli() -> None:
    """The group; its help text is `HELP`."""


for command in (
    plan,
    simulate,
    explain,
    analyze,
    run,
    verify,
    export,
    learn,
    detect,
    replay,
    topology,
    validate,
    profile,
    checkpoint,
):
    cli.add_command(command)


def _interrupt(number: int, frame: object) -> None:
    raise Interrupted(number)


def main() -> None:
    """The entry point of the installed program."""
    collect_rarely()
    for number in (signal.SIGTERM, signal.SIGUSR1):  # Slurm's warning is the second
        signal.signal(number, _interrupt)  # ends the ranks and clears up, as Ctrl-C does
    try:
        cli.main()
    finally:
        if "torch" in sys.modules:
            end_at_once(sys.exception())
