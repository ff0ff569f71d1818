"""What nvidia-smi or rocm-smi show of this machine, beside what NVML tells.

NVML counts NVLinks; only the matrix tells which GPUs they join, and which network card is near
which GPU. Called by `benchmark.measure_machine`.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from claw_plan.profiles.cluster_file import this_machine
from claw_plan.profiles.errors import InputError
from claw_plan.profiles.topology.cluster_text import make_cluster
from claw_plan.profiles.topology.node_links import intra_of
from claw_plan.profiles.topology.reading import Reading
from claw_plan.profiles.topology.recognise import read_text
from claw_plan.profiles.topology.source import Source
from claw_plan.profiles.units import MIB

NVIDIA = (("nvidia-smi", "-L"), ("nvidia-smi", "topo", "-m"))
ROCM = (("rocm-smi", "--showtopo"), ("rocm-smi", "--showproductname"))
_TIMEOUT_S = 60
_NEAREST = ("PIX", "PXB", "PHB", "NODE")

Run = Callable[[Sequence[str]], str]


def tool_output(command: Sequence[str]) -> str:
    """What the program prints; '' when it is not there, fails, or hangs."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""


def local_reading(
    commands: Sequence[Sequence[str]] = NVIDIA, run: Run = tool_output
) -> Reading | None:
    """The matrix that the tool prints here; None without the tool or without a matrix."""
    text = "\n".join(run(command) for command in commands)
    if not text.strip():
        return None
    try:
        return read_text(Source(" ".join(commands[0][:1]), text))[0]
    except InputError:
        return None


def refined(node: Mapping[str, Any], reading: Reading | None) -> dict[str, Any]:
    """The node's entry with links pair by pair where NVLink does not join all GPUs alike.

    What the matrix shows besides stands in the entry's `source`.
    """
    entry = dict(node)
    devices = entry["devices"]
    if reading is None or reading.gpu_count != devices["count"]:
        return entry
    intra = intra_of(reading, str(devices["type"]), devices["count"], [])
    if "pairs" in intra:
        entry["intra"] = intra
    notes = [f"paths as {reading.source} shows them", *rails(reading), *reading.warnings]
    return entry | {"source": "; ".join(notes)}


def rails(reading: Reading) -> list[str]:
    """Which network cards are nearest to which GPU, when they differ between GPUs."""
    nearest = []
    for gpu in range(reading.gpu_count or 0):
        by_kind = {
            kind: [
                nic.device or name
                for name, nic in reading.nics.items()
                if gpu < len(nic.to_gpus) and nic.to_gpus[gpu] == kind
            ]
            for kind in _NEAREST
        }
        nearest.append(next((names for names in by_kind.values() if names), []))
    if len({tuple(names) for names in nearest}) < 2:
        return []
    pairs = [f"GPU{gpu} {'/'.join(names) or 'none'}" for gpu, names in enumerate(nearest)]
    return ["rails: " + ", ".join(pairs)]


def rocm_node(run: Run = tool_output) -> dict[str, Any] | None:
    """An entry for AMD GPUs, from rocm-smi; None where it shows none.

    Raises InputError when the catalogue has not got them.
    """
    reading = local_reading(ROCM, run)
    if reading is None or not reading.gpu_count:
        return None
    made = make_cluster([reading])
    entry: dict[str, Any] = made.content["nodes"][0]
    if any(text.startswith("the GPUs are") for text in made.assumed):
        kinds = ", ".join(dict.fromkeys(reading.gpu_types)) or "AMD GPUs without a name"
        raise InputError(
            f"rocm-smi shows {kinds}, which the catalogue has not got; write a cluster.yaml with "
            "devices: {type: custom, kind: rocm, memory: ..., bandwidth: ..., peak: {...}}"
        )
    cores, memory = this_machine()
    entry["host"] = {"memory": f"{memory // MIB} MiB", "cores": cores}
    return refined(entry, reading)
