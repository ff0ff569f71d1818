from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from claw_plan.profiles.errors import InputError
from claw_plan.profiles.units import (
    GIB,
    format_bits_per_s,
    format_bytes,
    format_ns,
    gib,
    ms_from_ns,
    ns_from_s,
    parse_bytes,
    parse_bytes_per_s,
    parse_flops_per_s,
    parse_ns,
    s_from_ns,
)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("80 GiB", 80 << 30),
        ("1.5KiB", 1536),
        ("2 GB", 2_000_000_000),
        ("7 B", 7),
        ("1e3 MB", 10**9),
    ],
)
def test_sizes(text: str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("450 GB/s", 450e9),
        ("400 Gb/s", 50e9),
        ("400 Gbps", 50e9),
        ("100 Gbit/s", 12.5e9),
        ("8 Mb/s", 1e6),
        ("1 GiB/s", 2**30),
    ],
)
def test_a_lower_case_b_is_a_bit(text: str, bytes_per_s: float) -> None:
    assert parse_bytes_per_s(text) == bytes_per_s


def test_times_and_peaks() -> None:
    assert parse_ns("2 us") == parse_ns("2 µs") == 2000
    assert parse_ns("1.5 ms") == 1_500_000
    assert parse_ns("30 d") == 30 * 24 * 3600 * 10**9
    assert parse_flops_per_s("312 TFLOPS") == parse_flops_per_s("312 TFLOP/s") == 312e12


@pytest.mark.parametrize("parse", [parse_bytes, parse_ns, parse_bytes_per_s, parse_flops_per_s])
@pytest.mark.parametrize(
    "text",
    ["", "80", "GiB", "0 GiB", "-1 GiB", "inf GiB", "nan s", "1e999 B", "8 apples", 80, None],
)
def test_what_is_no_quantity_is_refused(parse: object, text: object) -> None:
    assert callable(parse)
    with pytest.raises(InputError):
        parse(text)


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_bytes, "80 GB/s"),
        (parse_bytes, "80 Gb"),
        (parse_bytes_per_s, "80 GB"),
        (parse_ns, "5 GB"),
        (parse_ns, "5 m"),
        (parse_flops_per_s, "5 GB"),
    ],
)
def test_foreign_units_are_refused_with_the_choices(parse: object, text: str) -> None:
    assert callable(parse)
    with pytest.raises(InputError, match=f"has the unit .* in '{text}'; use"):
        parse(text)


def test_sizes_and_times_for_people() -> None:
    assert format_bytes(17) == "17 B"
    assert format_bytes(310 << 20) == "310 MiB"
    assert format_bytes(12.44 * GIB) == "12.4 GiB"
    assert format_ns(41_700_000) == "41.7 ms"
    assert format_ns(3_200_000_000) == "3.20 s"
    assert format_ns(9_999_000_000) == "10.0 s"
    assert format_ns(120_400_000_000) == "120 s"
    assert format_ns(80_000) == "80.0 us"
    assert format_ns(12) == "12 ns"
    assert format_bits_per_s(12.5e9) == "100 Gbit/s"
    assert format_bits_per_s(450e9) == "3,600 Gbit/s"
    assert format_bits_per_s(3.14159e8) == "2.51 Gbit/s"
    assert format_bits_per_s(100) == "800 bit/s"


@given(st.integers(1, 10**15))
def test_seconds_and_nanoseconds_are_inverse(time_ns: int) -> None:
    assert ns_from_s(s_from_ns(time_ns)) == pytest.approx(time_ns, rel=1e-12)
    assert ms_from_ns(time_ns) == pytest.approx(s_from_ns(time_ns) * 1000)
    assert gib(time_ns * GIB) == time_ns
