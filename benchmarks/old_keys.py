"""Settings of results that qfleet 0.1 recorded, with the keys of this version: result files stay as they are."""

from __future__ import annotations

from collections.abc import Iterable

OLD = "0.1"
"""The version of rows that do not say by which one they were recorded."""

WORDS = {"placement=inline": "launcher=local", "placement=processes": "launcher=local", "placement=ray": "launcher=ray",
         "gradients=solo": "sync=none", "gradients=allreduce": "sync=allreduce", "gradients=server": "sync=server"}
KEYS = {"cells": "learners", "eval.beside": "eval.process", "explore.base": "explore.epsilon",
        "explore.alpha": "explore.steepness"}
SECTIONS = {"server.": "parameter_server."}


def renamed(words: Iterable[str]) -> list[str]:
    """Word by word the same settings of this version. `actors` of 0.1 were processes only if a placement said so."""
    words = list(words)
    apart = {"placement=processes", "placement=ray"} & set(words)
    met = {"gradients=allreduce", "gradients=server"} & set(words)
    actors = "actors" if apart and not met else "env.groups"
    return [_renamed(word, KEYS | {"actors": actors}) for word in words]


def _renamed(word: str, keys: dict[str, str]) -> str:
    if word in WORDS:
        return WORDS[word]
    key, equals, value = word.partition("=")
    for old, new in SECTIONS.items():
        if key.startswith(old):
            key = new + key.removeprefix(old)
    return f"{keys.get(key, key)}{equals}{value}"
