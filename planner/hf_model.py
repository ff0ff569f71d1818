"""A Hugging Face config as a model: which class it builds, and what that class is fed.

transformers is imported only when a model needs it; it takes seconds.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

from claw_plan.planner.foreign_code import ForeignCode
from claw_plan.planner.input_text import InputSpec
from claw_plan.profiles.errors import InputError, near_matches

CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
"""Where configs of different families keep the longest sequence."""

LARGEST_SIZES = {
    "num_hidden_layers": 10_000,
    "num_attention_heads": 10_000,
    "hidden_size": 10**6,
    "vocab_size": 10**8,
}
"""What a config's sizes may be: a hundred times the largest models published are slips."""

DEFAULT_CONTEXT = 512
"""For families with relative positions only; T5 was pre-trained at 512 (Raffel et al. 2020)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceConfig:
    """A config, and the class of the model to train (`architecture`)."""

    path: Path
    config: Any
    architecture: Any

    @classmethod
    def read(cls, path: Path, *, is_fed: bool = False) -> HuggingFaceConfig:
        """Reads config.json; raises InputError if it is none, or of no model trained here.

        `is_fed`: what the model is fed is given, so that it may be any class the config names.
        """
        try:
            entries = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"{path} is not JSON: {error}") from error
        if not isinstance(entries, dict) or "model_type" not in entries:
            raise InputError(f"{path}: a Hugging Face config has a key 'model_type'")
        try:
            import transformers
        except ImportError as error:
            raise InputError(
                f"{path} is a Hugging Face config, and transformers is not installed: "
                "pip install 'claw-plan[hf]'"
            ) from error
        family, known = str(entries["model_type"]), transformers.CONFIG_MAPPING
        if family not in known:
            near = near_matches(family, known)
            raise InputError(
                f"{path}: transformers {transformers.__version__} has no model_type {family!r}"
                + (f"; {near}" if near.startswith("did you mean") else "")
            )
        with ForeignCode(path, "reading the config"):
            # Code that came with a checkpoint is never run, and nobody is asked whether to.
            config = transformers.AutoConfig.from_pretrained(str(path), trust_remote_code=False)
        config.use_cache = False
        source = cls(path=path, config=config, architecture=_architecture(path, config, is_fed))
        source._check_sizes()
        return source

    def _check_sizes(self) -> None:
        """Sizes of which a model would be built without layers, or never be built at all."""
        text = self._text_config()
        for key, largest in LARGEST_SIZES.items():
            size = getattr(text, key, 1)
            if isinstance(size, int) and not 1 <= size <= largest:
                key = getattr(text, "attribute_map", {}).get(key, key)
                raise InputError(f"{self.path}: {key} is 1 to {largest}, but got {size}")

    @property
    def context(self) -> int:
        """The longest sequence the config names."""
        text = self._text_config()
        sizes = (getattr(text, key, None) for key in CONTEXT_KEYS)
        return next(
            (size for size in sizes if isinstance(size, int) and size > 0), DEFAULT_CONTEXT
        )

    def build(self) -> nn.Module:
        """The model with fresh weights, in float32 whatever the checkpoint was saved in."""
        module: nn.Module = self.architecture._from_config(self.config, dtype=torch.float32)
        return module

    def inputs(self) -> tuple[InputSpec, ...]:
        """Token ids, and labels of the same shape or one a row for classifiers."""
        vocabulary = int(self._text_config().vocab_size)
        tokens = InputSpec(
            name="input_ids", dtype="int64", shape=("B", self.context), bound=vocabulary
        )
        if self.architecture.__name__.endswith("ForSequenceClassification"):
            labels = InputSpec(
                name="labels", dtype="int64", shape=("B",), bound=int(self.config.num_labels)
            )
        else:
            labels = InputSpec(name="labels", dtype="int64", shape=tokens.shape, bound=vocabulary)
        return tokens, labels

    def _text_config(self) -> Any:
        return self.config.get_text_config()


TRAINED_HERE = (
    "ForCausalLM",
    "LMHeadModel",
    "ForConditionalGeneration",
    "ForMaskedLM",
    "ForSequenceClassification",
)
"""Endings of the classes whose inputs are token ids and labels."""


def _architecture(path: Path, config: Any, is_fed: bool) -> Any:
    """The class the config names, else the language model of its family."""
    import transformers

    for name in getattr(config, "architectures", None) or ():
        found = getattr(transformers, name, None)
        if found is not None and (is_fed or name.endswith(TRAINED_HERE)):
            return found
    autos: tuple[Any, ...] = (
        transformers.AutoModelForCausalLM,
        transformers.AutoModelForSeq2SeqLM,
    )
    if getattr(config, "is_encoder_decoder", False):
        autos = autos[::-1]
    for auto in (*autos, transformers.AutoModelForMaskedLM):
        found = auto._model_mapping.get(type(config), None)
        if found is not None:
            return found
    raise InputError(
        f"{path}: {config.model_type!r} has no class that is trained from token ids and labels; "
        'say what it is fed with --inputs "pixel_values=float32[B,3,224,224] '
        'labels=int64[B]<1000", or write a Python file with build_model() and '
        "example_batch(batch_size)"
    )
