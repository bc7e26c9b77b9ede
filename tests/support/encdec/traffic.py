"""Requests of encoder-decoder models for a cluster, as clients send them and as the reference reads them."""

from __future__ import annotations

import base64
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from openai import AsyncOpenAI
from PIL import Image

from support.data.oracle import OracleResult
from support.data.sounds import audio_file, sound
from support.data.traffic import Answer, client_of
from support.encdec.oracle import Inputs, audio_inputs, greedy, image_inputs, text_inputs
from support.processes.cluster import data_url
from support.waiting import within


@dataclass(frozen=True)
class EncDecCase:
    """One request: what the encoder reads is a text, a picture, or the seconds and seed of a sound."""

    source: str | Image.Image | tuple[float, int] = field(hash=False)
    decoder_ids: tuple[int, ...]
    #: Everything of it waits for an encoder.
    encoded: ClassVar[bool] = True

    def fields(self) -> dict[str, Any]:
        """What the body says of the encoder."""
        if isinstance(self.source, str):
            return {"encoder_prompt": self.source}
        if isinstance(self.source, tuple):
            return {"multi_modal_data": {"audio": {"data": base64.b64encode(_wav(*self.source)).decode()}}}
        return {"multi_modal_data": {"image": {"url": data_url(self.source)}}}

    def inputs(self, path: Path) -> Inputs:
        if isinstance(self.source, str):
            return text_inputs(path, self.source)
        if isinstance(self.source, tuple):
            seconds, seed = self.source
            return audio_inputs(path, sound(seconds, seed=seed))
        return image_inputs(path, self.source)


@functools.cache
def _wav(seconds: float, seed: int) -> bytes:
    return audio_file(sound(seconds, seed=seed), 16_000, "WAV", subtype="FLOAT")


def expected(path: Path, cases: Sequence[EncDecCase], tokens: int) -> list[OracleResult]:
    """The reference's answers."""
    return [
        greedy(path, case.inputs(path), max_new_tokens=tokens, decoder_ids=list(case.decoder_ids))
        for case in cases
    ]


async def ask(
    url: str, case: EncDecCase, tokens: int, model: str = "", into: Answer | None = None, **extra: Any
) -> Answer:
    """Streams one greedy answer of exactly `tokens` tokens; see `support.data.traffic.ask`."""
    answer = Answer() if into is None else into
    async with client_of(url) as client:
        await within("a whole answer", _stream(client, case, tokens, model, answer, extra))
    return answer


async def _stream(
    client: AsyncOpenAI, case: EncDecCase, tokens: int, model: str, answer: Answer, extra: dict[str, Any]
) -> None:
    body = {"ignore_eos": True, "return_token_ids": True} | case.fields() | extra
    stream: Any = await client.completions.create(
        model=model,
        prompt=None,
        max_tokens=tokens,
        temperature=0,
        stream=True,
        extra_body=body | {"decoder_prompt": list(case.decoder_ids)},
    )
    async for chunk in stream:
        for choice in chunk.choices:
            answer.text += choice.text or ""
            answer.token_ids += (choice.model_extra or {}).get("token_ids") or []
            answer.finish_reason = choice.finish_reason or answer.finish_reason
