"""What the encoder of an encoder-decoder model reads, and whether a request fits the model it names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from triptych.errors import InvalidRequest, RequestError
from triptych.proxy.media.source import ImagePart

if TYPE_CHECKING:
    from triptych.proxy.call.chat import ChatCall

#: Form of a text item whose media are token ids, little-endian uint32.
TOKEN_IDS = "token_ids"
_READS = {"image": "pictures", "audio": "sound", "text": "text"}


@dataclass(frozen=True, slots=True)
class ModelKind:
    """What a model takes: `modality` is that of its items ("image", "audio", "text")."""

    encoder_decoder: bool = False
    modality: str = "image"


@dataclass(frozen=True, slots=True)
class AudioFile:
    """An encoded audio file: base64 text, or its bytes."""

    source: str | bytes


@dataclass(frozen=True, slots=True)
class EncoderPrompt:
    """A text, token ids, audio or a picture for the encoder; `param` is the request field that holds it.

    `start_frame` is where a window of a long audio file begins.
    """

    source: str | tuple[int, ...] | AudioFile | ImagePart
    param: str
    start_frame: int = 0

    @property
    def modality(self) -> str:
        if isinstance(self.source, AudioFile):
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
            raise InvalidRequest(f"{self.param} holds text that is no Unicode", param=self.param) from None


@dataclass(frozen=True, slots=True)
class Transcription:
    """What a speech model shall do; empty fields are the model's defaults. See `common.proto`."""

    language: str = ""
    task: str = ""
    prompt: str = ""
    timestamps: bool = False
    detect_language: bool = False


def fit(call: ChatCall, kind: ModelKind) -> ChatCall:
    """The call as a model of this kind takes it; InvalidRequest names the field that the model cannot take.

    Of a text model, a prompt that stands alone is the encoder's.
    """
    encoder = call.encoder
    if not kind.encoder_decoder:
        if encoder is not None:
            remedy = "messages with the picture" if encoder.modality == "image" else "prompt or messages"
            raise InvalidRequest(
                f"{encoder.param}: {_name(call)} is no encoder-decoder model; send {remedy}",
                param=encoder.param,
            )
        return call
    if call.messages:
        raise InvalidRequest(
            f"messages: {_name(call)} is an encoder-decoder model, which knows no conversations: use "
            + _remedy(kind),
            param="messages",
        )
    if encoder is None and kind.modality == "text" and call.prompt is not None:
        return replace(call, encoder=EncoderPrompt(call.prompt, "prompt"), prompt=None)
    if encoder is None or encoder.modality != kind.modality:
        param = encoder.param if encoder is not None else "prompt"
        reads = _READS.get(kind.modality, kind.modality)
        raise InvalidRequest(
            f"{param}: the encoder of {_name(call)} reads {reads}: use {_remedy(kind)}", param=param
        )
    return call


def name_prompt(error: RequestError, param: str) -> RequestError:
    """A worker's complaint about the prompt, in the name of the field that the client sent."""
    if error.param != "prompt" or param == "prompt":
        return error
    return type(error)(f"{param}: {error.message}", param=param, retry_after=error.retry_after)


def _name(call: ChatCall) -> str:
    return f"model {call.model[:80]!r}" if call.model else "the model"


def _remedy(kind: ModelKind) -> str:
    if kind.modality == "audio":
        return "POST /v1/audio/transcriptions, or multi_modal_data.audio in POST /v1/completions"
    if kind.modality == "image":
        return "multi_modal_data.image in POST /v1/completions"
    return "prompt or encoder_prompt in POST /v1/completions"
