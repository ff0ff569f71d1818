"""The trainers of trainers.yaml: facts of each software, and the constants fitted for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from claw_plan.profiles.errors import InputError, near_matches
from claw_plan.profiles.files import read_yaml
from claw_plan.profiles.trainer import CONSTANTS, Trainer

DEFAULT = "torch"
"""Whose constants a trainer takes where it has none of its own, and planning without a profile."""


@cache
def load_trainers(path: Path | None = None) -> Mapping[str, Trainer]:
    """All trainers by name, of the file or of the one that comes with the program.

    Raises InputError for a file that is not one, and for keys that are not known.
    """
    document = read_yaml(path or Path(__file__).with_name("trainers.yaml"))
    return trainers_of(document.data, document.path.name)


def trainers_of(document: Mapping[str, Any], where: str) -> Mapping[str, Trainer]:
    """The trainers of a parsed file; `where` names it in errors."""
    facts, constants = document.get("facts"), document.get("constants")
    if not isinstance(facts, Mapping) or not isinstance(constants, Mapping):
        raise InputError(f"{where}: a file of trainers has the keys 'facts' and 'constants'")
    if DEFAULT not in facts or DEFAULT not in constants:
        raise InputError(f"{where}: {DEFAULT!r} is missing; others take what they lack from it")
    shared = {key: float(value) for key, value in (document.get("shared") or {}).items()}
    default = {**_own(constants, DEFAULT), **shared}
    found = {}
    for name in facts:
        own = _own(constants, name)
        known = _facts(facts, name, where)
        bad = [key for key in (*own, *known) if key not in _KEYS]
        if bad:
            raise InputError(f"{where}: {name}: {near_matches(bad[0], _KEYS)}")
        found[name] = Trainer(
            name=name,
            **{**default, **own},
            **known,
            fitted=tuple(key for key in CONSTANTS if key in own),
            source=str(document.get("source", "")),
        )
    return found


def _own(constants: Mapping[str, Any], name: str) -> dict[str, float]:
    return {key: float(value) for key, value in (constants.get(name) or {}).items()}


def _facts(facts: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    own = dict(facts[name] or {})
    like = own.pop("like", None)
    if like is None:
        return own
    if like not in facts:
        raise InputError(f"{where}: {name} is like {like!r}; {near_matches(like, facts)}")
    return {**_facts(facts, like, where), **own}


_KEYS = {field.name for field in fields(Trainer)} - {"name", "fitted", "source"}
