"""The workers' output as lines: order, duplicates, partial lines, any bytes."""

from __future__ import annotations

import re
from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from echelon.clock import FakeClock
from echelon.show.holdback import Holdback
from echelon.show.lines import Collapser, Line, clean, fold, spell_ranks


def test_the_same_line_of_all_is_one_at_once():
    lines = Collapser(3, FakeClock())
    assert lines.feed(0, "out", b"hi\n") == []
    assert lines.feed(2, "out", b"hi\n") == []
    assert lines.feed(1, "out", b"hi\n") == [Line("out", (0, 1, 2), "hi")]


def test_a_line_waits_only_a_moment_for_the_others():
    clock = FakeClock()
    lines = Collapser(2, clock)
    assert lines.feed(0, "out", b"mine\n") == []
    clock.advance(0.25)
    assert lines.due() == [Line("out", (0,), "mine")]


def test_one_worker_never_waits():
    assert Collapser(1, FakeClock()).feed(0, "err", b"a\nb\n") == [
        Line("err", (0,), "a"),
        Line("err", (0,), "b"),
    ]


def test_lines_after_a_differing_one_still_meet():
    lines = Collapser(2, FakeClock())
    lines.feed(0, "out", b"start\nrank 0\nend\n")
    lines.feed(1, "out", b"start\nrank 1\nend\n")
    shown = [(line.ranks, line.text) for line in lines.flush()]
    assert shown == [((1,), "rank 1"), ((0,), "rank 0"), ((0, 1), "end")]


def test_partial_lines_are_shown_after_a_while_and_not_again():
    clock = FakeClock()
    lines = Collapser(1, clock)
    assert lines.feed(0, "out", b"Password: ") == []
    clock.advance(3)
    assert [line.text for line in lines.due()] == ["Password: "]
    clock.advance(3)
    assert lines.due() == []
    assert [line.text for line in lines.feed(0, "out", b"done\n")] == ["done"]


def test_a_progress_bar_shows_its_last_state():
    clock = FakeClock()
    lines = Collapser(1, clock)
    assert lines.feed(0, "err", b"\r 1%\r 2%") == []
    clock.advance(3)
    assert [line.text for line in lines.due()] == [" 2%"]
    lines.feed(0, "err", b"\r 99%\r100%")
    assert [line.text for line in lines.feed(0, "err", b"\n")] == ["100%"]


def test_a_bar_without_end_does_not_grow():
    lines = Collapser(1, FakeClock())
    for _ in range(1000):
        lines.feed(0, "err", b"\r" + b"x" * 100)
    assert sum(len(p.data) for p in lines._partial.values()) < 30_000


def test_any_bytes_become_text():
    assert clean(b"caf\xe9\x00\x07 \x1b[2J\x1b[31mred\x1b[0m\r") == "caf� \x1b[31mred\x1b[0m"
    assert clean("日本語".encode()) == "日本語"


def test_a_character_cut_between_two_reads_is_whole():
    lines = Collapser(1, FakeClock())
    data = "né\n".encode()
    assert lines.feed(0, "out", data[:2]) == []
    assert lines.feed(0, "out", data[2:])[0].text == "né"


def test_a_worker_that_is_over_is_not_waited_for():
    lines = Collapser(2, FakeClock())
    assert lines.feed(0, "out", b"last") == []
    lines.finish(0)
    assert [line.text for line in lines.feed(1, "out", b"x\n")] == ["x"]
    assert [line.text for line in lines.flush()] == ["last"]


def test_how_lines_and_ranks_are_written():
    assert Line("out", (0, 1, 2, 5), "hi").render("box") == "[box:0-2,5] hi (×4)"
    assert Line("out", (3,), "hi").render("box") == "[box:3] hi"
    assert Line("out", (0, 1), "").render("box") == "[box:0-1]"
    assert spell_ranks((7,)) == "7"


def test_a_line_of_ours_is_folded_at_its_dots_and_else_at_blanks_and_commas():
    assert fold("a · b") == ["a · b"]
    assert fold("run x · 2 workers · allreduce", 20) == ["run x · 2 workers", "  allreduce"]
    assert fold("  one, two, three", 12) == ["  one, two,", "    three"]
    assert fold("allreduce,seed=1,ema=0.9", 14) == ["allreduce,", "  seed=1,", "  ema=0.9"]
    assert fold("x" * 30, 20) == ["x" * 30]
    assert fold("to " + "x" * 30 + " and back", 20) == ["to", "  " + "x" * 30, "  and back"]


@given(st.text("ab ,·", max_size=120), st.integers(6, 40))
def test_nothing_is_lost_by_folding(text, columns):
    bare = [re.sub(r"[ ·]", "", t) for t in (text, "".join(fold(text, columns)))]
    assert bare[0] == bare[1]


@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["a", "b", "c"]), st.floats(0, 0.3)), max_size=60),
)
def test_no_line_is_lost_and_every_worker_keeps_its_order(said):
    clock = FakeClock()
    lines = Collapser(3, clock)
    shown: list[Line] = []
    wrote = defaultdict(list)
    for rank, text, pause in said:
        wrote[rank].append(text)
        shown += lines.feed(rank, "out", text.encode() + b"\n")
        clock.advance(pause)
        shown += lines.due()
    shown += lines.flush()
    for rank in range(3):
        assert [line.text for line in shown if rank in line.ranks] == wrote[rank]


def test_a_traceback_is_held_until_it_is_known_what_it_is():
    clock = FakeClock()
    hold = Holdback(clock)
    first, second = (
        Line("err", (0,), "Traceback (most recent call last):"),
        Line("err", (0,), "ValueError: x"),
    )
    assert hold.pass_on([first, second, Line("out", (0,), "y")]) == [Line("out", (0,), "y")]
    clock.advance(1.1)
    assert hold.pass_on([]) == [first, second]  # the script caught it and went on


def test_after_a_failure_only_what_was_not_told_comes_out():
    hold = Holdback(FakeClock())
    hold.failing()
    assert hold.pass_on([Line("err", (1,), "ValueError: x"), Line("err", (1,), "note")]) == []
    assert hold.rest(["Traceback (most recent call last):\nValueError: x"]) == [Line("err", (1,), "note")]
