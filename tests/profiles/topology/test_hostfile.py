from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from claw_plan.profiles.errors import InputError
from claw_plan.profiles.topology.hostfile import read, recognise, select
from claw_plan.profiles.topology.reading import Host, Reading
from claw_plan.profiles.topology.source import Source, read_source

CORPUS = Path(__file__).parents[4] / "shared" / "corpus" / "cluster"
corpus = pytest.mark.skipif(not CORPUS.is_dir(), reason="the corpus is not beside the project")


def only(text: str) -> Reading:
    source = Source("hosts", text)
    assert recognise(source)
    (reading,) = read(source)
    return reading


@corpus
def test_corpus_with_slots() -> None:
    (reading,) = read(read_source(CORPUS / "alpa-deepspeed.hostfile"))
    assert reading.hosts == (Host(name="192.0.2.47", gpus=8), Host(name="192.0.2.46", gpus=8))
    assert reading.gpu_count == 8


@corpus
def test_corpus_without_slots_asks_for_gpus() -> None:
    (reading,) = read(read_source(CORPUS / "galvatron.hostfile"))
    assert len(reading.hosts) == 2
    assert reading.gpu_count is None
    assert "--gpus-per-node" in reading.unknown[0]


@pytest.mark.parametrize(
    "text",
    [
        "node1 slots=4\nnode2 slots=4",
        "node1 slots = 4 # head\r\n\r\n# comment\r\nnode2\tslots=4 max_slots=8\r\n",
        "node1:4\nnode2:4\n",
        "node1:4,node2:4\n",
        "me@node1 slots=4\nyou@node2 slots=4\n",
    ],
)
def test_forms(text: str) -> None:
    hosts = only(text).hosts
    assert [(host.name, host.gpus) for host in hosts] == [("node1", 4), ("node2", 4)]
    assert [host.user for host in hosts] == (["me", "you"] if "@" in text else [None, None])


def test_unequal_slots_are_said() -> None:
    reading = only("user1@192.0.2.10 slots=2\nuser2@192.0.2.7 slots=1\n")
    assert [host.gpus for host in reading.hosts] == [2, 1]
    assert reading.gpu_count is None
    assert "3 slots in total" in reading.facts
    assert "unequal" in reading.warnings[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x.x.x.x slots=8\nx.x.x.x lots=8", r"hosts:2: 'lots=8' is not understood; did you mean"),
        ("node1 slots=4\nnode1 slots=4", "hosts:2: the host node1 stands already in line 1"),
        ("node1\nnode1 slots=4", "hosts:2: the host node1 stands already in line 1"),
        ("node1 slots=0", "hosts:1: slots must be a number from 1"),
        ("node1 slots=-2", "hosts:1: slots must be a number from 1"),
        ("node1 slots=" + "9" * 1_000_000, "hosts:1: slots must be"),
        ("node1 slots=8\n-bad- slots=8", "hosts:2: '-bad-' is no host name"),
        ("node1 slots=8\nnode2 8", "hosts:2: '8' is not understood"),
        ("# nothing", "hosts names no host"),
    ],
)
def test_mistakes_are_named_with_their_line(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(Source("hosts", text))


def test_slots_that_a_host_has_not_are_refused() -> None:
    hosts = [Host(name="work1", gpus=2), Host(name="work2", gpus=4)]
    assert select(hosts, "work1@work2:0,3") == [hosts[0], Host(name="work2", gpus=2)]
    with pytest.raises(InputError, match="work1 has slots 0,1"):
        select(hosts, "work1:2,3")
    with pytest.raises(InputError, match="no host 'work3'; did you mean"):
        select(hosts, "work3")


def test_prose_and_matrices_are_no_hostfiles() -> None:
    assert not recognise(Source("t", "this is a text\nof several lines here\n"))
    assert not recognise(Source("t", "\tGPU0\tGPU1\nGPU0\t X \tPHB\nGPU1 PHB X\n"))


@given(st.text(alphabet="node1 slots=:@#\n[].", max_size=200))
@settings(max_examples=200, deadline=None)
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        read(Source("hosts", text))
    except InputError as error:
        assert str(error).startswith("hosts")
