"""Which encoder workers are asked about a video, and what becomes of one that nobody divides."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from triptych.proxy.encoders.video_splitter import VideoSplitter

NAMESPACE = "ab" * 32
WORKERS = ("a:1", "b:1", "c:1")


async def test_a_video_is_one_item_where_the_workers_have_gone_while_it_waited() -> None:
    """Of those known at first two are asked, one after the other."""
    asked: list[str] = []

    def channel(address: str) -> Any:
        asked.append(address)
        raise KeyError(("encoder", address))

    infos = [SimpleNamespace(address=address, namespaces=(NAMESPACE,)) for address in WORKERS]
    pool: Any = SimpleNamespace(
        serving=lambda role: [SimpleNamespace(info=info, silent=False) for info in infos]
    )
    media = SimpleNamespace(nbytes=3)
    video: Any = SimpleNamespace(mm_hash="cd" * 32, modality="video", options={}, media=media)
    assert await VideoSplitter(pool, channel).segments(video, NAMESPACE, "") == ()
    assert len(set(asked)) == 2
