"""Pictures by URL, in the formats that users have: the tokens of transformers on the same files."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.image_utils import load_image

from support.data.oracle import assert_exact
from support.data.traffic import Case, ask_all, expected, picture
from support.processes.web import WebServer, redirect, reply

TOKENS = 64
QUESTION = "what is in the picture"

pytestmark = pytest.mark.timeout(300)


@dataclass(frozen=True)
class UrlCase(Case):
    """The pictures of `images`, sent as `urls`."""

    urls: tuple[str, ...] = ()

    def client_messages(self) -> list[dict[str, Any]]:
        content: list[dict[str, Any]] = [
            {"type": "image_url", "image_url": {"url": self.urls[part], "detail": "low"}}
            if isinstance(part, int)
            else {"type": "text", "text": part}
            for part in self.parts
        ]
        return [{"role": "user", "content": content}]


def encoded(image: Image.Image, format: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def files() -> dict[str, bytes]:
    turned = Image.Exif()
    turned[0x0112] = 6
    deep = np.asarray(picture(5, 64, 64).convert("L")).astype(np.uint16) * 257
    clear = picture(6, 64, 64)
    clear.putalpha(picture(7, 64, 64).convert("L"))
    return {
        "turned.jpg": encoded(picture(1, 96, 64), "JPEG", exif=turned),
        "cmyk.jpg": encoded(picture(2, 64, 64).convert("CMYK"), "JPEG"),
        "deep.png": encoded(Image.fromarray(deep), "PNG"),
        "palette.png": encoded(picture(3, 64, 64).convert("P"), "PNG"),
        "clear.webp": encoded(clear, "WEBP"),
        "moving.gif": encoded(picture(8, 64, 64), "GIF", save_all=True, append_images=[picture(9, 64, 64)]),
        "plain.bmp": encoded(picture(10, 96, 64), "BMP"),
    }


async def test_every_format_by_url_gives_transformers_tokens(families) -> None:
    async with WebServer() as web:
        cases = []
        for name, data in files().items():
            web.give(f"/moved/{name}", redirect(f"/{name}"))
            web.give(f"/{name}", reply(data, content_type="application/octet-stream"))
            image = load_image(base64.b64encode(data).decode())
            cases.append(
                UrlCase((0, QUESTION, 1), (image, image), (web.url(f"/moved/{name}"), web.url(f"/{name}")))
            )
        reference = expected(families.checkpoints["qwen3_vl"], cases, TOKENS)
        answers = await ask_all(families.cluster.url, cases, TOKENS, model="qwen3_vl")
    assert_exact(reference, [answer.token_ids for answer in answers])
    assert [a.prompt_token_ids for a in answers] == [r.prompt_token_ids for r in reference]
    for answer in answers:
        assert answer.timings is not None
        assert answer.timings["fetch"] > 0
        assert len({item["mm_hash"] for item in answer.timings["items"]}) == 1
