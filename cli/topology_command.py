"""`claw-plan topology FILE…`: what files say of a machine and leave open; and a cluster.yaml."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from claw_plan.cli.json_output import json_text
from claw_plan.cli.options import FILE, check_can_write
from claw_plan.cli.streams import say

if TYPE_CHECKING:
    from claw_plan.profiles.topology.cluster_text import ClusterText
    from claw_plan.profiles.topology.reading import Reading

MAX_LINES = 24
"""Of one list in the text for people; --json has all."""


@click.command()
@click.argument("files", metavar="FILE...", type=FILE, nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print the reading as JSON.")
@click.option(
    "--output", "-o", type=FILE, metavar="FILE", help="Write a cluster file for --cluster."
)
@click.option("--gpu", metavar="TYPE", help="The GPUs' type, where no FILE names it: a100-80gb.")
@click.option(
    "--gpus-per-node",
    type=click.IntRange(1, 1024),
    metavar="N",
    help="GPUs of a host, where no FILE says how many.",
)
@click.option("--nic", metavar="TYPE", help="The network cards' type: ib-ndr, roce-200, …")
@click.option(
    "--include",
    metavar="HOSTS",
    help="Use these hosts of a hostfile only, as DeepSpeed does: node1@node2:0,1.",
)
def topology(
    files: tuple[Path, ...],
    as_json: bool,
    output: Path | None,
    gpu: str | None,
    gpus_per_node: int | None,
    nic: str | None,
    include: str | None,
) -> None:
    """Read what there is of a machine: what FILEs say, what is unknown, what is suspicious.

    FILE is the output of nvidia-smi topo -m or rocm-smi --showtopo, NCCL topology XML, an NCCL
    log, a log of nccl-tests or all_reduce_bench, a hostfile, a Slurm node list, or a hardware file
    of Galvatron, Calculon, ASTRA-sim, Proteus or Sailor. Several files describe one cluster.
    """
    from claw_plan.profiles.topology.cluster_text import make_cluster
    from claw_plan.profiles.topology.recognise import read_topology

    check_can_write(output, inputs=files)
    readings = [reading for path in files for reading in read_topology(path)]
    if include is not None:
        readings = included(readings, include)
    made: ClusterText | None = None
    if output is not None:
        from claw_plan.profiles.files import write_atomic

        made = make_cluster(readings, gpu=gpu, gpus_per_node=gpus_per_node, nic=nic)
        write_atomic(output, made.text())
    if as_json:
        click.echo(json_text(topology_object(readings, made)), nl=False)
    else:
        for reading in readings:
            print_reading(reading)
        if made is not None:
            _print_list("assumed", made.assumed)
            _print_list("suspicious", made.warnings)
    if output is not None:
        say(f"wrote {output}; plan with: claw-plan MODEL --cluster {output}")


def included(readings: Sequence[Reading], include: str) -> list[Reading]:
    """The readings with only the hosts that `include` names; raises InputError for others."""
    import dataclasses

    from claw_plan.profiles.errors import InputError
    from claw_plan.profiles.topology.hostfile import hosts_reading, select

    if not any(reading.hosts for reading in readings):
        raise InputError("--include names hosts, but no FILE is a list of hosts")
    result = []
    for reading in readings:
        if reading.hosts:
            chosen = hosts_reading(reading.source, reading.format, select(reading.hosts, include))
            names = ("hosts", "node_count", "gpu_count", "facts", "unknown", "warnings")
            changes = {name: getattr(chosen, name) for name in names}
            reading = dataclasses.replace(reading, **changes)
        result.append(reading)
    return result


def reading_object(reading: Reading) -> dict[str, Any]:
    """One reading for scripts."""
    return {
        "file": reading.source,
        "format": reading.format,
        "gpus": {"count": reading.gpu_count, "types": list(reading.gpu_types)},
        "pairs": {kind: [list(pair) for pair in pairs] for kind, pairs in reading.pairs.items()},
        "pairs_unknown": [list(pair) for pair in reading.pairs_unknown],
        "nvlink": reading.nvlink,
        "nics": {name: list(nic.to_gpus) for name, nic in reading.nics.items()},
        "nic_devices": {name: nic.device for name, nic in reading.nics.items() if nic.device},
        "nic_bytes_per_s": {
            name: nic.bytes_per_s for name, nic in reading.nics.items() if nic.bytes_per_s
        },
        "nodes": reading.node_count,
        "hosts": [{"name": host.name, "gpus": host.gpus} for host in reading.hosts],
        "node_lists": {text: list(hosts) for text, hosts in reading.node_lists.items()},
        "measured": [
            {
                "op": rate.op,
                "ranks": rate.ranks,
                "nodes": rate.nodes,
                "size_bytes": rate.size_bytes,
                "bytes_per_s": rate.bytes_per_s,
                "kind": rate.kind,
                "where": rate.where,
            }
            for rate in reading.rates
        ],
        "understood": list(reading.facts),
        "unknown": list(reading.unknown),
        "warnings": list(reading.warnings),
    }


def topology_object(readings: Sequence[Reading], made: ClusterText | None) -> dict[str, Any]:
    """All readings for scripts: together at the top, one by one under `files`."""
    from claw_plan.profiles.topology.recognise import merge

    described = [reading for reading in readings if reading.pairs or reading.nics]
    machines = described[:1] if len(described) > 1 else []
    others = [reading for reading in readings if reading not in described[1:]]
    whole = merge(machines + [reading for reading in others if reading not in machines])
    result = reading_object(whole)
    del result["file"]
    if len(described) > 1:
        others_text = f"{len(described)} machines are described: this is the first; see `files`"
        result["warnings"].append(others_text)
    result["files"] = [reading_object(reading) for reading in readings]
    if made is not None:
        result["assumed"] = made.assumed
        result["warnings"] += made.warnings
        result["cluster"] = made.content
    return result


def print_reading(reading: Reading) -> None:
    """One reading for people."""
    click.echo(f"{reading.source}: {reading.format}")
    understood = []
    if reading.gpu_count is not None:
        kinds = ", ".join(dict.fromkeys(reading.gpu_types))
        understood.append(f"{reading.gpu_count} GPUs{f' ({kinds})' if kinds else ''}")
    for kind, pairs in reading.pairs.items():
        shown = " ".join(f"{first}-{second}" for first, second in pairs[:12])
        more = f" and {len(pairs) - 12} more" if len(pairs) > 12 else ""
        understood.append(f"{kind}: {len(pairs)} pairs: {shown}{more}")
    for name, nic in reading.nics.items():
        device = f" ({nic.device})" if nic.device else ""
        rate = f", {nic.bytes_per_s * 8 / 1e9:g} Gb/s" if nic.bytes_per_s else ""
        paths = " ".join(kind or "?" for kind in nic.to_gpus)
        understood.append(f"{name}{device}{rate}: {paths or 'paths not described'}")
    if reading.hosts:
        names = [f"{host.name} ({host.gpus or '?'})" for host in reading.hosts]
        understood.append("hosts and their GPUs: " + ", ".join(names[:12]))
    understood += [
        f"measured {rate.op}, {rate.ranks or '?'} ranks: {rate.bytes_per_s / 1e9:.4g} GB/s "
        f"({rate.kind} bandwidth, {rate.where})"
        for rate in reading.rates
    ]
    _print_list("understood", [*understood, *reading.facts])
    _print_list("unknown", reading.unknown)
    _print_list("suspicious", reading.warnings)


def _print_list(title: str, texts: Iterable[str]) -> None:
    lines = list(texts)
    if not lines:
        return
    click.echo(f"  {title}:")
    for line in lines[:MAX_LINES]:
        click.echo(f"    {line}")
    if len(lines) > MAX_LINES:
        click.echo(f"    … and {len(lines) - MAX_LINES} more; see --json")
