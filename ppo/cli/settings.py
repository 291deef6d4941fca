"""The flags of all settings, in groups, for `python -m ppo.train --help`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import textwrap
import typing
from typing import Annotated, Any

import tyro

from ppo.config import Config, may_be_none
from ppo.ranges import RANGES

GROUPS = {
    "env": "task",
    "epochs": "optimisation",
    "gamma": "advantage",
    "objective": "objective",
    "normalize_advantages": "normalisation",
    "policy_layers": "network",
    "seed": "run",
}
"""Name of each group of settings, by the first of them in the order in which Config has them."""


def grouped(config: Config) -> tuple[Any, ...]:
    """Returns the settings as one dataclass per group, for tyro; `settings_of` puts them together again."""
    hints, docs = typing.get_type_hints(Config), documentation()
    groups: list[list[tuple]] = []
    for field in dataclasses.fields(Config):
        if field.name in GROUPS:
            groups.append([])
        text = tyro.conf.arg(help=_help(field.name, docs[field.name]))
        flag: Any = Annotated[hints[field.name], text]  # type: ignore[valid-type, name-defined]  # made for tyro to read
        groups[-1].append((field.name, flag, dataclasses.field(default=getattr(config, field.name))))
    return tuple(
        dataclasses.make_dataclass(name, fields, frozen=True, namespace={"__doc__": ""})()
        for name, fields in zip(GROUPS.values(), groups, strict=True)
    )


def settings_of(groups: tuple[Any, ...]) -> Config:
    """Returns the Config whose settings stand in the groups.

    Raises:
        ConfigError: If a setting, or a combination, cannot work.
    """
    return Config(**{name: value for group in groups for name, value in vars(group).items()})


def documentation() -> dict[str, str]:
    """Returns what is written below each setting of Config."""
    try:
        definition = ast.parse(textwrap.dedent(inspect.getsource(Config))).body[0]
    except OSError:  # installed without sources: no help, but no error either
        return {field.name: "" for field in dataclasses.fields(Config)}
    found = {}
    for pair in itertools.pairwise(ast.iter_child_nodes(definition)):
        match pair:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.split())
    return found


def _help(name: str, text: str) -> str:
    if name not in RANGES:
        return text
    return f"{text} [{RANGES[name]}{', or None' if may_be_none(name) else ''}]"
