"""Where pictures come from: the request itself, a folder that is open to clients, and nowhere else."""

from __future__ import annotations

import asyncio
import base64
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from yarl import URL

from support.data.media import content, kept_bytes, media_loader
from support.processes.web import PNG
from triptych.base.errors import ConfigError, InvalidRequest, TooLarge
from triptych.proxy.media.fetcher import FetchFailed, _redirected
from triptych.proxy.media.loader import MediaLoader, decode_base64
from triptych.proxy.media.source import ImagePart, image_format
from triptych.proxy.media.spool import MediaHold


async def loaded(loader: MediaLoader, part: ImagePart) -> bytes:
    """The part's bytes; nothing of it stays."""
    hold = MediaHold()
    hold.join()
    try:
        return await content(await loader.load(part, hold))
    finally:
        hold.leave()
        await asyncio.sleep(0)
        assert kept_bytes(loader.spool) == 0


def part_of(url: str) -> ImagePart:
    return ImagePart.of_url(url, "field")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inside = tmp_path / "open"
    (inside / "deep").mkdir(parents=True)
    (inside / "a.png").write_bytes(PNG)
    (inside / "deep" / "ä b.png").write_bytes(PNG)
    (inside / "text.png").write_bytes(b"root:x:0:0")
    (inside / "big.png").write_bytes(PNG + bytes(1 << 20))
    (inside / "inner").symlink_to(inside / "a.png")
    (inside / "escape.png").symlink_to(tmp_path / "secret.png")
    (inside / "out").symlink_to(tmp_path)
    os.mkfifo(inside / "pipe")
    (tmp_path / "secret.png").write_bytes(PNG)
    (tmp_path / "open-too").mkdir()
    (tmp_path / "open-too" / "a.png").write_bytes(PNG)
    return inside


@pytest.mark.parametrize("name", ["a.png", "deep/%C3%A4%20b.png", "inner", "deep/../a.png"])
async def test_a_file_below_the_folder_is_read(folder: Path, name: str) -> None:
    async with media_loader(allowed_media_folder=str(folder)) as loader:
        assert await loaded(loader, part_of(f"file://{folder}/{name}")) == PNG


@pytest.mark.parametrize(
    "name",
    [
        "../secret.png",
        "deep/../../secret.png",
        "%2e%2e/secret.png",
        "escape.png",
        "out/secret.png",
        "../open-too/a.png",
        "pipe",
        "deep",
        "",
        "missing.png",
        "a.png/x",
        "x" * 300,
    ],
)
async def test_what_is_outside_or_no_regular_file_is_refused_in_the_same_words(folder, name):
    async with media_loader(allowed_media_folder=str(folder)) as loader:
        with pytest.raises(InvalidRequest) as caught:
            await loaded(loader, part_of(f"file://{folder}/{name}"))
        assert caught.value.message == "field: no such file below the folder that is served"


async def test_a_file_that_is_too_large_or_no_picture_is_refused(folder: Path) -> None:
    async with media_loader(allowed_media_folder=str(folder), max_media_bytes=1 << 20) as loader:
        with pytest.raises(TooLarge):
            await loaded(loader, part_of(f"file://{folder}/big.png"))
        with pytest.raises(InvalidRequest, match="no PNG, JPEG"):
            await loaded(loader, part_of(f"file://{folder}/text.png"))


async def test_without_the_flag_no_file_is_served(folder: Path) -> None:
    async with media_loader() as loader:
        with pytest.raises(InvalidRequest) as caught:
            await loaded(loader, part_of(f"file://{folder}/a.png"))
        assert caught.value.param == "field"


async def test_inline_pictures_have_the_same_byte_limit() -> None:
    text = base64.b64encode(bytes(2000)).decode()
    async with media_loader(max_media_bytes=1999) as loader:
        for source in (text, bytes(2000)):
            with pytest.raises(TooLarge):
                await loaded(loader, ImagePart(source, "field"))
        assert await loaded(loader, ImagePart(bytes(1999), "field")) == bytes(1999)


