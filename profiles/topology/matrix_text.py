"""Lines of a text to the matrices of `nvidia-smi topo` that stand in it.

First half of the reader `nvidia_smi`. A row is known by a label before a path kind, a header by
names of GPUs without a path kind; so prompts, comment signs, names of files, colours, markdown
and text around the matrix do no harm, and cells are counted instead of looked for by position.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from claw_plan.profiles.errors import InputError
from claw_plan.profiles.topology.reading import MAX_GPUS
from claw_plan.profiles.topology.source import Source

CELL = re.compile(r"(?:X|NV\d{1,3}|SYS|NODE|SOC|PHB|PXB|PIX|PSB|C2C)\Z", re.IGNORECASE)
P2P_CELL = re.compile(r"(?:OK|CNS|GNS|TNS|NS|DR|NWE)\Z")
"""Cells of `nvidia-smi topo -p2p`: whether, not how, two GPUs reach each other."""

_GPU_END = re.compile(r"(?:^|.*[^A-Za-z0-9_])(GPU\d{1,5})\Z", re.IGNORECASE)
_WRONG_GPU = re.compile(r"GP?\d{1,5}\Z")
_SPACED_GPU = re.compile(r"\bGPU (\d{1,4})(?=\s|\Z)")
_LISTED_CELL = re.compile(
    r"[,;]\s*(?:GPU\d|(?:X|SYS|NODE|PHB|PXB|PIX|NV\d+)\s*[,;])", re.IGNORECASE
)
"""Cells of a table that was exported with commas; lists of CPUs have digits there."""

_HEADER_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_.:@-]{0,63}\Z")
_AFFINITY = re.compile(r"(?:CPU|NUMA|GPU)\s*(?:NUMA\s*)?(?:Affinity|ID|Aff\w*)", re.IGNORECASE)
_AFFINITY_WORDS = {"cpu", "numa", "affinity", "gpu", "id", "n/a", "aff"}
_KIND_LEGEND = re.compile(r"\W*(X|SYS|NODE|SOC|PHB|PXB|PIX|PSB|NV#)\s*=\s")
_NIC_LEGEND = re.compile(r"\W*(NIC\d{1,4})\s*:\s*([A-Za-z][\w.:-]{0,63})\s*\Z")
_CAPPED = re.compile(r"(\d{1,5}) NICs found in the topology, only displaying (\d{1,5})")
_COMMAND = re.compile(r"\btopo\s+(?:-i\s+\S+\s+)?(-m\b|-mp\b|--matrix\b|--matrix_pci\b|-p2p\b)")
_MAX_NICS = 4096
MAX_MATRICES = 256


@dataclass
class Row:
    """A row: its cells, and the word that stopped the reading of them ('' for none)."""

    label: str
    line: int
    cells: list[str]
    readable: int
    bad: str = ""
    rest: str = ""


@dataclass
class Matrix:
    """One matrix: the columns its header names (empty: no header), its rows and legends."""

    line: int
    columns: list[str] = field(default_factory=list)
    rows: dict[str, Row] = field(default_factory=dict)
    last: str = ""
    p2p_line: int = 0
    pci_only: bool = False
    legend: set[str] = field(default_factory=set)
    devices: dict[str, str] = field(default_factory=dict)
    capped: tuple[int, int] | None = None


@dataclass
class _State:
    found: list[Matrix] = field(default_factory=list)
    command: str = ""
    capped: tuple[int, int] | None = None
    wrong: tuple[int, str] | None = None

    @property
    def open(self) -> Matrix | None:
        return self.found[-1] if self.found else None


def find_matrices(source: Source) -> tuple[list[Matrix], tuple[int, str] | None]:
    """All matrices, and the line and label of a row that is labelled wrongly (None: none)."""
    state = _State()
    for number, raw in enumerate(source.lines, start=1):
        line = _plain(raw)
        words = line.split()
        if not words or len(words) > _MAX_NICS:
            continue
        if _note(state, line):
            continue
        row = _row(words, number, state.open)
        if row is not None:
            _add_row(state, row, number)
        elif (columns := _header(line)) is not None:
            state.found.append(_new_matrix(state, number, columns))
        elif state.open is not None and state.open.rows:
            _continue_row(state.open, words)
        elif state.open is not None:
            _continue_header(state.open, line, number)
        if len(state.found) > MAX_MATRICES:
            raise InputError(
                f"{source.where(number)}: more than {MAX_MATRICES} matrices; give one machine's"
            )
    return [matrix for matrix in state.found if matrix.rows], state.wrong


def _plain(line: str) -> str:
    """The line with blanks between its cells, whatever stood there."""
    line = line.replace("|", " ").replace('"', " ")
    if _LISTED_CELL.search(line):
        line = line.replace(",", " ").replace(";", " ")
    return _SPACED_GPU.sub(r"GPU\1", line)


def _note(state: _State, line: str) -> bool:
    """Takes what stands around a matrix: the command, legends, the cap on NICs."""
    matrix = state.open
    if match := _COMMAND.search(line):
        state.command = match[1]
    if match := _CAPPED.search(line):
        state.capped = (int(match[1]), int(match[2]))
        return True
    if match := _KIND_LEGEND.match(line):
        if matrix is not None:
            matrix.legend.add(match[1])
        return True
    if matrix is not None and (match := _NIC_LEGEND.match(line)):
        matrix.devices[match[1]] = match[2]
        return True
    return False


def _new_matrix(state: _State, number: int, columns: list[str]) -> Matrix:
    matrix = Matrix(number, columns, capped=state.capped)
    matrix.pci_only = state.command in ("-mp", "--matrix_pci")
    state.command, state.capped = "", None
    return matrix


def _add_row(state: _State, row: Row, number: int) -> None:
    matrix = state.open
    if _WRONG_GPU.match(row.label) and "X" in row.cells and state.wrong is None:
        state.wrong = (number, row.label)
    if matrix is None or row.label in matrix.rows:
        matrix = _new_matrix(state, number, [])
        state.found.append(matrix)
    if any(P2P_CELL.match(cell) for cell in (*row.cells, row.bad)) and not matrix.p2p_line:
        matrix.p2p_line = number
    matrix.rows[row.label] = row
    matrix.last = row.label


def _label(word: str, columns: Sequence[str]) -> str | None:
    """The GPU or NIC that a word names, a prefix such as 'host:' left out."""
    if match := _GPU_END.match(word):
        return match[1].upper()
    if word in columns or re.fullmatch(r"NIC\d{1,4}", word) or _WRONG_GPU.match(word):
        return word
    ends = [name for name in columns if word.endswith(name) and not word[-len(name) - 1].isalnum()]
    return max(ends, key=len) if ends else None


def _row(words: list[str], number: int, matrix: Matrix | None) -> Row | None:
    columns = matrix.columns if matrix is not None else []
    for place, word in enumerate(words[1:], start=1):
        if CELL.match(word) or P2P_CELL.match(word):
            label = _label(words[place - 1], columns)
            return None if label is None else _cells(label, words[place:], number)
    return None if matrix is None else _cut_row(words, number, matrix)


def _cut_row(words: list[str], number: int, matrix: Matrix) -> Row | None:
    """A row that ends before its first whole cell, as the last of a paste may."""
    gpus = [
        (place, match[1]) for place, word in enumerate(words) if (match := _GPU_END.match(word))
    ]
    if not matrix.rows or len(gpus) != 1 or len(words) > gpus[0][0] + 2:
        return None
    name = gpus[0][1].upper()
    if name in matrix.rows or name not in matrix.columns:
        return None
    rest = words[gpus[0][0] + 1 :]
    return Row(name, number, [], 0, rest[0] if rest else "end of line")


def _cells(label: str, words: list[str], number: int) -> Row:
    """Cells up to the affinities, which begin with a digit, 'N/A' or nothing at all."""
    row = Row(label, number, [], 0)
    for place, word in enumerate(words):
        if CELL.match(word):
            row.readable += 1
            if not row.bad:
                row.cells.append(_kind(word))
        elif word[0].isdigit() or word in ("N/A", "<N/A>", ",", "-"):
            row.rest = " ".join(words[place:])
            break
        elif not row.bad:
            row.bad = word
    return row


def _kind(word: str) -> str:
    kind = word.upper()
    return "SYS" if kind == "SOC" else kind


def _header(line: str) -> list[str] | None:
    """The columns that a line names, None when it is no header; fused names are taken apart."""
    start = re.search(r"(?<![A-Za-z0-9_])GPU\d", line, re.IGNORECASE)
    if start is None:
        return None
    text = _AFFINITY.sub(" ", line[start.start() :])
    text = re.sub(r"\bGPU(?=\d)", "GPU", text, flags=re.IGNORECASE)
    text = re.sub(r"\bNIC(?=\d)", "NIC", text, flags=re.IGNORECASE)
    text = re.sub(r"(GPU\d{1,5}|NIC\d{1,4})(?=[A-Za-z])", r"\1 ", text)
    text = re.sub(r"(\d)(?=mlx\d)", r"\1 ", text)
    words = [word for word in text.split() if word.lower() not in _AFFINITY_WORDS]
    gpus = [word for word in words if re.fullmatch(r"GPU\d{1,5}", word)]
    others = words[len(gpus) :]
    if not gpus or words[: len(gpus)] != gpus or len(gpus) > MAX_GPUS:
        return None
    return None if (named := _nic_columns(others)) is None else gpus + named


def _nic_columns(words: list[str]) -> list[str] | None:
    """Names of NICs, without a last one that was cut; None if one is no name of a NIC."""
    if not all(_HEADER_WORD.match(word) and re.search(r"\d", word) for word in words[:-1]):
        return None
    if words and not re.search(r"\d", words[-1]):
        starts = ("NIC", "GPU", "CPU", "NUMA", "Affinity", "mlx5_", *words[:-1])
        if any(name.startswith(words[-1]) for name in starts) or len(words) > 2:
            return words[:-1]
    return words if all(_HEADER_WORD.match(word) for word in words) else None


def _continue_header(matrix: Matrix, line: str, number: int) -> None:
    """A header that the terminal folded: names of NICs alone on the line below it."""
    if number != matrix.line + 1 or not matrix.columns:
        return
    words = [
        word for word in _AFFINITY.sub(" ", line).split() if word.lower() not in _AFFINITY_WORDS
    ]
    if all(
        re.fullmatch(r"(?:NIC|mlx|GPU|ib|roce|bnxt|rdma|hfi|efa|irdma)\w*\d\w*", w) for w in words
    ):
        matrix.columns += words
        matrix.line = number


def _continue_row(matrix: Matrix, words: list[str]) -> None:
    """A row that the terminal folded: cells alone on a line, after a row that has too few."""
    row = matrix.rows.get(matrix.last)
    if row is None or row.bad or row.rest or len(row.cells) >= len(matrix.columns):
        return
    cells = []
    for word in words:
        if not CELL.match(word):
            break
        cells.append(_kind(word))
    if cells and len(row.cells) + len(cells) <= len(matrix.columns):
        row.cells += cells
        row.readable += len(cells)
