"""Groups 4 and 11: requests that are no HTTP, or twice HTTP, or never end."""

from __future__ import annotations

import gzip
import json
import socket
import zlib

from support.hostile.attacks import GOOD, MODEL, Target, statuses

BODY = json.dumps({"model": MODEL, "messages": GOOD, "max_tokens": 1}).encode()
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n"


def request(*lines: str, body: bytes = b"", path: str = "/v1/chat/completions") -> bytes:
    head = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *lines]
    return ("\r\n".join(head) + "\r\n\r\n").encode("latin-1") + body


def chunked(body: bytes) -> bytes:
    return b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)


SMUGGLING = {
    "length and chunks": request(
        "Content-Length: 4", "Transfer-Encoding: chunked", body=b"0\r\n\r\n" + SMUGGLED
    ),
    "chunks and length": request(
        "Transfer-Encoding: chunked", "Content-Length: 6", body=b"0\r\n\r\n" + SMUGGLED
    ),
    "two lengths": request("Content-Length: 0", f"Content-Length: {len(SMUGGLED)}", body=SMUGGLED),
    "a list of lengths": request(f"Content-Length: 0, {len(SMUGGLED)}", body=SMUGGLED),
    "a signed length": request(f"Content-Length: +{len(SMUGGLED)}", body=SMUGGLED),
    "a negative length": request("Content-Length: -1", body=SMUGGLED),
    "a hexadecimal length": request("Content-Length: 0x10", body=SMUGGLED),
    "a length above 64 bits": request("Content-Length: 18446744073709551617", body=SMUGGLED),
    "an unknown transfer coding": request("Transfer-Encoding: xchunked", body=SMUGGLED),
    "a hidden transfer coding": request(
        "Transfer-Encoding: x", "Transfer-Encoding: chunked", body=chunked(b"{}")
    ),
    "a space before the colon": request("Content-Length : 5", body=b"xxxxx" + SMUGGLED),
    "a folded header": request("X: y", " Content-Length: 5", body=b"xxxxx" + SMUGGLED),
    "a chunk size that overflows": request("Transfer-Encoding: chunked", body=b"f" * 17 + b"\r\n" + SMUGGLED),
    "a chunk size with a sign": request("Transfer-Encoding: chunked", body=b"+5\r\nxxxxx\r\n0\r\n\r\n"),
    "a chunk without its end": request("Transfer-Encoding: chunked", body=b"5\r\nxxxxxyy" + SMUGGLED),
    "line ends without carriage return": request("Content-Length: 0").replace(b"\r\n", b"\n") + SMUGGLED,
    "a nul in a header": request("X-A: a\x00b"),
    "a carriage return in a header": request("X-A: a\rb"),
}
NO_HTTP = {
    "nothing": b"",
    "random bytes": bytes(range(256)) * 20,
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
    "an unknown method": b"BREW /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "CONNECT": b"CONNECT 169.254.169.254:80 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a path of other bytes": b"GET /\xff\xfe\x00 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "version 0.9": b"GET /v1/models\r\n",
    "version 9": b"GET /v1/models HTTP/9.9\r\nHost: localhost\r\n\r\n",
    "only a head's beginning": b"POST /v1/chat/completions HTTP/1.1\r\nHo",
}


def test_a_second_request_cannot_hide_in_the_first(target: Target) -> None:
    for name, data in SMUGGLING.items():
        answered = statuses(target.raw(data))
        assert 404 not in answered, f"{name}: the hidden request was served"
        assert all(400 <= status < 500 for status in answered), (name, answered)


def test_what_is_no_http_gets_400_or_nothing(target: Target) -> None:
    for name, data in NO_HTTP.items():
        answered = statuses(target.raw(data))
        assert all(400 <= status < 500 for status in answered), (name, answered)


PATHS = [
    "/../../etc/passwd",
    "/%2e%2e/%2e%2e/etc/passwd",
    "/v1/..//..//etc/passwd",
    "/docs/../../../etc/passwd",
]
PATHS += ["/%00", "/v1/models/%2e%2e%2f%2e%2e%2fetc%2fpasswd", "/admin", "/debug", "/.env", "//etc/passwd"]


def test_a_path_reaches_no_file(target: Target) -> None:
    for path in PATHS:
        reply = target.raw(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        assert statuses(reply) == [404], path
        assert b"root:" not in reply


def test_the_host_header_opens_nothing(target: Target) -> None:
    for host in ("", "evil.example", "127.0.0.1:1@evil", "x/v1/models?", "a" * 5000):
        head = f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
        reply = target.raw(head.encode())
        assert set(statuses(reply)) <= {200, 400, 403}, host
        assert b"evil" not in reply


def test_ten_thousand_headers_do_no_harm(target: Target) -> None:
    lines = "".join(f"X-{index}: {index}\r\n" for index in range(10_000))
    reply = target.raw(
        f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{lines}\r\n".encode()
    )
    assert set(statuses(reply)) <= {200, 431}


def test_a_length_that_lies_is_refused_or_waited_for_in_vain(target: Target) -> None:
    short = target.raw(request(f"Content-Length: {len(BODY) + 100}", "Connection: close", body=BODY))
    assert statuses(short) == [] or all(400 <= status < 500 for status in statuses(short))
    long = target.raw(request("Content-Length: 10", "Connection: close", body=BODY))
    assert statuses(long)[:1] == [400]


def test_an_endless_chunked_body_is_cut_off_at_the_limit(target: Target) -> None:
    piece = b"10000\r\n" + bytes(1 << 16) + b"\r\n"
    reply = target.raw(request("Transfer-Encoding: chunked", "Connection: close") + piece * 272, finish=False)
    assert statuses(reply) == [413]


def test_a_compressed_body_is_never_inflated(target: Target) -> None:
    for coding in ("gzip", "deflate", "br", "zstd", "gzip, gzip", "identity;q=0"):
        bomb = gzip.compress(bytes(20 << 20)) if "gzip" in coding else zlib.compress(bytes(20 << 20))
        status, reply = target.chat(bomb, Content_Encoding=coding)
        assert 400 <= status < 500, (coding, reply)
        assert reply["error"]["param"] == "body"


def test_pipelined_requests_are_answered_in_order(target: Target) -> None:
    one = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    last = b"GET /v1/nothing HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    assert statuses(target.raw(one * 50 + last, finish=False)) == [200] * 50 + [404]


def test_a_hundred_clients_that_leave_in_the_middle_cost_nothing(target: Target) -> None:
    for index in range(100):
        with socket.create_connection(("127.0.0.1", target.port), timeout=30) as connection:
            connection.sendall(request(f"Content-Length: {len(BODY)}", body=BODY[: index * 7]))
