"""Prompts of encoder-decoder models: the decoder's, and the text encoder's, as token ids.

The first functions are pure. A decoder prompt given as text to a model of texts is tokenised as the
encoder's is, with an end token, behind the start token. Beside audio or a picture it is the beginning of the
answer, and goes behind the model's own start. Token ids are taken as they are, behind the start token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from triptych.base.errors import ContextTooLong, InternalError, InvalidRequest
from triptych.base.request import MAX_CHARS_PER_TOKEN
from triptych.base.types import ItemPlan, MMFeature, Placement
from triptych.models.base import DecoderSide, PromptDefaults
from triptych.models.geometry import MAX_ROWS
from triptych.pd_worker.frontend.prompt import Prompt
from triptych.pd_worker.frontend.tokenization import GuardedTokenizer
from triptych.protos import common_pb2, pd_pb2


def behind_start(token_ids: Sequence[int], defaults: PromptDefaults) -> tuple[int, ...]:
    """A decoder prompt given as ids: the start token goes before it unless it is there already."""
    return defaults.prepend_start(token_ids)


def tokenized(
    token_ids: Sequence[int], head: Sequence[int], tail: Sequence[int], defaults: PromptDefaults
) -> tuple[int, ...]:
    """A decoder prompt given as text, between the tokenizer's own special tokens `head` and `tail`.

    Special tokens that the text itself begins or ends with are not repeated.
    """
    given, head, tail = tuple(token_ids), tuple(head), tuple(tail)
    if given[:1] != (defaults.start,) and given[: len(head)] != head:
        given = (*head, *given)
    if given[len(given) - len(tail) :] != tail:
        given = (*given, *tail)
    return defaults.prepend_start(given)


def behind_default(token_ids: Sequence[int], defaults: PromptDefaults) -> tuple[int, ...]:
    """A decoder prompt given as text, tokenised without special tokens of the tokenizer's own.

    The part of the default prompt with which the text itself begins is not repeated.
    """
    given, default = tuple(token_ids), defaults.token_ids
    for at in range(len(default)):
        rest = default[at:]
        if given[: len(rest)] == rest or (at == 0 and given[:1] == (defaults.start,)):
            return (*default[:at], *given)
    return (*default, *given)


def task_options(message: common_pb2.Transcription) -> dict[str, object]:
    """Options for the family's prompt and logits rules; fields that are not set are absent."""
    options: dict[str, object] = {}
    if message.language:
        options["language"] = message.language
    if message.task:
        options["task"] = message.task
    if message.timestamps:
        options["timestamps"] = True
    if message.detect_language:
        options["detect_language"] = True
    return options


@dataclass(frozen=True, slots=True)
class TwoPrompts:
    """The decoder's prompt with its one cross item, and the text encoder's; `options` are the task's."""

    prompt: Prompt
    encoder_token_ids: tuple[int, ...]
    options: Mapping[str, object]


