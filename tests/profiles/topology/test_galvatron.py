from __future__ import annotations

import json

import pytest

from claw_plan.profiles.errors import InputError
from claw_plan.profiles.topology.galvatron import read, recognise
from claw_plan.profiles.topology.reading import Reading
from claw_plan.profiles.topology.source import Source
from claw_plan.profiles.topology.structured import load


def only(data: dict[str, object], name: str = "g.json") -> Reading:
    source = Source(name, json.dumps(data, indent=1))
    document = load(source)
    assert document is not None
    assert recognise(document)
    (reading,) = read(source, document)
    return reading


def test_bandwidths_are_algorithm_rates_with_their_lines() -> None:
    reading = only({"allreduce_size_8_consec_1": 154.203, "pp_size_2": 7.65998})
    ring, stage = reading.rates
    assert (ring.op, ring.ranks, ring.kind) == ("all_reduce", 8, "algorithm")
    assert ring.bytes_per_s == pytest.approx(154.203e9)
    assert ring.where == "g.json:2"
    assert (stage.op, stage.ranks) == ("send", 2)


def test_times_are_milliseconds_of_mebibytes() -> None:
    (rate,) = only({"allreduce_size_8_1024MB_time": 8.1409}).rates
    assert rate.size_bytes == 1 << 30
    assert rate.bytes_per_s == pytest.approx(131.9e9, rel=1e-3)


def test_the_name_tells_nodes_and_gpus() -> None:
    data = {"pp_size_2": 8.1, "allreduce_size_16_consec_1": 7.7, "allreduce_size_2_consec_1": 99}
    reading = only(data, "p2p_2nodes_8gpus_per_node.json")
    assert (reading.gpu_count, reading.node_count) == (8, 2)
    assert [rate.nodes for rate in reading.rates] == [2, 2, None]


def test_overlap_is_a_fact() -> None:
    assert "1.126-fold" in only({"overlap_coe": 1.125552573612729}).facts[0]


def test_other_keys_and_wrong_values() -> None:
    document = load(Source("t", '{"pp_size_2": 1, "other": 2}'))
    assert document is not None
    assert not recognise(document)
    with pytest.raises(InputError, match=r"g\.json:2: pp_size_2: .*implausible"):
        only({"pp_size_2": -3})
