"""Which checkpoints go: a pure decision, and the removal that follows it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from echelon.checkpoint import manifest
from echelon.checkpoint.store import Store

FOLDER = re.compile(r"step-(\d{8,18})")


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(folder: str) -> int | None:
    """The step of a checkpoint's folder, None for a folder that is something else."""
    match = FOLDER.fullmatch(folder)
    return int(match[1]) if match else None


def to_remove(folders: Mapping[str, bool], saved: str, keep: int) -> list[str]:
    """The folders (name: is it complete?) that go after `saved` was completed, oldest first.

    Stay: the newest `keep` complete ones, `saved` itself, and incomplete ones that are newer than it (somebody may
    be writing them). At least the newest complete one always stays.
    """
    steps = {name: step for name in folders if (step := step_of(name)) is not None}
    complete = sorted((name for name in steps if folders[name]), key=steps.__getitem__)
    stay = {saved, *complete[-max(1, keep) :]}
    going = [
        name
        for name, step in steps.items()
        if name not in stay and (folders[name] or step < steps.get(saved, 0))
    ]
    return sorted(going, key=steps.__getitem__)


def look(store: Store) -> dict[str, dict[str, int | None]]:
    """Every checkpoint's folder with its files."""
    return {
        name: store.list(name)
        for name, size in store.list().items()
        if size is None and step_of(name) is not None
    }


def newest(store: Store) -> str | None:
    """The newest folder that has a manifest."""
    names = [name for name, size in store.list().items() if size is None and step_of(name) is not None]
    for name in sorted(names, key=lambda name: step_of(name) or 0, reverse=True):
        if store.size(f"{name}/{manifest.NAME}") is not None:
            return name
    return None


def prune(store: Store, saved: str, keep: int, listed: Mapping[str, int]) -> None:
    """After `saved` was completed with the files `listed`: removes strays of earlier attempts, then old checkpoints.

    The manifest goes first: whatever kills us in the middle leaves an incomplete folder, never a broken checkpoint.
    """
    folders = look(store)
    for name in folders.get(saved, {}):
        if name != manifest.NAME and name not in listed:
            store.remove(f"{saved}/{name}")
    complete = {name: manifest.NAME in files for name, files in folders.items()}
    for folder in to_remove(complete, saved, keep):
        for name in (manifest.NAME, *folders[folder]):
            store.remove(f"{folder}/{name}")
