"""`rocm-smi --showtopo`, in its text forms and as JSON, to a `Reading`.

The link types are read; weights and hops only confirm how many GPUs there are. rocm-smi shows no
NICs. Its path kinds are XGMI (Infinity Fabric) and PCIE.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from claw_plan.profiles.errors import InputError
from claw_plan.profiles.topology.reading import (
    MAX_GPUS,
    Pair,
    Reading,
    all_pairs,
    by_kind,
    gpu_names,
)
from claw_plan.profiles.topology.source import Source, whole_number

FORMAT = "rocm-smi --showtopo"

_TITLE = re.compile(
    r"(Link Type|Link accessibility|Weight|Hops|Min/Max|bandwidth|Numa)\b[^\n]{0,40}",
    re.IGNORECASE,
)
_GPU = re.compile(r"(?:.*\W)?GPU\[?(\d{1,4})\]?:?\Z")
_BDF = re.compile(r"\b[0-9a-fA-F]{4}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]\b")
"""amd-smi labels its tables by the GPUs' PCI addresses."""

_TYPE_CELL = re.compile(r"(XGMI|PCIE|UNKNOWN|IOLINK|N/A)\Z", re.IGNORECASE)
_PHRASE = re.compile(
    r"\(Topology\) Link type between DRM devices (\d{1,4}) and (\d{1,4})\W+([A-Za-z]+)"
)
_NAME = re.compile(
    r"GPU\[(\d{1,4})\]\s*:\s*(?:Card (?:series|SKU|model)|Device Name):\s*(.{1,60})", re.IGNORECASE
)
_MARK = re.compile(
    r"ROCm? ?(?:System Management Interface|SMI)|Link Type between two GPUs|LINK TYPE TABLE"
    r"|\(Topology\)"
)

Cells = dict[Pair, str]


def recognise(source: Source) -> bool:
    """Whether rocm-smi speaks here."""
    if _MARK.search(source.text):
        return True
    for line in source.lines:
        words = line.split()
        if {"XGMI", "PCIE"} & set(words) and any(_GPU.match(word) for word in words[:4]):
            return True
    return False


def read(source: Source) -> list[Reading]:
    """One Reading. Raises InputError when no link type can be read."""
    cells: Cells = {}
    warnings: list[str] = []
    gpus: set[int] = set()
    for number, first, second, kind in _links(source, gpus):
        gpus |= {first, second}
        if first == second:
            continue
        pair = (min(first, second), max(first, second))
        known = cells.get(pair)
        if known not in (None, kind):
            warnings.append(
                f"{source.where(number)}: GPU{first}-GPU{second} is {known} in one row and {kind} "
                "in the other: taken as unknown"
            )
            kind = "UNKNOWN"
        cells[pair] = kind
    count = max(gpus, default=-1) + 1
    if count > MAX_GPUS:
        raise InputError(f"{source.name}: GPU{count - 1} is no index of a GPU; is the file whole?")
    kinds = {pair: kind for pair, kind in cells.items() if kind in ("XGMI", "PCIE")}
    if count == 0 or (count > 1 and not kinds):
        raise InputError(
            f"{source.name}: no table 'Link Type between two GPUs'; run `rocm-smi --showtopo` and "
            "give its whole output"
        )
    unsure = [pair for pair in all_pairs(count) if pair not in kinds]
    if unsure:
        text = ", ".join(f"GPU{a}-GPU{b}" for a, b in unsure[:6])
        warnings.append(f"{len(unsure)} GPU pairs are not in the table: {text}")
    types = _types(source, count)
    unknown = ["NICs: rocm-smi does not show them"]
    unknown += [] if types else ["the type of the GPUs"]
    return [
        Reading(
            source=source.name,
            format=FORMAT,
            gpu_count=count,
            gpu_types=types,
            pairs=by_kind(kinds),
            pairs_unknown=tuple(unsure),
            nvlink="absent",
            unknown=tuple(unknown),
            warnings=(*warnings, *_island_warnings(count, kinds)),
        )
    ]


