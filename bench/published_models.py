"""Published models at their full size: planned from config.json, their split held against others'.

`bench/published_configs.yaml` has the configurations and the parameter counts that their authors
publish. Planning runs on fake tensors, so no weights are needed. The tensor-parallel split that
the planner finds from the flow of data is compared with `base_model_tp_plan`, which transformers'
config classes state by module names; where they state none, with Megatron's: every linear of a
block divided. The table becomes the second part of docs/models.md.

Run: python bench/published_models.py [--write docs/models.md] [--only NAME;…] [--results FILE]
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from claw_plan.planner.expert_search import search_experts
from claw_plan.planner.graph import ModelGraph
from claw_plan.planner.model_source import load_model
from claw_plan.planner.problem import Problem, Training
from claw_plan.planner.score import Scorer
from claw_plan.planner.search_space import search_space
from claw_plan.planner.space import Space
from claw_plan.planner.trace import trace
from claw_plan.profiles.cluster_file import load_cluster
from claw_plan.profiles.cost_model import ClusterCostModel
from claw_plan.profiles.errors import ClawPlanError
from claw_plan.profiles.trainers import DEFAULT, load_trainers
from claw_plan.profiles.units import format_ns

CONFIGS = Path(__file__).parent / "published_configs.yaml"
HEADING = "## Published models at full size"
ROUNDING = 0.02
"""How far a rounded published count may be from the true one: '66B' is 65.5 to 66.5."""

STYLES = {"col": "colwise", "row": "rowwise", "packed_col": "colwise"}
"""Beginnings of transformers' names; those that gather the output are divided all the same."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """A configuration; `exactly` is its checkpoint's parameter count, `about` a rounded one."""

    name: str
    config: dict[str, Any]
    exactly: int | None = None
    about: int | None = None
    inputs: str | None = None
    cluster: str = "dgx-h100"
    global_batch: int = 256


@dataclass(kw_only=True)
class Found:
    """What came of it. `split` and `stated` map modules of a block to 'colwise' or 'rowwise'.

    `whole` are the matrices of blocks that tensor parallelism leaves whole, with their share of
    all parameters; `stated` is None where transformers states no split.
    """

    name: str
    parameters: int = 0
    plan: str = ""
    step: str = ""
    tp_divides: int = 1
    split: dict[str, str] = field(default_factory=dict)
    stated: dict[str, str] | None = None
    whole: dict[str, float] = field(default_factory=dict)
    no_split: str = ""
    no_pipeline: str = ""
    refusal: str = ""


def configs() -> list[Published]:
    """All entries of the file."""
    return [Published(**entry) for entry in yaml.safe_load(CONFIGS.read_text(encoding="utf-8"))]


def plan_published(model: Published, folder: Path) -> Found:
    """Plans the model: the best of all candidates, as the command line finds it."""
    path = folder / "config.json"
    path.write_text(json.dumps(model.config))
    found = Found(name=model.name)
    try:
        problem = pose(model, path)
        scorer, space = Scorer(problem), Space(problem, {})
        scorer, searched = search_experts(scorer, search_space(scorer, space), {})
        ranked = searched.ranked
    except ClawPlanError as error:
        found.refusal = str(error).replace(f"{folder}/", "")
        return found
    if ranked:
        best = scorer.score(*ranked[0])
        found.plan, found.step = best.candidate.short(), format_ns(best.step_time_ns)
    graph = problem.graph
    found.parameters, found.tp_divides = graph.num_parameters, graph.tp_divides
    found.split, found.whole = split_of(graph), whole_of(graph)
    found.stated, found.no_split = stated_split(model.config, graph), graph.no_tensor_parallel
    found.no_pipeline = next(iter(graph.cut_refused.values()), "")
    return found


def pose(model: Published, path: Path) -> Problem:
    """The model in bfloat16 on its cluster, with what the default trainer adds."""
    loaded = load_model(path, inputs=model.inputs)
    graph = trace(loaded, seq_len=loaded.seq_len(), dtype="bfloat16")
    cluster = load_cluster(model.cluster)
    training = Training(
        global_batch=model.global_batch,
        seq_len=graph.seq_len,
        precision=graph.dtype,
        optimizer="adamw",
        memory_headroom=0.1,
    )
    return Problem(
        graph=graph,
        cluster=cluster,
        training=training,
        cost=ClusterCostModel(cluster, None, with_launches=False),
        trainer=load_trainers()[DEFAULT],
    )


def split_of(graph: ModelGraph) -> dict[str, str]:
    """The split the planner found: modules by their names in a block."""
    return {r.module: r.style for r in graph.tensor_parallel if r.style in STYLES.values()}


def matrices(graph: ModelGraph) -> dict[str, list[Any]]:
    """The parameters of two dimensions or more in blocks, by their names in a block."""
    blocks = [unit.name for unit in graph.blocks]
    found: dict[str, list[Any]] = {}
    for parameter in graph.parameters:
        block = next((name for name in blocks if parameter.name.startswith(f"{name}.")), None)
        if block is not None and len(parameter.shape) > 1:
            found.setdefault(parameter.name.removeprefix(f"{block}."), []).append(parameter)
    return found


def whole_of(graph: ModelGraph) -> dict[str, float]:
    """The matrices of blocks that every rank holds whole, and their share of all parameters."""
    return {
        name: sum(parameter.numel for parameter in each) / graph.num_parameters
        for name, each in matrices(graph).items()
        if any(parameter.tp_dim is None for parameter in each)
    }


def stated_split(config: Mapping[str, Any], graph: ModelGraph) -> dict[str, str] | None:
    """The split that transformers states for the modules that this model has in its blocks."""
    import transformers

    family = transformers.CONFIG_MAPPING[config["model_type"]]
    if not (stated := getattr(family, "base_model_tp_plan", None)):
        return None
    held = set(matrices(graph))
    found = {}
    for pattern, style in stated.items():
        _, is_in_block, module = pattern.partition(".*.")
        kind = next((ours for theirs, ours in STYLES.items() if style.startswith(theirs)), None)
        if is_in_block and kind and held & {module, f"{module}.weight"}:
            found[module] = kind
    return found


def judged(found: Found) -> str:
    """The split in words, and whether it is the stated one."""
    if not found.split:
        return f"none: {found.no_split}"
    text = f"tp divides {found.tp_divides}; "
    whole = [f"{name} ({share:.0%})" for name, share in found.whole.items() if share >= 0.005]
    wholes = f"; whole: {', '.join(whole)}" if whole else ""
    if found.stated is None:
        return text + ("Megatron's, less what is whole" if whole else "Megatron's") + wholes
    others = {name for name, style in found.stated.items() if found.split.get(name) != style}
    against = others & found.split.keys()
    if against:
        return f"{text}WRONG: {', '.join(sorted(against))}"
    more = sorted(found.split.keys() - found.stated.keys())
    text += "as stated" if not others else "as stated, less what is whole"
    return text + (f", and {', '.join(more)}" if more else "") + wholes


def counted(model: Published, found: Found) -> str:
    """The parameters, and whether they are those published."""
    text = f"{found.parameters:,}"
    if model.exactly is not None:
        right = found.parameters == model.exactly
        return text + (" as published" if right else f" WRONG, published are {model.exactly:,}")
    assert model.about is not None
    right = abs(found.parameters / model.about - 1) <= ROUNDING
    return f"{text} ({'' if right else 'WRONG, '}published: {model.about / 1e9:.4g} billion)"


def row(model: Published, found: Found) -> str:
    """One line of the table."""
    what = f"| {model.name} | {model.config['model_type']} "
    if found.refusal:
        return f"{what}| - | refused: {found.refusal} | |"
    plan = f"{found.plan}; {found.step} a step" if found.plan else "none fits"
    plan = f"{model.cluster}, batch {model.global_batch}: {plan}"
    if found.no_pipeline:
        plan += f"; not every cut: {found.no_pipeline}"
    return f"{what}| {counted(model, found)} | {plan} | {judged(found)} |"


def section(chosen: Sequence[tuple[Published, Found]]) -> str:
    """The second part of docs/models.md."""
    planned = [found for _, found in chosen if not found.refusal]
    families = {model.config["model_type"] for model, found in chosen if not found.refusal}
    stated = [found for found in planned if found.stated is not None]
    agree = sum(all(f.split.get(m, s) == s for m, s in (f.stated or {}).items()) for f in stated)
    return f"""{HEADING}

