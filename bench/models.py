"""Models that nobody here wrote: planned, verified against one process, or rightly refused.

Every entry of bench/model_sources/*.yaml names a package, or a commit of a public repository that
the user has cloned: `git clone https://github.com/karpathy/nanoGPT clones/karpathy+nanoGPT`. It
says how the model is built and which plans to verify. What is not installed or not cloned is left
out. `--results` keeps what was found in a file, so that a table can be made in pieces.

Run: python bench/models.py [--write docs/models.md] [--only NAME;…] [--clones FOLDER]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from claw_plan.executor.verify import verify_plans
from claw_plan.planner.errors import PlanError
from claw_plan.planner.fake_build import build_fake
from claw_plan.planner.model_source import LoadedModel, load_model
from claw_plan.planner.plan import save_plan
from claw_plan.planner.plan_writer import write_plan
from claw_plan.planner.problem import Problem, Training
from claw_plan.planner.score import Scorer
from claw_plan.planner.search_space import search_space
from claw_plan.planner.space import Space
from claw_plan.planner.torch_private import FakeTensorMode
from claw_plan.planner.trace import trace
from claw_plan.profiles.cluster_file import load_cluster
from claw_plan.profiles.cost_model import ClusterCostModel
from claw_plan.profiles.errors import ClawPlanError
from claw_plan.profiles.trainer import NEUTRAL

SOURCES = Path(__file__).parent / "model_sources"

Paths = dict[str, tuple[int, Path]]
"""(number of ranks, plan file) of each plan that is offered."""

PLANS = ("dp_replicate=2", "dp_shard=2", "tp=2", "pp=2", "pp=2,dp_shard=2")
"""The degrees that every small model is verified under; entries may name others."""

NEUTRAL_DEGREES = {"pp": 1, "tp": 1, "dp_replicate": 1, "dp_shard": 1}
GLOBAL_BATCH, STEPS = 8, 2
TIME_LIMIT_S = 280
TOGETHER = 6
"""So many models are verified in one set of processes, and their results kept then."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """One model: where it comes from, how it is built, and what should come of it.

    `file` are the lines of a model file, which in a repository lies at `path`; without it the file
    at `path` is the model, with `build` and `inputs`. `files` are the patterns of what is taken
    from a repository. `published` is the number of parameters its authors state. `plans` are
    verified; none for models planned for a `cluster` only. `refusal` is a part of the sentence
    that is right for models that cannot be trained as they stand.
    """

    name: str
    package: str | None = None
    repository: str | None = None
    commit: str = "HEAD"
    files: Sequence[str] = ("*.py",)
    file: str | None = None
    config: dict[str, Any] | None = None
    path: str | None = None
    build: str | None = None
    inputs: str | None = None
    cluster: str = "cpu"
    global_batch: int = GLOBAL_BATCH
    published: int | None = None
    plans: Sequence[str] = PLANS
    refusal: str | None = None

    def missing(self, clones: Path) -> str:
        """What is not here to try it with; empty when all is."""
        if self.package is not None and importlib.util.find_spec(_module(self.package)) is None:
            return f"{self.package} is not installed"
        if self.repository is not None and not self.clone(clones).is_dir():
            return f"{self.repository} is not cloned"
        return ""

    def clone(self, clones: Path) -> Path:
        assert self.repository is not None
        return clones / self.repository.replace("/", "+")

    def model_file(self, folder: Path, clones: Path) -> Path:
        """The model file, in the folder with all that the repository has beside it."""
        if self.repository is not None:
            archive = folder / "archive.tar"
            command = ["git", "-C", str(self.clone(clones)), "archive", "-o", str(archive)]
            subprocess.run([*command, self.commit, "--", *self.files], check=True)
            with tarfile.open(archive) as files:
                files.extractall(folder, filter="data")
        ending = "py" if self.config is None else "json"
        target = folder / (self.path or f"{self.name}.{ending}")
        text = json.dumps(self.config) if self.config is not None else self.file
        if text is not None:
            target.write_text(text)
        return target


@dataclass(kw_only=True)
class Result:
    """What came of one model. `verified` maps a plan to its errors or to a refusal."""

    name: str
    parameters: int = 0
    own_count: int = 0
    units: int = 0
    planned: str = ""
    verified: dict[str, Any] = field(default_factory=dict)
    refusal: str = ""


def sources(folder: Path = SOURCES) -> list[Source]:
    """All entries, in the order of the files."""
    return [
        Source(**entry)
        for path in sorted(folder.glob("*.yaml"))
        for entry in yaml.safe_load(path.read_text(encoding="utf-8"))
    ]


def plan_model(source: Source, folder: Path, clones: Path) -> tuple[Result, Paths]:
    """Traces the model and writes the plans that are offered into the folder."""
    result = Result(name=source.name)
    try:
        model = load_model(
            source.model_file(folder, clones), build=source.build, inputs=source.inputs
        )
        return result, _plan(source, model, folder, result)
    except ClawPlanError as error:
        result.refusal = str(error).replace(f"{folder}/", "")
        return result, {}


def _plan(source: Source, model: LoadedModel, folder: Path, result: Result) -> Paths:
    cluster = load_cluster(source.cluster)
    on_cpu = cluster.backend == "gloo"
    graph = trace(model, seq_len=model.seq_len(), dtype="float32" if on_cpu else "bfloat16")
    result.parameters, result.units = graph.num_parameters, len(graph.units)
    result.own_count = _own_count(model)
    problem = Problem(
        graph=graph,
        cluster=cluster,
        training=Training(
            global_batch=source.global_batch,
            seq_len=graph.seq_len,
            precision=graph.dtype,
            optimizer="adamw",
            memory_headroom=0.1,
        ),
        cost=ClusterCostModel(cluster, None),
        trainer=NEUTRAL,
    )
    scorer, paths = Scorer(problem), {}
    for plan in source.plans or ("",):
        fixed = {k: int(v) for k, _, v in (part.partition("=") for part in plan.split(",")) if k}
        try:
            space = Space(problem, NEUTRAL_DEGREES | fixed if plan else {})
            found = search_space(scorer, space)
        except PlanError as error:
            result.verified[plan] = str(error)
            continue
        if not found.ranked:
            result.verified[plan] = space.explain_empty()
            continue
        best = scorer.score(*found.ranked[0])
        if not plan:
            result.planned = best.candidate.short()
            continue
        written = write_plan(problem, best, model, folder=folder, profile="catalogue", search={})
        path = folder / f"{plan.replace(',', '_')}.yaml"
        save_plan(written, path)
        paths[plan] = (best.candidate.num_devices, path)
    return paths


def _own_count(model: LoadedModel) -> int:
    """What torch counts in the model that the package builds, ties once."""
    module = build_fake(model, FakeTensorMode())
    return sum(parameter.numel() for parameter in module.parameters())


def verify_all(planned: Sequence[tuple[Result, Paths]]) -> None:
    """Verifies the plans of one size of all models in one set of processes.

    Where that ends in an error, each half is tried alone, down to the plan that it is of.
    """
    for wanted in sorted({size for _, paths in planned for size, _ in paths.values()}):
        _verify(
            [
                (result, plan, path)
                for result, paths in planned
                for plan, (size, path) in paths.items()
                if size == wanted
            ]
        )


def _verify(plans: Sequence[tuple[Result, str, Path]]) -> None:
    try:
        found = verify_plans([path for _, _, path in plans], STEPS)
    except ClawPlanError as error:
        if len(plans) == 1:
            ((result, plan, path),) = plans
            result.verified[plan] = str(error).replace(f"{path.parent}/", "")
            return
        half = len(plans) // 2
        _verify(plans[:half])
        _verify(plans[half:])
        return
    for (result, plan, _), verified in zip(plans, found, strict=True):
        result.verified[plan] = asdict(verified)


def _module(package: str) -> str:
    return {"open_clip_torch": "open_clip"}.get(package, package.replace("-", "_"))


def plan_apart(source: Source, folder: Path, clones: Path) -> tuple[Result, Paths]:
    """`plan_model` in a fork of this process: what the package changes or breaks stays there."""
    folder.mkdir()
    forks = multiprocessing.get_context("fork")
    ours, theirs = forks.Pipe(duplex=False)

    def work() -> None:
        theirs.send(plan_model(source, folder, clones))

    fork = forks.Process(target=work)
    fork.start()
    theirs.close()
    try:
        if ours.poll(TIME_LIMIT_S):
            return ours.recv()
        return Result(name=source.name, refusal=f"no answer in {TIME_LIMIT_S} s"), {}
    except EOFError:
        return Result(name=source.name, refusal="the process ended with an error"), {}
    finally:
        fork.kill()
        fork.join()


def row(source: Source, result: Result) -> str:
    """One line of the table."""
    where = source.package or f"{source.repository} {source.commit[:7]}"
    what = f"| {source.name} | {where} "
    if result.refusal:
        right = source.refusal is not None and source.refusal in result.refusal
        return f"{what}| - | {'' if right else 'WRONGLY '}refused: {result.refusal} |"
    if source.refusal is not None:
        return f"{what}| {result.parameters:,} | WRONG: not refused |"
    parts = [f"planned for {source.cluster}: {result.planned}"] if result.planned else []
    parts += [_verified(plan, told) for plan, told in result.verified.items()]
    return f"{what}| {_count(source, result)} | {'; '.join(parts)} |"


def _count(source: Source, result: Result) -> str:
    """Parameters, which must be those that torch counts and that the authors state."""
    text = f"{result.parameters:,}"
    if result.parameters != result.own_count:
        text += f" WRONG, torch counts {result.own_count:,}"
    if source.published not in (None, result.parameters):
        text += f" WRONG, published are {source.published:,}"
    return text + (" as published" if source.published == result.parameters else "")


def _verified(plan: str, told: str | dict[str, Any]) -> str:
    if isinstance(told, str):
        return f"{plan}: {told}"
    if not told["ok"]:
        return f"{plan}: WRONG {told['first_difference']}"
    worst = max(told["fp64_max_loss_diff"], told["fp64_max_param_diff"])
    return f"{plan}: {worst:.0e}" if worst else f"{plan}: 0"


def page(found: Sequence[tuple[Source, Result]]) -> str:
    """docs/models.md."""
    packages = sorted({source.package for source, _ in found if source.package} | {"torch"})
    versions = ", ".join(f"{package} {version(package)}" for package in packages)
    lines = [row(source, result) for source, result in found]
    plans = [
        [told["ok"] for told in result.verified.values() if isinstance(told, dict)]
        for _, result in found
    ]
    right, wrong = (sum(each.count(ok) for each in plans) for ok in (True, False))
    refused = sum(bool(result.refusal) for _, result in found)
    return f"""# Models that nobody here wrote

