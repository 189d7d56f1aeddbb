"""Where a script is: what it did so far, in order, and how a resumed script finds its way back to the same place.

A resumed process runs the script from the top. Everything that the script asks of the run (a loop over a loader, an
evaluation, a reduce, a checkpoint) is a Mark; marks made in the body of a loop hang below it and go with the iteration.
While the script follows a saved trail, what was done is not done again: loops that were over yield nothing, calls return
what they returned. The mark that says `here` is the place; once the script is there, it lives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

from echelon.errors import LoopError


@dataclass(eq=False)
class Mark:
    """One thing that a script asked for."""

    kind: str
    """"loop 0", "epochs", "evaluate", "reduce", …"""

    done: bool = False
    here: bool = False
    """The saved trail was left at this very mark: after it if it is done, in front of its next item or at it if not."""

    value: Any = None
    """What it returned; of a loop where it stands, of epochs the epoch."""

    body: list[Mark] = field(default_factory=list)
    """What was asked for since its current item came."""

    inside: bool = False
    """Of a saved loop: the script was in its body, so its current item comes once more."""

    optional: bool = False
    """A script may come by or not, for reasons that nobody can follow."""

    def saved(self, inside: bool) -> dict[str, Any]:
        """Without what no one can come back to: the body counts only while the script is in it."""
        body = [mark.saved(mark.inside) for mark in self.body] if inside else []
        return {"kind": self.kind, "done": self.done, "here": self.here, "value": self.value, "body": body,
                "inside": inside, "optional": self.optional}  # fmt: skip

    @classmethod
    def read(cls, record: dict[str, Any]) -> Mark:
        return cls(**record | {"body": [cls.read(inner) for inner in record["body"]]})


STEPS = "steps"
"""Optimizer steps outside any loop over a prepared loader; `value` counts those that followed one another."""


class Trail:
    """One a run. `arrive` is called once, at the place where the saved trail ends."""

    def __init__(self, arrive: Callable[[], None]) -> None:
        self.root = Mark("script", inside=True)
        self.path: list[Mark] = [self.root]
        """The script, and the loops (or epochs) in whose bodies it is, the innermost last."""
        self.ahead: list[list[Mark] | None] | None = None
        """While following: the saved marks of each body in `path`; None for a body that simply runs again."""
        self._arrive = arrive

    @property
    def following(self) -> bool:
        """Not there yet: nothing counts."""
        return self.ahead is not None

    # -- saving --------------------------------------------------------------------------------------------------

    def leave_at(self, here: Mark) -> None:
        """The trail is about to be saved, ending at `here`: a loop in whose body the script is counts as in front of its
        next item."""
        path = self.path[: self.path.index(here)] if here in self.path else self.path
        for mark in self._all(self.root):
            mark.here = mark is here
            mark.inside = mark in path

    def saved(self) -> list[dict[str, Any]]:
        """The trail as plain data, after leave_at()."""
        return [mark.saved(mark.inside) for mark in self.root.body]

    @property
    def loop(self) -> Mark | None:
        """The innermost loop over a loader in whose body the script is."""
        return next((mark for mark in reversed(self.path) if mark.kind.startswith("loop")), None)

    def _all(self, mark: Mark) -> list[Mark]:
        return [m for inner in mark.body for m in (inner, *self._all(inner))]

    def follow(self, records: list[dict[str, Any]]) -> None:
        """From now on the script only finds its way back. It must be at its beginning."""
        if self.root.body:
            raise LoopError(
                f"run.resume was called after the script had begun ({self.root.body[0].kind})",
                remedy="Call it before the first loop, right after prepare, or start with --resume.",
            )
        self.ahead = [[Mark.read(record) for record in records]]

    def bare_steps(self) -> int:
        """While following: steps that the script must run through because no loader leads around them."""

        def count(level: list[Mark]) -> int:
            return sum(m.value if m.kind == STEPS else count(m.body) for m in level)

        return sum(count(level) for level in self.ahead or [] if level is not None)

    # -- calls ---------------------------------------------------------------------------------------------------

    def call(self, kind: str, live: Callable[[], Any], *, keep: bool = True) -> Any:
        """`live()`, or what it returned in the run that is resumed. Without `keep` it is called again anyway."""
        found = self._expected(kind)
        if found is not None and not found.done:
            self._arrived()  # the run was left at this call: it has not happened yet
            found = None
        mark = found if found is not None else Mark(kind)
        self._body.append(mark)
        if found is None or not keep:
            mark.value = live()
            mark.value, value = (mark.value if keep else None), mark.value
        else:
            value = mark.value
        mark.done = True
        if found is not None and found.here:
            self._arrived()
        return value

    def moment(self, kind: str) -> Mark | None:
        """The script comes by something that returns nothing: its mark, or None when that was done already.

        Whether it comes by may depend on the clock or the weather: on the way back moments may be missing or be new.
        """
        level = self.ahead[-1] if self.ahead is not None else None
        if level is not None and [m.kind for m in level[len(self._body) :][:1]] != [kind]:
            return None
        found = self._expected(kind)
        if found is not None and not found.done:
            self._arrived()  # the run was left at this very moment: it has not come yet
            found = None
        mark = Mark(kind, done=True, optional=True)
        self._body.append(mark)
        if found is None:
            return mark
        self.arrived_at(found)
        return None

    def at(self, kind: str) -> Mark:
        """A mark for a call that has not happened yet: the place to come back to when it never will."""
        mark = Mark(kind)
        self._body.append(mark)
        return mark

    def stepped(self) -> Mark | None:
        """An optimizer stepped outside any loop over a loader: the mark to come back to; None on the way back, where the
        step has no effect. Such steps cannot be left out, so a resumed script runs through them."""
        body, level = self._body, self.ahead[-1] if self.ahead is not None else None
        last = body[-1] if body and body[-1].kind == STEPS else None
        if level is None:
            if last is None:
                last = Mark(STEPS, done=True, value=0)
                body.append(last)
            last.value += 1
            return None if self.following else last
        if last is None or last.value >= level[len(body) - 1].value:
            if self._expected(STEPS) is None:  # a moment that did not come was the place
                return self.stepped()
            last = Mark(STEPS, done=True, value=0)
            body.append(last)
        last.value += 1
        saved = level[len(body) - 1]
        if saved.here and saved.value == last.value:
            self._arrived()
        return None

    # -- loops ---------------------------------------------------------------------------------------------------

    def enter(self, kind: str) -> tuple[Mark, Mark | None]:
        """A loop begins: its mark, and the saved one when there is a way to follow."""
        found = self._expected(kind)
        mark = Mark(kind)
        self._body.append(mark)
        return mark, found

    def item(self, mark: Mark, saved: Mark | None = None) -> None:
        """The loop is about to give an item: from here the script is in its body, which follows that of `saved`."""
        self.between(mark)
        self.path.append(mark)
        if self.ahead is not None:
            self.ahead.append(saved.body if saved is not None else None)

    def between(self, mark: Mark) -> None:
        """The script asked for the next item: the last one's body is over."""
        if mark in self.path:
            at = self.path.index(mark)
            self._pass_rest(at, mark)
            del self.path[at:]
            if self.ahead is not None:
                del self.ahead[at:]
        mark.body = []

    def _pass_rest(self, at: int, mark: Mark) -> None:
        """The body ends: if only moments were left in the saved one, and one of them is the place, this is it."""
        level = self.ahead[at] if self.ahead is not None else None
        rest = level[len(mark.body) :] if level is not None else []
        if any(m.here for m in rest) and all(m.optional for m in rest):
            self._arrived()

    def leave(self, mark: Mark) -> None:
        """The loop is over. Loops that were begun in its body and go on belong to whoever is around it."""
        parent = self.path[self.path.index(mark) - 1] if mark in self.path else None
        if parent is not None:
            parent.body += [inner for inner in mark.body if not inner.done]
        self.between(mark)
        mark.done = True

    def trained_later(self, found: Mark) -> bool:
        """Did the saved script train in a loop after this one, beside it?"""
        beside = (self.ahead or [[]])[-1] or []
        later = beside[[m is found for m in beside].index(True) + 1 :]
        return any(m.kind.startswith("loop") and (m.value or {}).get("trained", True) for m in later)

    @property
    def has_looped(self) -> bool:
        """Has the script come to a loop yet?"""
        return any(mark.kind.startswith("loop") for mark in self._all(self.root))

    def arrived_at(self, found: Mark | None) -> None:
        """`found` was reached; if it is the place, the script lives from now on."""
        if found is not None and found.here and self.following:
            self._arrived()

    # -- inside --------------------------------------------------------------------------------------------------

    @property
    def _body(self) -> list[Mark]:
        return self.path[-1].body

    def _expected(self, kind: str) -> Mark | None:
        """The saved mark of what the script does now; None when it lives."""
        if self.ahead is None or self.ahead[-1] is None:
            return None
        saved, at = self.ahead[-1], len(self._body)
        while at < len(saved) and saved[at].kind != kind and saved[at].optional:
            self._body.append(saved[at])
            if saved[at].here:
                self._arrived()
                return None
            at += 1
        if at < len(saved) and saved[at].kind == kind:
            return saved[at]
        expected = f"there came {saved[at].kind}" if at < len(saved) else "nothing came any more"
        raise LoopError(
            f"the script went another way than in the run that is resumed: here is {kind}, and {expected} "
            f"(looking for {self.place()})",
            remedy="A resumed run needs the same script and arguments. To take only the weights, load a run.save file.",
        )

    def place(self) -> str:
        """The place that is looked for, in words."""
        words, level = [], (self.ahead or [[]])[0] or []
        while level:
            mark = next((m for m in level if m.here or m.inside), level[-1])
            value = mark.value if isinstance(mark.value, dict) else {}
            epoch = f" epoch {value['epoch']}, batch {value['start']}" if "start" in value else ""
            words.append(_words(mark, epoch))
            level = [] if mark.here else mark.body
        return " > ".join(words) or "the start"

    def give_in(self) -> None:
        """The script did not come to the place in this iteration, but nothing of it is left to do: go on behind it."""
        self._arrived()

    def lost_way(self) -> NoReturn:
        """The script left the body in which the place is without coming to it."""
        raise LoopError(
            f"the script did not come back to the place at which the run was left: {self.place()}",
            remedy="A resumed run needs the same script and arguments.",
        )

    def _arrived(self) -> None:
        self.ahead = None
        self._arrive()


def _words(mark: Mark, epoch: str) -> str:
    if mark.kind == "epochs":
        return f"epoch {mark.value}"
    return f"{mark.value} steps without a prepared loader" if mark.kind == STEPS else f"{mark.kind}{epoch}"


def epochs_to_do(n: int, trail: Trail) -> Iterator[int]:
    """run.epochs: those that were done in an earlier life do not come again, the one that was left does."""
    mark, saved = trail.enter("epochs")
    try:
        for epoch in range(
            saved.value if saved is not None else 0, n if saved is None or not saved.done else 0
        ):
            mark.value = epoch
            trail.item(mark, saved if saved is not None and epoch == saved.value else None)
            yield epoch
            trail.between(mark)
            if trail.following:
                trail.lost_way()
    finally:
        trail.leave(mark)
    trail.arrived_at(saved)
