"""The trainers of trainers.yaml: facts of each software, and the constants fitted for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from claw_plan.profiles.errors import InputError, near_matches
from claw_plan.profiles.files import read_yaml
from claw_plan.profiles.fitted import Fitted, fitted
from claw_plan.profiles.trainer import CONSTANTS, SHARED, Trainer

DEFAULT = "torch"
"""Whose constants a trainer takes where it has none of its own, and planning without a profile."""


@cache
def load_trainers(path: Path | None = None, *, with_fitted: bool = True) -> Mapping[str, Trainer]:
    """All trainers by name, of the file or of the one that comes with the program.

    `with_fitted=False` leaves all at the constants that fits begin with. Raises InputError for a
    file that is not one, and for keys that are not known.
    """
    document = read_yaml(path or Path(__file__).with_name("trainers.yaml"))
    return trainers_of(document.data, document.path.name, fitted() if with_fitted else Fitted())


def trainers_of(
    document: Mapping[str, Any], where: str, constants: Fitted
) -> Mapping[str, Trainer]:
    """The trainers of a parsed file; `where` names it in errors."""
    for key in ("facts", "prior", "own"):
        if not isinstance(document.get(key), Mapping):
            raise InputError(f"{where}: a file of trainers has a mapping {key!r}")
    facts = document["facts"]
    if DEFAULT not in facts:
        raise InputError(f"{where}: {DEFAULT!r} is missing; others take what they lack from it")
    found: dict[str, Trainer] = {}
    for name in facts:
        _add(found, name, document, where, constants)
    return found


def _add(
    found: dict[str, Trainer], name: str, document: Mapping[str, Any], where: str, fit: Fitted
) -> Trainer:
    """The trainer, its parent first."""
    if name in found:
        return found[name]
    facts = document["facts"]
    own_facts = dict(facts[name] or {})
    like = own_facts.get("like", "" if name == DEFAULT else DEFAULT)
    if like and like not in facts:
        raise InputError(f"{where}: {name} is like {like!r}; {near_matches(like, facts)}")
    parent = _add(found, like, document, where, fit) if like else None
    known = {**(_facts_of(parent) if parent else {}), **own_facts}
    known.pop("like", None)
    kind = known.pop("own", None) or (parent and _kind(parent, document)) or "fused"
    if kind not in document["own"]:
        near = near_matches(str(kind), document["own"])
        raise InputError(f"{where}: {name}: there are no constants {kind!r} in 'own'; {near}")
    before = {**document["prior"], **fit.shared}
    if parent is not None:
        before = {key: getattr(parent, key) for key in (*CONSTANTS, *SHARED)}
    own = fit.trainers.get(name, {})
    bad = [key for key in (*before, *own, *known) if key not in _KEYS]
    if bad:
        near = near_matches(bad[0], _KEYS)
        raise InputError(f"{where}: {name}: there is no key {bad[0]!r}; {near}")
    values: dict[str, Any] = {key: float(value) for key, value in {**before, **own}.items()}
    found[name] = Trainer(
        name=name,
        **values,
        **known,
        parent=like,
        fitted=tuple(document["own"][kind]),
        source=fit.source,
    )
    return found[name]


def _kind(trainer: Trainer, document: Mapping[str, Any]) -> str | None:
    """Under which name of `own` its constants stand."""
    kinds = document["own"]
    return next((kind for kind, names in kinds.items() if tuple(names) == trainer.fitted), None)


def _facts_of(parent: Trainer) -> dict[str, Any]:
    return {key: getattr(parent, key) for key in _FACTS}


_KEYS = {each.name for each in fields(Trainer)} - {"name", "parent", "fitted", "source"}
_FACTS = _KEYS - {*CONSTANTS, *SHARED, "relative"}
