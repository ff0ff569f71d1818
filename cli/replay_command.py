"""`claw-plan replay`: what a recording of training tells, and what other hardware would change."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from claw_plan.cli.json_output import json_text
from claw_plan.cli.options import COUNT, FILE, check_can_write
from claw_plan.cli.perfetto import write_trace
from claw_plan.cli.progress import ProgressBar
from claw_plan.cli.replay_report import print_replay, replay_object
from claw_plan.cli.streams import say, stdout_kept_clean
from claw_plan.profiles.errors import InputError

if TYPE_CHECKING:
    from claw_plan.executor.replay import Replay
    from claw_plan.executor.resimulate import Resimulation

# The executor is imported when the command runs: it brings torch, and --help must not wait.

SCALE = re.compile(r"(link|compute|host)=([0-9.]+(?:[eE][-+]?\d{1,2})?)x?\Z")


def _factors(
    context: click.Context, option: click.Parameter, values: tuple[str, ...]
) -> dict[str, float]:
    """'link=2x,compute=0.5x' as numbers."""
    factors: dict[str, float] = {}
    for text in (part.strip() for value in values for part in value.split(",")):
        found = SCALE.match(text)
        try:
            factor = float(found[2]) if found else math.nan
        except ValueError:
            factor = math.nan
        if found is None or not 1e-6 <= factor <= 1e6:
            raise click.BadParameter(
                f"{text!r} is not a part and how many times faster it shall be, as in link=2x; "
                "parts are link, compute and host"
            )
        if found[1] in factors:
            raise click.BadParameter(f"{found[1]} is scaled twice")
        factors[found[1]] = factor
    return factors


@click.command()
@click.argument("traces", metavar="TRACE...", type=FILE, nargs=-1, required=True)
@click.option(
    "--rank",
    "ranks_given",
    type=click.IntRange(min=0, max=10**6),
    multiple=True,
    metavar="R",
    help="Rank of a trace that does not tell it; once for each such trace, in order.",
)
@click.option(
    "--cluster", "-c", metavar="C", help="Simulate the recorded step again on this cluster."
)
@click.option(
    "--scale",
    multiple=True,
    callback=_factors,
    metavar="PART=F,…",
    help="Simulate it again with links, computation or the host F times as fast, as in "
    "link=2x,compute=0.5x.",
)
@click.option("--ranks", type=COUNT, metavar="N", help="Simulate it again on so many ranks.")
@click.option(
    "--profile", type=FILE, metavar="F", help="Add what the traces measured to this profile."
)
@click.option(
    "--trace", type=FILE, metavar="OUT", help="Write the typical step for ui.perfetto.dev."
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON (docs/json.md).")
def replay(
    traces: tuple[Path, ...],
    ranks_given: tuple[int, ...],
    cluster: str | None,
    scale: dict[str, float],
    ranks: int | None,
    profile: Path | None,
    trace: Path | None,
    as_json: bool,
) -> None:
    """Say where the time of recorded training went, and what other hardware would change.

    TRACE is a trace of torch.profiler (.json, .json.gz, a tar or folder of ranks), an execution
    trace, an Nsight Systems export (sqlite), or a folder that 'claw-plan run' wrote.
    """
    check_can_write(profile, inputs=traces)
    check_can_write(trace, inputs=(*traces, profile))
    with stdout_kept_clean(), ProgressBar() as progress:
        progress("loading", 0.0)
        from claw_plan.executor.replay import replay as analyse
        from claw_plan.executor.trace_readers.read import read_traces

        progress("reading the traces", 0.1)
        recordings = read_traces(traces, ranks_given)
        progress("matching the ranks", 0.8)
        found = analyse(recordings)
        progress("simulating again", 0.9)
        predicted, said = _resimulate(found, traces, cluster, scale, ranks)
    if profile is not None:
        _learn(found, traces, cluster, profile)
    if trace is not None:
        _write_trace(found, trace)
    if as_json:
        click.echo(json_text(replay_object(found, predicted, said)), nl=False)
    else:
        print_replay(found, predicted, said)


def _resimulate(
    found: Replay,
    traces: tuple[Path, ...],
    cluster: str | None,
    scale: dict[str, float],
    ranks: int | None,
) -> tuple[Resimulation | None, tuple[str, ...]]:
    """The prediction, if one is asked for, and what it rests on."""
    if cluster is None and not scale and ranks is None:
        return None, ()
    from claw_plan.executor.replay_hardware import change_to, recorded_cluster
    from claw_plan.executor.resimulate import resimulate
    from claw_plan.profiles.cluster_file import load_cluster

    target = load_cluster(cluster) if cluster is not None else None
    recorded = recorded_cluster(found, traces) if target is not None else None
    change, said = change_to(found, recorded, target, scale, ranks)
    predicted = resimulate(found, change)
    return predicted, (*said, *predicted.warnings)


def _learn(found: Replay, traces: tuple[Path, ...], cluster: str | None, profile: Path) -> None:
    from claw_plan.executor.replay_hardware import recorded_cluster
    from claw_plan.executor.replay_measurements import measurements_of
    from claw_plan.profiles.profile import append_profile

    recorded = recorded_cluster(found, traces)
    if recorded is None:
        raise InputError(
            f"{found.traces[0].source} does not tell which device it ran on, so its times cannot "
            "go into a profile"
        )
    measured = measurements_of(found, recorded)
    if not measured:
        raise InputError(
            f"{found.traces[0].source} holds no time of a known piece of work: record with "
            "record_shapes=True, and on all ranks"
        )
    append_profile(profile, measured)
    say(
        f"added {len(measured)} measurements on {recorded.nodes[0].device.name} to {profile}; "
        f"plan with --profile {profile}"
    )


def _write_trace(found: Replay, path: Path) -> None:
    from claw_plan.executor.replay_timeline import timeline_of

    write_trace(timeline_of(found), path, f"step {found.typical}")
    say(f"wrote {path}; open it at ui.perfetto.dev")
