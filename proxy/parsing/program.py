"""The parser process: parses bodies one after the other, within limits, and says what is wrong with them."""

from __future__ import annotations

import gc
import importlib
import resource
import signal
import socket
import struct
import sys
import traceback
from typing import Any

import msgspec

from triptych.base.errors import InternalError, RequestError, TooLarge
from triptych.proxy.parsing.parse import Parse, ParseOrder, ParseVerdict

#: With a body's descriptor: the bytes of its order, which follows. Before a verdict: its bytes.
BODY_HEAD = struct.Struct(">I")
VERDICT_HEAD = struct.Struct(">I")
#: Of the process: 64 MiB of JSON with the most values that are taken need a third of it.
MEMORY_BYTES = 1 << 30

_MAX_FAULT = 16 << 10
_orders = msgspec.msgpack.Decoder(ParseOrder)


def parse_of(order: ParseOrder) -> Parse[Any]:
    return Parse(getattr(importlib.import_module(order.module), order.name), order.options)


def judged(parse: Parse[Any], raw: bytes) -> ParseVerdict:
    """What comes of parsing the body, which is then dropped."""
    try:
        parse(raw)
    except RequestError as error:
        return ParseVerdict.of(error)
    except MemoryError:
        return ParseVerdict.of(TooLarge("the request takes too much memory to read: send less", param="body"))
    except Exception:
        verdict = ParseVerdict.of(InternalError("an unexpected error in the proxy"))
        verdict.fault = traceback.format_exc()[-_MAX_FAULT:]
        return verdict
    return ParseVerdict()


def serve(proxy: socket.socket, seconds: float) -> None:
    """Until the other side closes. A body that takes more seconds of a core ends the process by SIGPROF."""
    while True:
        head, bodies, *_ = socket.recv_fds(proxy, BODY_HEAD.size, 1, socket.MSG_WAITALL)
        if not head:
            return
        parse = parse_of(_orders.decode(_received(proxy, *BODY_HEAD.unpack(head))))
        with open(bodies[0], "rb") as body:
            body.seek(0)
            raw = body.read()
        signal.setitimer(signal.ITIMER_PROF, seconds)
        verdict = msgspec.msgpack.encode(judged(parse, raw))
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        del raw
        proxy.sendall(VERDICT_HEAD.pack(len(verdict)) + verdict)
        gc.collect()


def _received(proxy: socket.socket, size: int) -> bytes:
    return proxy.recv(size, socket.MSG_WAITALL)


def main() -> None:
    """`program SECONDS`, with its socket as standard input."""
    # Ctrl-C is for the proxy, which closes the socket when it ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    # A million values make many passes over all of them, and no cycles.
    gc.disable()
    with socket.socket(fileno=sys.stdin.fileno()) as proxy:
        serve(proxy, float(sys.argv[1]))


if __name__ == "__main__":
    main()
