"""A file of whatever format to its Readings: finds the reader by content, never by name.

What is known and no topology (a training configuration, Kubernetes objects, …) is refused by
name, with what to give instead.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from claw_plan.profiles.errors import InputError
from claw_plan.profiles.files import Document
from claw_plan.profiles.topology import (
    astra_sim,
    bench_log,
    calculon,
    galvatron,
    hostfile,
    nccl_log,
    nccl_xml,
    nvidia_smi,
    proteus,
    rocm_smi,
    sailor,
    slurm,
    structured,
)
from claw_plan.profiles.topology.reading import Reading
from claw_plan.profiles.topology.source import Source, read_source

_KNOWN = (
    "known are nvidia-smi topo -m, rocm-smi --showtopo, NCCL topology XML and logs, nccl-tests "
    "and all_reduce_bench logs, hostfiles, Slurm node lists, and files of Galvatron, Calculon, "
    "ASTRA-sim, Proteus and Sailor"
)
_DOCUMENTS: tuple[
    tuple[Callable[[Document], bool], Callable[[Source, Document], list[Reading]]], ...
] = (
    (galvatron.recognise, galvatron.read),
    (calculon.recognise, calculon.read),
    (astra_sim.recognise, astra_sim.read),
    (proteus.recognise, proteus.read),
    (sailor.recognise, sailor.read),
)


def read_topology(path: Path) -> list[Reading]:
    """The Readings of a file. Raises InputError with file, line and remedy."""
    return read_text(read_source(path))


def read_text(source: Source) -> list[Reading]:
    """The Readings of a text; several where it holds matrices of several machines."""
    if nccl_xml.recognise(source):
        return nccl_xml.read(source)
    if rocm_smi.recognise(source):
        return rocm_smi.read(source)
    logs = [module for module in (nccl_log, bench_log) if module.recognise(source)]
    if logs:
        parts = [reading for module in logs for reading in module.read(source)]
        if nvidia_smi.recognise(source):
            parts += nvidia_smi.read(source)
        return [merge(parts)]
    if nvidia_smi.recognise(source):
        return nvidia_smi.read(source)
    refuse_other_descriptions(source)
    document = structured.load(source)
    if document is not None:
        return _read_document(source, document)
    if slurm.recognise(source):
        return slurm.read(source)
    if astra_sim.recognise_htsim(source):
        return astra_sim.read_htsim(source)
    is_data = source.name.lower().endswith((".json", ".yaml", ".yml", ".xml"))
    if hostfile.recognise(source) and not is_data:  # a lone `null` or word is no host there
        return hostfile.read(source)
    line, text = first_line(source)
    raise InputError(f"{source.where(line)}: {text[:60]!r} begins no file that is known; {_KNOWN}")


def _read_document(source: Source, document: Document) -> list[Reading]:
    for recognises, reads in _DOCUMENTS:
        if recognises(document):
            return reads(source, document)
    keys = ", ".join(" ".join(str(key).split())[:30] for key in list(document.data)[:4])
    raise InputError(
        f"{source.where(first_line(source)[0])}: a file with the keys {keys or 'none'}, which is "
        f"no description of a machine; {_KNOWN}"
    )


def first_line(source: Source) -> tuple[int, str]:
    """Number and text of the first line that is not blank."""
    for number, line in enumerate(source.lines, start=1):
        if line.strip():
            return number, line.strip()
    return 1, ""


_OTHERS = (
    (
        r"^\s*(?:distributed_type|fsdp_config|deepspeed_config|compute_environment)\s*:",
        "a training configuration of accelerate, no cluster; `claw-plan detect` writes a "
        "cluster file",
    ),
    (
        r"^\s*apiVersion\s*:",
        "Kubernetes objects, which name no GPUs' links; run `nvidia-smi topo -m` in a pod",
    ),
    (
        r"^\s*(?:HeadNode|Scheduling|SlurmQueues)\s*:",
        "an AWS ParallelCluster configuration; name its instance type, as in --cluster "
        "2xp5.48xlarge",
    ),
    (
        r"^\s*profiler_hardware\s*:",
        "the settings of Galvatron's profiler, no cluster; give the JSON files that it writes",
    ),
    (
        r"^\s*nodes\s*:\s*$|^\s*nodes\s*:\s*\[\s*\{",
        "a cluster file of claw-plan already; plan with --cluster",
    ),
    (
        r"^\s*\"?(?:zero_optimization|train_micro_batch_size_per_gpu|train_batch_size)\"?\s*:",
        "a training configuration of DeepSpeed, no cluster; give its hostfile",
    ),
    (
        r"\"(?:traceEvents|deviceProperties|distributedInfo)\"\s*:",
        "a trace of the PyTorch profiler; see `claw-plan replay`",
    ),
    (
        r"NVIDIA-SMI has failed|No devices were found|(?:nvidia|rocm)-smi: (?:command )?not found",
        "the tool's own error, no topology; run it where the driver sees the GPUs",
    ),
    (r"^\s*<!DOCTYPE html|^\s*<html", "a web page; save the text, not the page"),
)


def refuse_other_descriptions(source: Source) -> None:
    """Raises InputError for files that are known to be something else."""
    for pattern, what in _OTHERS:
        compiled = re.compile(pattern, re.IGNORECASE)
        for number, line in enumerate(source.lines[:2000], start=1):
            if compiled.search(line[:500]):
                raise InputError(f"{source.where(number)}: {what}")


def merge(parts: list[Reading]) -> Reading:
    """Several Readings of one machine; what the first says wins."""
    whole = parts[0]
    for part in parts[1:]:
        changes: dict[str, object] = {}
        for name in ("gpu_count", "gpu_types", "pairs", "nics", "hosts", "node_count", "draft"):
            if not getattr(whole, name) and getattr(part, name):
                changes[name] = getattr(part, name)
        if part.pairs and not whole.pairs:
            changes |= {"pairs_unknown": part.pairs_unknown, "nvlink": part.nvlink}
        for name in ("rates", "facts", "warnings"):
            changes[name] = (*getattr(whole, name), *getattr(part, name))
        changes["unknown"] = _still_unknown((*whole.unknown, *part.unknown), parts)
        changes["format"] = f"{whole.format}, {part.format}"
        whole = dataclasses.replace(whole, **changes)  # type: ignore[arg-type]
    return whole


def _still_unknown(texts: Sequence[str], parts: Sequence[Reading]) -> tuple[str, ...]:
    """What no part answers, said once."""
    answered = {
        "the type of the GPUs": any(part.gpu_types for part in parts),
        "the paths between GPUs": any(part.pairs for part in parts),
        "NICs": any(part.nics for part in parts),
    }
    left: list[str] = []
    for text in dict.fromkeys(texts):
        known = any(text.startswith(start) and is_known for start, is_known in answered.items())
        said = any(other != text and other.startswith(text) for other in texts)
        if not known and not said:
            left.append(text)
    return tuple(left)
