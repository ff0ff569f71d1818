"""Logs of nccl-tests (rccl-tests) and all_reduce_bench.py to a `Reading` with measured rates.

Bandwidths are converted to bytes per second here: nccl-tests prints GB/s, all_reduce_bench.py
Gbps (bits) or GBps (bytes), by its version.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable

from claw_plan.profiles.topology.reading import MAX_GPUS, Host, Rate, Reading
from claw_plan.profiles.topology.source import Source, real_number, whole_number

NCCL_TESTS = "nccl-tests log"
ALL_REDUCE_BENCH = "all_reduce_bench log"

_PROGRAM = re.compile(
    r"\b(all_reduce|all_gather|reduce_scatter|alltoall|broadcast|sendrecv|reduce|gather|scatter|"
    r"hypercube)_perf"
)
_OPS = {"alltoall": "all_to_all", "sendrecv": "send"}
_DEVICE = re.compile(
    r"#\s+Rank\s+(\d{1,7}) (?:Group\s+\d+ )?Pid\s+\d+ on\s+(\S{1,128}) device\s+(\d{1,4}) "
    r"\[[\w:.]{1,20}\] (.{1,60})"
)
_HEADER = re.compile(r"#\s+size\s+count\s+type\b")
_ROW_START = re.compile(r"\s*(\d{1,18})\s+(\d{1,18})\s+[a-z]\w{2,15}\s")
_AVERAGE = re.compile(r"# Avg bus bandwidth\s*:\s*([\d.]{1,30})")
_BUSBW = re.compile(r"busbw: ?\s{0,4}([\d.]{1,30}) {1,4}(Gbps|GBps|Mbps|MBps)\b", re.IGNORECASE)
_TABLE = re.compile(
    r"\|\s*([\d.]{1,20})([KMG]i?B)\s*\|\s*([\d.]{1,20})\s*(Gbps|GBps)\s*\|\s*[\d.]{1,20}\s*GB?ps"
)
_TABLE_RANKS = re.compile(r"bandwidth of all_reduce\b.{0,80}?(\d{1,6}) ranks")
_DATA_SIZE = re.compile(r"data size: ([\d.]{1,20}) GB")
_LOCAL_RANK = re.compile(r"^(?:local_rank|rank)\s*[:=]\s*(\d{1,4})\s*$")
_UNITS = {"gbps": 1e9 / 8, "mbps": 1e6 / 8}
_BYTE_UNITS = {"GBps": 1e9, "MBps": 1e6, "GBPS": 1e9, "MBPS": 1e6}
_SIZES = {"KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30, "KiB": 1 << 10, "MiB": 1 << 20}
_SIZES |= {"GiB": 1 << 30}
_MAX_BYTES_PER_S = 1e13


def recognise(source: Source) -> bool:
    """Whether one of the two programs wrote this."""
    return _is_nccl_tests(source) or _is_bench(source)


def _is_nccl_tests(source: Source) -> bool:
    return any(_HEADER.search(line) or _DEVICE.search(line) for line in source.lines)


def _is_bench(source: Source) -> bool:
    return any(
        _BUSBW.search(line) or _TABLE.search(line) or _TABLE_RANKS.search(line)
        for line in source.lines
    )


def read(source: Source) -> list[Reading]:
    """One Reading, of whichever program wrote the log."""
    return [_NcclTests(source).reading() if _is_nccl_tests(source) else _bench(source)]


class _NcclTests:
    """Reads the device list and the table of one nccl-tests log."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._op = ""
        self._hosts: dict[str, dict[int, str]] = {}
        self._ranks: list[int] = []
        self._rows: list[tuple[int, int, float, float]] = []
        self._average = ""
        self._odd: list[str] = []

    def reading(self) -> Reading:
        self._scan()
        ranks = len(self._ranks)
        alone = ranks > 1 and set(self._ranks) == {0}
        op, guessed = self._op, False
        if not op and self._rows:
            op, guessed = _op_of_ratio(ranks, [(row[2], row[3]) for row in self._rows])
        warnings = list(self._odd)
        if alone:
            warnings.append(
                f"all {ranks} processes are rank 0: nccl-tests was built without MPI=1, each "
                "measured itself; its figures are left out"
            )
        elif self._average and real_number(self._average) == 0:
            warnings.append(f"{self._average} GB/s of average bus bandwidth: nothing was measured")
        hosts = tuple(Host(name=name, gpus=len(gpus)) for name, gpus in self._hosts.items())
        counts = {host.gpus for host in hosts}
        count = counts.pop() if len(counts) == 1 else None
        names = [name for gpus in self._hosts.values() for name in gpus.values()]
        types = tuple(names[:count]) if count and len(set(names)) == 1 else ()
        unknown = [] if types else ["the type of the GPUs"]
        if not op and self._rows:
            unknown.append("which collective was measured: the log does not name the program")
        facts = [f"{ranks} ranks on {len(hosts)} hosts"] if ranks else []
        if guessed:
            facts.append(f"{op}, by the ratio of its two bandwidths; the log does not name it")
        if len(set(names)) > 1:
            warnings.append(f"the GPUs differ: {', '.join(sorted(set(names))[:4])}")
        return Reading(
            source=self._source.name,
            format=NCCL_TESTS,
            gpu_count=count,
            gpu_types=types,
            hosts=hosts,
            node_count=len(hosts) or None,
            rates=() if alone or not op else tuple(self._rates(op, ranks, len(hosts))),
            facts=tuple(facts),
            unknown=(*unknown, "the paths between GPUs", "NICs"),
            warnings=tuple(warnings),
        )

    def _scan(self) -> None:
        for number, line in enumerate(self._source.lines, start=1):
            if (match := _PROGRAM.search(line)) and not self._op and "Linking" not in line:
                self._op = _OPS.get(match[1], match[1])
            if (match := _DEVICE.search(line)) and int(match[3]) < MAX_GPUS:
                self._ranks.append(int(match[1]))
                self._hosts.setdefault(match[2], {})[int(match[3])] = match[4].strip()
            elif match := _AVERAGE.search(line):
                self._average = match[1]
            elif match := _ROW_START.match(line):
                self._row(number, line, match)

    def _row(self, number: int, line: str, match: re.Match[str]) -> None:
        """Takes the better of out-of-place and in-place; each is time, algbw, busbw, errors."""
        words = line.split()
        size = whole_number(match[1], 1 << 50)
        groups = [words[-8:-4], words[-4:]] if len(words) >= 11 else [words[-4:]]
        best: tuple[float, float] | None = None
        for group in groups:
            numbers = [real_number(word) for word in group[:3]]
            if len(group) == 4 and None not in numbers:
                pair = (numbers[1] or 0.0, numbers[2] or 0.0)
                best = max(best, pair) if best else pair
                if group[3] not in ("0", "N/A") and (real_number(group[3]) or 0) >= 1:
                    self._odd.append(f"{self._source.where(number)}: wrong results counted")
        if size and best:
            self._rows.append((number, size, best[0], best[1]))

    def _rates(self, op: str, ranks: int, nodes: int) -> Iterable[Rate]:
        for number, size, _, bus in self._rows:
            if 0 < bus * 1e9 < _MAX_BYTES_PER_S:
                yield Rate(
                    op=op,
                    ranks=ranks or None,
                    nodes=nodes or None,
                    bytes_per_s=bus * 1e9,
                    kind="bus",
                    where=self._source.where(number),
                    size_bytes=size,
                )


