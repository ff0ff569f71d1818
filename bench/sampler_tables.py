"""Writes the tables of docs/samplers.md from the lines that bench/samplers.py keeps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

ORDER = ("tpe", "cmaes", "nsga2", "random", "anneal", "rl", "rl, pre-trained")
NAMES = {
    "tpe": "TPE", "cmaes": "CMA-ES", "nsga2": "NSGA-II", "random": "random",
    "anneal": "annealing", "rl": "RL", "rl, pre-trained": "RL, pre-trained",
}  # fmt: skip

Line = dict[str, Any]
Ratios = dict[tuple[str, str, str, str], list[float | None]]
"""By problem, searcher, start and budget; None for an answer that does not fit."""


def ratios(lines: Sequence[Line]) -> Ratios:
    """Each answer over the optimum, one a seed."""
    best = {problem(line): line["time_ns"] for line in lines if line["key"][2] == "exact"}
    found: Ratios = defaultdict(list)
    for line in lines:
        searcher, start, _, budget = line["key"][2:]
        if searcher != "exact":
            time_ns = line["time_ns"]
            ratio = time_ns / best[problem(line)] if time_ns is not None else None
            found[problem(line), searcher, start, str(budget)].append(ratio)
    return found


def problem(line: Line) -> str:
    """Its name in the tables."""
    return f"{line['key'][0]}, {line['key'][1]}"


def summary(lines: Sequence[Line]) -> Iterator[str]:
    """The mean and worst ratio of each searcher over all problems."""
    found = ratios(lines)
    yield "| searcher | 200, cold | 1,000, cold | 200, warm | 1,000, warm | problems | CPU s |"
    yield "|---|---|---|---|---|---|---|"
    for searcher in ORDER:
        cells = []
        for start in ("cold", "warm"):
            for budget in ("200", "1000"):
                own = [
                    ratio
                    for key, each in found.items()
                    if key[1:] == (searcher, start, budget)
                    for ratio in each
                ]
                cells.append(_mean_and_worst(own))
        mine = [line for line in lines if line["key"][2] == searcher]
        problems = len({problem(line) for line in mine})
        seconds = sum(line["cpu_s"] for line in mine)
        yield f"| {NAMES[searcher]} | {' | '.join(cells)} | {problems} | {seconds:.0f} |"


def _mean_and_worst(own: Sequence[float | None]) -> str:
    fits = [ratio for ratio in own if ratio is not None]
    if not fits:
        return "-"
    misses = f", {len(own) - len(fits)} do not fit" if len(own) > len(fits) else ""
    return f"{fmean(fits):.4f} ({max(fits):.3f}{misses})"


def by_problem(lines: Sequence[Line], budget: str, start: str) -> Iterator[str]:
    """The mean ratio over seeds of each problem; the exact method's time beside it."""
    found = ratios(lines)
    exact = {problem(line): line for line in lines if line["key"][2] == "exact"
             and line["key"][3] == start}  # fmt: skip
    yield f"| problem | start | {' | '.join(NAMES[s] for s in ORDER)} | DP, CPU s |"
    yield "|---" * (len(ORDER) + 3) + "|"
    for name, line in exact.items():
        cells = []
        for searcher in ORDER:
            own = [r for r in found.get((name, searcher, start, budget), ()) if r is not None]
            cells.append(f"{fmean(own):.4f}" if own else "-")
        begins = line["start_ns"] / line["time_ns"]
        yield f"| {name} | {begins:.3f} | {' | '.join(cells)} | {line['cpu_s']:.2f} |"


def write_tables(target: Path, lines: Sequence[Line]) -> None:
    """Puts the tables between their marks."""
    text = target.read_text(encoding="utf-8")
    tables = {
        "summary": summary(lines),
        "cold": by_problem(lines, "200", "cold"),
        "warm": by_problem(lines, "1000", "warm"),
    }
    for mark, rows in tables.items():
        before, _, rest = text.partition(f"<!-- {mark} -->\n")
        _, _, after = rest.partition(f"<!-- /{mark} -->")
        body = "\n".join(rows)
        text = f"{before}<!-- {mark} -->\n{body}\n<!-- /{mark} -->{after}"
    target.write_text(text, encoding="utf-8")
