"""Spans of a real encoder worker, and the producer that its embeddings carry through the store."""

from __future__ import annotations

from support.data.pictures import picture
from support.engine.encoder_bench import NAMESPACE, Job, OpenBench, png
from support.tracing.spans import kept_tracer, new_context
from support.waiting import until
from triptych.base.tracing.context import SpanContext, from_bytes, metadata
from triptych.store.embedding_store import EmbeddingStore
from triptych.store.results import Loaded


async def producer_of(store: EmbeddingStore, key: str) -> SpanContext | None:
    """The context that a reader of the item gets with it."""
    [plan] = await store.look_up([(key, NAMESPACE)])
    assert plan is not None
    loaded = await store.load(plan, lambda nbytes: memoryview(bytearray(nbytes)))
    assert isinstance(loaded, Loaded)
    return from_bytes(loaded.producer)


async def test_an_embedding_carries_the_span_that_computed_it(
    open_bench: OpenBench, store: EmbeddingStore
) -> None:
    tracer, kept = kept_tracer()
    parent = new_context(sampled=True)
    async with open_bench(tracer=tracer) as b:
        job = await Job(b, png(picture(1, 96, 64)), metadata=metadata(parent)).planned()
        await job.finished()
        await until(lambda: "save" in kept.names(), "the job's spans")
        server = kept.one("encoder job")
        assert server.parent == parent
        stages = [span for span in kept.spans if span.parent == server.context]
        assert [span.name for span in stages] == ["preprocess", "wait for tower", "tower", "save"]
        assert all(server.start <= span.start <= span.end <= server.end + 0.001 for span in stages), stages
        assert await producer_of(store, job.key) == kept.one("tower").context
