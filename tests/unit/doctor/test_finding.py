"""The doctor's table: a line for each check, a remedy below each failure."""

from __future__ import annotations

from triptych.apps.doctor.finding import fail, failed, note, ok, table

GROUPS = [
    ("machine", [ok("memory", "8 GiB"), fail("files", "256", "ulimit -Hn 65536")]),
    ("empty", []),
    ("store", [note("persistence", "on", "CONFIG SET save ''")]),
]


def test_every_check_is_a_line_and_remedies_are_below_theirs():
    assert table(GROUPS).splitlines() == [
        "machine",
        "  ok    memory       8 GiB",
        "  FAIL  files        256",
        "                     -> ulimit -Hn 65536",
        "store",
        "  note  persistence  on",
        "                     -> CONFIG SET save ''",
        "1 of 3 checks failed, 1 notes",
    ]


def test_only_failures_fail():
    assert failed(GROUPS)
    assert not failed(GROUPS[1:])


def test_a_text_of_a_server_neither_ends_the_line_nor_moves_the_cursor():
    text = table([("store", [ok("version", "7.0\n  FAIL  forged\x1b[2J\u2028")])])
    assert len(text.splitlines()) == 3 and "\x1b" not in text
