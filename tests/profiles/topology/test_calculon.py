from __future__ import annotations

import json
from typing import Any

import pytest

from claw_plan.profiles.cluster_file import cluster_from_mapping
from claw_plan.profiles.errors import InputError
from claw_plan.profiles.topology.calculon import read, recognise
from claw_plan.profiles.topology.reading import Reading
from claw_plan.profiles.topology.source import Source
from claw_plan.profiles.topology.structured import load


def system(**changes: Any) -> dict[str, Any]:
    return {
        "matrix": {"float16": {"tflops": 312}},
        "mem1": {"GiB": 80, "GBps": 2048},
        "networks": [
            {"bandwidth": 300, "size": 8, "latency": 0.00001},
            {"bandwidth": 25, "size": 65536, "latency": 0.00002},
        ],
    } | changes


def only(data: dict[str, Any]) -> Reading:
    source = Source("a100.json", json.dumps(data, indent=1))
    document = load(source)
    assert document is not None
    assert recognise(document)
    (reading,) = read(source, document)
    return reading


def test_figures_become_a_node() -> None:
    reading = only(system())
    assert reading.gpu_count == 8
    assert reading.draft is not None
    (node,) = cluster_from_mapping({"nodes": [reading.draft]}, "t").nodes
    assert node.device.memory_bytes == 80 << 30
    assert node.device.peak_flops_per_s == {"float16": 312e12}
    assert node.intra.bytes_per_s == 300e9
    assert node.intra.latency_ns == 10_000
    assert node.nic.bytes_per_s == 25e9


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mem1": {"GiB": 80000000000, "GBps": 2048}}, r"a100.json:8: mem1.GiB: .*implausible"),
        ({"networks": []}, "networks: must be a list"),
        ({"matrix": {"int1": {"tflops": 1}}}, "matrix: has none of float8"),
        ({"networks": [{"bandwidth": 1, "size": 65536, "latency": 1e-5}]}, "not one node"),
        ({"mem1": {"GiB": "80 GiB", "GBps": 1}}, "must be a number"),
    ],
)
def test_implausible_figures_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        only(system(**changes))