def _op_of_ratio(ranks: int, rows: list[tuple[float, float]]) -> tuple[str, bool]:
    """All-reduce is the only one whose bus bandwidth is above its algorithm bandwidth."""
    ratios = [bus / algorithm for algorithm, bus in rows if algorithm > 1]
    if ranks > 2 and ratios:
        expected = 2 * (ranks - 1) / ranks
        if abs(statistics.median(ratios) - expected) < 0.02 * expected:
            return "all_reduce", True
    return "", False


def _bench(source: Source) -> Reading:
    rates: list[Rate] = []
    last: list[tuple[int, float]] = []
    ranks: int | None = None
    local: set[int] = set()
    size: int | None = None
    for number, line in enumerate(source.lines, start=1):
        if match := _TABLE_RANKS.search(line):
            ranks = int(match[1])
        if match := _LOCAL_RANK.match(line.strip()):
            local.add(int(match[1]))
        if match := _DATA_SIZE.search(line):
            size = round((real_number(match[1]) or 0) * 1e9) or None
        if match := _TABLE.search(line):
            value = real_number(match[3])
            payload = round((real_number(match[1]) or 0) * _SIZES[match[2]])
            if value:
                speed = value * _per_s(match[4])
                rates.append(_rate(source, number, speed, ranks, payload))
        elif (match := _BUSBW.search(line)) and (value := real_number(match[1])):
            last.append((number, value * _per_s(match[2])))
    ranks = ranks or (len(local) or None)
    if last and not rates:
        newest = last[-(ranks or 1) :]
        number, speed = sorted(newest, key=lambda pair: pair[1])[len(newest) // 2]
        rates.append(_rate(source, number, speed, ranks, size))
    facts = [f"{len(last)} bandwidths, one a rank; the middle one of the last round is taken"]
    return Reading(
        source=source.name,
        format=ALL_REDUCE_BENCH,
        gpu_count=len(local) or None,
        rates=tuple(rate for rate in rates if rate.bytes_per_s < _MAX_BYTES_PER_S),
        facts=tuple(facts) if last else (),
        unknown=("the type of the GPUs", "the paths between GPUs"),
    )


def _per_s(unit: str) -> float:
    """Bytes per second of a unit; a capital B is a byte, a small one a bit."""
    return _BYTE_UNITS.get(unit) or _UNITS[unit.lower()]


def _rate(source: Source, line: int, speed: float, ranks: int | None, size: int | None) -> Rate:
    return Rate(
        op="all_reduce",
        ranks=ranks,
        nodes=None,
        bytes_per_s=speed,
        kind="bus",
        where=source.where(line),
        size_bytes=size,
    )
