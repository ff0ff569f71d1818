"""The only place where units are converted.

Inside, time is `int` nanoseconds (`_ns`), size `int` bytes (`_bytes`), work `int` floating-point
operations (`_flops`), and rates are `float` per second. People and files speak of "80 GiB",
"450 GB/s" or "2 us"; they meet the program here and nowhere else.

GB, GB/s and Gb/s are decimal (1e9), GiB is 2**30. A lower-case b is a bit: 400 Gb/s is 50 GB/s.
"""

from __future__ import annotations

import re

from claw_plan.profiles.errors import InputError

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000
NS_PER_US = 1_000
GIB = 1 << 30
MIB = 1 << 20

_SIZES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
_SIZES |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_BITS = {"b": 1, "Kb": 10**3, "Mb": 10**6, "Gb": 10**9, "Tb": 10**12}
_BITS |= {"bit": 1, "Kbit": 10**3, "Mbit": 10**6, "Gbit": 10**9, "Tbit": 10**12}
_TIMES_NS = {"ns": 1, "us": 10**3, "µs": 10**3, "ms": 10**6, "s": 10**9, "min": 60 * 10**9}
_TIMES_NS |= {"h": 3600 * 10**9, "d": 86400 * 10**9}
_FLOPS = {"FLOPS": 1, "GFLOPS": 10**9, "TFLOPS": 10**12, "PFLOPS": 10**15}
_FLOPS |= {"FLOP/s": 1, "GFLOP/s": 10**9, "TFLOP/s": 10**12, "PFLOP/s": 10**15}

_QUANTITY = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*([A-Za-zµ/]*)\s*\Z")


def _split(text: object, what: str, example: str) -> tuple[float, str]:
    match = _QUANTITY.match(text) if isinstance(text, str) else None
    if match is None:
        raise InputError(f"{what} must be a number with its unit, as in {example!r}; got {text!r}")
    number = float(match[1])
    if not 0 < number < float("inf"):
        raise InputError(f"{what} must be positive and finite; got {text!r}")
    return number, match[2]


def _in_unit(text: object, units: dict[str, int], what: str, example: str) -> float:
    number, unit = _split(text, what, example)
    if unit not in units:
        choices = ", ".join(units)
        raise InputError(
            f"{what} has the unit {unit or 'none'!r} in {text!r}; use one of {choices}"
        )
    return number * units[unit]


def parse_bytes(text: object) -> int:
    """'80 GiB' to bytes. Raises InputError for a missing or foreign unit, or no positive size."""
    return round(_in_unit(text, _SIZES, "a size", "80 GiB"))


def parse_ns(text: object) -> int:
    """'2 us' to nanoseconds. Raises InputError for a missing or foreign unit."""
    return round(_in_unit(text, _TIMES_NS, "a duration", "2 us"))


def parse_bytes_per_s(text: object) -> float:
    """'450 GB/s' or '400 Gb/s' to bytes per second. A rate in bits is divided by eight."""
    units: dict[str, int] = {f"{unit}/s": factor for unit, factor in _SIZES.items()}
    number, unit = _split(text, "a bandwidth", "450 GB/s")
    bits = {f"{unit}/s": factor for unit, factor in _BITS.items()}
    bits |= {"Kbps": 10**3, "Mbps": 10**6, "Gbps": 10**9}
    if unit in units:
        return number * units[unit]
    if unit in bits:
        return number * bits[unit] / 8
    raise InputError(
        f"a bandwidth has the unit {unit or 'none'!r} in {text!r}; use bytes (GB/s) or bits (Gb/s)"
    )


def parse_flops_per_s(text: object) -> float:
    """'312 TFLOPS' to floating-point operations per second."""
    return _in_unit(text, _FLOPS, "a peak", "312 TFLOPS")


def ns_from_s(seconds: float) -> int:
    """Seconds to nanoseconds, rounded to the nearest."""
    return round(seconds * NS_PER_S)


def s_from_ns(time_ns: int) -> float:
    """Nanoseconds to seconds."""
    return time_ns / NS_PER_S


def ms_from_ns(time_ns: float) -> float:
    """Nanoseconds to milliseconds."""
    return time_ns / NS_PER_MS


def gib(size_bytes: float) -> float:
    """Bytes to GiB."""
    return size_bytes / GIB


def format_bytes(size_bytes: float) -> str:
    """A size for people: '12.4 GiB', '310 MiB', '17 B'."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if abs(size_bytes) >= _SIZES[unit]:
            value = size_bytes / _SIZES[unit]
            return f"{value:.1f} {unit}" if abs(value) < 100 else f"{value:.0f} {unit}"
    return f"{size_bytes:.0f} B"


def format_bits_per_s(bytes_per_s: float) -> str:
    """A link's rate for people, to three digits: '12.5 Gbit/s', '3,600 Gbit/s'."""
    rate = 8 * bytes_per_s
    unit = next((unit for unit in ("Gbit", "Mbit", "Kbit") if rate >= 0.9995 * _BITS[unit]), "bit")
    value = rate / _BITS[unit]
    return f"{float(f'{value:.3g}'):,.10g} {unit}/s"


def format_ns(time_ns: float) -> str:
    """A duration for people, to three digits: '41.7 ms', '3.20 s', '80.0 us'."""
    for unit, factor in (("s", NS_PER_S), ("ms", NS_PER_MS), ("us", NS_PER_US)):
        if abs(time_ns) >= factor:
            value = time_ns / factor
            digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
            return f"{value:.{digits}f} {unit}"
    return f"{time_ns:.0f} ns"
