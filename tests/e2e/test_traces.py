"""One trace through real processes, as a real OTLP collector gets it."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from support.processes.cluster import Cluster, free_port, wait_for
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


def restart_pd_worker(cluster: Cluster) -> None:
    """Another process takes the PD worker's place."""
    before = cluster.pid("pd-0")
    incarnations = {worker.incarnation for worker in cluster.workers() if worker.pool == "pd"}
    cluster.kill("pd-0")

    def there() -> bool:
        found = {worker.incarnation for worker in cluster.workers() if worker.pool == "pd"}
        return cluster.pids("pd").get("pd-0", before) != before and bool(found - incarnations)

    wait_for("another PD worker", there)


def damage_embeddings(cluster: Cluster) -> None:
    """Changes the last byte of each stored embedding; the headers stay whole."""
    with redis.Redis(unix_socket_path=cluster.store_url.removeprefix("unix://")) as client:
        keys = [key for key in client.scan_iter("*") if client.pttl(key) >= 0]
        assert keys
        for key in keys:
            size = client.strlen(key)
            [last] = client.getrange(key, size - 1, size - 1)
            client.setrange(key, size - 1, bytes([last ^ 1]))


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
        # The prefill begins once the item is there, and the load once it is saved.
        assert named(spans, "save").end <= named(spans, "load item").end <= named(spans, "decode").start
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
def test_a_reader_is_linked_through_the_store_and_a_damaged_value_is_encoded_again(tmp_path: Path) -> None:
    with running_collector() as collector, traced(tmp_path / "run", collector) as cluster:
        url = picture_url((30, 200, 30))
        made, headers = parent_of_a_trace()
        ask(cluster, url, headers)
        tower = named(spans_of(collector, made, has("tower", "PD request")), "tower")

        restart_pd_worker(cluster)  # the next one has nothing in memory
        read, headers = parent_of_a_trace()
        ask(cluster, url, headers)
        load = named(spans_of(collector, read, has("PD request", "load item")), "load item")
        assert load.attributes["triptych.item.source"] == "store"
        assert load.links == ((made, tower.span_id),)

        restart_pd_worker(cluster)
        damage_embeddings(cluster)
        again, headers = parent_of_a_trace()
        ask(cluster, url, headers)
        spans = spans_of(collector, again, has("PD request", "load item", "save", "chat demo"))
        assert named(spans, "encode item").attributes["triptych.item.re_encode"] is True
        assert "item damaged" in named(spans, "PD request").events
        # The encoder worker has kept its output: it saves that again, with the span that computed it.
        assert not has("tower")(spans)
        assert named(spans, "load item").links == ((made, tower.span_id),)
        assert not named(spans, "chat demo").failed


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
