"""What kind of prompt a model takes, and whether a request fits the model that it names."""

from __future__ import annotations

from dataclasses import dataclass, replace

from triptych.base.errors import InvalidRequest, RequestError
from triptych.proxy.call.chat import ChatCall, EncoderPrompt

_READS = {"image": "pictures", "audio": "sound", "text": "text"}


@dataclass(frozen=True, slots=True)
class ModelKind:
    """What a model takes: `modality` is that of its items ("image", "audio", "text")."""

    encoder_decoder: bool = False
    modality: str = "image"

    @property
    def input_modalities(self) -> tuple[str, ...]:
        """What a prompt may consist of: an encoder-decoder model reads the one kind that its encoder does."""
        return (self.modality,) if self.encoder_decoder else ("text", self.modality)


def fit(call: ChatCall, kind: ModelKind) -> ChatCall:
    """The call as a model of this kind takes it; InvalidRequest names the field that the model cannot take.

    Of a text model, a prompt that stands alone is the encoder's.
    """
    encoder = call.encoder
    if not kind.encoder_decoder:
        if encoder is not None:
            remedy = "messages with the picture" if encoder.modality == "image" else "prompt or messages"
            raise InvalidRequest(
                f"{encoder.param}: {_name(call)} is not an encoder-decoder model; send {remedy}",
                param=encoder.param,
            )
        return call
    if call.messages:
        raise InvalidRequest(
            f"messages: {_name(call)} is an encoder-decoder model, which does not support conversations: use "
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
