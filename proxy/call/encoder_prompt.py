"""What the encoder of an encoder-decoder model reads, and what a speech model shall do with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from triptych.base.errors import InvalidRequest
from triptych.proxy.media.source import AudioPart, ImagePart

#: Form of a text item whose media are token ids, little-endian uint32.
TOKEN_IDS = "token_ids"


@dataclass(frozen=True, slots=True)
class EncoderPrompt:
    """A text, token ids, audio or a picture for the encoder; `param` is the request field that holds it.

    `start_frame` is where a window of a long audio file begins.
    """

    source: str | tuple[int, ...] | AudioPart | ImagePart
    param: str
    start_frame: int = 0

    @property
    def modality(self) -> str:
        if isinstance(self.source, AudioPart):
            return "audio"
        return "image" if isinstance(self.source, ImagePart) else "text"

    @property
    def options(self) -> Mapping[str, object]:
        """Processor options of the item: part of its key."""
        if self.start_frame:
            return {"start_frame": self.start_frame}
        return {"form": TOKEN_IDS} if isinstance(self.source, tuple) else {}

    def text_bytes(self) -> bytes:
        """The item's media, where the prompt is no file; InvalidRequest for text that is no Unicode."""
        if isinstance(self.source, tuple):
            return b"".join([token.to_bytes(4, "little") for token in self.source])
        assert isinstance(self.source, str)
        try:
            return self.source.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(
                f"{self.param} holds text that is not valid Unicode", param=self.param
            ) from None


@dataclass(frozen=True, slots=True)
class Transcription:
    """What a speech model shall do; empty fields are the model's defaults. See `common.proto`."""

    language: str = ""
    task: str = ""
    prompt: str = ""
    timestamps: bool = False
    detect_language: bool = False
