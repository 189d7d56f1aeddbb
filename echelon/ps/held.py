"""One model's parameters on the servers, as a worker sees them (apply=server): where they lie, what goes there and what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from echelon import verdict
from echelon.clock import Deadline
from echelon.errors import UsageError, WorldError
from echelon.native import spread
from echelon.ps.keys import Holder, Placement, place
from echelon.ps.keys import Tensor as Spec
from echelon.ps.pending import Pending
from echelon.ps.recipes import Recipe
from echelon.ps.route import Routed
from echelon.ps.spans import Piece
from echelon.ps.worker import Servers

Call = Pending | Routed

ALONE = 2
"""A tensor's memory is held by the tensor, and by who asks for their number."""


class Held:
    """See the module. `params` are (name, parameter) in the order of the backward pass.

    Values are pulled into one memory a server and copied from there into the parameters.
    """

    def __init__(self, servers: Servers, model: int, params: Sequence[tuple[str, Tensor]], rank: int) -> None:
        self.servers, self.model, self.rank = servers, model, rank
        self.params = dict(params)
        specs = [
            Spec(name, p.numel(), p.element_size(), str(p.dtype).removeprefix("torch.")) for name, p in params
        ]
        self.placement: Placement = place(specs, len(servers))
        self.pulled: list[Tensor] = []
        """By server: its ranges as they were pulled last."""
        self._pairs: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._by_name: dict[str, list[tuple[Tensor, Tensor]]] = {}
        """The same by parameter, past autograd's counters."""
        self._own: dict[str, int] = {}
        """How many of the tensors that share a parameter's memory are ours."""
        self._pushes = self.steps = 0
        for index, link in enumerate(servers.links):
            size = self.placement.memory_bytes(Holder("server", index))
            self.pulled.append(link.buffer(max(size, 64)).zero_())
        self.suspects: list[tuple[int, str]] = []
        """Whose parts were not finite, and in which tensor, when squares() was asked last."""
        self._places: list[int] = []
        self._moves = servers.moves
        self.follow()

    def follow(self) -> None:
        """Parameters whose memory the script replaced (`p.data = …`) are found again; memory that a server shared which is gone is given up."""
        if self._moves != self.servers.moves:
            self._moves, self._places = self.servers.moves, []
            for index, link in enumerate(self.servers.links):
                self.pulled[index] = link.buffer(self.pulled[index].nbytes).copy_(self.pulled[index])
        places = [p.data_ptr() for p in self.params.values()]
        if places == self._places:
            return
        self._pairs, self._by_name = ([], []), {}
        before = {name: _sharing(p) for name, p in self.params.items()}
        into, flats = [], {name: _flat(p) for name, p in self.params.items()}
        for r in self.placement.ranges:
            flat, dtype = flats[r.tensor.name], getattr(torch, r.tensor.dtype)
            if (flat.numel(), flat.dtype) != (r.tensor.numel, dtype):
                raise UsageError(
                    f"`{r.tensor.name}` is {flat.numel()} of {flat.dtype} now, and the servers hold {r.tensor.numel} of {dtype}",
                    remedy="Change shapes and types before run.prepare.",
                )
            memory = self.pulled[r.holder.rank][r.offset_bytes : r.offset_bytes + r.nbytes]
            into.append((flat[r.begin : r.end], memory.view(dtype)))
            self._by_name.setdefault(r.tensor.name, []).append((into[-1][0].data, into[-1][1]))
        self._pairs = [live for live, _ in into], [memory for _, memory in into]
        self._places = places
        flats.clear()
        del flat
        self._own = {name: _sharing(p) - before[name] for name, p in self.params.items()}

    def edited(self) -> bool:
        """Did the script write into parameters since they were pulled? Sees every bit, also what was written past autograd's
        counters (`p.data.clamp_()`)."""
        return not spread.same(*self._pairs)

    def open(self) -> None:
        """Every worker opens; the values are worker 0's. Blocks until they are there. A worker that was started again takes what the
        servers have."""
        self.gather()
        pendings = []
        for index, link in enumerate(self.servers.links):
            held = self.placement.held_by(Holder("server", index))
            ranges = [[r.key, r.offset_bytes, r.numel, r.tensor.dtype] for r in held]
            payload = [self.pulled[index]] if self.rank == 0 else []
            head = {"model": self.model, "ranges": ranges, "replicas": self.servers.replicas}
            pendings.append(link.call("train.open", head, payload))
        replies = self.servers.wait(pendings, "opening a model on the servers")
        if any(reply.head["held"] for reply in replies):
            self.pull()

    def upload(self) -> None:
        """Worker 0's values are the servers' from now on. Only between steps."""
        if self.rank == 0:
            self.bring()

    def bring(self) -> None:
        """The values here are the servers' from now on. Only between steps; in a new term, by one worker that was there before."""
        self.gather()
        head = {"model": self.model}
        calls = zip(self.servers.links, self.pulled, strict=True)
        self.servers.wait([link.call("train.values", head, x) for link, x in calls], "values to the servers")

    @torch.no_grad()
    def gather(self) -> None:
        """What was pulled last becomes what the parameters are."""
        live, memory = self._pairs
        if live:
            torch._foreach_copy_(memory, live)

    @torch.no_grad()
    def swap_in(self) -> None:
        """The parameters become what was pulled."""
        live, memory = self._pairs
        if live:
            torch._foreach_copy_(live, memory)

    # -- gradients -------------------------------------------------------------------------------------------------

    def runs(self, names: Sequence[str], starts: Sequence[int]) -> list[list[tuple[list[int], int, int]]]:
        """By server: (keys, begin, end) of the pieces of a flat buffer in which these tensors begin at `starts`; neighbours
        that go to one server are one piece."""
        by_server: list[list[tuple[list[int], int, int]]] = [[] for _ in self.servers.links]
        for name, start in zip(names, starts, strict=True):
            for r in self.placement.pieces(name):
                found = by_server[r.holder.rank]
                begin, end = start + r.begin, start + r.end
                if found and found[-1][2] == begin:
                    found[-1] = ([*found[-1][0], r.key], found[-1][1], end)
                else:
                    found.append(([r.key], begin, end))
        return by_server

    def push(self, flat: Tensor, runs: list[list[tuple[list[int], int, int]]]) -> list[tuple[int, int, Call]]:
        """Pieces of a flat buffer to their servers: (server, number of the push, call). The buffer is the servers' until the calls
        are done."""
        sent = []
        for index, (link, mine) in enumerate(zip(self.servers.links, runs, strict=True)):
            if mine:
                self._pushes += 1
                head = {"model": self.model, "push": self._pushes, "keys": [keys for keys, _, _ in mine]}
                payload = [flat[begin:end] for _, begin, end in mine]
                sent.append((index, self._pushes, link.call("train.push", head, payload)))
        return sent

    def take_back(self, pushes: Sequence[tuple[int, int, Call]]) -> None:
        """Blocks until the buffers of these pushes are ours again; they do not count."""
        calls: list[Call] = []
        for index, number, _ in pushes:
            head = {"model": self.model, "pushes": [number]}
            calls.append(self.servers.links[index].call("train.back", head))
        self.servers.wait([*calls, *(pending for _, _, pending in pushes)], "a push to be taken back")

    # -- together --------------------------------------------------------------------------------------------------

    def keys(self, names: Sequence[str]) -> list[list[int]]:
        """By server: the keys of these tensors."""
        found: list[list[int]] = [[] for _ in self.servers.links]
        for name in names:
            for r in self.placement.pieces(name):
                found[r.holder.rank].append(r.key)
        return found

    def rooms(self) -> list[Tensor]:
        """Memory for the values of all servers, one each."""
        return [link.buffer(x.nbytes) for link, x in zip(self.servers.links, self.pulled, strict=True)]

    def step(
        self,
        optimizer: int,
        groups: Sequence[tuple[Recipe, Sequence[str]]],
        parts: Sequence[tuple[Tensor, list[list[tuple[list[int], int, int]]]]],
        used: Sequence[str],
        out: Sequence[Tensor] | None,
        verb: str = "train.step",
        **numbers: Any,
    ) -> tuple[int, list[Call]]:
        """A part of an update and its step in one call to each server, which has copies of `parts` when this returns: the number of
        the update, and the calls. `out` is written before they are done."""
        self.servers.number(self.model)
        self.steps = number = self.steps + 1  # updates are numbered by steps alone
        keyed = [(recipe.to_plain(), self.keys(names)) for recipe, names in groups]
        mine = self.keys(used)
        calls = []
        for index, link in enumerate(self.servers.links):
            keys: list[list[int]] = []
            payload: list[Tensor] = []
            for flat, runs in parts:
                keys += [run for run, _, _ in runs[index]]
                payload += [flat[begin:end].clone() for _, begin, end in runs[index]]
            head: dict[str, Any] = {
                "model": self.model, "number": number, "optimizer": optimizer, "keys": keys, "used": mine[index],
                "groups": [[plain, by_server[index]] for plain, by_server in keyed], **numbers,
            }  # fmt: skip
            calls.append(link.call(verb, head, payload, out=[out[index]] if out is not None else None))
        return number, calls

    def pull(self, *, updated: bool = False) -> None:
        """The parameters become what the servers have now; with `updated` only if some update was made there, by whichever worker."""
        pulls = zip(self.servers.links, self.pulled, strict=True)
        head = {"model": self.model}
        calls = [link.call("train.pull", head, out=[x]) for link, x in pulls]
        replies = self.servers.wait(calls, "values of the servers")
        if not updated or any(int(reply.head["updates"]) for reply in replies):
            self.swap_in()

    @torch.no_grad()
    def take(self, memory: Sequence[Tensor]) -> None:
        """The parameters become what lies in these (of rooms())."""
        for index, x in enumerate(memory):
            self.pulled[index].copy_(x)
        self.swap_in()

    def squares(self, names: Sequence[str]) -> tuple[list[list[float]], bool]:
        """Each tensor's sums of squares of its global gradient, by range, and whether all are finite. Every worker calls it."""
        number = self.servers.number(self.model)
        keys = self.keys(names)
        pendings = [
            link.call("train.squares", {"model": self.model, "number": number, "keys": mine})
            for link, mine in zip(self.servers.links, keys, strict=True)
        ]
        replies = self.servers.wait(pendings, "the norm of the gradients")
        found = {
            key: x
            for r, mine in zip(replies, keys, strict=True)
            for key, x in zip(mine, r.head["squares"], strict=True)
        }
        self.suspects = [
            self.named(told) for r in replies for told in verdict.from_plain(r.head.get("whose", ()))
        ]
        by_tensor = [[found[r.key] for r in self.placement.pieces(name)] for name in names]
        return by_tensor, all(r.head["finite"] for r in replies)

    def named(self, told: tuple[int, int]) -> tuple[int, str]:
        """Whose part of a range it is, and of which tensor."""
        worker, key = told
        return worker, self.placement.ranges[key].tensor.name if 0 <= key < len(self.placement.ranges) else ""

    def apply(
        self,
        optimizer: int,
        groups: Sequence[tuple[Recipe, float, Sequence[str]]],
        unused: Sequence[str],
        values: bool = True,
        since: int | None = None,
    ) -> None:
        """The optimizer's step on the servers, with each group's factor times the gradient; the parameters are the new ones when
        it returns, or without `values` as they were: see ask(). `since` names the iteration, where several steps make one: see void().
        Every worker calls it."""
        number = self.servers.number(self.model)
        skip = self.keys(unused)
        keyed = [(recipe.to_plain(), factor, self.keys(names)) for recipe, factor, names in groups]
        pendings = []
        for index, link in enumerate(self.servers.links):
            head: dict[str, Any] = {
                "model": self.model, "number": number, "optimizer": optimizer, "unused": skip[index],
                "groups": [[plain, factor, keys[index]] for plain, factor, keys in keyed],
            }  # fmt: skip
            if since is not None:
                head["since"] = since
            pendings.append(link.call("train.apply", head, out=[self.pulled[index]] if values else None))
        self.servers.wait(pendings, "the servers' step", sum(x.nbytes for x in self.pulled) if values else 0)
        if values:
            self.swap_in()

    def void(self, since: int) -> None:
        """The steps of this iteration did not happen. Every worker calls it; what the servers have then is to be pulled."""
        head = {"model": self.model, "since": since}
        calls = [link.call("train.void", head) for link in self.servers.links]
        self.servers.wait(calls, "a lost iteration to be undone")

    # -- values that come later ------------------------------------------------------------------------------------

    def ask(self, piece: Piece) -> list[Call]:
        """Asks for some of the values after the step that all servers have made. Returns at once; the next step must not be asked for
        before they are here."""
        calls: list[Call] = []
        for link, memory, spans in zip(self.servers.links, self.pulled, piece.spans, strict=True):
            if spans:
                head = {"model": self.model, "spans": [list(span) for span in spans]}
                calls.append(link.call("train.pull", head, out=[memory[begin:end] for begin, end in spans]))
        return calls

    def arrived(self, calls: Sequence[Call], piece: Piece) -> None:
        """Blocks until they are here."""
        if any(not call.done for call in calls):
            self.servers.wait(calls, "values of the servers", piece.nbytes)
        for call in calls:
            call.wait(Deadline.after(0))  # done: raises what came instead

    @torch.no_grad()
    def put(self, names: Sequence[str]) -> None:
        """These parameters become what was pulled; autograd's counters do not see it."""
        pairs = [pair for name in names for pair in self._by_name.get(name, ())]
        if pairs:
            torch._foreach_copy_([live for live, _ in pairs], [memory for _, memory in pairs])

    def shared(self, name: str) -> bool:
        """Is there a tensor of the script's that shares this parameter's memory?"""
        return _sharing(self.params[name]) - self._own[name] != ALONE

    # -- state -----------------------------------------------------------------------------------------------------

    def state(self, optimizer: int, names: Sequence[str]) -> dict[str, dict[str, Tensor]]:
        """The optimizer's state of these tensors, whole, as torch has it. Any worker may ask, between steps."""
        keys = self.keys(names)
        calls = [
            link.call("train.state", {"model": self.model, "optimizer": optimizer, "keys": mine})
            for link, mine in zip(self.servers.links, keys, strict=True)
        ]
        found: dict[str, dict[str, Tensor]] = {}
        for reply in self.servers.wait(calls, "the state of the servers' optimizers"):
            at = 0
            for key, steps, arrays, there in reply.head["state"]:
                r = self.placement.ranges[key]
                if there:
                    mine = found.setdefault(r.tensor.name, {})
                    if steps >= 0:
                        mine["step"] = torch.tensor(float(steps))
                    param = self.params[r.tensor.name]
                    for name in arrays:
                        whole = mine.setdefault(name, torch.zeros_like(param))
                        _flat(whole)[r.begin : r.end].copy_(reply.tensors[at].view(-1))
                        at += 1
        return found

    def load(
        self, optimizer: int, groups: Sequence[tuple[Recipe, Sequence[str]]], state: dict[str, dict[str, Any]]
    ) -> None:
        """Worker 0's values and this state are the servers' from now on. Every worker calls it, and returns when they are."""
        if self.rank == 0:
            self._load(optimizer, groups, state)
        self.squares([])  # nobody asks for the state before it is there

    def _load(
        self, optimizer: int, groups: Sequence[tuple[Recipe, Sequence[str]]], state: dict[str, dict[str, Any]]
    ) -> None:
        self.upload()
        calls = []
        for index, link in enumerate(self.servers.links):
            told, tensors = [], []
            recipes = [(recipe.to_plain(), self.keys(names)[index]) for recipe, names in groups]
            for _, keys in recipes:
                for key in keys:
                    r = self.placement.ranges[key]
                    mine = state.get(r.tensor.name, {})
                    arrays = {k: v for k, v in mine.items() if k != "step" and isinstance(v, Tensor)}
                    steps = int(mine["step"]) if "step" in mine else -1
                    told.append([key, steps, list(arrays), bool(arrays)])
                    tensors += [_flat(x)[r.begin : r.end] for x in arrays.values()]
            head = {"model": self.model, "optimizer": optimizer, "recipes": recipes, "state": told}
            calls.append(link.call("train.load", head, tensors))
        self.servers.wait(calls, "state to the servers")


def _sharing(x: Tensor) -> int:
    """How many hold the memory of x, the one who asks included; -1 if this torch does not tell."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return -1 if count is None else int(count(x.untyped_storage()._cdata))


def _flat(x: Tensor) -> Tensor:
    """One dimension over the memory of x, in the order in which it lies there."""
    x = x.detach()
    if x.is_contiguous():
        return x.view(-1)
    if x.numel() and x.untyped_storage().nbytes() < (x.storage_offset() + x.numel()) * x.element_size():
        raise WorldError("a parameter whose elements overlap cannot lie on a server")
    return x.as_strided((x.numel(),), (1,), x.storage_offset())
