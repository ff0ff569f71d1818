from __future__ import annotations

import pytest

from claw_plan.profiles.errors import InputError
from claw_plan.profiles.topology.astra_sim import read, read_htsim, recognise, recognise_htsim
from claw_plan.profiles.topology.reading import Reading
from claw_plan.profiles.topology.source import Source
from claw_plan.profiles.topology.structured import load

HTSIM = (
    "Nodes 8\nTiers 2\nPodsize 4\n\nTier 0\nDownlink_speed_Gbps 200\nDownlink_Latency_ns 1000\n"
    "\nTier 1\nDownlink_speed_Gbps 100\n"
)


def only(text: str) -> Reading:
    source = Source("n.yml", text)
    document = load(source)
    assert document is not None
    assert recognise(document)
    (reading,) = read(source, document)
    return reading


def test_a_network_of_two_dimensions() -> None:
    reading = only(
        "# topology: [ Ring ]\ntopology: [ Switch, Ring ]\nnpus_count: [ 8, 4 ]\n"
        "bandwidth: [ 400.0, 50 ]  # GB/s\nlatency: [ 936.25, 2000 ]\n"
    )
    assert (reading.gpu_count, reading.node_count) == (8, 4)
    assert reading.draft is not None
    assert reading.draft["intra"]["bandwidth"] == "400 GB/s"
    assert reading.draft["nics"]["latency"] == "2000 ns"
    assert reading.facts[0] == "32 NPUs: 8 x 4"


def test_latencies_below_any_network_are_suspicious() -> None:
    text = "topology: [Ring]\nnpus_count: [4]\nbandwidth: [3.125]\nlatency: [3.39]\n"
    assert "n.yml:4: latency: 3.39 ns is implausibly short" in only(text).warnings[1]


def test_logical_dimensions_are_text() -> None:
    reading = only('{"logical-dims": ["8", "2"]}')
    assert (reading.gpu_count, reading.node_count, reading.draft) == (8, 2, None)


def test_a_system_file_has_no_topology() -> None:
    reading = only('{"scheduling-policy": "LIFO", "local-mem-bw": 3350}')
    assert reading.gpu_count is None
    assert "memory of a device: 3350 GB/s" in reading.facts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("topology: [Ring]\nnpus_count: [4, 2]\nbandwidth: [1]\nlatency: [500]", "n.yml:2: npus"),
        ("topology: [Ring]\nnpus_count: [x]\nbandwidth: [1]\nlatency: [500]", "n.yml:2: npus"),
        ("topology: [Ring]\nnpus_count: [4]\nbandwidth: [.nan]\nlatency: [500]", "n.yml:3: band"),
        ("topology: [Ring]\nnpus_count: [4]\nbandwidth: [1]\n", "latency: this key is missing"),
        ('{"logical-dims": "8"}', "must be a list"),
    ],
)
def test_mistakes_are_named_with_their_line(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        only(text)


def test_htsim() -> None:
    source = Source("t.topo", HTSIM)
    assert recognise_htsim(source)
    (reading,) = read_htsim(source)
    assert reading.node_count == 8
    assert reading.draft is not None
    assert reading.draft["nics"]["bandwidth"] == "200 Gb/s"
    assert reading.draft["nics"]["latency"] == "1000 ns"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("Nodes 8", "Nodes x", "t:1: Nodes must be a number"),
        ("Tiers 2", "Tiers 3", "Tiers is 3, but 2"),
        ("Gbps 100", "Gbps nan", "t:10: a speed in Gbps"),
    ],
)
def test_htsim_mistakes(old: str, new: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_htsim(Source("t", HTSIM.replace(old, new)))
