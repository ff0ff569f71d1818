"""CSV files of iteration times (as vTrain's of A100 clusters) to `TrainingRow`s.

One line is one run: sizes of a GPT, degrees of the plan, milliseconds. The columns are found by
their names, in any order. What vTrain's files leave out is filled in from its paper and
repository (Bang et al., 'vTrain', MICRO 2024): A100 of 80 GB, Megatron-LM in fp16 with activation
checkpointing, GPT-2's vocabulary padded to 51200.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path

from claw_plan.profiles.errors import InputError, near_matches
from claw_plan.profiles.files import read_text
from claw_plan.profiles.hardware_text import hardware_of
from claw_plan.profiles.published_fields import BrokenRows, Row, shown
from claw_plan.profiles.published_rows import ITERATIONS, NotExpressed, Published
from claw_plan.profiles.training_row import Dimensions, PublishedPlan, TrainingRow
from claw_plan.profiles.units import NS_PER_MS

_COLUMNS = {
    "# gpus": "gpus",
    "global batch": "global_batch",
    "micro batch": "micro_batch",
    "hidden size": "hidden",
    "attention heads": "heads",
    "# layers": "layers",
    "sequence length": "seq_len",
    "tensor parallelism": "tp",
    "data parallelism": "dp",
    "pipeline parallelism": "pp",
}
TIME_COLUMN = "iteration time (ms)"

VOCAB = 51200
NETWORK = "4x200 Gb/s InfiniBand per node"
"""Not in the files. With 4 NICs the runs with tensor parallelism over two nodes come out least
wrong; with 8 they would be 40 % faster than measured."""

_ASSUMED = (
    "GPU: A100 of 80 GB with NVSwitch, 8 a node",
    "trained by Megatron-LM in fp16, all activations recomputed, no optimizer sharding",
    f"vocabulary {VOCAB}",
)


def is_iterations(text: str) -> bool:
    """Whether the first line has the columns of a file of iteration times."""
    header = _header(text)
    return TIME_COLUMN in header and sum(name in header for name in _COLUMNS) >= 3


def _header(text: str) -> list[str]:
    try:
        first = next(csv.reader(io.StringIO(text.partition("\n")[0])), [])
    except csv.Error:
        return []
    return [name.strip().lower() for name in first]


def read_iterations(path: Path) -> Published:
    """The rows of a file; raises InputError where a column is missing or every row is broken."""
    text = read_text(path)
    header = _header(text)
    for name in (*_COLUMNS, TIME_COLUMN):
        if name not in header:
            raise InputError(
                f"{path.name}:1: the column {name!r} is missing; {near_matches(name, header)}"
            )
    rows: list[TrainingRow] = []
    others: list[NotExpressed] = []
    broken = BrokenRows()
    for number, cells in enumerate(_lines(path, text), start=1):
        if number == 1 or not any(cell.strip() for cell in cells):
            continue
        row = Row(path, (number,), f"{path.stem}:{number}")
        with broken.caught(row.name, path.name):
            if len(cells) != len(header):
                raise row.fail("", f"has {len(cells)} cells for {len(header)} columns")
            line = dict(zip(header, cells, strict=True))
            values = {key: _whole(row, name, line[name]) for name, key in _COLUMNS.items()}
            time_ns = _time_ns(row, line[TIME_COLUMN])
            reason = _contradiction(values)
            if reason:
                others.append(NotExpressed(id=row.name, family=path.name, reason=reason))
            else:
                rows.append(_training_row(path, row.name, values, time_ns))
    others += broken.among(len(rows) + len(others))
    return Published(path=path, kind=ITERATIONS, training=tuple(rows), not_expressed=tuple(others))


def _lines(path: Path, text: str) -> list[list[str]]:
    try:
        return list(csv.reader(io.StringIO(text)))
    except csv.Error as error:
        raise InputError(f"{path.name} is no table of iteration times: {error}") from None


def _whole(row: Row, column: str, cell: str) -> int:
    try:
        number = float(cell)
    except ValueError:
        number = 0.0
    if not 1 <= number < 1e9 or number != int(number):
        raise row.fail(column, f"must be a whole number of at least 1; got {shown(cell)}")
    return int(number)


def _time_ns(row: Row, cell: str) -> int:
    try:
        milliseconds = float(cell)
    except ValueError:
        milliseconds = 0.0
    if not 0 < milliseconds < 1e9:
        raise row.fail(TIME_COLUMN, f"must be a positive number; got {shown(cell)}")
    return round(milliseconds * NS_PER_MS)


def _contradiction(values: dict[str, int]) -> str:
    """Why the row cannot be repeated; '' when it can."""
    product = values["tp"] * values["dp"] * values["pp"]
    if product != values["gpus"]:
        return f"tp * dp * pp is {product}, not the {values['gpus']} GPUs"
    if values["global_batch"] % (values["dp"] * values["micro_batch"]):
        return "the global batch is no multiple of dp * micro-batch"
    if values["hidden"] % values["heads"]:
        return f"{values['heads']} heads do not divide hidden {values['hidden']}"
    return ""


def _training_row(path: Path, name: str, values: dict[str, int], time_ns: int) -> TrainingRow:
    hardware = hardware_of("A100-80GB", values["gpus"], 8, "NVLink/NVSwitch", NETWORK)
    network = (f"network: {NETWORK}",) if values["gpus"] > 8 else ()
    hidden, layers = values["hidden"], values["layers"]
    return TrainingRow(
        id=name,
        family=path.name,
        group=f"{hidden}x{layers}",
        trainer="vtrain",
        trust="A",
        complete=True,
        model_name=f"GPT-{hidden}x{layers}",
        dimensions=Dimensions(
            layers=layers,
            hidden=hidden,
            heads=values["heads"],
            kv_heads=values["heads"],
            head_dim=hidden // values["heads"],
            ffn=4 * hidden,
            vocab=VOCAB,
            seq_len=values["seq_len"],
            tied=True,
            learned_positions=True,
        ),
        cluster=hardware.cluster,
        device_name=hardware.device_name,
        plan=PublishedPlan(
            dp=values["dp"],
            tp=values["tp"],
            pp=values["pp"],
            cp=1,
            ep=1,
            etp=1,
            vpp=1,
            micro_batch=values["micro_batch"],
            global_batch=values["global_batch"],
            sharding="none",
            recompute="full",
            dtype="float16",
            layers_per_stage=_stages(layers, values["pp"]),
        ),
        step_time_ns=time_ns,
        assumed=(*_ASSUMED, *network),
        source="vTrain, measured iterations on A100",
    )


def _stages(layers: int, pp: int) -> tuple[int, ...]:
    """Layers of each stage, the first ones longer; () where all are equal."""
    base, rest = divmod(layers, pp)
    return tuple(base + (stage < rest) for stage in range(pp)) if rest else ()
