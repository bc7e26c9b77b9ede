"""Requests with a trace of their own at a demo cluster, and what a collector gets of them."""

from __future__ import annotations

import contextlib
import json
import secrets
import ssl
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from PIL import Image

from support.processes.cluster import Cluster, data_url, running_cluster, wait_for
from support.tracing.collector import Collector, Received
from triptych.apps.launch.model_path import DEMO_MODEL

#: Spans of a request whose one picture is encoded, in one trace.
WHOLE = {
    "chat demo": "",
    "fetch": "chat demo",
    "look up": "chat demo",
    "encode item": "chat demo",
    "encoder job": "encode item",
    "preprocess": "encoder job",
    "wait for tower": "encoder job",
    "tower": "encoder job",
    "save": "encoder job",
    "PD attempt": "chat demo",
    "PD request": "PD attempt",
    "wait for items": "PD request",
    "load item": "PD request",
    "prefill": "PD request",
    "decode": "PD request",
}
SECRET = "a question that is nobody's business"


@contextlib.contextmanager
def traced(
    folder: Path, collector: Collector, *words: str, environment: dict[str, str] | None = None
) -> Iterator[Cluster]:
    """A demo cluster whose spans go to the collector."""
    flags = ("--otlp-endpoint", collector.url, "--served-model-name", "demo", "--threads", "1", *words)
    with running_cluster(DEMO_MODEL, folder, *flags, environment=environment) as cluster:
        yield cluster


def picture_url(colour: tuple[int, int, int]) -> str:
    return data_url(Image.new("RGB", (64, 64), colour))


def parent_of_a_trace() -> tuple[str, dict[str, str]]:
    """A trace id, and the headers of a caller in that trace."""
    trace_id = secrets.token_hex(16)
    return trace_id, {"traceparent": f"00-{trace_id}-{secrets.token_hex(8)}-01", "tracestate": "rojo=1"}


def ask(cluster: Cluster, url: str, headers: dict[str, str], **fields: Any) -> dict[str, Any]:
    """The answer of a cluster to a question about a picture."""
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": SECRET}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, **fields}
    return post(f"{cluster.url}/v1/chat/completions", body, headers)


def post(
    url: str, body: dict[str, Any], headers: dict[str, str], trust: ssl.SSLContext | None = None
) -> dict[str, Any]:
    """The reply to a JSON body."""
    request = urllib.request.Request(
        url, data=json.dumps(body).encode(), headers={"Content-Type": "application/json", **headers}
    )
    with urllib.request.urlopen(request, timeout=120, context=trust) as reply:
        answer: dict[str, Any] = json.loads(reply.read())
        return answer


def spans_of(
    collector: Collector, trace_id: str, complete: Callable[[list[Received]], bool]
) -> list[Received]:
    """The spans of a trace once they are complete: each process sends its own every second."""
    wait_for("the spans of the trace", lambda: complete(collector.spans(trace_id)))
    return collector.spans(trace_id)


def parents(spans: list[Received]) -> dict[str, str]:
    """The name of each span's parent, by the span's name; empty for one outside. Each name is there once.

    Left out is "queue", which is there twice: before a PD worker, and in it.
    """
    by_id = {span.span_id: span.name for span in spans}
    found = [(span.name, by_id.get(span.parent_id, "")) for span in spans if span.name != "queue"]
    assert len(found) == len(dict(found)), found
    return dict(found)


def services(spans: list[Received]) -> dict[str, str]:
    """The service of each span, by its name."""
    return {span.name: span.service.removeprefix("triptych-") for span in spans}


def named(spans: list[Received], name: str) -> Received:
    [span] = [span for span in spans if span.name == name]
    return span


def has(*names: str) -> Callable[[list[Received]], bool]:
    return lambda spans: set(names) <= {span.name for span in spans}
