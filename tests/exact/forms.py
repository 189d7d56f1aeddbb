"""The forms whose steps are counted. Data alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Form:
    """One run of steps.py: a small transformer with AdamW and clipping."""

    workers: int
    servers: int
    strategy: str

    @property
    def stepped(self) -> bool:
        """By run.step instead of a plain loop."""
        return "pipeline" in self.strategy

    @property
    def clip(self) -> float | None:
        """The script clips to this norm, where a worker can know the norm."""
        return None if "update=" in self.strategy else 0.5


FORMS = {
    "one process": Form(1, 0, ""),
    "allreduce": Form(2, 0, "allreduce"),
    "ps, servers sum": Form(2, 2, "ps,servers_share=1.0"),
    "ps, servers apply": Form(2, 2, "ps,apply=server"),
    "ps, bounded": Form(2, 1, "ps,update=bounded"),
    "ps, async": Form(1, 1, "ps,update=async"),
    "sharded, level 1": Form(2, 0, "sharded,level=1"),
    "sharded, level 3": Form(2, 0, "sharded,level=3,wrap_mib=0.0002"),
    "tensor": Form(2, 0, "tensor=2"),
    "pipeline": Form(2, 0, "pipeline=2,microbatches=4,cut=blocks.1"),
}
