from __future__ import annotations

import pytest

from claw_plan.profiles.topology.bench_log import read, recognise
from claw_plan.profiles.topology.reading import Host, Reading
from claw_plan.profiles.topology.source import Source


def devices(hosts: str, ranks: list[int] | None = None) -> str:
    lines = "# Using devices\n"
    for place, host in enumerate(hosts):
        rank = place if ranks is None else ranks[place]
        lines += (
            f"#  Rank {rank:2} Group  0 Pid  1887 on  {host} device {hosts[:place].count(host):2} "
            "[0x8d] NVIDIA H100 80GB HBM3\n"
        )
    return lines


HEADER = (
    "#                                   out-of-place                       in-place\n"
    "#  size  count  type  redop  root  time  algbw  busbw #wrong  time  algbw  busbw #wrong\n"
    "#   (B) (elements)                 (us) (GB/s) (GB/s)          (us) (GB/s) (GB/s)\n"
)
ROWS = (
    "   536870912   134217728  float sum -1  1806.7  297.16  445.74  0  1835.9  292.43  438.6  0\n"
    "  1073741824  268435456 float sum -1  3108.8  345.38  518.07  0  2924.7  367.13  550.7  N/A\n"
    "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 488.2\n"
)


def only(text: str) -> Reading:
    source = Source("t", text)
    assert recognise(source)
    (reading,) = read(source)
    return reading


def test_nccl_tests_with_its_command() -> None:
    reading = only("$ ./build/all_gather_perf -b 512M\n" + devices("aabb") + HEADER + ROWS)
    assert reading.hosts == (Host(name="a", gpus=2), Host(name="b", gpus=2))
    assert reading.gpu_types == ("NVIDIA H100 80GB HBM3",) * 2
    first, second = reading.rates
    assert (first.op, first.ranks, first.nodes, first.kind) == ("all_gather", 4, 2, "bus")
    assert (first.bytes_per_s, second.bytes_per_s) == (445.74e9, 550.7e9)
    assert first.size_bytes == 536870912
    assert first.where == "t:10"


def test_the_ratio_of_bandwidths_tells_an_all_reduce() -> None:
    reading = only(devices("aaaa") + HEADER + ROWS)
    assert {rate.op for rate in reading.rates} == {"all_reduce"}
    assert any("by the ratio" in fact for fact in reading.facts)
    assert only(devices("aa") + HEADER + ROWS).rates == ()  # two ranks: every ratio is one


def test_processes_that_are_all_rank_0_measured_themselves() -> None:
    reading = only("all_reduce_perf\n" + devices("ab", [0, 0]) + HEADER + ROWS)
    assert reading.rates == ()
    assert "built without MPI=1" in reading.warnings[0]


def test_old_tables_have_an_error_column() -> None:
    text = "all_reduce_perf\n#   size  count  type  redop  time algbw busbw error time ...\n"
    text += "  1024  256 float sum  43.23 0.02 0.04 2e-07  39.96 0.03 0.05 2e-07\n"
    assert [rate.bytes_per_s for rate in only(text).rates] == [0.05e9]


def test_all_reduce_bench_gives_bits_of_the_last_round() -> None:
    text = "local_rank: 1\nlocal_rank: 0\n0 data size: 4.0 GB\n"
    for round_of in ("800.0  Gbps", "1000.0  Gbps"):
        text += f"1:\n duration: 0.04 sec\n busbw: {round_of}\n0:\n busbw: {round_of}\n"
    reading = only(text)
    (rate,) = reading.rates
    assert reading.gpu_count == 2
    assert (rate.bytes_per_s, rate.ranks, rate.size_bytes) == (125e9, 2, 4_000_000_000)


def test_newer_all_reduce_bench_gives_a_table_in_bytes() -> None:
    text = (
        "The average bandwidth of all_reduce over 16 ranks (5 warmups / 20 trials):\n"
        "| payload |    busbw   |    algbw   |\n| ------: | ---------: | ---------: |\n"
        "|    32KB |   0.92GBps |   0.49GBps |\n|     1GB | 350.61GBps | 186.99GBps |\n"
    )
    small, large = only(text).rates
    assert (small.size_bytes, large.size_bytes) == (32 << 10, 1 << 30)
    assert (large.ranks, large.bytes_per_s) == (16, pytest.approx(350.61e9))


def test_wrong_results_are_told() -> None:
    rows = ROWS.replace("445.74  0", "445.74  7")
    reading = only("all_reduce_perf\n" + devices("aa") + HEADER + rows)
    assert "t:8: wrong results counted" in reading.warnings
