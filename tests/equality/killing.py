"""kill -9 of servers of a running run, one at a time: the next only once every shard has a copy again."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from pathlib import Path


class Killer:
    """Kills random processes of these roles in the run whose folder this is, until it is told to stop."""

    def __init__(self, folder: Path, seed: int, roles: tuple[str, ...] = ("server",), pause_s: float = 0.3):
        self.folder, self.roles, self.pause_s = folder, roles, pause_s
        self.rng = random.Random(seed)
        self.killed: list[tuple[str, int]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *raised):
        self._over.set()
        self._thread.join(30)

    def _run(self) -> None:
        while not self._over.wait(self.pause_s * (0.5 + self.rng.random())):
            if self.whole():
                self.kill_one()

    def events(self) -> list[dict]:
        found = []
        for line in (self.folder / "events.jsonl").read_text().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:  # being written
                pass
        return found

    def whole(self) -> bool:
        """Every shard has a copy, and has had it since the last kill."""
        copied = {e["shard"]: e["copied"] for e in self.events() if "copied" in e}
        return bool(copied) and all(copied.values())

    def processes(self) -> list[dict]:
        listed = json.loads((self.folder / "processes.json").read_text())
        return [p for p in listed if p["role"] in self.roles and p.get("code") is None]

    def kill_one(self) -> None:
        chosen = self.rng.choice(self.processes())
        who = (chosen["role"], chosen["rank"])
        try:
            os.kill(chosen["pid"], signal.SIGKILL)
        except ProcessLookupError:
            return
        self.killed.append(who)
        if chosen["role"] == "server":
            self._seen_dead(who)

    def _seen_dead(self, who: tuple[str, int]) -> None:
        """Waits until the run knows: until then it looks whole."""
        give_up = time.monotonic() + 30
        before = sum("copied" in e for e in self.events())
        while time.monotonic() < give_up and not self._over.wait(0.02):
            if sum("copied" in e for e in self.events()) > before:
                return
