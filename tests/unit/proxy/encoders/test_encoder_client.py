from __future__ import annotations

import asyncio
from typing import Any

from triptych.protos import encoder_pb2
from triptych.proxy.encoders.encoder_client import EncodeStream


class Channel:
    """Calls that nobody answers."""

    def stream_stream(self, *_: Any, **__: Any) -> None:
        return None


async def test_a_word_that_the_tower_gets_on_gives_the_job_its_whole_time_again() -> None:
    channel: Any = Channel()
    media: Any = None
    owner: Any = None
    job = EncodeStream(channel, encoder_pb2.EncodeJob(), media, owner, phase_timeout=60.0)
    async with asyncio.timeout(30.0) as deadline:
        job._deadline = deadline
        before = deadline.when()
        assert job._handle(encoder_pb2.EncodeEvent(waits=encoder_pb2.JobWaits())) is None
        after = deadline.when()
    assert before is not None
    assert after is not None
    assert after > before
