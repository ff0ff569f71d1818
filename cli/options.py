"""The options of planning, with their checks, and the paths that commands write to."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import click

from claw_plan.profiles.errors import InputError
from claw_plan.profiles.files import why_not_replaceable
from claw_plan.profiles.work import PRECISIONS

Command = TypeVar("Command", bound=Callable[..., Any])


COUNT = click.IntRange(min=1, max=10**9)
"""A count above 10^9 (samples of a batch, tokens of a sequence) is a slip of the keyboard."""

SAMPLES = click.IntRange(min=1, max=10**7)
"""A hundred times the largest batches trained with; beyond, steps have too many microbatches."""

FILE = click.Path(path_type=Path)

SEARCHERS = ("auto", "exhaustive", "tpe", "cmaes", "nsga2", "rl", "anneal", "random")
"""Those of planner.samplers, which brings numpy and is only imported when a plan is made."""


def fraction(context: click.Context, option: click.Parameter, value: float) -> float:
    """Refuses what is no fraction from 0 to below 1."""
    if not 0 <= value < 1:  # also refuses nan
        raise click.BadParameter(f"{value} is not a fraction from 0 to below 1, such as 0.10")
    return value


memory_headroom = click.option(
    "--memory-headroom",
    type=float,
    default=0.10,
    show_default=True,
    callback=fraction,
    metavar="F",
    help="Fraction of each device's memory that a plan must leave free.",
)
"""The option that plan and explain share."""


def seconds(context: click.Context, option: click.Parameter, value: float | None) -> float | None:
    """Refuses what is no positive number of seconds."""
    if value is not None and not 0 < value < math.inf:
        raise click.BadParameter(f"{value} is not a positive number of seconds")
    return value


def _above_zero(
    context: click.Context, option: click.Parameter, value: float | None
) -> float | None:
    if value is not None and not 0 < value < math.inf:
        raise click.BadParameter(f"{value} is not a positive number")
    return value


PLANNING_OPTIONS = (
    click.option(
        "--cluster",
        "-c",
        required=True,
        metavar="C",
        help="A cluster.yaml, or a shorthand: 2xdgx-h100 (two nodes), cpu (this machine's cores).",
    ),
    click.option(
        "--global-batch",
        type=SAMPLES,
        metavar="N",
        help="Samples of one optimizer step, over all devices.  [default: 256]",
    ),
    click.option(
        "--seq-len",
        type=COUNT,
        metavar="N",
        help="Tokens of a sample.  [default: the model's context, at most 8192]",
    ),
    click.option(
        "--precision",
        type=click.Choice(list(PRECISIONS)),
        metavar="P",
        help="bf16, fp16 or fp32, in which kernels compute.  [default: bf16 where the hardware "
        "has it]",
    ),
    click.option(
        "--optimizer",
        type=click.Choice(["adamw", "lamb", "sgd"]),
        help="Sets the optimizer's memory and time.  [default: adamw]",
    ),
    click.option(
        "--clip-norm",
        type=float,
        callback=_above_zero,
        metavar="X",
        help="Largest norm of all gradients together.  [default: no clipping]",
    ),
    memory_headroom,
    click.option(
        "--fix",
        default="",
        metavar="KNOB=VALUE,…",
        help="Pins knobs, as in tp=2,pp=2,schedule=1F1B; the others are searched.",
    ),
    click.option(
        "--codecs",
        default="",
        metavar="CODEC,…",
        help="Codecs that may encode replicas' gradients, as in one_bit,int8, or all. They change "
        "what is trained (docs/communication.md).",
    ),
    click.option(
        "--asynchronous",
        is_flag=True,
        help="Lets steps of a pipeline overlap (PipeDream2BW): no bubble, but gradients of the "
        "weights of one step before, which changes what is trained (docs/asynchronous.md).",
    ),
    click.option(
        "--token-frequencies",
        type=FILE,
        metavar="FILE",
        help="How often each token id occurs, in .npy or as text: what tp divides by the "
        "vocabulary is then dealt out so that each rank looks up as much.",
    ),
    click.option(
        "--baseline",
        type=FILE,
        metavar="FILE",
        help="Your setting, to compare with and never to lose to: a Megatron-LM command, a "
        "torchtitan TOML, a DeepSpeed JSON or an Accelerate YAML.",
    ),
    click.option(
        "--objective",
        default="step_time",
        show_default=True,
        metavar="O",
        help="What is best: step_time, cost, deadline=<time> (with --steps), goodput, memory, "
        "balanced or balanced=<balance weight>:<time weight>.",
    ),
    click.option(
        "--steps",
        type=COUNT,
        metavar="N",
        help="Steps that are to be done by the deadline of --objective deadline=<time>.",
    ),
    click.option(
        "--build",
        metavar="EXPR",
        help='Expression that makes the model in its own file, as in "GPT(GPTConfig())".',
    ),
    click.option(
        "--inputs",
        metavar="TEXT",
        help='The forward\'s inputs, as in "idx=int64[B,1024]<50304 targets=int64[B,1024]<50304".',
    ),
    click.option(
        "--profile",
        type=FILE,
        metavar="F",
        help="Measured times from 'claw-plan learn'.  [default: the cluster's, where one exists]",
    ),
    click.option(
        "--time-limit",
        type=float,
        callback=seconds,
        metavar="S",
        help="Stop searching after so many seconds; the report then says how far from proven.",
    ),
    click.option(
        "--search",
        type=click.Choice(SEARCHERS),
        metavar="S",
        help="Refine the best plan where not all can be tried: cuts, blocks that recompute, "
        f"bucket sizes. {', '.join(SEARCHERS)}.  [default: no refinement]",
    ),
    click.option(
        "--storage",
        metavar="S",
        help="File or database (sqlite:///study.db) that keeps the Optuna study of --search, to "
        "be resumed.",
    ),
    click.option(
        "--policy",
        type=FILE,
        metavar="F",
        help="A policy trained on the blocks of other models, for --search rl (docs/samplers.md).",
    ),
    click.option(
        "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the search."
    ),
)


def planning_options(command: Command) -> Command:
    """Adds the options that say what is planned for what."""
    for option in reversed(PLANNING_OPTIONS):
        command = option(command)
    return command


def check_can_write(path: Path | None, *, inputs: Iterable[Path | None] = ()) -> None:
    """Refuses a path that cannot be written, before any work is done for it.

    `inputs` are the files that the command reads, or writes otherwise: none may be replaced.
    """
    if path is None:
        return
    folder = path.absolute().parent
    if why := why_not_replaceable(path):
        raise InputError(f"cannot write {str(path)!r}: {why}")
    if not folder.is_dir():
        raise InputError(f"cannot write {str(path)!r}: there is no folder {str(folder)!r}")
    if not os.access(folder, os.W_OK):
        raise InputError(f"cannot write {str(path)!r}: its folder is not writable")
    target = os.path.realpath(path)
    if any(other is not None and os.path.realpath(other) == target for other in inputs):
        raise InputError(f"cannot write {str(path)!r}: this command uses that file otherwise too")