class EncDecPrompts:
    """Builds both prompts for one checkpoint. Thread-safe. Errors are InvalidRequest and name the field."""

    def __init__(
        self, tokenizer: Tokenizer, guarded: GuardedTokenizer, decoder: DecoderSide, max_model_len: int
    ) -> None:
        # As transformers calls it: truncation and padding of the file are off.
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._guarded = guarded
        self._decoder = decoder
        self._max_model_len = max_model_len
        plain, whole = (
            self._tokenizer.encode("a", add_special_tokens=special).ids for special in (False, True)
        )
        begin = next((at for at in range(len(whole)) if whole[at : at + len(plain)] == plain), 0)
        #: What the tokenizer puts before and after a text.
        self._around = whole[:begin], whole[begin + len(plain) :]

    def build(self, message: pd_pb2.SubmitRequest, plans: Sequence[ItemPlan]) -> TwoPrompts:
        """Both prompts of a request with these items; a resumed one's are those of the earlier attempt."""
        plan = self._check(message, plans)
        options = task_options(message.transcription)
        if previous := self._previous(message.transcription.prompt):
            options["prompt_ids"] = previous
        features = (MMFeature(plan, Placement(0, 0)),)
        encoder = self._encoder_ids(message.encoder_prompt, plan)
        if message.HasField("resume") and message.resume.prompt_token_ids:
            token_ids = tuple(message.resume.prompt_token_ids)
            self._check_ids(token_ids, "prompt_token_ids", "resume")
        else:
            token_ids = self._decoder_ids(message, options)
        return TwoPrompts(Prompt(token_ids, features), encoder, options)

    def _check(self, message: pd_pb2.SubmitRequest, plans: Sequence[ItemPlan]) -> ItemPlan:
        if message.messages:
            raise InvalidRequest(
                "messages: an encoder-decoder model knows no conversations: send encoder_prompt",
                param="messages",
            )
        if len(plans) != 1:
            raise InvalidRequest(
                f"an encoder-decoder model takes exactly one encoder prompt, not {len(plans)}",
                param="encoder_prompt",
            )
        if message.HasField("transcription"):
            if self._decoder.modality != "audio":
                raise InvalidRequest("transcription: this model takes no audio", param="transcription")
            if message.HasField("prompt"):
                raise InvalidRequest(
                    "prompt and transcription exclude each other: both say how the decoder begins",
                    param="prompt",
                )
        if message.HasField("encoder_prompt") and plans[0].modality != "text":
            raise InvalidRequest("encoder_prompt: this model's encoder reads no text", param="encoder_prompt")
        return plans[0]

    def _encoder_ids(self, message: common_pb2.EncoderPrompt, plan: ItemPlan) -> tuple[int, ...]:
        """Token ids as the encoder worker has made them; none for audio."""
        kind = message.WhichOneof("body")
        if kind is None:
            return ()
        if kind == "token_ids":
            ids = tuple(message.token_ids.ids)
        else:
            # The encoder worker has taken it: its tokens may stand for more characters than others do.
            most = self._decoder.cross.max_rows if self._decoder.cross is not None else None
            self._check_chars(message.text, most or MAX_ROWS, "encoder_prompt")
            ids = tuple(self._tokenizer.encode(message.text).ids)
        if len(ids) != plan.rows:
            raise InternalError(
                f"the encoder has read {plan.rows} tokens, but the prompt has {len(ids)}: "
                "encoder and PD workers have different tokenizers"
            )
        return ids

    def _decoder_ids(self, message: pd_pb2.SubmitRequest, options: Mapping[str, object]) -> tuple[int, ...]:
        defaults = self._decoder.prompt_defaults(options)
        match message.prompt.WhichOneof("body") if message.HasField("prompt") else "":
            case "":
                return defaults.token_ids
            case "token_ids":
                ids = tuple(message.prompt.token_ids.ids)
                self._check_ids(ids, "prompt", "prompt")
                return ids if message.prompt.unmodified else behind_start(ids, defaults)
        self._check_chars(message.prompt.text, self._max_model_len, "prompt")
        text_ids = self._text_ids(message.prompt.text)
        if self._decoder.modality == "text":
            return tokenized(text_ids, *self._around, defaults)
        return behind_default(text_ids, defaults)

    def _text_ids(self, text: str) -> list[int]:
        """Token ids of the text, with the special tokens that it spells and no others."""
        return self._guarded.encode_raw(text, add_special_tokens=False)

    def _previous(self, text: str) -> tuple[int, ...]:
        """A transcription's prompt, for the family to put before its start.

        No text of it becomes a special token.
        """
        if not text.strip():
            return ()
        self._check_chars(text, self._max_model_len, "prompt")
        plain = self._guarded.protect(" " + text.strip())
        return tuple(self._guarded.encode(plain, add_special_tokens=False))

    def _check_ids(self, ids: Sequence[int], name: str, param: str) -> None:
        vocab_size = self._decoder.geometry.vocab_size
        if not ids:
            raise InvalidRequest(f"{name} must hold at least one token", param=param)
        if max(ids) >= vocab_size:
            raise InvalidRequest(f"{name} holds token ids beyond {vocab_size - 1}", param=param)

    def _check_chars(self, text: str, tokens: int, param: str) -> None:
        if len(text) > tokens * MAX_CHARS_PER_TOKEN:
            raise ContextTooLong(
                f"{param} has {len(text)} characters, more than {tokens} tokens hold: shorten it", param=param
            )
