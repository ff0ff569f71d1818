"""`nvidia-smi topo -m` (and -mp) to a `Reading`.

Cells of a row that is complete are taken at their columns. Of a row that was cut, clipped or
fused, only the cells before the damage count, and only for pairs of GPUs, where the other GPU's
row can confirm them; its NIC cells stay unknown, for nothing confirms their columns.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from claw_plan.profiles.errors import InputError
from claw_plan.profiles.topology.matrix_text import Matrix, Row, find_matrices
from claw_plan.profiles.topology.reading import (
    MAX_GPUS,
    Nic,
    Pair,
    Reading,
    all_pairs,
    by_kind,
    gpu_names,
    is_nvlink,
    nvlink_warnings,
)
from claw_plan.profiles.topology.source import Source

FORMAT = "nvidia-smi topo"

_LISTED = re.compile(r"\bGPU (\d{1,4}): ([A-Za-z][\w /.-]{1,60}?) \(UUID: ")
"""A line of `nvidia-smi -L`, which people often paste along."""

_FULL_LEGEND = {"SYS", "NODE", "PHB", "PXB", "PIX"}


def recognise(source: Source) -> bool:
    """Whether a matrix of GPUs stands in the text."""
    matrices, wrong = find_matrices(source)
    return wrong is not None or any(
        re.match(r"GPU\d", label) for matrix in matrices for label in matrix.rows
    )


def read(source: Source) -> list[Reading]:
    """One Reading a machine; equal matrices, or -m and -mp of one machine, become one.

    Raises InputError, with file and line, for what is no matrix of `topo -m`.
    """
    matrices, wrong = find_matrices(source)
    if wrong is not None:
        raise InputError(
            f"{source.where(wrong[0])}: the row is labelled {wrong[1]!r}, not GPU and a number: "
            "a malformed table; paste the output of `nvidia-smi topo -m` unchanged"
        )
    usable = [matrix for matrix in matrices if not matrix.p2p_line]
    if not usable:
        line = next((m.p2p_line for m in matrices if m.p2p_line), 1)
        raise InputError(
            f"{source.where(line)}: not a `topo -m` matrix: cells such as OK and CNS come from "
            "`nvidia-smi topo -p2p`; run `nvidia-smi topo -m`"
        )
    listed = _listed_types(source)
    readings = [_MatrixReader(source, matrix, listed).reading() for matrix in usable]
    ignored = [matrix for matrix in matrices if matrix.p2p_line]
    merged = _one_machine(readings)
    if ignored:
        note = f"{source.where(ignored[0].line)}: a `topo -p2p` matrix, left out"
        merged[0] = _with(merged[0], warnings=[note])
    return merged


def _listed_types(source: Source) -> dict[int, str]:
    found = {}
    for line in source.lines:
        if match := _LISTED.search(line):
            found[int(match[1])] = match[2].strip()
    return found


def _with(reading: Reading, *, warnings: Sequence[str]) -> Reading:
    values = {name: getattr(reading, name) for name in reading.__dataclass_fields__}
    return Reading(**(values | {"warnings": (*reading.warnings, *warnings)}))


def _one_machine(readings: list[Reading]) -> list[Reading]:
    """Drops matrices that repeat another, or are its PCI-only view."""
    kept: list[Reading] = []
    repeated = 0
    for reading in sorted(readings, key=lambda r: r.nvlink != "present"):
        if any(_covers(other, reading) for other in kept):
            repeated += 1
        else:
            kept.append(reading)
    kept.sort(key=readings.index)
    if repeated:
        note = (
            f"{repeated + len(kept)} matrices, {repeated} of which repeat another: read as one "
            "machine; if they are of several, say so in a hostfile"
        )
        kept[0] = _with(kept[0], warnings=[note])
    return kept


def _covers(whole: Reading, part: Reading) -> bool:
    if whole.gpu_count != part.gpu_count:
        return False
    ours = {pair: kind for kind, pairs in whole.pairs.items() for pair in pairs}
    theirs = {pair: kind for kind, pairs in part.pairs.items() for pair in pairs}
    return all(
        ours.get(pair) == kind or is_nvlink(ours.get(pair, "")) for pair, kind in theirs.items()
    )


class _MatrixReader:
    """Makes the Reading of one matrix."""

    def __init__(self, source: Source, matrix: Matrix, listed: Mapping[int, str]) -> None:
        self._source = source
        self._listed = listed
        self._matrix = matrix
        self._unknown: list[str] = []
        self._warnings: list[str] = []
        self._columns = self._named_columns()
        self._gpus = [name for name in self._columns if re.fullmatch(r"GPU\d+", name)]
        self._place = self._places()

    def reading(self) -> Reading:
        count = len(self._gpus)
        kinds, unsure = self._pairs()
        nics = self._nics()
        self._check_rows()
        if unsure and not kinds:
            raise InputError(
                f"{self._where(self._matrix.line)}: no row of the matrix can be read; were its "
                "tabs lost? paste the output of `nvidia-smi topo -m` unchanged"
            )
        nvlink = self._nvlink(kinds, nics)
        types = self._types()
        if not types:
            self._unknown.append("the type of the GPUs: `topo -m` does not print it")
        if not nics and count:
            self._unknown.append("NICs: the matrix has no column for one")
        elif nics:
            self._unknown.append("the rate of the NICs")
        self._warnings += nvlink_warnings(count, kinds, unsure)
        self._nic_warnings(nics)
        self._virtual_machine(kinds)
        return Reading(
            source=self._source.name,
            format=FORMAT + (" -mp" if self._matrix.pci_only else " -m"),
            gpu_count=count,
            gpu_types=types,
            pairs=by_kind(kinds),
            pairs_unknown=tuple(unsure),
            nics=nics,
            nvlink=nvlink,
            unknown=tuple(self._unknown),
            warnings=tuple(self._warnings),
        )

    def _where(self, line: int) -> str:
        return self._source.where(line)

    def _named_columns(self) -> list[str]:
        """The header's columns; without a header, or with a cut one, as many as rows show."""
        columns, rows = self._matrix.columns, self._matrix.rows
        if len(set(columns)) != len(columns):
            raise InputError(
                f"{self._where(self._matrix.line)}: the header names a column twice; paste the "
                "output of `nvidia-smi topo -m` unchanged"
            )
        whole = [row for row in rows.values() if not row.bad]
        widest = max((len(row.cells) for row in whole), default=0)
        missing = [label for label in rows if label not in columns]
        if columns and not missing and sum(len(r.cells) > len(columns) for r in whole) <= 1:
            return columns
        if columns:
            self._warnings.append(
                f"{self._where(self._matrix.line)}: the header names {len(columns)} columns, but "
                f"there are {len(rows)} rows of up to {widest} cells: columns are counted there"
            )
        return self._counted_columns(widest)

    def _counted_columns(self, widest: int) -> list[str]:
        rows = self._matrix.rows
        numbers = [int(label[3:]) for label in rows if re.fullmatch(r"GPU\d+", label)]
        count = max(numbers, default=-1) + 1
        others = [label for label in rows if not label.startswith("GPU")]
        if not self._matrix.columns:
            self._warnings.append(
                f"{self._where(self._matrix.line)}: no header line: columns are counted from the "
                "rows; paste the line that starts with GPU0 too"
            )
        if not others:
            linked = [
                place
                for row in rows.values()
                for place, cell in enumerate(row.cells)
                if is_nvlink(cell)
            ]
            count = max(count, max(linked, default=-1) + 1)
            if widest > count and not linked:
                raise InputError(
                    f"{self._where(self._matrix.line)}: no header line, and {widest} cells in the "
                    f"rows of {count} GPUs: which are NICs is not said; paste the line that "
                    "starts with GPU0 too"
                )
            if widest > count:
                self._unknown.append("which columns are NICs: those after the last NVLink taken")
        if count > MAX_GPUS:
            raise InputError(f"{self._where(self._matrix.line)}: a row of GPU{count - 1}: typo?")
        names = others or [f"NIC{index}" for index in range(widest - count)]
        names += [f"NIC{index}" for index in range(len(names), widest - count)]
        return [f"GPU{index}" for index in range(count)] + names

    def _places(self) -> dict[str, int]:
        """Index of every GPU: its number, or its place where the numbers are not 0 to n-1."""
        numbers = [int(name[3:]) for name in self._gpus]
        if sorted(numbers) == list(range(len(numbers))):
            return dict(zip(self._gpus, numbers, strict=True))
        self._warnings.append(
            f"the GPUs are {', '.join(self._gpus[:8])}: part of a machine, numbered from 0 here"
        )
        return {name: place for place, name in enumerate(self._gpus)}

    def _is_whole(self, row: Row) -> bool:
        return not row.bad and len(row.cells) == len(self._columns)

    def _trusted(self, name: str) -> list[str]:
        """The cells of a row whose columns are certain."""
        row = self._matrix.rows.get(name)
        if row is None:
            return []
        own = self._columns.index(name)
        if self._is_whole(row):
            return row.cells if row.cells[own] == "X" else []
        cells = row.cells[: len(self._columns)]
        if "X" in cells and (cells.index("X") != own):
            return []  # a cell is missing before the diagonal: all are shifted
        return cells[: len(self._gpus)]

    def _pairs(self) -> tuple[dict[Pair, str], list[Pair]]:
        said: dict[Pair, set[str]] = {}
        for name in self._gpus:
            for other, cell in zip(self._columns, self._trusted(name), strict=False):
                if other in self._place and other != name:
                    first, second = sorted((self._place[name], self._place[other]))
                    said.setdefault((first, second), set()).add(cell)
        kinds = {pair: next(iter(cells)) for pair, cells in said.items() if len(cells) == 1}
        kinds = {pair: kind for pair, kind in kinds.items() if kind != "X"}
        for (first, second), cells in sorted(said.items()):
            if len(cells) > 1:
                self._warnings.append(
                    f"GPU{first}-GPU{second} is {' in one row and '.join(sorted(cells))} in the "
                    "other: taken as unknown"
                )
        unsure = [pair for pair in all_pairs(len(self._gpus)) if pair not in kinds]
        if unsure:
            text = ", ".join(f"GPU{a}-GPU{b}" for a, b in unsure[:6])
            more = f" and {len(unsure) - 6} more" if len(unsure) > 6 else ""
            self._unknown.append(f"the path of {len(unsure)} GPU pairs: {text}{more}")
        return kinds, unsure

    def _nics(self) -> dict[str, Nic]:
        nics = {}
        rows = self._matrix.rows
        for name in self._columns[len(self._gpus) :]:
            column = self._columns.index(name)
            kinds: list[str | None] = [None] * len(self._gpus)
            own = rows.get(name)
            whole = own is not None and self._is_whole(own) and own.cells[column] == "X"
            for gpu in self._gpus:
                cells = self._trusted(gpu) if gpu in rows and self._is_whole(rows[gpu]) else []
                said = {cells[column]} if cells else set()
                if whole and own is not None:
                    said.add(own.cells[self._columns.index(gpu)])
                if len(said) > 1:
                    self._warnings.append(f"{name}-{gpu} differs between its row and its column")
                kinds[self._place[gpu]] = said.pop() if len(said) == 1 else None
            nics[name] = Nic(to_gpus=tuple(kinds), device=self._matrix.devices.get(name))
        return nics

    def _check_rows(self) -> None:
        """Says of every row that is missing or damaged what can be read of it."""
        rows, width = self._matrix.rows, len(self._columns)
        gone = [name for name in self._columns if name not in rows]
        for row in rows.values():
            if row.label not in self._columns:
                self._warnings.append(
                    f"{self._where(row.line)}: the row {row.label} has no column, left out"
                )
            elif not self._is_whole(row):
                stopped = f"; {row.bad!r} is no path kind" if row.bad else ""
                self._warnings.append(
                    f"{self._where(row.line)}: row {row.label} has {row.readable} readable cells "
                    f"of {width}{stopped}"
                )
            elif row.cells[self._columns.index(row.label)] != "X":
                self._warnings.append(
                    f"{self._where(row.line)}: row {row.label} has no X in its own column"
                )
        missing_gpus = [name for name in gone if name in self._place]
        if missing_gpus:
            self._warnings.append(
                f"{len(self._gpus)} GPU columns, {len(self._gpus) - len(missing_gpus)} GPU rows: "
                + ", ".join(f"row {name} missing" for name in missing_gpus[:16])
            )
        others = [name for name in gone if name not in self._place]
        if others and len(others) < width - len(self._gpus):
            self._warnings.append(f"rows missing: {', '.join(others[:8])}")
        if self._matrix.capped:
            found, shown = self._matrix.capped
            self._warnings.append(
                f"{found} NICs found, only {shown} shown; most are virtual functions, whose rates "
                "must not be added"
            )

    def _nvlink(self, kinds: dict[Pair, str], nics: dict[str, Nic]) -> str:
        if any(is_nvlink(kind) for kind in kinds.values()):
            return "present"
        legend = self._matrix.legend
        whole = len(kinds) == len(all_pairs(len(self._gpus)))
        if len(self._gpus) > 1 and whole and legend >= {"NV#"} and not self._matrix.pci_only:
            return "absent"
        text = "NVLink: no cell shows it, but a `topo -mp` would not; run `topo -m` to be sure"
        if self._matrix.pci_only or legend >= _FULL_LEGEND - {"SYS"}:
            self._matrix.pci_only = True
            text = "NVLink: this is the PCI-only view (topo -mp), which hides it; run `topo -m`"
        if self._matrix.pci_only or self._served(nics):
            self._warnings.append(text)
        if len(self._gpus) > 1 or self._matrix.pci_only:
            self._unknown.append(text)
        return "unknown"

    def _served(self, nics: dict[str, Nic]) -> bool:
        """Whether most GPUs have a NIC behind their own bridge, as machines with NVLink do."""
        near = [gpu for nic in nics.values() for gpu, k in enumerate(nic.to_gpus) if k == "PIX"]
        return len(set(near)) > max(2, len(self._gpus) // 2)

    def _types(self) -> tuple[str, ...]:
        if set(self._listed) == set(range(len(self._gpus))):
            return tuple(self._listed[index] for index in range(len(self._gpus)))
        return ()

    def _nic_warnings(self, nics: dict[str, Nic]) -> None:
        near = [name for name, nic in nics.items() if {"PIX", "PXB", "PHB"} & set(nic.to_gpus)]
        far = [name for name, nic in nics.items() if set(nic.to_gpus) == {"SYS"}]
        if near and far:
            self._warnings.append(
                f"{', '.join(far[:8])} lie across sockets (SYS) from every GPU while "
                f"{', '.join(near[:4])} are near: not for GPUDirect"
            )
        names = list(nics)
        rows = [self._matrix.rows.get(name) for name in names]
        cards: list[list[str]] = []
        for name, row in zip(names, rows, strict=True):
            if row is None or not self._is_whole(row):
                continue
            same = [other for other in names if row.cells[self._columns.index(other)] == "PIX"]
            group = sorted([name, *same], key=names.index)
            if len(group) > 2 and group not in cards:
                cards.append(group)
        for group in cards[:4]:
            self._warnings.append(
                f"{group[0]} to {group[-1]} ({len(group)} NICs) share one PCIe bridge: ports or "
                "virtual functions of one card, whose rates must not be added"
            )

    def _virtual_machine(self, kinds: dict[Pair, str]) -> None:
        def place(gpu: int) -> str:
            row = self._matrix.rows.get(self._gpus[gpu])
            return row.rest if row is not None else ""

        odd = [
            pair for pair, kind in kinds.items() if kind == "SYS" and place(pair[0]) not in ("",)
        ]
        odd = [(a, b) for a, b in odd if place(a) == place(b) and place(a) != "N/A"]
        if odd and not self._matrix.pci_only:
            gpus = sorted({gpu for pair in odd for gpu in pair})
            self._warnings.append(
                f"SYS between {gpu_names(gpus)}, which have the same CPU and NUMA affinity: "
                "usual in a virtual machine, whose PCIe tree is made up, and with NPS sub-nodes"
            )
