"""Megatron-LM's command line, in a shell script or as plain text, to a `Setting`.

Meanings and defaults are those of Megatron-LM's `megatron/training/arguments.py` (core 0.9 and
later): degrees are 1 and gradients are clipped at 1.0 where nothing is said; the distributed
optimizer shards optimizer states alone (ZeRO-1), `--data-parallel-sharding-strategy` more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from claw_plan.planner.baselines.setting import Draft, Setting, whole
from claw_plan.planner.baselines.shell_text import Word, words_of
from claw_plan.planner.schedules import INTERLEAVED
from claw_plan.profiles.errors import InputError

FORMAT = "Megatron-LM"

DEGREES = {
    "--tensor-model-parallel-size": "tp",
    "--pipeline-model-parallel-size": "pp",
    "--context-parallel-size": "cp",
    "--expert-model-parallel-size": "ep",
    "--expert-tensor-parallel-size": "etp",
}
BATCHES = {"--global-batch-size": "global_batch", "--seq-length": "seq_len"}
SHARDING = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
CLIP_NORM = 1.0
"""`--clip-grad` where it is not given."""

NO_KNOB = {
    "--tp-comm-overlap": "tensor-parallel traffic is reckoned exposed",
    "--decoder-first-pipeline-num-layers": "stages are cut evenly",
    "--decoder-last-pipeline-num-layers": "stages are cut evenly",
    "--pipeline-model-parallel-layout": "stages are cut evenly",
    "--fp8-format": "products are reckoned in 16 bits",
    "--fp8-hybrid": "products are reckoned in 16 bits",
    "--recompute-modules": "the attention's core alone is reckoned",
    "--use-tp-pp-dp-mapping": "ranks are laid out pp, dp, cp, tp",
    "--rampup-batch-size": "the whole batch is reckoned",
    "--cpu-offloading": "activations stay on the device",
}
"""Flags that change a step's time or memory and have no counterpart here."""

VALUED = {
    *(*DEGREES, *BATCHES, "--micro-batch-size", "--nproc-per-node", "--nnodes", "--num-layers"),
    *("--data-parallel-sharding-strategy", "--num-layers-per-virtual-pipeline-stage"),
    *("--num-virtual-stages-per-pipeline-rank", "--recompute-granularity", "--optimizer"),
    *("--recompute-method", "--recompute-num-layers", "--clip-grad", "--fp8-format"),
    *("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"),
    *("--pipeline-model-parallel-layout", "--recompute-modules", "--rampup-batch-size"),
}
SWITCHES = {
    *("--sequence-parallel", "--use-distributed-optimizer", "--use-torch-fsdp2", "--bf16"),
    *("--optimizer-cpu-offload", "--recompute-activations", "--fp16", "--fp8-hybrid"),
    *("--tp-comm-overlap", "--use-tp-pp-dp-mapping", "--cpu-offloading"),
}


@dataclass(frozen=True, slots=True)
class _Flag:
    value: str
    place: str
    unknown: str


def is_megatron(text: str) -> bool:
    """Whether the text holds Megatron's flags."""
    return any(flag in text for flag in (*DEGREES, "--micro-batch-size"))


def read_megatron(text: str, file: str) -> Setting:
    """Reads it; raises InputError for a value that is no number, or no microbatch size."""
    flags = _flags(words_of(text), file)
    draft = Draft(FORMAT, file)
    for flag, given in list(flags.items()):
        if given.unknown:
            draft.leave_out(given.place, f"the file gives {given.unknown} no value; left open")
            del flags[flag]
    _degrees(draft, flags)
    _data_parallelism(draft, flags)
    _pipeline(draft, flags)
    _recompute(draft, flags)
    _training(draft, flags)
    for flag in flags.keys() & NO_KNOB.keys():
        draft.leave_out(flags[flag].place, NO_KNOB[flag])
    return draft.done()


def _flags(words: list[Word], file: str) -> dict[str, _Flag]:
    """The flags that matter here, with the word behind those that take one; the last counts."""
    found: dict[str, _Flag] = {}
    for word, following in zip(words, [*words[1:], Word("", 0)], strict=True):
        name, equals, value = word.text.partition("=")
        name = name.replace("_", "-")
        if name not in VALUED | SWITCHES:
            continue
        unknown = word.unknown
        if not equals and name in VALUED:
            value, unknown = following.text, following.unknown
        shown = name if unknown or not value else f"{name} {value}"
        found[name] = _Flag(value, f"{file}:{word.line}: {shown}", unknown)
    return found


