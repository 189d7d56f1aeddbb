"""Who failed first: tables of exits and last words."""

from __future__ import annotations

from echelon.events import Failed
from echelon.launch.blame import Exit, code_of_status, judge


def said(
    rank: int, time: float, error: str = "ValueError: x", *, code: int = 1, consequence: bool = False
) -> Failed:
    return Failed(
        time=time, rank=rank, host="h", step=7, code=code, error=error, traceback="", consequence=consequence
    )


def exits(*ends: Exit) -> dict[int, Exit]:
    return {end.rank: end for end in ends}


def test_nobody_failed():
    assert judge({}, []) is None
    assert judge(exits(Exit(0, 0, 1.0), Exit(1, 0, 2.0)), []) is None


def test_workers_that_we_ended_are_no_failure_by_themselves():
    assert judge(exits(Exit(0, 143, 1.0, ours=True), Exit(1, 137, 1.0, ours=True)), []) is None


def test_the_cause_is_named_even_if_a_consequence_was_heard_first():
    verdict = judge(
        exits(Exit(0, 1, 5.0), Exit(1, 1, 5.1), Exit(2, 143, 6.0, ours=True)),
        [said(0, 4.9, "PeerLost: worker 1", consequence=True), said(1, 5.0)],
    )
    assert (verdict.rank, verdict.code, verdict.consequences, verdict.also) == (1, 1, (0, 2), ())


def test_a_broken_gloo_connection_is_a_consequence():
    lost = "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4"
    verdict = judge(exits(Exit(0, 1, 4.0), Exit(1, 137, 5.0)), [said(0, 4.0, lost)])
    assert (verdict.rank, verdict.code, verdict.consequences) == (1, 137, (0,))


def test_a_users_own_connection_error_is_not():
    refused = "ConnectionRefusedError: [Errno 111] Connection refused"
    verdict = judge({}, [said(1, 1.0, refused), said(0, 2.0, "PeerLost: worker 1", consequence=True)])
    assert (verdict.rank, verdict.consequences) == (1, (0,))


def test_of_several_errors_of_their_own_the_first_is_told():
    verdict = judge(exits(Exit(2, 1, 3.3)), [said(0, 3.2), said(2, 3.1), said(1, 3.3)])
    assert (verdict.rank, verdict.also, verdict.consequences) == (2, (0, 1), ())


def test_only_consequences_are_known():
    verdict = judge({}, [said(1, 2.0, consequence=True), said(0, 1.0, consequence=True)])
    assert (verdict.rank, verdict.consequences) == (0, (1,))


def test_the_exit_code_of_a_worker_that_we_had_to_end_is_what_it_said():
    verdict = judge(exits(Exit(1, 143, 5.0, ours=True)), [said(1, 4.0, code=3)])
    assert verdict.code == 3


def test_reasons_read_well():
    assert judge(exits(Exit(0, 137, 1.0)), []).reason == "killed by SIGKILL"
    assert judge(exits(Exit(0, 9, 1.0)), []).reason == "exit code 9 without an exception"
    assert judge({}, [said(0, 1.0, "KeyError: 'a'")]).reason == "KeyError: 'a'"


def test_statuses_become_codes_as_in_a_shell():
    assert [code_of_status(s) for s in (0, 1 << 8, 7 << 8, 9, 11 | 0x80)] == [0, 1, 7, 137, 139]
