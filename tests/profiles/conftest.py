"""Rows as published files hold them, for the tests of the readers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

_ROW: dict[str, Any] = {
    "id": "run-1",
    "source": {"title": "Somebody's benchmark", "table": "T1", "where": "a page"},
    "family": "somebody",
    "group": "somebody|7b",
    "trust": "A",
    "model": {
        "name": "Llama-7B",
        "layers": 32,
        "hidden": 4096,
        "heads": 32,
        "kv_heads": 32,
        "ffn": 11008,
        "vocab": 32000,
        "gated_mlp": True,
        "tied_embeddings": False,
        "seq_len": 2048,
    },
    "hardware": {
        "gpu": "H100-80GB",
        "count": 16,
        "gpus_per_node": 8,
        "intra": "NVLink/NVSwitch",
        "inter": "400 Gb/s RDMA per GPU",
    },
    "plan": {
        "dp": 16,
        "tp": 1,
        "pp": 1,
        "cp": 1,
        "ep": 1,
        "vpp": 1,
        "micro_batch": 2,
        "global_batch": 64,
        "sharding": "FSDP full shard",
        "recompute": "none",
        "precision": "bf16",
        "sequence_parallel": False,
    },
    "measured": {"step_time_s": 1.5},
    "missing": [],
    "completeness": "full",
}


def _row(**changes: Any) -> dict[str, Any]:
    values = copy.deepcopy(_ROW)
    for key, change in changes.items():
        if isinstance(change, dict) and isinstance(values.get(key), dict):
            merged = values[key] | change
            values[key] = {name: one for name, one in merged.items() if one is not None}
        elif change is None:
            del values[key]
        else:
            values[key] = change
    return values


@pytest.fixture
def row() -> Callable[..., dict[str, Any]]:
    """Makes a sound row of training.yaml; changes of a part are merged, None removes a key."""
    return _row


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., Path]:
    """Writes data into a YAML file and gives its path."""

    def write(data: Any, name: str = "runs.yaml") -> Path:
        path = tmp_path / name
        path.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
        return path

    return write