def _links(source: Source, gpus: set[int]) -> Iterator[tuple[int, int, int, str]]:
    """Line, both GPUs and the kind of every link; GPUs that other tables name go to `gpus`."""
    if source.text.lstrip().startswith("{"):
        yield from _json_links(source)
        return
    columns: list[int] = []
    in_types = False
    numbered: dict[str, str] = {}
    for number, raw in enumerate(source.lines, start=1):
        line = _BDF.sub(lambda m: numbered.setdefault(m[0].lower(), f"GPU{len(numbered)}"), raw)
        words = line.replace("|", " ").split()
        if phrase := _PHRASE.search(line):
            yield number, int(phrase[1]), int(phrase[2]), phrase[3].upper()
        elif ("=" in line or "TABLE" in line) and (title := _TITLE.search(line.replace("=", ""))):
            in_types = title[1].lower() == "link type"
            columns = []
        elif named := _header(words):
            columns = named
            gpus.update(columns)
        else:
            yield from _row_links(words, columns, in_types, number)


def _header(words: list[str]) -> list[int]:
    """The GPUs that a line of nothing else names, what a log puts before each line left out."""
    start = next((place for place, word in enumerate(words[:4]) if _GPU.match(word)), len(words))
    found = [_GPU.match(word) for word in words[start:]]
    return [int(match[1]) for match in found if match] if all(found) else []


def _row_links(
    words: list[str], columns: list[int], in_types: bool, number: int
) -> Iterator[tuple[int, int, int, str]]:
    place = next((i for i, word in enumerate(words[:4]) if _GPU.match(word)), None)
    if place is None or not columns:
        return
    own = int(_GPU.sub(r"\1", words[place]))
    cells = words[place + 1 :]
    if not in_types and not any(_TYPE_CELL.match(cell) for cell in cells):
        return
    if len(cells) != len(columns) and own in columns:
        before = cells[: columns.index(own) + 1]
        if not before or before[-1] not in ("0", "X", "SELF"):
            return  # shifted: a cell is missing before the diagonal
    for other, cell in zip(columns, cells, strict=False):
        if _TYPE_CELL.match(cell):
            yield number, own, other, cell.upper()
        elif other == own:
            yield number, own, own, ""


def _json_links(source: Source) -> Iterator[tuple[int, int, int, str]]:
    try:
        data = json.loads(source.text)
    except (ValueError, RecursionError):
        raise InputError(f"{source.name}: not valid JSON; was it cut off?") from None
    system = data.get("system", {}) if isinstance(data, dict) else {}
    for key, value in system.items() if isinstance(system, dict) else ():
        match = _PHRASE.search(f"{key} {value}")
        if match:
            yield 1, int(match[1]), int(match[2]), match[3].upper()


def _types(source: Source, count: int) -> tuple[str, ...]:
    names: dict[int | None, str] = {}
    for line in source.lines:
        if match := _NAME.search(line):
            index = whole_number(match[1], MAX_GPUS)
            names.setdefault(index, match[2].strip())
    return tuple(names[i] for i in range(count)) if set(names) == set(range(count)) else ()


def _island_warnings(count: int, kinds: Cells) -> list[str]:
    """Names the hives, where XGMI does not join all GPUs."""
    groups: list[set[int]] = []
    for gpu in range(count):
        joined = [group for group in groups if any(_is_xgmi(kinds, gpu, other) for other in group)]
        groups = [group for group in groups if group not in joined]
        groups.append({gpu}.union(*joined))
    hives = sorted((sorted(group) for group in groups if len(group) > 1), key=lambda g: g[0])
    if not hives or len(groups) == 1:
        return []
    text = " and ".join("{" + gpu_names(hive) + "}" for hive in hives)
    return [f"XGMI joins only {text}; other pairs use PCIe"]


def _is_xgmi(kinds: Cells, first: int, second: int) -> bool:
    return kinds.get((min(first, second), max(first, second))) == "XGMI"
