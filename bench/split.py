"""What the exact program divides in the blocks of published architectures, and what that saves.

Each model of `bench/published_configs.yaml` is built on fake tensors (no weights, no GPU); the
blocks of every kind are solved at a degree over the links of one node. The table becomes part of
docs/tensor_parallel.md.

Run: python bench/split.py [--degree 8] [--cluster dgx-h100] [--only NAME,…] [--sequence]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml

from claw_plan.planner.model_source import load_model
from claw_plan.planner.split.choice import BlockSplit, best_split, block_flows
from claw_plan.planner.split.costs import SplitCosts
from claw_plan.planner.split.graph import SplitGraph
from claw_plan.planner.split.ways import Setting
from claw_plan.planner.subject import Subject
from claw_plan.profiles.cluster_file import load_cluster
from claw_plan.profiles.cost_model import ClusterCostModel
from claw_plan.profiles.errors import ClawPlanError
from claw_plan.profiles.units import format_ns
from claw_plan.profiles.work import CollectiveWork

CONFIGS = Path(__file__).parent / "published_configs.yaml"


def costs_of_node(cluster_name: str, degree: int) -> SplitCosts:
    """Prices inside one node of the cluster."""
    cluster = load_cluster(cluster_name)
    model = ClusterCostModel(cluster)

    def collective_ns(op: str, size: int) -> int:
        work = CollectiveWork(op=op, bytes=size, group_size=degree, nodes=1)
        return model.collective(work).alone_ns

    return SplitCosts(
        op_ns=lambda work: model.op(work).ns,
        collective_ns=collective_ns,
        gradient_ns=lambda size: collective_ns("all_reduce", size),
    )


def flows_of(entry: dict[str, Any], folder: Path) -> dict[str, SplitGraph | str]:
    """One flow of every kind of block."""
    path = folder / "config.json"
    path.write_text(json.dumps(entry["config"]))
    model = load_model(path, inputs=entry.get("inputs"))
    subject = Subject.prepare(model, seq_len=model.seq_len(), dtype=torch.bfloat16, fold=2)
    kinds: dict[object, tuple[str, SplitGraph | str]] = {}
    for name, flow in block_flows(subject).items():
        kinds.setdefault(flow if isinstance(flow, str) else flow.signature(), (name, flow))
    return dict(kinds.values())


def rows(entry: dict[str, Any], setting: Setting, costs: SplitCosts) -> Iterator[str]:
    """A line of the table for each kind of block."""
    name = entry["name"]
    with tempfile.TemporaryDirectory() as folder:
        try:
            flows = flows_of(entry, Path(folder))
        except ClawPlanError as error:
            yield f"| {name} | | | | | | {str(error).splitlines()[0][:120]} |"
            return
    for block, flow in flows.items():
        if isinstance(flow, str):
            yield f"| {name} | `{block}` | | | | | {flow} |"
            continue
        start = time.process_time()
        try:
            split = best_split(block, flow, setting, costs)
        except ClawPlanError as error:
            yield f"| {name} | `{block}` | {len(flow.ops)} | | | | {error} |"
            continue
        yield _row(name, split, len(flow.ops), time.process_time() - start)


def _row(name: str, split: BlockSplit, ops: int, seconds: float) -> str:
    columns, rows = (
        ", ".join(dict.fromkeys(f"`{n.rpartition('.')[0] or n}`" for n in names)) or "none"
        for names in (split.columns, split.rows)
    )
    moved = f"{len(split.forward)} + {len(split.backward)}"
    saved = f"{format_ns(split.whole_ns)} → {format_ns(split.time_ns)}"
    return (
        f"| {name} | `{split.block}` | {ops} | {columns} | {rows} | {moved} | {saved}, solved in "
        f"{seconds:.2f} s |"
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--degree", type=int, default=8)
    parser.add_argument("--cluster", default="dgx-h100")
    parser.add_argument("--only", default="")
    parser.add_argument("--sequence", action="store_true")
    given = parser.parse_args()
    costs = costs_of_node(given.cluster, given.degree)
    setting = Setting(degree=given.degree, sequence=given.sequence)
    wanted = set(filter(None, given.only.split(",")))
    print("| model | block | operators | columns | rows | collectives | both passes |")
    print("|---|---|---|---|---|---|---|")
    for entry in yaml.safe_load(CONFIGS.read_text()):
        if wanted and entry["name"] not in wanted:
            continue
        for row in rows(entry, setting, costs):
            print(row)
            sys.stdout.flush()


if __name__ == "__main__":
    main()
