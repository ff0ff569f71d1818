from __future__ import annotations

import json
from typing import Any

import pytest

from claw_plan.profiles.cluster_file import cluster_from_mapping
from claw_plan.profiles.errors import InputError
from claw_plan.profiles.topology.proteus import read, recognise
from claw_plan.profiles.topology.reading import Reading
from claw_plan.profiles.topology.source import Source
from claw_plan.profiles.topology.structured import load


def only(name: str, **changes: Any) -> Reading:
    data = {"n_node": 4, "n_gpu_per_node": 8, "gpu_gflops": 15700, "gpu_memory": 32000}
    data |= {"gpu_memory_bw": 900, "gpu_to_gpu": 20, "inter_node": 12.5} | changes
    source = Source(name, json.dumps(data, indent=1))
    document = load(source)
    assert document is not None
    assert recognise(document)
    (reading,) = read(source, document)
    return reading


def test_figures_become_a_node() -> None:
    reading = only("dgx1.json")
    assert (reading.gpu_count, reading.node_count) == (8, 4)
    (node,) = cluster_from_mapping({"nodes": [reading.draft]}, "t").nodes
    assert node.device.memory_bytes == 32_000_000_000
    assert node.device.peak_flops_per_s == {"float32": 15.7e12}
    assert node.nic.bytes_per_s == 12.5e9


def test_figures_that_do_not_suit_the_name_are_suspicious() -> None:
    assert len(only("dgx1.json").warnings) == 1
    assert "implausible for a 1080" in only("proteus-1080_n2.json").warnings[1]


def test_mistakes_are_named_with_their_line() -> None:
    with pytest.raises(InputError, match=r"x\.json:2: n_node: must be a whole number"):
        only("x.json", n_node=1.5)
    with pytest.raises(InputError, match=r"x\.json:5: gpu_memory: .*is the unit right"):
        only("x.json", gpu_memory=32e9)
