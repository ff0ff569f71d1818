"""`claw-plan detect`: this machine, or several together, as a cluster file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from claw_plan.cli.json_output import json_text
from claw_plan.cli.options import FILE, check_can_write
from claw_plan.cli.progress import ProgressBar
from claw_plan.cli.streams import say, stdout_kept_clean

if TYPE_CHECKING:
    from claw_plan.executor.detect_cluster import Detected
    from claw_plan.profiles.topology.reading import Host


@click.command()
@click.option(
    "--output",
    "-o",
    type=FILE,
    metavar="FILE",
    help="Write the cluster file, and what was measured beside it as FILE.profile.  [default: "
    "print the cluster file]",
)
@click.option("--benchmark", is_flag=True, help="Measure GPUs and their links too (minutes).")
@click.option(
    "--hostfile",
    type=FILE,
    metavar="F",
    help="Look at the hosts of this file, through ssh.  [default: those of the Slurm job, or this "
    "machine]",
)
@click.option("--json", "as_json", is_flag=True, help="Print cluster and measurements as JSON.")
def detect(output: Path | None, benchmark: bool, hostfile: Path | None, as_json: bool) -> None:
    """Describe this machine, or several and their network, as a cluster file.

    GPUs are named by their driver; CPU cores, the loopback network and the network between hosts
    are measured, which takes some seconds. Run it alone for this machine, with --hostfile or in a
    Slurm job for several, or on all of them at once through srun or torchrun.
    """
    check_can_write(output, inputs=[hostfile])
    with stdout_kept_clean(), ProgressBar() as progress:
        progress("looking", 0.0)
        found = _found(hostfile, benchmark, lambda what: progress(what, 0.5))
    if found is None:  # one of the hosts; the first one answers
        return
    for note in found.notes:
        say(note)
    if as_json:
        click.echo(json_text(_object(found)), nl=False)
    text = _yaml(found.content)
    if output is None:
        if not as_json:
            click.echo(text, nl=False)
        return
    from claw_plan.profiles.files import write_atomic
    from claw_plan.profiles.profile import append_profile

    write_atomic(output, text)
    say(f"wrote {output}; plan with: claw-plan MODEL --cluster {output}")
    if found.measurements:
        profile = output.with_name(output.name + ".profile")
        append_profile(profile, found.measurements)
        say(f"wrote {len(found.measurements)} measurements to {profile}, which planning reads")


def _found(hostfile: Path | None, benchmark: bool, say_what: Any) -> Detected | None:
    """What is detected, here, by the hosts together, or by the hosts that are started for it."""
    from claw_plan.executor.benchmark import measure_machine
    from claw_plan.executor.detect_cluster import Detected, detect_together, node_place
    from claw_plan.executor.ranks import Rank

    def describe() -> tuple[Mapping[str, Any], list[Any]]:
        return measure_machine(say_what, benchmark=benchmark)

    rank = Rank.from_environment()
    if rank is not None and hostfile is None:
        place = node_place(rank)
        if place is None:
            return None
        if place[1] > 1:
            return detect_together(*place, describe)
    hosts, starter = _hosts(hostfile)
    if len(hosts) > 1 or hostfile is not None:
        return _by_hosts(hosts, starter, benchmark)
    content, measurements = describe()
    return Detected(_plain(content), measurements)


def _hosts(hostfile: Path | None) -> tuple[Sequence[Host], str]:
    from claw_plan.profiles.errors import InputError
    from claw_plan.profiles.topology.recognise import read_topology
    from claw_plan.profiles.topology.slurm import allocation

    if hostfile is None:
        inside_a_step = "SLURM_PROCID" in os.environ
        return ([] if inside_a_step else allocation(os.environ)), "srun"
    hosts = read_topology(hostfile)[0].hosts
    if not hosts:
        raise InputError(f"{hostfile.name} names no host; a line is  node1 slots=8")
    return hosts, "ssh"


def _by_hosts(hosts: Sequence[Host], starter: str, benchmark: bool) -> Detected:
    from claw_plan.executor.detect_cluster import Detected
    from claw_plan.executor.detect_hosts import detect_on
    from claw_plan.executor.errors import ExecutionError
    from claw_plan.profiles.profile import measurement_of

    arguments = ["--json", *(["--benchmark"] if benchmark else [])]
    text = detect_on(hosts, starter, arguments)
    try:
        answer = json.loads(text)
        measurements = [measurement_of(record) for record in answer["measurements"]]
        return Detected(answer["cluster"], measurements, answer["notes"])
    except (ValueError, KeyError, TypeError):
        raise ExecutionError(
            f"{hosts[0].name} answered {text[:80]!r}, not a detection; is the same claw-plan "
            "installed there?"
        ) from None


def _object(found: Detected) -> dict[str, Any]:
    from claw_plan.profiles.profile import record_of

    records = [record_of(measurement) for measurement in found.measurements]
    return {"cluster": found.content, "notes": found.notes, "measurements": records}


def _yaml(content: Mapping[str, Any]) -> str:
    import yaml

    return yaml.safe_dump(_plain(content), sort_keys=False, allow_unicode=True, width=100)


def _plain(value: Any) -> Any:
    """Mappings and sequences as YAML's own, for the dumper knows no others."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value
