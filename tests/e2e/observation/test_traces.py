"""One trace through real processes, as a real OTLP collector gets it."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.processes.cluster import free_port, wait_for
from support.tracing.collector import Collector, running_collector
from support.tracing.requests import (
    SECRET,
    WHOLE,
    ask,
    has,
    named,
    parent_of_a_trace,
    parents,
    picture_url,
    services,
    spans_of,
    traced,
)


def test_one_trace_leads_from_the_client_through_all_processes(tmp_path: Path) -> None:
    with running_collector() as collector, traced(tmp_path / "run", collector) as cluster:
        trace_id, headers = parent_of_a_trace()
        ask(cluster, picture_url((200, 30, 30)), headers)
        spans = spans_of(collector, trace_id, has(*WHOLE))
        assert parents(spans) == WHOLE
        server = named(spans, "chat demo")
        assert server.parent_id == headers["traceparent"].split("-")[2]
        assert {span.state for span in spans} == {"rojo=1"}
        assert not any(span.failed for span in spans)
        made_by = services(spans)
        assert made_by["encode item"] == made_by["PD attempt"] == "proxy"
        assert (made_by["tower"], made_by["decode"]) == ("encoder", "pd")
        for span in spans:
            assert server.start - 0.05 <= span.start <= span.end <= server.end + 0.05, span
        # The prefill begins once the item is there: read from the encoder's memory, beside its save.
        assert named(spans, "save").start <= named(spans, "load item").end <= named(spans, "decode").start
        assert SECRET not in repr(spans)

        # A second request shares the embedding: linked to the span that computed it, in another trace.
        tower = named(spans, "tower")
        assert named(spans, "load item").links == ((trace_id, tower.span_id),)
        again, headers = parent_of_a_trace()
        ask(cluster, picture_url((200, 30, 30)), headers)
        second = spans_of(collector, again, has("chat demo", "load item", "PD request"))
        assert named(second, "load item").links == ((trace_id, tower.span_id),)
        assert not has("tower")(second)


@pytest.mark.slow
def test_a_collector_that_is_down_is_not_felt_and_one_that_comes_back_gets_new_spans(tmp_path: Path) -> None:
    port = free_port()
    collector = Collector(url=f"http://127.0.0.1:{port}")
    with traced(tmp_path / "run", collector) as cluster:
        answers = [
            ask(cluster, picture_url((colour, 9, 9)), parent_of_a_trace()[1])["choices"][0]["finish_reason"]
            for colour in range(8)
        ]
        assert set(answers) <= {"stop", "length"}
        with running_collector(port) as back:

            def came() -> bool:
                ask(cluster, picture_url((7, 7, 7)), parent_of_a_trace()[1])
                return {"triptych-proxy", "triptych-encoder", "triptych-pd"} <= {
                    s.service for s in back.spans()
                } or ("triptych-pd" in {s.service for s in back.spans()})

            wait_for("spans at the collector", came)
        log = cluster.log.read_text()
        warned = [line for line in log.splitlines() if "spans of traces are lost" in line]
        assert len(warned) <= 6, warned  # one a minute in each of three processes
        assert "Traceback" not in log