Made by `python bench/published_models.py --write docs/models.md` from
`bench/published_configs.yaml` with transformers {version("transformers")} and torch
{version("torch")}, without weights: {len(chosen)} configurations; {len(planned)}, of
{len(families)} architectures, are planned and {len(chosen) - len(planned)} refused. The split is
what the planner finds from the flow of data; for {len(stated)} models transformers states one
(`base_model_tp_plan`), and for {agree} of them no module is divided otherwise. "Whole" are
matrices of blocks that every rank holds whole, with their share of all parameters.

| model | architecture | parameters | plan | tensor parallelism in the blocks |
|---|---|---|---|---|
{chr(10).join(row(model, found) for model, found in chosen)}
"""


def write(path: Path, text: str) -> None:
    """Replaces this part of the page, or adds it."""
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    start = re.split(f"^{re.escape(HEADING)}$", old, flags=re.MULTILINE)[0].rstrip("\n")
    path.write_text(f"{start}\n\n{text}", encoding="utf-8")


def plan_all(chosen: Iterable[Published], results: Path | None, known: dict[str, Any]) -> None:
    """Plans each; `known` and the file have what was found so far."""
    for model in chosen:
        with tempfile.TemporaryDirectory() as name:
            found = plan_published(model, Path(name))
        known[model.name] = asdict(found)
        print(row(model, found), file=sys.stderr, flush=True)
        if results is not None:
            results.write_text(json.dumps(known, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", type=Path)
    parser.add_argument("--only", default="", help="names between semicolons")
    parser.add_argument("--results", type=Path, help="JSON with what was found before; added to")
    options = parser.parse_args()
    names = options.only.split(";") if options.only else []
    known: dict[str, Any] = {}
    if options.results and options.results.exists():
        known = json.loads(options.results.read_text())
    chosen = [m for m in configs() if (m.name in names if names else m.name not in known)]
    plan_all(chosen, options.results, known)
    if options.write:
        listed = [(m, Found(**known[m.name])) for m in configs() if m.name in known]
        write(options.write, section(listed))


if __name__ == "__main__":
    main()
