"""The golden cells: what is trained, under which strategy, in which launch. Data alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cell:
    """One training of two epochs, 10 batches of a model of the equality tests."""

    strategy: str
    model: str
    optimizer: str
    dtype: str = "float64"
    clip: float | None = None
    """The script clips the gradient's norm to it: no power of two, whose products are exact."""
    stepped: bool = False
    """By run.step instead of a plain loop."""
    lost: tuple[int, ...] = ()
    """Steps that are lost on purpose, and made again."""

    @property
    def name(self) -> str:
        """As it stands in the file."""
        words = [self.strategy or "allreduce", self.model, self.optimizer, self.dtype]
        words += [f"clip={self.clip}"] if self.clip else []
        words += ["run.step"] if self.stepped else []
        words += [f"lost={'+'.join(map(str, self.lost))}"] if self.lost else []
        return " ".join(words)


@dataclass(frozen=True)
class Launch:
    """Cells that are trained one after the other by the same processes."""

    workers: int
    servers: int
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Script:
    """A whole run of script.py, in which something happens. The name says what was trained how."""

    fault: str
    name: str
    workers: int
    servers: int
    strategy: str
    lives: tuple[tuple[tuple[str, ...], int], ...] = (((), 0),)
    """Of each life: its further options, and its exit code."""


SCRIPTS = {
    "a killed worker": Script("kill", "ps,apply=server cnn adam clip=0.3", 2, 1, "ps,apply=server"),
    "a resumed run": Script("stop", "allreduce cnn adam clip=0.3", 2, 0, "", (((), 75), (("--resume",), 0))),
}

LAUNCHES = {
    "one worker": Launch(1, 0, (
        Cell("", "mlp", "sgd", "float32"),
        Cell("accumulate=3,microbatches=2", "transformer", "adamw", clip=0.3),
        Cell("", "cnn", "adam", lost=(1, 3, 4)),
    )),
    "one worker and a server": Launch(1, 1, (
        Cell("ps,update=async", "mlp", "sgd"),
        Cell("ps,update=bounded", "transformer", "adamw", "float32"),
        Cell("ps,update=local,local_steps=2", "cnn", "sgd"),
        Cell("ps,update=local,local_steps=2,outer=diloco", "transformer", "adamw"),
    )),
    "two workers": Launch(2, 0, (
        Cell("", "mlp", "sgd", "float32"),
        Cell("", "transformer", "adamw", clip=0.3),
        Cell("", "cnn", "rmsprop", "float32"),
        Cell("", "table", "adagrad"),
        Cell("accumulate=3,microbatches=2", "cnn", "adam"),
        Cell("", "transformer", "adamw", "float32", lost=(2, 3, 7)),
        Cell("compress=int8", "transformer", "sgd", "float32"),
        Cell("sharded,level=1", "cnn", "adamw", clip=0.3),
        Cell("sharded,level=2,wrap_mib=0.0002", "gpt", "sgd", "float32"),
        Cell("sharded,level=3,wrap_mib=0.0002,accumulate=3", "gpt", "adamw"),
        Cell("tensor=2", "heads", "adamw", clip=0.3),
        Cell("tensor=2", "two", "sgd", "float32", lost=(1, 3, 4)),
        Cell("pipeline=2,microbatches=5,schedule=1f1b,cut=mix", "transformer", "adamw", clip=0.3, stepped=True),
        Cell("pipeline=2,microbatches=2,schedule=gpipe,cut=n2", "cnn", "sgd", "float32", stepped=True),
        Cell("pipeline=2,microbatches=2,schedule=interleaved,cut=middle.0+middle.2+middle.3", "two stages", "adamw", stepped=True),
        Cell("pipeline=2,microbatches=5,schedule=zero-bubble,cut=middle.2", "two stages", "adam", lost=(2, 3), stepped=True),
    )),
    "two workers and two servers": Launch(2, 2, (
        Cell("ps,servers_share=1.0", "mlp", "sgd", "float32"),
        Cell("ps,servers_share=0.4", "transformer", "adamw", clip=0.3),
        Cell("ps,apply=server", "transformer", "adamw", clip=0.3),
        Cell("ps,apply=server", "cnn", "rmsprop", "float32"),
        Cell("ps,apply=server,accumulate=3,microbatches=2", "mlp", "adagrad"),
        Cell("ps,apply=server", "mlp", "sgd", lost=(1, 3, 4)),
        Cell("ps,update=local,local_steps=2", "cnn", "sgd"),
    )),
    "four workers": Launch(4, 0, (
        Cell("data=2,tensor=2", "heads", "adamw", clip=0.3),
        Cell("tensor=2,pipeline=2,microbatches=2,cut=blocks.1", "heads", "adamw", stepped=True),
        Cell("data=2,pipeline=2,microbatches=2,schedule=zero-bubble,cut=n2", "cnn", "sgd", "float32", stepped=True),
        Cell("sharded,level=3,shard_workers=2,wrap_mib=0.0002", "gpt", "adamw"),
        Cell("sharded,level=3,wrap_mib=0.0005,data=2,pipeline=2,microbatches=2,cut=blocks.1", "heads", "adamw", stepped=True),
        Cell("pipeline=3+1,microbatches=5,shares=2:1:1+1,cut=mix", "transformer", "adamw", stepped=True),
    )),
}  # fmt: skip