Made by `python bench/models.py --write docs/models.md` from `bench/model_sources/`, on CPUs, with
{versions}.
{len(found)} entries: of {sum(map(bool, plans))} models {right} plans train like one process and
{wrong} not (marked WRONG); {refused} files are refused.

Behind each plan stands the largest difference in fp64, of losses and parameters, from one process
after {STEPS} steps (allowed: 1e-10; 0 means bit for bit), or why it is not offered. Parameters are
those that torch counts in the model itself, where said as its authors publish them. Files of
repositories are used as they stand at the commit; `bench/model_sources/repositories.yaml` has the
lines beside them.

| model | from | parameters | planned and verified |
|---|---|---|---|
{chr(10).join(lines)}
"""


Known = dict[str, dict[str, Any]]
"""What was found before, by name."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", type=Path)
    parser.add_argument("--only", default="", help="names between semicolons")
    parser.add_argument("--clones", type=Path, default=Path("clones"))
    parser.add_argument("--results", type=Path, help="JSON with what was found before; added to")
    options = parser.parse_args()
    names, clones = options.only.split(";") if options.only else [], options.clones.absolute()
    known: Known = {}
    if options.results and options.results.exists():
        known = json.loads(options.results.read_text())
    chosen = [each for each in sources() if not names or each.name in names]
    new = [each for each in chosen if names or each.name not in known]
    for start in range(0, len(new), TOGETHER):
        tried = try_all(new[start : start + TOGETHER], clones)
        known |= {result.name: asdict(result) for result in tried}
        if options.results:
            options.results.write_text(json.dumps(known, indent=1))
    found = [(each, Result(**known[each.name])) for each in sources() if each.name in known]
    if options.write:
        write_first_part(options.write, page(found))


def write_first_part(path: Path, text: str) -> None:
    """Writes the page, and keeps the part that `published_models` made."""
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    _, heading, rest = old.partition("\n## ")
    path.write_text(text + heading + rest, encoding="utf-8")


def try_all(chosen: Sequence[Source], clones: Path) -> list[Result]:
    """Plans each that is here, then verifies all plans."""
    present = [each for each in chosen if not each.missing(clones)]
    with tempfile.TemporaryDirectory() as name:
        planned = []
        for source in present:
            planned.append(plan_apart(source, Path(name) / str(len(planned)), clones))
            print(row(source, planned[-1][0]), file=sys.stderr, flush=True)
        verify_all(planned)
    results = [result for result, _ in planned]
    print(
        *(row(source, result) for source, result in zip(present, results, strict=True)), sep="\n"
    )
    return results


if __name__ == "__main__":
    main()
