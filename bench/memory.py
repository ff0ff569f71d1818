"""Predicted peak memory against torch's tracker for Llama-3-8B's shape, all 32 layers.

Run: python bench/memory.py (about five minutes). Prints a Markdown table.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

from claw_plan.planner.model_source import load_model
from claw_plan.planner.trace import trace
from claw_plan.profiles.units import gib

HERE = Path(__file__).parent
TEST = HERE.parent / "tests" / "validation" / "test_memory_tracker.py"


def main() -> None:
    spec = importlib.util.spec_from_file_location("tracker_test", TEST)
    assert spec is not None and spec.loader is not None
    test = importlib.util.module_from_spec(spec)
    sys.modules["tracker_test"] = test
    spec.loader.exec_module(test)
    test.LAYERS = 32
    print("| tokens | plan | recompute | predicted GiB | tracked GiB | error |")
    print("|---|---|---|---|---|---|")
    for seq in (2048, 8192):
        test.SEQ = seq
        graph = trace(load_model(test.CONFIG), seq_len=seq, dtype="bfloat16")
        for name, plain in (
            ("FSDP 64", test.FSDP),
            ("TP 8", test.TP),
            ("FSDP 8 x TP 8", test.BOTH),
        ):
            for recompute in ("none", "full"):
                candidate = replace(plain, recompute=recompute)
                predicted = test.predicted_bytes(graph, candidate)
                tracked = test.tracked_bytes(candidate)
                error = predicted / tracked - 1
                print(
                    f"| {seq} | {name} | {recompute} | {gib(predicted):.2f} | {gib(tracked):.2f} "
                    f"| {error:+.2%} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
