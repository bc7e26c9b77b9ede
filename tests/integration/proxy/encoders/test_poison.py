"""A picture that ends every encoder which takes it up."""

from __future__ import annotations

import asyncio
import logging

import pytest
from openai import BadRequestError

from support.fakes.fake_workers import key_of, picture, user, whole_text
from support.fakes.proxy_fakes import FakeCluster
from support.waiting import until

POISON = picture("poison")


@pytest.mark.parametrize("encoders", [1, 2])
@pytest.mark.parametrize("stage", ["plan", "tower"])
async def test_a_picture_that_ends_three_encoders_is_refused_and_the_others_go_on(store, encoders, stage):
    async with FakeCluster(store, encoders=encoders) as cluster:
        for encoder in cluster.encoders:
            encoder.ends_at[key_of(POISON)] = stage
        bad = asyncio.create_task(cluster.ask(user("?", POISON)))
        pictures = asyncio.gather(*(cluster.stream(user("?", picture(f"p{i}"))) for i in range(6)))
        assert await cluster.stream([{"role": "user", "content": "count"}]) == whole_text(8)
        with pytest.raises(BadRequestError, match="3 encoder workers ended") as caught:
            await bad
        assert caught.value.param == "messages[0].content[0].image_url.url"
        assert sum(len(encoder.restarts) for encoder in cluster.encoders) == 3
        assert await pictures == [whole_text(8)] * 6
        await cluster.at_rest()


async def test_the_items_that_an_encoder_loses_make_one_line(store, caplog):
    async with FakeCluster(store) as cluster:
        encoder = cluster.encoders[0]
        encoder.gate.clear()
        asked = asyncio.create_task(cluster.ask(user("?", *(picture(f"p{i}") for i in range(4)))))
        await until(lambda: len(encoder.media) == 4)
        with caplog.at_level(logging.INFO, "triptych.proxy.encoders.job_runner"):
            await encoder.kill()
            await until(lambda: "elsewhere" in caplog.text)
            encoder.gate.set()
            await encoder.start()
            await asked
        first = next(message for message in caplog.messages if "elsewhere" in message)
        assert f"{encoder.address}: 4 (" in first