def _degrees(draft: Draft, flags: dict[str, _Flag]) -> None:
    for flag, knob in DEGREES.items():
        if flag in flags:
            draft.knob(knob, whole(flags[flag].value, flags[flag].place), flags[flag].place)
        elif knob in ("tp", "pp", "cp"):
            draft.knobs.setdefault(knob, 1)
    ways = draft.knobs["tp"]
    if "--sequence-parallel" in flags and ways > 1:
        draft.knob("sequence_parallel", True, flags["--sequence-parallel"].place)
    else:
        draft.knobs["sequence_parallel"] = False
    if "--micro-batch-size" in flags:
        given = flags["--micro-batch-size"]
        draft.knob("microbatch_size", whole(given.value, given.place), given.place)
    _world(draft, flags)


def _world(draft: Draft, flags: dict[str, _Flag]) -> None:
    """The devices that torchrun starts, where the script says."""
    each, nodes = flags.get("--nproc-per-node"), flags.get("--nnodes")
    if each and each.value.isdecimal() and (nodes is None or nodes.value.isdecimal()):
        draft.devices = int(each.value) * int(nodes.value if nodes else 1)


def _data_parallelism(draft: Draft, flags: dict[str, _Flag]) -> None:
    stage, place = 0, draft.file
    if "--use-distributed-optimizer" in flags:
        stage, place = 1, flags["--use-distributed-optimizer"].place
    strategy = flags.get("--data-parallel-sharding-strategy")
    if strategy:
        if strategy.value not in SHARDING:
            raise InputError(
                f"{strategy.place}: the sharding is one of {', '.join(SHARDING)}, "
                f"but got {strategy.value!r}"
            )
        stage, place = SHARDING[strategy.value], strategy.place
    elif "--use-torch-fsdp2" in flags:
        stage, place = 3, flags["--use-torch-fsdp2"].place
    draft.zero(stage, place)
    offload = flags.get("--optimizer-cpu-offload")
    draft.knob("offload", "optimizer" if offload else "none", offload.place if offload else place)


def _pipeline(draft: Draft, flags: dict[str, _Flag]) -> None:
    stages = draft.knobs["pp"]
    per_rank, place = 1, draft.file
    each = flags.get("--num-layers-per-virtual-pipeline-stage")
    virtual = flags.get("--num-virtual-stages-per-pipeline-rank")
    layers = flags.get("--num-layers")
    if virtual:
        per_rank, place = whole(virtual.value, virtual.place), virtual.place
    elif each and layers and stages > 1:
        place = each.place
        per_rank, rest = divmod(
            whole(layers.value, layers.place), stages * whole(each.value, each.place)
        )
        if rest or not per_rank:
            raise InputError(
                f"{place}: the {layers.value} layers do not divide into {stages} ranks of virtual "
                f"stages of {each.value}"
            )
    draft.knob("stages_per_rank", per_rank if stages > 1 else 1, place)
    draft.knob("schedule", INTERLEAVED if stages > 1 and per_rank > 1 else "1F1B", place)


def _recompute(draft: Draft, flags: dict[str, _Flag]) -> None:
    granularity = flags.get("--recompute-granularity") or flags.get("--recompute-activations")
    if granularity is None:
        draft.knobs["recompute"] = "none"
        return
    mode = "full" if granularity.value == "full" else "attention"
    draft.knob("recompute", mode, granularity.place)
    method = flags.get("--recompute-method")
    count = flags.get("--recompute-num-layers")
    if mode != "full" or not method or not count or count.unknown:
        return
    layers = whole(count.value, count.place)
    if method.value == "block":
        draft.knob("recompute_blocks", layers, count.place)
    elif layers > 1:
        draft.leave_out(count.place, "runs of blocks are reckoned as every block by itself")


def _training(draft: Draft, flags: dict[str, _Flag]) -> None:
    for flag, name in BATCHES.items():
        if flag in flags:
            draft.train(name, whole(flags[flag].value, flags[flag].place), flags[flag].place)
    for flag in ("bf16", "fp16"):
        if f"--{flag}" in flags:
            precision = {"bf16": "bfloat16", "fp16": "float16"}[flag]
            draft.train("precision", precision, flags[f"--{flag}"].place)
    optimizer = flags.get("--optimizer")
    if optimizer:
        _optimizer(draft, optimizer.value, optimizer.place)
    clip = flags.get("--clip-grad")
    norm = _real(clip.value, clip.place) if clip else CLIP_NORM
    if norm > 0:
        draft.train("clip_norm", norm, clip.place if clip else draft.file)


def _optimizer(draft: Draft, name: str, place: str) -> None:
    if name in ("adam", "sgd"):
        draft.train("optimizer", "adamw" if name == "adam" else "sgd", place)
    else:
        draft.leave_out(place, f"the optimizer {name} is reckoned as AdamW")


def _real(value: Any, place: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise InputError(f"{place} must be a number, but got {value!r}") from None
