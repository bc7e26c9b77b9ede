"""Request bodies, made before the window begins so that sending costs a copy: texts and pictures."""

from __future__ import annotations

import base64
import io
import mmap
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack

import msgspec

from triptych_bench.goodput.load.job import LoadJob, Target
from triptych_bench.goodput.load.pictures import draw
from triptych_bench.goodput.load.words import text
from triptych_bench.goodput.load.workload import Picture, PlannedRequest

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


def words_per_token(short: tuple[int, int], long: tuple[int, int]) -> float:
    """From two (words, prompt tokens by the server's usage): what chat templates add falls out."""
    words, tokens = long[0] - short[0], long[1] - short[1]
    return words / tokens if words > 0 and tokens > 0 else 1.0


#: JPEG quality of PIL's default, which `vllm bench serve` sends too.
QUALITY = 75


def jpeg(picture: Picture) -> bytes:
    """The file's bytes."""
    buffer = io.BytesIO()
    draw(picture).save(buffer, format="JPEG", quality=QUALITY)
    return buffer.getvalue()


def data_url(picture: Picture) -> bytes:
    """The file as a data: URL, ready to stand in JSON."""
    return b"data:image/jpeg;base64," + base64.b64encode(jpeg(picture))
