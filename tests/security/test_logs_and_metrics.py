"""Group 12: what clients write reaches no log and makes no metric; a name cannot fake a log line."""

from __future__ import annotations

import re
import urllib.request

from support.data.pictures import picture
from support.engine.encoder_bench import png
from support.hostile.attacks import Target, picture_url, question, statuses

CANARY = "canary-5f3a9c"
FAKE = "\n2026-01-01 00:00:00 ERROR triptych forged line"


def test_no_log_holds_prompts_answers_media_salts_or_keys(target: Target) -> None:
    body = {
        "messages": [
            {"role": "system", "content": f"{CANARY}-system"},
            *question(picture_url(png(picture(31)))),
        ],
        "max_tokens": 4,
        "stop": [f"{CANARY}-stop"],
        "cache_salt": f"{CANARY}-salt",
        "user": f"{CANARY}-user",
        "metadata": {"x": f"{CANARY}-metadata"},
    }
    body["messages"][1]["content"][1]["text"] = f"{CANARY}-prompt"
    status, reply = target.chat(body, Authorization=f"Bearer {CANARY}-key", Cookie=f"{CANARY}-cookie")
    assert status == 200, reply
    for bad in (
        {"messages": [{"role": "user", "content": f"{CANARY}-bad"}], "temperature": f"{CANARY}-number"},
        {"messages": question(f"data:image/png;base64,{CANARY}")},
        {"messages": question(f"https://user:{CANARY}@127.0.0.1/{CANARY}.png?token={CANARY}")},
        {"messages": [{"role": "user", "content": CANARY}], "max_tokens": 10**7},
        {"messages": [{"role": "user", "content": CANARY}], "response_format": {"type": CANARY}},
    ):
        assert 400 <= target.chat(bad)[0] < 500
    target.raw(
        f"GET /{CANARY}?key={CANARY} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
    )
    assert CANARY not in target.cluster.log.read_text(errors="replace")
    assert "iVBORw0KGgo" not in target.cluster.log.read_text(errors="replace")


def test_a_name_with_a_line_end_makes_no_line_of_its_own(target: Target) -> None:
    target.chat({"messages": [{"role": "user", "content": "x"}], "model": "m" + FAKE, "max_tokens": 1})
    target.chat(
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}, X_Request_Id="a\tb" + "c" * 500
    )
    for name in (b"a\x1b[2Jb", b"a b", b"x" * 4000, b"\xff\xfe"):
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += b"X-Request-Id: %s\r\n"
        reply = target.raw(head % name + b"Content-Length: 2\r\n\r\n{}")
        assert set(statuses(reply)) <= {400, 431}
        assert name not in reply
    log = target.cluster.log.read_bytes()
    assert b"forged line" not in log
    assert b"\x1b[2J" not in log


def series(target: Target) -> set[str]:
    with urllib.request.urlopen(f"{target.cluster.url}/metrics", timeout=30) as page:
        return set(re.findall(r"^([a-z:_]+(?:\{[^}]*\})?) ", page.read().decode(), re.MULTILINE))


def test_no_clients_word_becomes_a_label(target: Target) -> None:
    def storm(mark: str) -> None:
        for index in range(30):
            target.chat({"messages": [{"role": "user", "content": "x"}], "model": f"{mark}{index}"})
            target.chat({"messages": [{"role": mark, "content": "x"}], "user": f"{mark}{index}"})
            target.raw(
                f"{'GET'} /{mark}{index} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
            )

    storm("zzmark")
    before = series(target)
    storm("zzother")
    assert series(target) == before
    assert not any("zzmark" in name for name in before)
