from __future__ import annotations

import pytest

from claw_plan.executor.benchmark_rates import (
    gigabytes_per_s,
    link_figures,
    moved_bytes,
    undisturbed_ns,
)
from claw_plan.profiles.catalogue import link
from claw_plan.profiles.cluster_schema import LinkFigures
from claw_plan.profiles.work import CollectiveWork


def work(op: str, size: int, ranks: int = 4, backend: str = "nccl") -> CollectiveWork:
    return CollectiveWork(op=op, bytes=size, group_size=ranks, nodes=1, backend=backend)


@pytest.mark.parametrize(
    ("op", "backend", "share"),
    [
        ("all_reduce", "nccl", 1.5),
        ("reduce_scatter", "nccl", 0.75),
        ("reduce_scatter", "gloo", 1.5),
        ("all_gather", "gloo", 0.75),
        ("all_to_all", "nccl", 0.75),
        ("send", "nccl", 1.0),
        ("broadcast", "gloo", 1.0),
    ],
)
def test_bytes_over_one_port(op: str, backend: str, share: float) -> None:
    assert moved_bytes(work(op, 1000, 4, backend)) == share * 1000


def test_start_and_rate_are_found_again() -> None:
    sizes = [1 << 12, 1 << 20, 1 << 26]
    samples = {work("send", size, 2): (round(5000 + size / 20e9 * 1e9),) * 4 for size in sizes} | {
        work("all_reduce", size): (round(30000 + 1.5 * size / 15e9 * 1e9),) for size in sizes
    }
    found = link(None, LinkFigures.model_validate(link_figures(samples, "here")))
    assert found.rate("send") == pytest.approx(20e9, rel=1e-2)
    assert found.rate("all_reduce") == pytest.approx(15e9, rel=1e-2)
    assert found.latency_ns == pytest.approx(5000, rel=1e-2)
    assert found.bytes_per_s >= 20e9 * 0.99
    assert found.startup_ns == {}


def test_gloo_has_startups() -> None:
    figures = link_figures({work("send", 1 << n, 2, "gloo"): (100,) for n in (1, 4)}, "here")
    assert set(figures["startup"]) == {"send"}


def test_disturbed_samples_do_not_count() -> None:
    assert undisturbed_ns((9, 1, 2, 99)) == 2
    assert gigabytes_per_s(1.23456e9) == "1.235 GB/s"
