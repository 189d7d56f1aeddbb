"""What training takes on a worker, what a worker has, and what is said when that does not suffice."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from echelon import failure
from echelon.errors import NoRoom
from echelon.mesh import limits, memory
from echelon.mesh.memory import Fits, Have, Split, Tight, TooLarge, Training
from echelon.parallel import needs
from echelon.parallel.building.recorder import recorded
from echelon.strategy import merge, parse

MIB, GIB = 1 << 20, 1 << 30
ADAM = Training(parameters=400 * MIB, gradients=400 * MIB, state=800 * MIB, other=0, largest=16 * MIB)
SMALL_UNITS = 4 * MIB


@pytest.mark.case("too large: what is needed and what fits")
@pytest.mark.parametrize(
    ("split", "mib"),
    [
        (Split(), 1600),
        (Split(state_elsewhere=True), 800),
        (Split(level=1, shards=4), 400 + 400 + 200 + 32),
        (Split(level=2, shards=4, unit=SMALL_UNITS), 100 + 100 + 200 + (400 - 100) + 2 * 16),
        (Split(level=3, shards=4, unit=SMALL_UNITS), 100 + 100 + 200 + 4 * 16),
        (Split(level=3, shards=4), 100 + 100 + 200 + 4 * 32),
        (Split(stages=4), 400),
        (Split(stages=4, largest_stage=0.5), 800),
        (Split(stages=100), 16 * 4),
        (Split(tensor=2), 800),
        (Split(banked=True), 2000),
        (Split(stages=2, banked=True), 1000),
        (Split(tensor=2, stages=2), 400),
        (Split(stages=2, level=1, shards=2), 200 + 200 + 200 + 32),
    ],
    ids=str,
)
def test_what_a_worker_needs(split, mib):
    assert memory.needed(ADAM, split).total == pytest.approx(mib * MIB, rel=1e-6)


@pytest.mark.parametrize(
    ("strategy", "workers", "split"),
    [
        ("allreduce", 4, Split()),
        ("accumulate=2", 4, Split(banked=True)),
        ("sharded,microbatches=2", 4, Split(level=3, shards=4)),
        ("ps,apply=server", 4, Split(state_elsewhere=True)),
        ("sharded,level=2,wrap_mib=8", 4, Split(level=2, shards=4, unit=8 * MIB)),
        ("sharded,shard_workers=2", 4, Split(level=3, shards=2)),
        ("sharded,pipeline=2", 8, Split(level=3, shards=4, stages=2)),
        ("pipeline=3+1", 4, Split(stages=2)),
        ("tensor=2,pipeline=2", 8, Split(stages=2, tensor=2)),
    ],
)
def test_how_a_strategy_lays_a_model(strategy, workers, split):
    assert memory.split_of(merge(parse(strategy)), workers) == split


def test_memory_is_short_where_what_is_freed_and_kept_would_not_fit_as_well():
    need = memory.needed(ADAM, Split(level=3, shards=4))
    assert memory.short(need, Have(1000 * MIB, "a limit"), base=200 * MIB)
    assert not memory.short(need, Have(2000 * MIB, "a limit"), base=200 * MIB)


def test_what_sharded_gathers_is_the_largest_unit_of_the_model():
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)]
    model = nn.Sequential(*layers, nn.Linear(64, 256))
    layer = 4 * 64 * 65
    found = needs.training([model], [], unit_bytes=layer)
    assert found.unit == 4 * 65 * 256
    assert memory.needed(found, Split(level=3, shards=2)).gathered == 4 * found.unit
    assert needs.training([model], [], unit_bytes=1 << 30).unit == sum(p.nbytes for p in model.parameters())
    assert needs.training([model], []).unit == 0


def test_what_fits_is_said_with_what_it_takes():
    assert isinstance(memory.judge(ADAM, Split(), Have(2 * GIB, "a limit"), 4, "allreduce"), Fits)
    short = memory.judge(ADAM, Split(), Have(4 * GIB, "the control group's limit", 4), 4, "allreduce")
    assert isinstance(short, TooLarge)
    assert short.message == (
        "training this model under allreduce takes 1.6 GiB on each worker, and a worker has 1.0 GiB: 576 MiB are missing\n"
        "  parameters 400 MiB + gradients 400 MiB + optimizer state 800 MiB, before the first activation; the control group's "
        "limit is 4.0 GiB, shared by 4 workers."
    )
    assert short.remedy == (
        "With 4 workers and the same memory these fit: --strategy sharded,level=2 (764 MiB a worker) or --strategy pipeline=2 "
        "(1000 MiB a worker)."
    )


def test_where_nothing_fits_here_the_number_of_workers_that_would_is_said():
    verdict = memory.judge(ADAM, Split(), Have(300 * MIB, "a limit"), 2, "allreduce")
    assert isinstance(verdict, TooLarge)
    assert "--strategy sharded fits 10 such workers on further hosts" in verdict.remedy
    assert memory.needed(ADAM, Split(level=3, shards=10)).total <= 300 * MIB
    assert memory.needed(ADAM, Split(level=3, shards=9)).total > 300 * MIB
    hopeless = memory.judge(ADAM, Split(), Have(40 * MIB, "a limit"), 2, "allreduce")
    assert isinstance(hopeless, TooLarge)
    assert "give them more memory" in hopeless.remedy


def test_weights_that_are_too_large_by_themselves_name_run_build():
    verdict = memory.judge(ADAM, Split(), Have(300 * MIB, "a limit"), 8, "allreduce")
    assert isinstance(verdict, TooLarge)
    assert "The weights alone are 400 MiB: put `with run.build():` around the construction" in verdict.remedy


def test_what_the_process_itself_takes_only_warns():
    verdict = memory.judge(ADAM, Split(), Have(1700 * MIB, "a limit"), 4, "allreduce", base=300 * MIB)
    assert isinstance(verdict, Tight)
    assert "memory is short" in verdict.message
    assert "sharded,level=1" in verdict.message


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("SGD", {}), ("SGD", {"momentum": 0.9}), ("Adam", {}), ("AdamW", {}), ("AdamW", {"amsgrad": True}), ("NAdam", {}),
        ("RAdam", {}), ("Adamax", {}), ("Adadelta", {}), ("Rprop", {}), ("RMSprop", {}), ("Adagrad", {}), ("ASGD", {}),
        ("RMSprop", {"momentum": 0.9, "centered": True}), ("Muon", {}),
    ],
    ids=str,
)  # fmt: skip
def test_what_optimizers_keep_is_counted_as_torch_keeps_it(kind, options):
    model = nn.Linear(64, 64, bias=False)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, **options)
    predicted = needs.training([model], [optimizer]).state
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    kept = [
        v
        for s in optimizer.state.values()
        for v in s.values()
        if isinstance(v, torch.Tensor) and v.numel() > 1
    ]
    assert predicted == sum(t.nbytes for t in kept)


def test_a_model_is_counted_once_whatever_is_tied_or_frozen_and_before_it_is_made():
    def make():
        model = nn.Sequential(
            nn.Embedding(100, 32), nn.Linear(32, 100, bias=False), nn.BatchNorm1d(100), nn.Linear(100, 3)
        )
        model[1].weight = model[0].weight
        model[3].requires_grad_(False)
        return model

    plain = make()
    found = needs.training([plain], [torch.optim.AdamW(plain.parameters())], ema=True)
    trained = 4 * (3200 + 200)
    whole = trained + 4 * 303
    assert found == Training(
        parameters=whole, gradients=trained, state=2 * trained, other=4 * 200 + 8 + whole, largest=4 * 3200
    )
    with recorded():
        later = make()
    assert needs.training([later], [torch.optim.AdamW(later.parameters())], ema=True) == found


def test_training_that_cannot_fit_is_refused_and_the_rest_is_not():
    strategy = merge(parse("allreduce"))
    assert needs.require_room(ADAM, strategy, 2, Have(2 * GIB, "a limit")) == ""
    assert needs.require_room(ADAM, strategy, 2, None) == ""
    with pytest.raises(NoRoom, match=r"600 MiB are missing"):
        needs.require_room(ADAM, strategy, 2, Have(1000 * MIB, "a limit"))
    assert needs.require_room(ADAM, merge(parse("sharded")), 4, Have(1000 * MIB, "a limit")) == ""


def folder(root: Path, name: str, text: str) -> None:
    root.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


@pytest.fixture
def machine(tmp_path):
    proc = tmp_path / "proc"
    folder(proc, "meminfo", "MemTotal:  8388608 kB\nSwapTotal: 0 kB\n")
    for rank, group in enumerate(("/job/a", "/job/b", "/other")):
        words = (
            "python",
            "-P",
            "-m",
            "echelon.role",
            "worker",
            "--rank",
            str(rank),
            "--run",
            "night",
            "--",
            "train.py",
        )
        for pid in (100 + rank, 200 + rank):  # a worker, and a child of it
            folder(proc / str(pid), "cmdline", "\0".join(words))
            folder(proc / str(pid), "cgroup", f"4:memory:{group}\n")
    return proc


def test_the_tightest_limit_above_a_worker_counts(tmp_path, machine):
    folder(tmp_path / "memory" / "job", "memory.limit_in_bytes", f"{3 * GIB}\n")
    folder(tmp_path / "memory" / "job" / "a", "memory.limit_in_bytes", f"{4 * GIB}\n")
    folder(tmp_path / "memory", "memory.limit_in_bytes", "9223372036854771712\n")
    found = limits.have("night", "4:memory:/job/a\n3:cpu:/\n", tmp_path, machine)
    assert found == Have(3 * GIB, "the control group's limit", sharers=2)
    assert found.share == 3 * GIB // 2


def test_both_versions_of_control_groups_are_read(tmp_path, machine):
    folder(tmp_path / "user.slice" / "job", "memory.max", "max\n")
    folder(tmp_path / "user.slice", "memory.max", f"{2 * GIB}\n")
    found = limits.have("", "0::/user.slice/job\n", tmp_path, machine)
    assert found == Have(2 * GIB, "the control group's limit")
    container = tmp_path / "container"
    folder(container, "memory.max", f"{GIB}\n")
    assert limits.have("", "0::/docker/abc\n", container, machine) == Have(GIB, "the control group's limit")


def test_without_a_limit_the_machine_is_shared_by_its_workers(tmp_path, machine):
    assert limits.have("night", "0::/\n", tmp_path, machine) == Have(
        8 * GIB, "this machine's memory", sharers=3
    )
    assert limits.have("night", "garbage\n::", tmp_path / "nothing", tmp_path / "proc" / "100") is None


def status(proc, peak, files, shared, ours):
    told = f"VmHWM:\t{peak} kB\nRssAnon:\t1 kB\nRssFile:\t{files} kB\nRssShmem:\t{shared} kB\n"
    folder(proc / "self", "status", told)
    folder(proc / "self", "smaps_rollup", f"Pss_Anon: 1 kB\nPss_Shmem: {ours} kB\n")


def test_a_peak_is_without_files_and_without_the_others_part_of_what_is_shared(tmp_path):
    peak = limits.Peak(tmp_path)
    assert peak.look() is None
    status(tmp_path, 1000, 200, 400, 100)
    assert peak.look() == 500 * 1024
    status(tmp_path, 1500, 210, 410, 0)  # hardly more is shared: not counted again
    assert peak.look() == (1500 - 210 - 300) * 1024
    status(tmp_path, 1500, 210, 600, 200)
    assert peak.look() == (1500 - 210 - 400) * 1024
    assert limits.Peak().look() > 1 << 20


def test_here_something_is_found():
    found = limits.have()
    assert found is not None
    assert found.limit > 100 * MIB
    assert limits.held() > MIB
    before = limits.counted()
    kept = torch.ones(32 * MIB // 4)
    assert limits.counted() - before == pytest.approx(kept.nbytes, rel=0.2)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("shapes differ"), False),
        (ValueError("out of memory"), False),
    ],
    ids=str,
)  # fmt: skip
def test_an_allocation_that_failed_is_told_what_takes_less(error, told):
    event = failure.describe(error, rank=0, host="a", step=0)
    assert ("What takes less of it" in event.traceback) is told
    assert "What takes less" not in event.error


def test_have_says_whose_limit_it_is():
    assert "This worker has 1.0 GiB (the job's limit is 2.0 GiB, shared by 2 workers)" in memory.advice(
        dataclasses.replace(Have(2 * GIB, "the job's limit"), sharers=2)
    )
