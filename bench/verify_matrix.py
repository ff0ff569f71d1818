"""Plans made, run and verified against one process, through the command line.

Three untouched models (examples/gpt_small.py with its tied head, a Hugging Face Llama and a
GPT-2) under six plans of two and four processes. For each: plan with --fix, run two steps, verify
five. Prints a Markdown table and, with --write, puts it into docs/verified.md.

Run: python bench/verify_matrix.py [--write] [--models gpt,llama,gpt2]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "verified.md"
PLANS = ("dp_shard=2", "dp_replicate=2", "tp=2", "pp=2", "pp=2,tp=2", "pp=2,dp_shard=2")
NEUTRAL = {"pp": 1, "tp": 1, "dp_replicate": 1, "dp_shard": 1}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 6,
    "vocab_size": 2048,
    "max_position_embeddings": 64,
}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 256,
    "n_head": 8,
    "n_layer": 6,
    "vocab_size": 2048,
    "n_positions": 64,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}


def claw_plan(*arguments: str) -> dict[str, object]:
    command = [str(Path(sys.executable).with_name("claw-plan")), *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    result: dict[str, object] = json.loads(done.stdout)
    return result


def models(folder: Path) -> dict[str, Path]:
    paths = {"gpt": ROOT / "examples" / "gpt_small.py"}
    for name, config in (("llama", LLAMA), ("gpt2", GPT2)):
        paths[name] = folder / name / "config.json"
        paths[name].parent.mkdir()
        paths[name].write_text(json.dumps(config))
    return paths


def row(name: str, model: Path, plan: str, folder: Path) -> str:
    pinned = NEUTRAL | {k: int(v) for k, v in (part.split("=") for part in plan.split(","))}
    fix = ",".join(f"{knob}={value}" for knob, value in pinned.items())
    path = folder / "plan.yaml"
    claw_plan(str(model), "--cluster", "cpu", "--global-batch", "8", "--fix", fix, "-o", str(path))
    run = claw_plan("run", str(path), "--steps", "2")
    result = claw_plan("verify", str(path), "--steps", "5")
    losses = run["losses"]
    assert isinstance(losses, list) and len(losses) == 2
    return (
        f"| {name} | {plan} | {'yes' if result['ok'] else 'NO'} "
        f"| {result['fp64_max_loss_diff']:.1e} | {result['fp64_max_param_diff']:.1e} "
        f"| {result['fp32_max_loss_diff']:.1e} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--models", default="gpt,llama,gpt2")
    options = parser.parse_args()
    lines = [
        "| model | plan | equal | fp64 losses | fp64 parameters | fp32 losses |",
        "|---|---|---|---|---|---|",
    ]
    print(*lines, sep="\n", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model, path in models(folder).items():
            for plan in PLANS if model in options.models.split(",") else ():
                lines.append(row(model, path, plan, folder))
                print(lines[-1], flush=True)
    if options.write:
        TARGET.write_text(
            "# Plans against one process\n\nLargest differences after five steps, made by "
            f"`python bench/verify_matrix.py --write` with torch {torch.__version__} on CPU. "
            "Allowed are 1e-10 in fp64 and 1e-5 in fp32. `gpt` is examples/gpt_small.py (10.1 M "
            "parameters, tied head); `llama` and `gpt2` are untouched Hugging Face models.\n\n"
            + "\n".join(lines)
            + "\n"
        )


if __name__ == "__main__":
    main()
