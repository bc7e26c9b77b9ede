"""Request bodies, made before the window begins so that sending costs a copy: texts and pictures."""

from __future__ import annotations

import base64
import io
import mmap
import random
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack

import msgspec
import numpy as np
from PIL import Image

from triptych.goodput.load.job import LoadJob, Target
from triptych.goodput.load.workload import Picture, PlannedRequest

_json = msgspec.json.encode


class PictureFile:
    """All pictures of a window as data: URLs in one nameless file: the page cache holds what fits."""

    def __init__(self, pictures: Iterable[Picture]) -> None:
        self._places: dict[Picture, tuple[int, int]] = {}
        self._open = ExitStack()
        file = self._open.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        at = 0
        for picture in pictures:
            if picture not in self._places:
                size = file.write(data_url(picture))
                self._places[picture] = (at, at + size)
                at += size
        file.flush()
        # An empty file cannot be mapped.
        self._map: mmap.mmap | None = None
        if at:
            self._map = self._open.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    def __getitem__(self, picture: Picture) -> bytes:
        assert self._map is not None
        begin, end = self._places[picture]
        return self._map[begin:end]

    def close(self) -> None:
        self._open.close()


class Bodies:
    """The bodies of a job's requests."""

    def __init__(self, job: LoadJob) -> None:
        planned = [request for _, request in job.schedule]
        self.pictures = PictureFile(picture for request in planned for picture in request.pictures)
        self._heads = [_head(job.target, request) for request in planned]
        self._texts = [
            _json({"type": "text", "text": text(request.text_tokens, request.seed, job.words_per_token)})
            for request in planned
        ]
        self._planned = planned

    def body(self, index: int) -> bytes:
        """The JSON body of request `index`: its pictures, then its text."""
        parts = [self._heads[index], b',"messages":[{"role":"user","content":[']
        for picture in self._planned[index].pictures:
            parts += [b'{"type":"image_url","image_url":{"url":"', self.pictures[picture], b'"}},']
        return b"".join([*parts, self._texts[index], b"]}]}"])

    def close(self) -> None:
        self.pictures.close()


def _head(target: Target, request: PlannedRequest) -> bytes:
    """Everything but the messages, without the closing brace."""
    fields = {
        "model": target.model,
        "max_tokens": request.output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if target.ignore_eos:
        fields["ignore_eos"] = True
    if target.timings:
        fields["triptych_timings"] = True
    return _json(fields | dict(target.extra))[:-1]


_LIST = (
    "the of and to in is was for on that with as by at from his her they this be are not have had which "
    "or one you were all their there been many some time very when much new write would like so these "
    "long make thing see him two has look more day could go come did number sound no most people my over "
    "know water than call first who may down side now find any work part take get place made live where "
    "after back little only round man year came show every good me give our under name very through just "
    "form sentence great think say help low line differ turn cause same mean move right boy old too does "
    "tell set three want air well also play small end put home read hand port large spell add even land "
    "here must big high such follow act why ask men change went light kind off need house picture try us "
    "again animal point "
)
WORDS = tuple(_LIST.split())


def text(tokens: int, seed: int, words_per_token: float = 1.0) -> str:
    """Words by chance: every seed begins another prefix, so that no prefix cache answers."""
    rng = random.Random(f"text-{seed}")
    return " ".join(rng.choices(WORDS, k=max(1, round(tokens * words_per_token))))


def words_per_token(short: tuple[int, int], long: tuple[int, int]) -> float:
    """From two (words, prompt tokens by the server's usage): what chat templates add falls out."""
    words, tokens = long[0] - short[0], long[1] - short[1]
    return words / tokens if words > 0 and tokens > 0 else 1.0


#: JPEG quality of PIL's default, which `vllm bench serve` sends too.
QUALITY = 75


def draw(picture: Picture) -> Image.Image:
    """`noise`: every pixel by chance, as vLLM's random-mm has it; `waves`: smooth, with small files."""
    rng = np.random.default_rng(picture.seed)
    if picture.content == "noise":
        pixels = rng.integers(0, 256, (picture.height, picture.width, 3), np.uint8)
    else:
        y, x = np.mgrid[0 : picture.height, 0 : picture.width]
        pace = rng.uniform(0.01, 0.2, (3, 2))
        phase = rng.uniform(0, 6.28, 3)
        waves = [127 + 127 * np.sin(a * x + b * y + p) for (a, b), p in zip(pace, phase, strict=True)]
        pixels = np.stack(waves, -1).astype(np.uint8)
    return Image.fromarray(pixels)


def jpeg(picture: Picture) -> bytes:
    """The file's bytes."""
    buffer = io.BytesIO()
    draw(picture).save(buffer, format="JPEG", quality=QUALITY)
    return buffer.getvalue()


def data_url(picture: Picture) -> bytes:
    """The file as a data: URL, ready to stand in JSON."""
    return b"data:image/jpeg;base64," + base64.b64encode(jpeg(picture))
