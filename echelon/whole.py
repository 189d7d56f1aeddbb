"""All of a run's state: tensors by (parameter's name, slot) for whoever saves them, everything else as plain data.

Names are the user's own; a second model's begin with `model1/`. Slots: "value" for weights and buffers, "ema", and for an
optimizer's state its index and key ("optimizer0.exp_avg").
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from echelon import owed
from echelon.checkpoint.handed import Handed
from echelon.checkpoint.holding import Holding
from echelon.checkpoint.load import Saved
from echelon.data import randomness
from echelon.errors import CheckpointError
from echelon.mesh.layout import Key, Placed
from echelon.placing import Placing, Source
from echelon.prepare import model as models
from echelon.prepare.trail import Trail
from echelon.prepared import Prepared

_PREFIXED = re.compile(r"(model|optimizer)\d+/")


class Whole:
    """Reads and writes the state of everything prepared. Restoring is exact: the same bits at any number of workers."""

    def __init__(self, prepared: Prepared) -> None:
        self.prepared, self.machine, self.world = prepared, prepared.machine, prepared.world
        self.placing = Placing(prepared)

    # -- names ---------------------------------------------------------------------------------------------------

    def _params(self) -> Iterator[tuple[str, nn.Module, Tensor]]:
        """(name, its model, parameter), each parameter once."""
        seen: set[int] = set()
        self.prepared.make_whole()
        for i, model in enumerate(self.prepared.models):
            prefix = f"model{i}/" if i else ""
            for name, param in models.unwrapped(model).named_parameters():
                if id(param) not in seen:
                    seen.add(id(param))
                    yield prefix + models.plain_name(name), model, param

    def _buffers(self, model: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
        """(name, buffer, is it part of the state dict)."""
        index = self.prepared.models.index(model)
        prefix = f"model{index}/" if index else ""
        plain = models.unwrapped(model)
        buffers = list(plain.named_buffers())
        kept = set(plain.state_dict(keep_vars=True)) if buffers else set()
        for name, buffer in buffers:
            yield prefix + models.plain_name(name), buffer, name in kept

    def _names(self) -> dict[int, str]:
        return {id(param): name for name, _, param in self._params()}

    def _optimizer_names(self, index: int, known: dict[int, str] | None = None) -> list[list[str]]:
        """The names of each group's parameters; `known` are those of _names(), if they were asked for already."""
        known = self._names() if known is None else known
        groups = self.machine.optimizers[index].optimizer.param_groups
        return [
            [known.get(id(p), f"optimizer{index}/group{g}/{n}") for n, p in enumerate(group["params"])]
            for g, group in enumerate(groups)
        ]

    # -- saving --------------------------------------------------------------------------------------------------

    def holdings(self, handed: bool = False) -> list[Holding]:
        """Every tensor. Weights and optimizer state rest until the next step; buffers change in forward. What is `handed` to a worker
        that was started again is all of it, less what lies on servers."""
        for prepared in self.machine.optimizers if not handed else ():
            prepared.fetch_state()
        named = [(name, param) for name, _, param in self._params()]
        names = {id(param): name for name, param in named}
        hold, of = self.placing.hold, self.placing.of
        found = [h for name, param in named for h in hold(name, "value", param, of(param))]
        for model in self.prepared.models:
            for name, buffer, _ in self._buffers(model):
                placed = self.placing.of_buffer(name)
                if placed is not None or self.prepared.seat[0] == 0 or handed:
                    found += hold(name, "value", buffer, placed, settled=False)
            average = self.prepared.averages.get(id(model))
            if average is not None:
                pairs = zip(average.live, average.shadow, strict=True)
                found += [h for live, shadow in pairs for h in hold(names[id(live)], "ema", shadow, of(live))]
        own = self.prepared.strategy.update == "local"
        seen = {holding.key.name for holding in found if holding.key.slot == "value"}
        for i, prepared in enumerate(self.machine.optimizers):
            optimizer = prepared.optimizer
            for group, mine in zip(optimizer.param_groups, self._optimizer_names(i, names), strict=True):
                for name, param in zip(mine, group["params"], strict=True):
                    if name not in seen:  # a parameter of no prepared model
                        found += hold(name, "value", param, of(param))
                    for slot, value in optimizer.state.get(param, {}).items():
                        if isinstance(value, Tensor) and not (own and self.world.rank):
                            found += self.placing.hold_state(name, f"optimizer{i}.{slot}", value, param, own)
        if self.prepared.strategy.compress != "none":
            found += owed.holdings(self.machine.syncs, self._trained())
        return found

    def _trained(self) -> dict[int, str]:
        """Names of all parameters that meet, those of no prepared model too."""
        known = names = self._names()
        for i, prepared in enumerate(self.machine.optimizers):
            for group, mine in zip(
                prepared.optimizer.param_groups, self._optimizer_names(i, names), strict=True
            ):
                known = {id(p): name for name, p in zip(mine, group["params"], strict=True)} | known
        return known

    def objects(self, handed: bool = False) -> dict[str, Any]:
        """Everything else, as plain data."""
        for prepared in self.machine.optimizers if not handed else ():
            prepared.fetch_state()
        names = self._names()
        own_buffers: dict[str, Tensor] = {}
        strategy = self.prepared.strategy
        if (not strategy.sync_batchnorm or strategy.update == "local") and self.prepared.seat[0]:
            for model in self.prepared.models:
                here = [(name, x) for name, x, _ in self._buffers(model) if not self._absent(name)]
                own_buffers |= {name: buffer.detach() for name, buffer in here}
        return {
            "optimizers": [self._optimizer_objects(i, names) for i in range(len(self.machine.optimizers))],
            "schedulers": [scheduler.state_dict() for scheduler in self.prepared.schedulers],
            "scalers": [scaler.state_dict() for scaler in self.prepared.scalers],
            "tracked": [obj.state_dict() for obj in self.prepared.tracked],
            "extra": [_extra_state(model) for model in self.prepared.models],
            "feeds": [feed.saved() for feed in self.prepared.feeds],
            "layouts": [sync.layout() for sync in self.machine.syncs],
            "buffers": own_buffers,
            "random": randomness.packed(randomness.capture(self.world.device.type == "cuda")),
            "step": self.machine.counters.global_step,
            **({"samples": self.machine.counters.all_samples} if handed else {}),
            "mesh": self._mesh(),
        }

    def _mesh(self) -> list[list[int]]:
        mesh = self.world.mesh
        return [list(mesh.sizes), list(mesh.widths)]

    def _absent(self, name: str) -> bool:
        return self.placing.empty(self.placing.of_buffer(name))

    def _optimizer_objects(self, index: int, known: dict[int, str]) -> dict[str, Any]:
        optimizer = self.machine.optimizers[index].optimizer
        names = self._optimizer_names(index, known)
        groups, state = [], {}
        for group, mine in zip(optimizer.param_groups, names, strict=True):
            groups.append({key: value for key, value in group.items() if key != "params"})
            for name, param in zip(mine, group["params"], strict=True):
                rest = {k: v for k, v in optimizer.state.get(param, {}).items() if not isinstance(v, Tensor)}
                if rest:
                    state[name] = rest
        slots = list(dict.fromkeys(slot for entry in optimizer.state.values() for slot in entry))
        return {
            "groups": groups,
            "names": names,
            "state": state,
            "slots": slots,
            "own": self._own(index, names),
            "partial": any(self.placing.empty(self.placing.of_state(p)) for p in optimizer.state)
            or any(
                self.placing.empty(self.placing.of(p)) for g in optimizer.param_groups for p in g["params"]
            ),
        }

    def _own(self, index: int, names: list[list[str]]) -> dict[str, dict[str, Tensor]]:
        """With update=local every worker's optimizer has a state of its own: worker 0's lies with the weights, the others' with the rest."""
        if self.prepared.strategy.update != "local" or not self.world.rank:
            return {}
        optimizer = self.machine.optimizers[index].optimizer
        pairs = [
            (name, optimizer.state.get(param, {}))
            for group, mine in zip(optimizer.param_groups, names, strict=True)
            for name, param in zip(mine, group["params"], strict=True)
        ]
        return {
            name: {k: v for k, v in kept.items() if isinstance(v, Tensor)} for name, kept in pairs if kept
        }

    # -- restoring -----------------------------------------------------------------------------------------------

    def restore(self, saved: Source, objects: dict[str, Any]) -> None:
        """Everything there is, at the place where the run was left."""
        self.prepared.adopt_loose_parameters()  # their optimizer's state has to find its meeting
        for i in range(len(self.prepared.models)):
            self.restore_one(saved, objects, "model", i)
        for i in range(len(self.machine.optimizers)):
            self.restore_one(saved, objects, "optimizer", i)
        for kind in ("scheduler", "scaler", "tracked"):
            for i in range(len(self._of(kind))):
                self.restore_one(saved, objects, kind, i)
        for feed, record in zip(self.prepared.feeds, objects["feeds"], strict=False):
            feed.restore(record)
        if saved.world_size == self.world.size:
            for sync, layout in zip(self.machine.syncs, objects["layouts"], strict=False):
                sync.lay(layout)
        if isinstance(saved, Saved):  # what was handed over is on the servers already
            for prepared in self.machine.optimizers:
                prepared.load_state()
            dropped = owed.restore(self.machine.syncs, self._trained(), saved)
            if dropped and self.world.rank == 0:
                self.prepared.warn(dropped)
        self._restore_random(saved, objects)

    def _of(self, kind: str) -> list[Any]:
        kinds = {"scheduler": self.prepared.schedulers, "scaler": self.prepared.scalers}
        return kinds.get(kind, self.prepared.tracked)

    def restore_one(self, saved: Source, objects: dict[str, Any], kind: str, index: int) -> None:
        """One object, as it is prepared."""
        if kind == "model":
            self._restore_model(saved, objects, self.prepared.models[index], index)
            return
        records = objects[{"tracked": "tracked"}.get(kind, kind + "s")]
        if index >= len(records):
            return  # the run was left before the script prepared it
        if kind == "optimizer":
            self._restore_optimizer(saved, records[index], index)
            return
        try:
            self._of(kind)[index].load_state_dict(records[index])
        except (KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
            raise CheckpointError(
                f"{kind} {index} does not take its state of the checkpoint {saved.path}: {type(error).__name__}: {error}",
                remedy="Prepare and track the same objects in the same order as in the run that is resumed.",
            ) from error

    def _restore_model(self, saved: Source, objects: dict[str, Any], model: nn.Module, index: int) -> None:
        here = set(saved.keys())
        if index >= len(objects["extra"]):
            return
        self.prepared.make_whole()
        average = self.prepared.averages.get(id(model))
        shadows = {id(p): s for p, s in zip(average.live, average.shadow, strict=True)} if average else {}
        wanted: set[str] = set()
        for name, owner, param in self._params():
            if owner is model:
                wanted.add(name)
                placed = self.placing.of(param)
                self._read(saved, here, Key(name), param, placed)
                if id(param) in shadows and Key(name, "ema") in here:
                    self.placing.read(saved, Key(name, "ema"), shadows[id(param)], placed)
        for name, buffer, kept in self._buffers(model):
            wanted.add(name)
            if self._absent(name):
                continue
            if kept or (Key(name) in here and saved.shape(Key(name)) == tuple(buffer.shape)):
                self._read(saved, here, Key(name), buffer, self.placing.of_buffer(name))
            if name in objects["buffers"] and saved.world_size == self.world.size:
                buffer.copy_(objects["buffers"][name])
        self._refuse_more(here, wanted, index)
        if objects["extra"][index]:
            models.unwrapped(model).load_state_dict(objects["extra"][index], strict=False)

    def _read(self, saved: Source, here: set[Key], key: Key, out: Tensor, placed: Placed | None) -> None:
        if key not in here:
            near = difflib.get_close_matches(key.name, [k.name for k in here if k.slot == key.slot], n=1)
            raise CheckpointError(
                f"the checkpoint {saved.path} has no tensor `{key.name}`, which this model has",
                remedy=(f"The nearest it has is `{near[0]}`. " if near else "")
                + "Resume with the model that was saved; for another one load a run.save file by hand.",
            )
        self.placing.read(saved, key, out, placed)

    def _refuse_more(self, here: set[Key], wanted: set[str], index: int) -> None:
        """Weights that would be lost without a word."""
        prefix = f"model{index}/" if index else ""
        values = {k.name for k in here if k.slot == "value"}
        mine = (
            {n for n in values if n.startswith(prefix)}
            if index
            else {n for n in values if not _PREFIXED.match(n)}
        )
        more = sorted(mine - wanted)
        if more:
            raise CheckpointError(
                f"the checkpoint holds `{more[0]}`"
                + (f" and {len(more) - 1} more tensors" if len(more) > 1 else "")
                + ", which this model lacks",
                remedy="Resume with the model that was saved; for another one load a run.save file by hand.",
            )

    def same_parameters(self, objects: dict[str, Any], index: int) -> bool:
        """Does optimizer `index` step what it stepped when the checkpoint was made?"""
        records = objects["optimizers"]
        return index >= len(records) or self._optimizer_names(index) == records[index]["names"]

    def _restore_optimizer(self, saved: Source, record: dict[str, Any], index: int) -> None:
        optimizer = self.machine.optimizers[index].optimizer
        names = self._optimizer_names(index)
        if names != record["names"]:
            raise CheckpointError(
                f"optimizer {index} {_difference(names, record['names'])}",
                remedy="Prepare the same optimizer over the same parameters as in the run that is resumed.",
            )
        known = self._everybodys(saved, record, index)
        slots: dict[str, list[Key]] = {}
        here = set(saved.keys())
        for key in sorted(here, key=str):
            if key.slot.startswith(f"optimizer{index}."):
                slots.setdefault(key.name, []).append(key)
        for group, mine, kept in zip(optimizer.param_groups, names, record["groups"], strict=True):
            for name, param in zip(mine, group["params"], strict=True):
                if name.startswith("optimizer"):
                    self._read(saved, here, Key(name), param, self.placing.of(param))
                absent = self.placing.empty(self.placing.of_state(param))
                state = {} if absent else dict(known["state"].get(name, {}))
                for key in slots.get(name, ()) if not absent else ():
                    slot = key.slot.partition(".")[2]
                    there = optimizer.state.get(param, {}).get(slot)
                    state[slot] = self.placing.read_state(saved, key, param, group, there)
                if saved.world_size == self.world.size:
                    state |= {slot: x.clone() for slot, x in record.get("own", {}).get(name, {}).items()}
                if state:
                    order = {slot: at for at, slot in enumerate(known["slots"])}
                    optimizer.state[param] = dict(sorted(state.items(), key=lambda item: order[item[0]]))
                elif param in optimizer.state:
                    del optimizer.state[param]
            for key_, value in kept.items():
                if isinstance(group.get(key_), Tensor) and isinstance(value, Tensor):
                    group[key_].copy_(value)
                else:
                    group[key_] = value

    def _everybodys(self, saved: Source, record: dict[str, Any], index: int) -> dict[str, Any]:
        """What is no tensor in an optimizer's state, of all parameters: where ranks had only some of them, each knows a part."""
        state, slots = dict(record["state"]), dict.fromkeys(record["slots"])
        for rank in saved.ranks() if record.get("partial") else ():
            theirs = saved.objects(rank)["optimizers"]
            if index < len(theirs):
                state = theirs[index]["state"] | state
                slots |= dict.fromkeys(theirs[index]["slots"])
        return {"state": state, "slots": list(slots)}

    def _restore_random(self, saved: Source, objects: dict[str, Any]) -> None:
        """Each rank's own; a rank that was not there takes another's, and numbers of its own for dropout."""
        cuda = self.world.device.type == "cuda"
        state = randomness.unpacked(objects["random"])
        randomness.restore(state if cuda else randomness.without_cuda(state))
        seed, mine = self.prepared.strategy.seed, self._mesh()
        theirs = objects.get("mesh", [[saved.world_size, 1, 1], []])
        if theirs != mine and (theirs[0][0] != saved.world_size or mine[0][0] != self.world.size):
            # cut otherwise: whoever shares a part of the batch must draw alike
            torch.manual_seed(randomness.mix(seed, self.world.part[0], saved.step, "dropout"))
        elif self.world.rank >= saved.world_size or isinstance(saved, Handed):
            torch.manual_seed(randomness.mix(seed, self.world.rank, saved.step, "dropout"))


def gather(prepared: Prepared, whole: Whole, trail: Trail) -> tuple[dict[str, Any], list[Holding]]:
    """What this worker saves; where workers are not at one place, nobody goes on before all have it."""
    while True:
        seat = prepared.seat
        objects = whole.objects()  # loops note their places
        objects["trail"] = trail.saved()
        holdings = whole.holdings()
        prepared.machine.all_saved()
        if prepared.seat == seat:
            return objects, holdings


def _extra_state(model: nn.Module) -> dict[str, Any]:
    plain = models.unwrapped(model)
    if not any(type(module).get_extra_state is not nn.Module.get_extra_state for module in plain.modules()):
        return {}
    return {key: value for key, value in plain.state_dict().items() if key.endswith("_extra_state")}


def _difference(here: list[list[str]], there: list[list[str]]) -> str:
    if len(here) != len(there):
        return f"has {len(here)} parameter groups here and {len(there)} in the checkpoint"
    mine, saved = [n for g in here for n in g], [n for g in there for n in g]
    for a, b in zip(mine, saved, strict=False):
        if a != b:
            return f"steps `{a}` where the checkpoint has `{b}`"
    return f"steps {len(mine)} parameters here and {len(saved)} in the checkpoint"
