"""Segments of videos, as encoder workers divide them: items that several workers encode at once."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import pairwise

import msgspec
from grpc import aio

from triptych.base.hashing import rendezvous, tenant_digest
from triptych.base.rpc.channels import MEDIA_FRAME_BYTES
from triptych.protos import encoder_pb2, encoder_pb2_grpc
from triptych.proxy.splitter import SplitItem, VideoSegment
from triptych.proxy.workers import KnownWorkers

logger = logging.getLogger(__name__)

#: How long a worker may take to divide a video; above it the video is one item.
SPLIT_SECONDS = 10.0
#: Workers that are asked about one video.
_ASKED = 2
#: Videos whose segments are remembered.
_REMEMBERED = 4096


class VideoSplitter:
    """Asks one encoder worker about each new video; `channel` connects to an address."""

    def __init__(self, pool: KnownWorkers, channel: Callable[[str], aio.Channel]) -> None:
        self._pool = pool
        self._channel = channel
        self._known: OrderedDict[str, Sequence[VideoSegment]] = OrderedDict()

    async def segments(
        self, video: SplitItem, namespace: str, salt: str, tenant: str = ""
    ) -> Sequence[VideoSegment]:
        """The segments of a video; empty where it is one item, or no worker divides it in time."""
        key = video.mm_hash
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        for address in self._workers(key, namespace)[:_ASKED]:
            try:
                async with asyncio.timeout(SPLIT_SECONDS):
                    segments = self._known[key] = await self._ask(address, video, namespace, salt, tenant)
            except (aio.AioRpcError, TimeoutError, KeyError) as error:  # KeyError: it has gone meanwhile
                logger.info("encoder worker %s does not divide a video: %r", address, error)
                continue
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
            return segments
        return ()

    def _workers(self, key: str, namespace: str) -> list[str]:
        serving = [worker.info for worker in self._pool.serving("encoder") if not worker.silent]
        able = [info.address for info in serving if namespace in info.namespaces]
        return sorted(able, key=lambda address: rendezvous(key, address), reverse=True)

    async def _ask(
        self, address: str, video: SplitItem, namespace: str, salt: str, tenant: str
    ) -> Sequence[VideoSegment]:
        job = encoder_pb2.EncodeJob(
            job_id=f"split-{video.mm_hash[:12]}",
            mm_hash=video.mm_hash,
            namespace=namespace,
            modality=video.modality,
            processor_options=msgspec.json.encode(video.options, order="sorted").decode(),
            salt=salt,
            media_bytes=video.media.nbytes,
            timeout=SPLIT_SECONDS,
            tenant=tenant_digest(tenant),
        )

        async def requests() -> AsyncIterator[encoder_pb2.EncodeRequest]:
            yield encoder_pb2.EncodeRequest(job=job)
            async for frame in video.media.frames(MEDIA_FRAME_BYTES):
                yield encoder_pb2.EncodeRequest(media=frame)

        stub = encoder_pb2_grpc.EncoderServiceStub(self._channel(address))
        split: aio.StreamUnaryMultiCallable[encoder_pb2.EncodeRequest, encoder_pb2.VideoSegments]
        split = stub.SplitVideo
        answer = await split(requests())
        # No seconds from a worker of an earlier release: one item.
        ends = zip(answer.ends, answer.seconds, strict=False)
        moments = pairwise([(0, 0.0), *ends])
        return [VideoSegment(a, b, answer.extra_rows, since, until) for (a, since), (b, until) in moments]
