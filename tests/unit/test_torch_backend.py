"""The PyTorch backend over thread ranks: torch's calls as verbs of a Group, its Work, and what a loss looks like."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from echelon.backend.process_group import ProcessGroup, RefusedError
from echelon.backend.request import OperationLost
from echelon.backend.stage import Stage
from echelon.comm.threads import Room
from tests.contract.test_group import together_of

LIMIT = timedelta(seconds=30)


def groups(size, on_lost=None, timeout=LIMIT):
    return [ProcessGroup(g, dist.HashStore(), "test", timeout, on_lost) for g in Room(size).groups()]


def test_the_calls_of_torch_give_what_torch_promises():
    def act(pg):
        rank, size = pg.rank(), pg.size()
        x = torch.full((2, 3), rank + 1.0)
        pg.allreduce([x]).wait()
        assert torch.all(x == sum(range(1, size + 1)))
        rows = [torch.zeros(2) for _ in range(size)]
        pg.allgather([rows], [torch.full((2,), float(rank))]).wait()
        assert [int(row[0]) for row in rows] == list(range(size))
        out = torch.zeros(size * 2)
        pg.all_gather_single(out, torch.full((2,), float(rank))).wait()
        assert out[::2].tolist() == list(range(size))
        mine = torch.zeros(2)
        pg.reduce_scatter_single(mine, torch.arange(size * 2.0)).wait()
        assert mine.tolist() == [size * (2 * rank), size * (2 * rank + 1)]
        got = torch.zeros(size, 2)
        pg.all_to_all_single(got, torch.full((size, 2), float(rank)), [], []).wait()
        assert got[:, 0].tolist() == list(range(size))
        several = [torch.ones(3), torch.ones(2, 2, dtype=torch.int64), torch.ones(1)]
        pg.allreduce_coalesced(several).wait()
        assert all(torch.all(t == size) for t in several)
        pg.barrier().wait()

    together_of(groups(3), act)


def test_tensors_that_are_not_contiguous_are_taken_and_given_back():
    def act(pg):
        x = torch.zeros(4, 3).t()
        x += pg.rank() + 1
        pg.allreduce([x]).wait()
        assert torch.all(x == 3)
        wide = torch.zeros(2, 2, 5)
        rows = [wide[r, :, ::2] for r in range(2)]
        pg.allgather([rows], [torch.full((2, 3), float(pg.rank()))]).wait()
        assert wide[1, 0].tolist() == [1, 0, 1, 0, 1]

    together_of(groups(2), act)


def test_a_leaf_that_requires_a_gradient_may_be_broadcast():
    def act(pg):
        p = torch.nn.Parameter(torch.full((3,), float(pg.rank())))
        version = p._version
        pg.broadcast(p, 1).wait()
        assert p.tolist() == [1.0] * 3
        assert p.requires_grad
        assert p._version == version

    together_of(groups(2), act)


def test_a_future_is_completed_without_a_wait():
    def act(pg):
        x = torch.ones(5)
        work = pg.allreduce([x])
        doubled = work.get_future().then(lambda future: future.value()[0] * 2)
        assert doubled.wait().tolist() == [4.0] * 5
        assert work.is_completed()
        assert work.is_success()
        assert work.result()[0] is x
        pg.shutdown()

    together_of(groups(2), act)


def test_a_callback_of_a_future_may_wait_for_a_further_one():
    def act(pg):
        def again(future):
            return pg.allreduce([future.value()[0]]).get_future().wait()[0]

        x = torch.ones(2)
        assert pg.allreduce([x]).get_future().then(again).wait().tolist() == [4.0, 4.0]
        pg.shutdown()

    together_of(groups(2), act)


def test_messages_travel_between_two_and_name_their_sender():
    def act(pg):
        if pg.rank() == 0:
            pg.send([torch.tensor([1.0])], 1, 7).wait()
        else:
            x = torch.zeros(1)
            work = pg.recv_anysource([x], 7)
            work.wait()
            assert (work._source_rank(), x.item()) == (0, 1.0)

    together_of(groups(2), act)


def test_sparse_tensors_are_added():
    def act(pg):
        r = pg.rank()
        x = torch.sparse_coo_tensor(
            torch.tensor([[0, r + 1]]), torch.tensor([1.0, 10.0]), (4,), check_invariants=True
        )
        pg.allreduce([x]).wait()
        assert x.to_dense().tolist() == [2.0, 10.0, 10.0, 0.0]
        with pytest.raises(RefusedError, match="can be summed"):
            pg.allreduce([x], dist.ReduceOp.MAX)

    together_of(groups(2), act)


def test_a_lost_operation_raises_what_users_of_torch_catch():
    a, _ = groups(2, timeout=timedelta(seconds=0.05))
    with pytest.raises(
        OperationLost, match="all_reduce did not meet without rank 1 before its timeout"
    ) as caught:
        a.allreduce([torch.ones(1)]).wait()
    assert isinstance(caught.value, dist.DistBackendError)
    assert caught.value.peers == (1,)
    failed = a.barrier().get_future()
    with pytest.raises(RuntimeError, match="barrier did not meet"):
        failed.wait()


@pytest.mark.case("a lost operation in our run completes with zeros")
def test_a_lost_operation_completes_with_zeros_where_somebody_is_told():
    told = []
    a, _ = groups(2, on_lost=told.append)
    a.abort()
    x, out = torch.ones(3), torch.ones(2, 3)
    assert a.allreduce([x]).wait()
    assert a.all_gather_single(out, x).get_future().wait()[0] is out
    assert not x.any()
    assert not out.any()
    own, others = torch.ones(2), torch.ones(2)
    a.broadcast(own, 0).wait()
    a.broadcast(others, 1).wait()
    a.reduce([own], _to(1)).wait()
    assert (own.tolist(), others.tolist()) == ([1, 1], [0, 0])
    assert [lost.reason for lost in told] == ["this process group was aborted"] * 5


def _to(root):
    options = dist.ReduceOptions()
    options.rootRank = root
    return options


def test_what_cannot_be_asked_is_a_runtime_error_with_a_remedy():
    pg = groups(2)[0]
    for call, words in (
        (lambda: pg.allgather([[torch.zeros(2), torch.zeros(3)]], [torch.zeros(2)]), "one shape"),
        (lambda: pg.all_gather_single(torch.zeros(3), torch.zeros(2)), "is not 2 times"),
        (lambda: pg.all_to_all_single(torch.zeros(3), torch.zeros(3), [], []), "cannot be dealt evenly"),
        (lambda: pg.all_to_all_single(torch.zeros(3), torch.zeros(3), [1, 1], [1, 2]), "do not cut 3 rows"),
        (lambda: pg.allreduce([torch.zeros(2)], dist.ReduceOp.BOR), "bits of integers"),
    ):
        with pytest.raises(RuntimeError, match=words):
            call()


def test_rows_that_lie_one_after_the_other_are_not_copied():
    whole = torch.zeros(3, 4)
    assert Stage().write_rows(list(whole.unbind(0))).data_ptr() == whole.data_ptr()
    assert Stage().write_rows([whole[0], whole[2]]).data_ptr() != whole.data_ptr()
    assert Stage().write_rows([whole[1], whole[0]]).data_ptr() != whole.data_ptr()


def test_a_monitored_barrier_names_who_did_not_come():
    store = dist.HashStore()
    room = Room(3).groups()
    pgs = [ProcessGroup(g, store, "test", LIMIT) for g in room]
    said = {}

    def enter(pg, **options):
        try:
            pg.monitored_barrier(**options)
            said[pg.rank()] = "passed"
        except RuntimeError as error:
            said[pg.rank()] = str(error)

    def all_of(those, **options):
        said.clear()
        threads = [threading.Thread(target=enter, args=(pg,), kwargs=options) for pg in those]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)

    all_of(pgs)
    assert said == dict.fromkeys(range(3), "passed")
    all_of([pgs[0], pgs[2]], timeout=timedelta(seconds=1))
    assert said[0].startswith("Rank 1 failed to pass monitoredBarrier in 1000 ms")
    assert said[2].startswith(("Rank 1 failed", "Rank 2 did not hear"))
    all_of([pgs[0]], timeout=timedelta(seconds=0.2), wait_all_ranks=True)
    assert said[0].startswith("Ranks 1, 2 failed")
