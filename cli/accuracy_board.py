"""docs/accuracy.md: how far off predictions of published measurements are, with plots.

`claw-plan validate FILE… --write docs/accuracy.md` makes it from scores. The errors of runs that
the constants were not fitted to stand in docs/accuracy/cross_validation.json, which the fit
writes; without that file the board says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from claw_plan.cli.scatter_chart import Points, scatter_svg
from claw_plan.cli.validation_report import TITLES, cells, number, totals
from claw_plan.cli.validation_scores import (
    MEMORY,
    TIMES,
    UNITS,
    Scores,
    families,
    memory,
    reasons,
)
from claw_plan.profiles.errors import InputError
from claw_plan.profiles.files import read_text, write_atomic

CROSS_VALIDATION = "cross_validation.json"

PEERS = (
    ("rows expressed", "Calculon 18 %, llm-analysis 65 %"),
    (
        "step time, all families: MAPE / median / p90 / bias",
        "a constant utilisation per family 16.8 / 12.7 / 34 / +2; the best mix of three "
        "simulators and regressions 12.3 / 7.9 / 26 / -2",
    ),
    ("step time, mean over families", "20"),
    ("16-bit rows; FP8 and FP4 rows; GPUs without a row", "10.6; 16.7; 27.7"),
    ("A100 iterations, 64 and 512 GPUs", "Calculon 15.3, vTrain's own 14.7"),
    ("A100 iterations, 2 to 8 GPUs", "Calculon 38.9, vTrain's own 8.4"),
    ("Megatron, 1.7B to 1T parameters (SC'21)", "Calculon 10.3"),
    ("recompute study (Korthikanti et al.)", "Calculon 3.65, in sample"),
    ("8 x B200 (SimuMax): time / memory", "SimuMax's own 5.6 / 0.5"),
)
"""What others reach on the same rows, in percent; groups of runs left out where not said."""

NOT_MODELLED = (
    "Routers are taken as balanced unless the row says otherwise; an imbalance of experts slows "
    "a step in proportion.",
    "Releases of one program differ by up to 1.7 times on the same plan; only Megatron-Bridge "
    "before and from 26.06, and Megatron-LM of 2021 and of 2022, are told apart.",
    "Data loading, evaluation, checkpoints, and nodes that are slower than others.",
    "Clocks that fall under load: rates are those that training sustained.",
    "Congestion of a network shared with other jobs.",
)

_HEADER = ("n", "MAPE", "median", "p90", "bias", "pairs", "right", "regret", "near best")


def write_board(scores: Scores, names: Sequence[str], path: Path) -> list[Path]:
    """Writes the page and its plots; gives all paths written."""
    folder = path.with_suffix("")
    folder.mkdir(exist_ok=True)
    plots = {}
    for quantity, title in TITLES.items():
        points = points_of(scores, quantity)
        if points:
            plot = folder / f"{quantity}.svg"
            write_atomic(plot, scatter_svg(title, UNITS[quantity], points))
            plots[quantity] = plot
    validated = _cross_validation(folder / CROSS_VALIDATION)
    write_atomic(path, board_text(scores, names, validated, sorted(plots, key=list(TITLES).index)))
    return [path, *plots.values()]


def points_of(scores: Scores, quantity: str) -> dict[str, Points]:
    """(measured, predicted) of a quantity's rows, by family."""
    points: dict[str, list[tuple[float, float]]] = {}
    for row in scores.of(quantity):
        points.setdefault(row.family, []).append((row.pair.measured, row.pair.predicted))
    return dict(points)


def _cross_validation(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        return {}
    try:
        content = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise InputError(f"{path.name}:{error.lineno}: not JSON: {error.msg}") from None
    if not isinstance(content, dict) or not all(isinstance(v, dict) for v in content.values()):
        raise InputError(f"{path.name}: must map what is left out to families to their errors")
    return content


def board_text(
    scores: Scores,
    names: Sequence[str],
    validated: Mapping[str, Any],
    plots: Sequence[str],
) -> str:
    """The page."""
    parts = [
        "# Accuracy",
        "Predictions of measurements that others published, through the path that plans go: "
        "sizes to a transformer, traced, lowered, simulated. Errors are predicted / measured - 1 "
        "in percent; p90 is of the absolute errors, bias the mean of the signed ones. Two real "
        "clusters with one configuration differ by 2 to 6 %: less is noise. Made by "
        f"`claw-plan validate {' '.join(names)} --write docs/accuracy.md`.",
        "## Runs that the constants were not fitted to",
        *_validated(validated),
        "## Others on the same rows",
        table(("rows", "reported"), PEERS),
        "## With the constants that come with the program",
        "Those constants were fitted to these rows. *pairs* are plans of one model, software, "
        "GPU, count and batch that were measured more than 5 % apart, *right* the share told "
        "right; *regret* is how much slower the plan picked is than the best, *near best* the "
        "share of picks within 2 %.",
        *(text for quantity in TIMES for text in _families(scores, quantity, plots)),
        *_memory(scores, plots),
        *_not_expressed(scores),
        "## What is not modelled",
        "\n".join(f"- {text}" for text in NOT_MODELLED),
    ]
    return "\n\n".join(parts) + "\n"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown; figures stand to the right of the first column."""
    rule = ["---", *["--:"] * (len(header) - 1)] if len(header) > 2 else ["---"] * len(header)
    lines = [header, rule, *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _validated(validated: Mapping[str, Any]) -> list[str]:
    if not validated:
        return [f"Not counted yet: the fit writes `accuracy/{CROSS_VALIDATION}`."]
    parts = []
    for left_out, by_family in validated.items():
        rows = [
            (
                name,
                str(errors.get("n", "-")),
                *(number(errors.get(key)) for key in ("mape", "median", "p90")),
                number(errors.get("bias"), sign=True),
            )
            for name, errors in by_family.items()
        ]
        parts.append(f"### Left out: {left_out}")
        parts.append(table(("family", *_HEADER[:5]), rows))
    return parts


def _families(scores: Scores, quantity: str, plots: Sequence[str]) -> list[str]:
    if not scores.of(quantity):
        return []
    rows = [(name, *cells(one)) for name, one in families(scores, (quantity,)).items()]
    rows += [(f"**{name}**", *cells(one)) for name, one in totals(scores, quantity)]
    return [f"### {TITLES[quantity]}", table(("family", *_HEADER), rows), *_plot(quantity, plots)]


def _plot(quantity: str, plots: Sequence[str]) -> list[str]:
    if quantity not in plots:
        return []
    return [f"![{TITLES[quantity]}: predicted against measured](accuracy/{quantity}.svg)"]


def _memory(scores: Scores, plots: Sequence[str]) -> list[str]:
    errors, too_low, verdicts = memory(scores)
    if not errors.n:
        return []
    return [
        "### Memory",
        f"Memory of {errors.n} runs: MAPE {number(errors.mape)}, median {number(errors.median)}, "
        f"p90 {number(errors.p90)}, bias {number(errors.bias, sign=True)}; {number(too_low)} % of "
        f"them more than 5 % too low. Of {verdicts.out_of_memory} runs that ran out of memory "
        f"{verdicts.told} are told; {verdicts.false_alarms} false alarms among {verdicts.ran} "
        "that fitted.",
        *_plot(MEMORY, plots),
    ]


def _not_expressed(scores: Scores) -> list[str]:
    if not scores.not_expressed:
        return []
    rows = [(str(count), reason) for reason, count in reasons(scores).items()]
    return ["## Not expressed", table(("rows", "reason"), rows)]
