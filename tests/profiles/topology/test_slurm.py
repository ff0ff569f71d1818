from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from claw_plan.profiles.errors import InputError
from claw_plan.profiles.topology.reading import Host
from claw_plan.profiles.topology.slurm import allocation, expand, gpus_per_node, read, recognise
from claw_plan.profiles.topology.source import Source, read_source

CORPUS = Path(__file__).parents[4] / "shared" / "corpus" / "cluster"


@pytest.mark.skipif(not CORPUS.is_dir(), reason="the corpus is not beside the project")
def test_corpus() -> None:
    expected = yaml.safe_load((CORPUS / "slurm_nodelists.expect.yaml").read_text())
    source = read_source(CORPUS / "slurm_nodelists.txt")
    assert recognise(source)
    (reading,) = read(source)
    assert {text: list(hosts) for text, hosts in reading.node_lists.items()} == expected


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n[08-10]", ["n08", "n09", "n10"]),
        ("r[1-2]n[3,5]-ib", ["r1n3-ib", "r1n5-ib", "r2n3-ib", "r2n5-ib"]),
        ("a-b-[9-11],c", ["a-b-9", "a-b-10", "a-b-11", "c"]),
    ],
)
def test_lists_are_expanded(text: str, hosts: list[str]) -> None:
    assert list(expand(text)) == hosts


@pytest.mark.parametrize(
    "text",
    ["n[1-", "n[3-1]", "n[a-b]", "n[1-2]]", "n[]", "a,,b", "a,", "", "n[0-999999999]",
     "n[1-999][1-999][1-999]", "a,a", "n[" + "9" * 1_000_000 + "]"],
)  # fmt: skip
def test_broken_and_endless_lists_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="the node list"):
        expand(text)


def test_an_environment_tells_gpus_and_their_type() -> None:
    text = "export SLURM_JOB_NODELIST='n[1-2]'\nSLURM_GPUS_PER_NODE=h100:8\nSLURM_NNODES=3\n"
    (reading,) = read(Source("env", text))
    assert reading.hosts == (Host(name="n1", gpus=8), Host(name="n2", gpus=8))
    assert reading.gpu_types == ("h100",) * 8
    assert "SLURM_NNODES is 3, but the node list has 2 nodes" in reading.warnings


def test_scontrol_tells_the_gpus_of_each_node() -> None:
    text = "NodeName=a1 Arch=x86_64\n   Gres=gpu:a100:4(S:0-1)\nNodeName=a2\n   Gres=gpu:a100:8\n"
    (reading,) = read(Source("nodes", text))
    assert [host.gpus for host in reading.hosts] == [4, 8]


def test_mistakes_are_named_with_their_line() -> None:
    with pytest.raises(InputError, match="t:2: the node list"):
        read(Source("t", "n[1-2]\nn[3-1]\n"))


def test_gpus_of_a_node() -> None:
    assert gpus_per_node({"SLURM_JOB_GPUS": "0,1,2"}) == (3, "")
    assert gpus_per_node({"SLURM_GPUS_ON_NODE": "4"}) == (4, "")
    assert gpus_per_node({"SLURM_GPUS_ON_NODE": "many"}) == (None, "")


def test_allocation_of_this_process() -> None:
    assert allocation({}) == []
    environment = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_GPUS_ON_NODE": "2"}
    assert allocation(environment) == [Host(name="n1", gpus=2), Host(name="n2", gpus=2)]


@given(st.text(alphabet="n[]0129,-a", max_size=40))
@settings(max_examples=300, deadline=None)
def test_any_list_is_expanded_or_refused(text: str) -> None:
    try:
        assert expand(text)
    except InputError as error:
        assert "the node list" in str(error)
