"""training.yaml and files like it: a list of published runs to `TrainingRow`s.

Listed as not expressed, with the reason, are rows that lack a key they must have or hold a value
of another kind, and sound ones that cannot be repeated (a GPU without figures, degrees that do not
multiply to the GPUs, a trial without a figure).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from claw_plan.profiles import catalogue
from claw_plan.profiles.errors import InputError
from claw_plan.profiles.hardware_text import Hardware, hardware_of
from claw_plan.profiles.published_facts import dimensions_of, facts_of
from claw_plan.profiles.published_fields import BrokenRows, Fields, Row, shown
from claw_plan.profiles.published_figures import Run, memories, out_of_memory, step_time_ns
from claw_plan.profiles.published_plan import Assumptions, plan_of
from claw_plan.profiles.published_rows import TRAINING, NotExpressed, Published
from claw_plan.profiles.published_trainer import trainer_of
from claw_plan.profiles.training_row import Dimensions, PublishedPlan, TrainingRow

_NEEDED = ("model", "hardware", "plan", "measured")


class _CannotRepeat(Exception):
    """Why a sound row cannot be predicted."""


def is_training(data: Any) -> bool:
    """Whether the data of a YAML file is a list of runs."""
    rows = data.get("rows") if isinstance(data, dict) else data
    return bool(
        isinstance(rows, list)
        and any(isinstance(row, dict) and sum(key in row for key in _NEEDED) >= 2 for row in rows)
    )


def read_training(path: Path, data: Any) -> Published:
    """The rows of a file; raises InputError where every row is broken."""
    keys: tuple[str | int, ...] = ("rows",) if isinstance(data, dict) else ()
    rows: Sequence[Any] = data["rows"] if isinstance(data, dict) else data
    expressed: list[TrainingRow] = []
    others: list[NotExpressed] = []
    broken = BrokenRows()
    seen: set[str] = set()
    for index, values in enumerate(rows):
        given = values if isinstance(values, dict) else {}
        name, family = str(given.get("id", index)), str(given.get("family", "unknown"))
        with broken.caught(name, family):
            fields = _fields(path, (*keys, index), values)
            if name in seen:
                raise fields.fail("id", "stands twice in the file")
            seen.add(name)
            try:
                expressed += _rows(fields)
            except _CannotRepeat as reason:
                others.append(NotExpressed(id=name, family=family, reason=str(reason)))
    others += broken.among(len(expressed) + len(others))
    return Published(
        path=path, kind=TRAINING, training=tuple(expressed), not_expressed=tuple(others)
    )


def _fields(path: Path, keys: tuple[str | int, ...], values: Any) -> Fields:
    name = str(values.get("id", keys[-1])) if isinstance(values, dict) else str(keys[-1])
    row = Row(path, keys, name)
    if not isinstance(values, dict):
        raise row.fail("", f"must hold keys and values; got {shown(values)}")
    fields = Fields(row, values)
    fields.text("id")
    return fields


def _rows(fields: Fields) -> list[TrainingRow]:
    """One row for each figure of memory; the first has the step time."""
    model, measured = fields.part("model"), fields.part("measured")
    assumed = Assumptions()
    family = fields.text("family", "unknown")
    facts = facts_of(fields)
    trainer = trainer_of(family, facts)
    hardware = _hardware(fields.part("hardware"), assumed)
    sizes = dimensions_of(model, assumed)
    plan = plan_of(fields.part("plan"), sizes, trainer, facts.get("notes", ""), assumed)
    count = fields.part("hardware").whole("count")
    _check(plan, sizes, count)
    derived = fields.part("derived") if "derived" in fields else Fields(fields.row, {})
    device = catalogue.device(hardware.device_name)
    run = Run(
        sizes=sizes,
        device=device,
        count=count,
        global_batch=plan.global_batch,
        trainer=trainer,
    )
    time_ns, note = step_time_ns(measured, derived, run)
    if note:
        assumed.say(note)
    figures = memories(measured, trainer)
    verdict = out_of_memory(measured)
    if time_ns is None and not figures and verdict is None:
        raise _CannotRepeat(_without_figure(measured))
    row = TrainingRow(
        id=fields.text("id"),
        family=family,
        group=fields.text("group", family),
        trainer=trainer,
        trust=fields.text("trust", "B"),
        complete=_is_complete(fields),
        model_name=model.text("name", "unnamed"),
        dimensions=sizes,
        cluster=hardware.cluster,
        device_name=hardware.device_name,
        plan=plan,
        step_time_ns=time_ns,
        memory_bytes=figures[0].bytes if figures else None,
        memory_kind=figures[0].kind if figures else "",
        out_of_memory=verdict,
        optimizer="" if trainer == "neusight" else "adamw",
        assumed=tuple(assumed.texts),
        flags=fields.texts("flags"),
        facts=facts,
        source=facts.get("title", ""),
    )
    return [row, *(_also(row, figure.bytes, figure.kind) for figure in figures[1:])]


def _also(row: TrainingRow, size_bytes: int, kind: str) -> TrainingRow:
    """The same run with another figure of its memory."""
    return replace(
        row,
        id=f"{row.id}:{kind}",
        step_time_ns=None,
        memory_bytes=size_bytes,
        memory_kind=kind,
        out_of_memory=None,
    )


def _hardware(fields: Fields, assumed: Assumptions) -> Hardware:
    count = fields.whole("count")
    per_node = fields.whole("gpus_per_node", min(count, 8))
    intra, inter = fields.text("intra", ""), fields.text("inter", "")
    try:
        hardware = hardware_of(fields.text("gpu"), count, per_node, intra, inter)
    except InputError as error:
        raise _CannotRepeat(str(error)) from None
    assumed.texts += hardware.assumed
    return hardware


def _check(plan: PublishedPlan, sizes: Dimensions, count: int) -> None:
    """Refuses what contradicts itself."""
    product = plan.dp * plan.tp * plan.pp * plan.cp
    if product != count:
        raise _CannotRepeat(f"dp * tp * pp * cp is {product}, not the {count} GPUs")
    if plan.global_batch % (plan.dp * plan.micro_batch):
        raise _CannotRepeat(
            f"the global batch {plan.global_batch} is no multiple of dp * micro-batch "
            f"{plan.dp} * {plan.micro_batch}"
        )
    if plan.ep > 1 and sizes.moe is None:
        raise _CannotRepeat(f"expert parallelism of {plan.ep} without experts")
    if (plan.dp * plan.cp * plan.tp) % (plan.ep * plan.etp):
        raise _CannotRepeat(f"ep * etp {plan.ep} * {plan.etp} does not divide dp * cp * tp")
    if plan.pp * plan.vpp > sizes.layers + 2:
        raise _CannotRepeat(f"{plan.pp * plan.vpp} stages for {sizes.layers} layers")


def _without_figure(measured: Fields) -> str:
    if measured.truth("failed", False):
        return "the trial did not finish, cause not printed"
    return "no time, rate or memory that can be compared"


def _is_complete(fields: Fields) -> bool:
    """As the file says; else whether nothing of the plan is missing."""
    if "completeness" in fields:
        return fields.text("completeness") == "full"
    return not any(key.startswith("plan.") for key in fields.texts("missing"))
