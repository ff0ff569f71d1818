"""Our collectives on groups of 2 to 8 real processes: against exact sums, gloo's, and formulas."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from ast import literal_eval
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from claw_plan.executor.communication.algorithms import all_reduce, even_bounds, reduce_scatter
from claw_plan.executor.errors import ExecutionError
from claw_plan.profiles.collective_schedules import Nodes

RANK = Path(__file__).with_name("rank_collectives.py")

ELEMENTS = 840
"""Divides by every number up to 8, so that formulas hold to the byte."""

Seen = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """By case 'size/algorithm/nodes/length/dtype' what each rank of the group saw."""
    folder = tmp_path_factory.mktemp("collectives")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANK), str(rank), "8", str(folder)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(8)
    ]
    assert [rank.wait(timeout=280) for rank in ranks] == [0] * 8
    found = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(8)]
    return {key: [ranks[key] for ranks in found if key in ranks] for key in found[0]}


@pytest.mark.slow
def test_all_ranks_end_with_the_same_bits(seen: Seen) -> None:
    assert len(seen) == 16 * (5 * 5 + 4)  # layouts, algorithms, lengths and dtypes
    for key, ranks in seen.items():
        assert len(ranks) == int(key.partition("/")[0])
        assert len({rank["bits"] for rank in ranks}) == 1, key


@pytest.mark.slow
def test_sums_equal_the_backends(seen: Seen) -> None:
    # Of at most 8 numbers below 4; bf16 rounds to 2^-8 at each of at most 7 sums of up to 16.
    allowed = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 7 * 16 * 2**-9}
    for key, ranks in seen.items():
        most = allowed[key.rpartition("/")[2]]
        assert max(max(rank["error"], rank["from_native"]) for rank in ranks) <= most, key


@pytest.mark.slow
def test_scattered_and_gathered_parts_are_those_of_the_sum(seen: Seen) -> None:
    checked = 0
    for key, ranks in seen.items():
        if not key.endswith("float64"):
            continue
        size, name, nodes, _, _ = key.split("/")
        is_even = len({len(node) for node in literal_eval(nodes)}) == 1
        parts = ranks[0]["parts"]
        if name == "ring" or (name == "halving_doubling" and size in "248"):
            assert not isinstance(parts, str), key
        if isinstance(parts, str):
            assert name not in ("ring", "hierarchical") or not is_even, key
            said = name.removesuffix("_in_chunks")
            assert parts.startswith(f"scattering or gathering alone by {said} needs"), key
        else:
            assert max(max(rank["parts"]) for rank in ranks) <= 1e-12, key
            checked += 1
    assert checked > 60


@pytest.mark.slow
def test_bytes_sent_are_the_formulas(seen: Seen) -> None:
    size_bytes = ELEMENTS * 8
    for key, found in seen.items():
        size, name, nodes, length, dtype = key.split("/")
        if length != str(ELEMENTS) or dtype != "float64":
            continue
        ranks, sent = int(size), [one["sent"] for one in found]
        least = 2 * (ranks - 1) * size_bytes // ranks
        doublings = math.floor(math.log2(ranks))
        left_over = ranks - 2**doublings
        if name == "ring":
            assert sent == [least] * ranks, key
        elif name == "tree" and ranks > 2:  # n-1 edges, each taken up and down
            assert sum(sent) == 2 * (ranks - 1) * size_bytes, key
        elif name.startswith("tree"):
            assert sum(sent) == tree_bytes(literal_eval(nodes), size_bytes), key
            # on one node a rank sends two halves up, and two halves down to each of two children
            assert "), (" in nodes or max(sent) <= 2 * size_bytes, key
        elif name == "recursive_doubling":
            exchanges = 2**doublings * doublings
            assert sum(sent) == (exchanges + 2 * left_over) * size_bytes, key
        elif name == "halving_doubling":
            halves = 2 * (2**doublings - 1) * size_bytes
            assert sum(sent) == halves + 2 * left_over * size_bytes, key
        elif nodes in (f"(({', '.join(map(str, range(ranks)))}),)", "((0, 1), (2, 3))"):
            assert sent == [least] * ranks, key


def tree_bytes(nodes: Nodes, size_bytes: int) -> int:
    """All that ranks send: a ring inside nodes, after those left over; then n-1 edges between."""
    spanned, local = len(nodes), min(map(len, nodes))
    if spanned == 1:
        spanned, local = len(nodes[0]), 1
        nodes = ((0,),) * spanned
    left_over = sum(map(len, nodes)) - local * spanned
    inside = spanned * 2 * (local - 1) * size_bytes + 2 * left_over * size_bytes
    return inside + 2 * (spanned - 1) * size_bytes


def test_parts_differ_by_one_element_at_most() -> None:
    assert even_bounds(10, 4) == [0, 2, 5, 7, 10]
    assert even_bounds(0, 2) == [0, 0, 0]


@pytest.fixture
def alone() -> Any:
    """A group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_one_rank_keeps_what_it_has(alone: dist.ProcessGroup) -> None:
    flat = torch.arange(3.0)
    for name in ("ring", "tree", "recursive_doubling", "halving_doubling", "hierarchical"):
        all_reduce(flat, alone, name)
        assert flat.tolist() == [0, 1, 2]
    assert reduce_scatter(flat, alone, "ring").tolist() == [0, 1, 2]


def test_names_that_are_none_are_refused(alone: dist.ProcessGroup) -> None:
    with pytest.raises(ExecutionError, match=r"no collective 'rign'; choose one of \('ring', 'tr"):
        all_reduce(torch.zeros(1), alone, "rign")