@pytest.mark.parametrize(
    "flags",
    [
        {"max_media_bytes": 65 << 20},
        {"max_media_bytes": 0},
        {"media_timeout": 0.0},
        {"media_fetches": 0},
        {"allowed_media_folder": "/nowhere"},
        {"allowed_media_folder": "/"},
        {"spool_folder": "/nowhere"},
        {"allow_media_networks": "x"},
    ],
)
async def test_flags_that_cannot_work_are_config_errors_that_name_them(flags: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="--" + next(iter(flags)).replace("_", "-")):
        async with media_loader(**flags):
            pass


async def test_a_source_is_loaded_once_for_all_who_ask_and_kept_until_the_last_leaves() -> None:
    async with media_loader() as loader:
        hold, loads = MediaHold(), 0

        async def load() -> object:
            nonlocal loads
            loads += 1
            return await loader.spool.keep(PNG)

        hold.join()
        hold.join()
        first, second = await asyncio.gather(hold.get("a", load), hold.get("a", load))  # type: ignore[arg-type]
        assert first is second
        assert loads == 1
        hold.leave()
        assert await content(first) == PNG
        hold.leave()
        await asyncio.sleep(0)
        assert kept_bytes(loader.spool) == 0


async def test_one_who_leaves_early_does_not_end_the_load_of_the_others() -> None:
    async with media_loader() as loader:
        hold, go_on = MediaHold(), asyncio.Event()

        async def load() -> object:
            await go_on.wait()
            return await loader.spool.keep(PNG)

        hold.join()
        hold.join()
        gone = asyncio.create_task(hold.get("a", load))  # type: ignore[arg-type]
        stays = asyncio.create_task(hold.get("a", load))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        gone.cancel()
        hold.leave()
        go_on.set()
        assert await content(await stays) == PNG
        hold.leave()


def test_https_is_never_left_for_http() -> None:
    with pytest.raises(FetchFailed):
        _redirected(URL("https://example.com/a"), "http://example.com/a")
    assert str(_redirected(URL("http://example.com/a"), "https://example.com/b")) == "https://example.com/b"
    assert str(_redirected(URL("https://example.com/a/b?c"), "../d")) == "https://example.com/d"


KNOWN = {
    PNG: "png",
    b"\xff\xd8\xff\xe0": "jpeg",
    b"GIF89a": "gif",
    b"GIF87a": "gif",
    b"BM" + bytes(20): "bmp",
}
KNOWN[b"RIFF\x00\x00\x00\x00WEBPVP8 "] = "webp"
OTHERS = [
    b"RIFF\x00\x00\x00\x00WAVEfmt ",
    b"BM",
    b"II*\x00",
    b"MM\x00*",
    b"8BPS",
    b"%!PS",
    b"<svg",
    b"\x80\x04\x95",
    b"",
]
OTHERS += [b"\x00\x00\x00\x20ftyp" + brand for brand in (b"avif", b"heic", b"mp42")]


@pytest.mark.parametrize(("head", "name"), [*KNOWN.items(), *((head, None) for head in OTHERS)])
def test_the_first_bytes_tell_the_format(head: bytes, name: str | None) -> None:
    assert image_format(head) == name


@pytest.mark.parametrize("width", [64, 76])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("kind", [str, lambda text: memoryview(text.encode())])
def test_base64_in_lines_is_read(width: int, end: str, kind: Callable[[str], Any]) -> None:
    data = random.Random(width).randbytes(2 << 20)
    text = base64.b64encode(data).decode()
    lines = end.join(text[at : at + width] for at in range(0, len(text), width)) + end
    assert decode_base64(kind(lines), "field") == data


@pytest.mark.parametrize("text", ["AA-_" * 9, "AA" + "\n" + "é", "AAAA\n" * 99 + "A", "-" * 400])
def test_what_is_no_base64_is_refused_and_the_url_safe_alphabet_named(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_base64(text, "field")
    assert caught.value.param == "field"
    assert ("send + and / in place of - and _" in caught.value.message) == ("-" in text)
