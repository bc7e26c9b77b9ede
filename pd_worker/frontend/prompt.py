"""The prompt builder: renders and tokenises messages, expands image tokens, finds the format of tools."""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer

from triptych.base.errors import ContextTooLong, InvalidRequest
from triptych.base.request import MAX_CHARS_PER_TOKEN, Message, TemplateOptions, TextPart
from triptych.base.types import ItemPlan, MMFeature, Placement
from triptych.models.base import DecoderSide
from triptych.models.checkpoint.retriever import retriever_template
from triptych.pd_worker.frontend.chat_template import (
    ChatTemplate,
    TemplateMessage,
    for_template,
    parse_messages,
    parse_tools,
    parse_variables,
    protect_object,
    read_template,
    unwritten_items,
)
from triptych.pd_worker.frontend.item_tokens import written_others, written_token
from triptych.pd_worker.frontend.reasoning import Reasoning, find_reasoning
from triptych.pd_worker.frontend.tokenization import GuardedTokenizer, load_tokenizer
from triptych.pd_worker.frontend.tool_format import find_tool_format, output_markers, with_native_ids
from triptych.pd_worker.frontend.wire import in_words, parse_pair, plain_text

logger = logging.getLogger(__name__)

_NO_OPTIONS = TemplateOptions()


@dataclass(frozen=True, slots=True)
class Prompt:
    """The expanded prompt, and its items with their placements, in slot order."""

    token_ids: tuple[int, ...]
    features: tuple[MMFeature, ...]


class PromptBuilder:
    """Builds prompts for one checkpoint. Thread-safe."""

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: GuardedTokenizer,
        decoder: DecoderSide,
        max_model_len: int,
        *,
        image_token_id: int | None = None,
        others: Mapping[str, int] | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
        reasoning: Reasoning | None = None,
        tool_format: str = "",
        kept: frozenset[int] = frozenset(),
        dropped: frozenset[int] = frozenset(),
        adds_first: bool = True,
    ) -> None:
        """`image_token_id` is what the template writes for an image, the decoder's by default.

        `others` are what it writes for a video or a sound, where it takes them.
        `decode` gives the text of ids; it is needed where items have text around them. `adds_first`: the
        tokenizer's own first token stands before what the template writes.
        """
        self._adds_first = adds_first
        #: What marks the model's reasoning; None where it does not reason.
        self.reasoning = reasoning
        #: How the model writes tool calls; the special tokens of both, which stay in the output's text, and
        #: tokens around an answer, which do not.
        self.tool_format = tool_format
        self.kept, self.dropped = kept, dropped
        image = decoder.image_token_id if image_token_id is None else image_token_id
        #: The modality of each token that stands for an item.
        self._items = {token: modality for modality, token in (others or {}).items()}
        self._items |= {} if image is None else {image: "image"}
        self._decode = decode
        self._template = template
        self._tokenizer = tokenizer
        self._decoder = decoder
        self._max_model_len = max_model_len

    @property
    def modalities(self) -> frozenset[str]:
        """Those of the items that prompts may have: the template writes them, and the class takes them."""
        return frozenset(self._items.values()).intersection(self._decoder.modalities)

    @property
    def guarded(self) -> GuardedTokenizer:
        """The tokenizer that keeps user text from becoming special tokens."""
        return self._tokenizer

    def build(
        self, messages: bytes, plans: Sequence[ItemPlan], options: TemplateOptions = _NO_OPTIONS
    ) -> Prompt:
        """The prompt of Submit's JSON messages; InvalidRequest names what is wrong."""
        return self._build(parse_messages(messages), plans, options)

    def build_pair(self, messages: bytes, plans: Sequence[ItemPlan], *, by_words: bool) -> Prompt:
        """The prompt by which the model scores a document for a query.

        By the chat template where that knows both; else in the form of Qwen's rerankers, or as a pair.
        """
        pair = parse_pair(messages)
        if self._template.takes_documents:
            return self._build(pair, plans, _NO_OPTIONS)
        if by_words:
            return self._build(in_words(pair), plans, _NO_OPTIONS)
        texts = [plain_text(message) for message in pair[-2:]]
        self._check_length(sum(map(len, texts)), "prompt")
        return self._raw(tuple(self._tokenizer.encode_pair(*texts)))

    def _build(
        self, parsed: Sequence[Message], plans: Sequence[ItemPlan], options: TemplateOptions
    ) -> Prompt:
        slots = [modality for message in parsed for modality in message.slots]
        items = self._by_slot(plans)
        if len(slots) != len(items):
            raise InvalidRequest(
                f"messages hold {len(slots)} images, videos and sounds, but {len(items)} items came",
                param="messages",
            )
        if slots != [item[0].modality for item in items]:
            raise InvalidRequest("messages and items name modalities in other orders", param="messages")
        token_ids = self._encode(parsed, options, items)
        self._check_slots(token_ids, slots, parsed)
        return self._expand(token_ids, items)

    def _by_slot(self, plans: Sequence[ItemPlan]) -> list[list[ItemPlan]]:
        """The plans of each slot: one, or those of a video's segments."""
        items: list[list[ItemPlan]] = []
        for plan in plans:
            if items and plan.modality == "video" and self._decoder.continues(plan):
                items[-1].append(plan)
            else:
                items.append([plan])
        return items

    def build_text(self, text: str) -> Prompt:
        """The prompt of a text without a template.

        Special tokens in it count, as the tokenizer has them; an image token stays plain text.
        """
        self._check_length(len(text), "prompt")
        return self._raw(tuple(self._tokenizer.encode_raw(text)))

    def build_token_ids(self, token_ids: Sequence[int]) -> Prompt:
        """The prompt of token ids; InvalidRequest for those that the model lacks, and for image tokens."""
        vocab_size = self._decoder.geometry.vocab_size
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            raise InvalidRequest(f"prompt holds token ids beyond {vocab_size - 1}", param="prompt")
        if self._places.intersection(token_ids):
            raise InvalidRequest("prompt holds image tokens: images come in messages", param="prompt")
        return self._raw(tuple(token_ids))

    def tokenize(self, messages: bytes, options: TemplateOptions = _NO_OPTIONS) -> list[int]:
        """Token ids of a chat's prompt, each item still one token."""
        parsed = parse_messages(messages)
        token_ids = self._encode(parsed, options)
        slots = [modality for message in parsed for modality in message.slots]
        self._check_slots(token_ids, slots, parsed)
        return token_ids

    def resume(
        self, token_ids: Sequence[int], placements: Sequence[tuple[int, int]], plans: Sequence[ItemPlan]
    ) -> Prompt:
        """The prompt that an earlier attempt expanded; InvalidRequest when items and places do not fit."""
        if len(placements) != len(plans):
            raise InvalidRequest(f"{len(placements)} placements for {len(plans)} items", param="resume")
        vocab_size = self._decoder.geometry.vocab_size
        token_ids = tuple(token_ids)
        if not token_ids or max(token_ids) >= vocab_size:
            raise InvalidRequest(f"prompt_token_ids must be from 0 to {vocab_size - 1}", param="resume")
        features, end = [], 0
        for (offset, length), plan in zip(placements, plans, strict=True):
            expected = self._decoder.placeholder(plan)
            if (
                offset < end
                or length != len(expected)
                or list(token_ids[offset : offset + length]) != expected
            ):
                raise InvalidRequest(f"no placeholder of {length} tokens stands at {offset}", param="resume")
            features.append(MMFeature(plan, Placement(offset, length, plan.runs)))
            end = offset + length
        self._check_images(token_ids, features)
        return Prompt(token_ids, tuple(features))

    @property
    def _places(self) -> frozenset[int]:
        """Tokens that stand for items or their rows."""
        return self._decoder.row_token_ids | self._items.keys()

    def _check_images(self, token_ids: tuple[int, ...], features: Sequence[MMFeature]) -> None:
        for token in self._places:
            placed = sum(token_ids[f.placement.offset : f.placement.end].count(token) for f in features)
            if token_ids.count(token) != placed:
                raise InvalidRequest("prompt_token_ids hold image tokens outside placements", param="resume")

    def _raw(self, token_ids: tuple[int, ...]) -> Prompt:
        if not token_ids:
            raise InvalidRequest("prompt must hold at least one token", param="prompt")
        return Prompt(token_ids, ())

    def _encode(
        self, messages: Sequence[Message], options: TemplateOptions, items: Sequence[Sequence[ItemPlan]] = ()
    ) -> list[int]:
        if len(messages) > self._max_model_len:
            # Each message has at least one token; rendering more would only take time.
            raise ContextTooLong(
                f"messages holds {len(messages)} messages, more than the {self._max_model_len} tokens that "
                "the model takes: leave some out",
                param="messages",
            )
        # Before the template: rendering what is too long anyway would only take time.
        self._check_length(sum(message.characters for message in messages), "messages")
        try:
            text = self._with_text_around(self._render(messages, options), items)
            self._check_length(len(text), "messages")
            return self._tokenizer.encode(text, add_special_tokens=self._adds_first)
        except UnicodeError as error:
            raise InvalidRequest("messages hold text that is no Unicode", param="messages") from error

    def _render(self, messages: Sequence[Message], options: TemplateOptions) -> str:
        protect, messages = self._tokenizer.protect, with_native_ids(self.tool_format, messages)
        shaped = [for_template(message, index, protect) for index, message in enumerate(messages)]
        mark = _mark_end(messages[-1], shaped[-1]) if options.continue_final_message else ""
        text = self._template.render(
            shaped,
            tools=[protect_object(tool, protect, "tools", 1) for tool in parse_tools(options.tools)],
            variables=protect_object(parse_variables(options.variables), protect, "chat_template_kwargs"),
            generation_prompt=options.generation_prompt and not mark,
        )
        return _cut_at(text, mark) if mark else text

    def _with_text_around(self, text: str, items: Sequence[Sequence[ItemPlan]]) -> str:
        """The text with that which items have around their placeholders, so that it is tokenised with it."""
        if self._decode is None or not self._items:
            return text
        around = [
            (self._decoder.text_around(item[0])[0], self._decoder.text_around(item[-1])[1]) for item in items
        ]
        if not any(head or tail for head, tail in around):
            return text
        tokens = {self._decode([token]) for token in self._items}
        parts = re.split(f"({'|'.join(map(re.escape, tokens))})", text)
        if len(parts) != 2 * len(items) + 1:
            return text
        for at, (head, tail) in enumerate(around):
            parts[2 * at + 1] = f"{self._decode(head)}{parts[2 * at + 1]}{self._decode(tail)}"
        return "".join(parts)

    def _check_length(self, characters: int, param: str) -> None:
        if characters > self._max_model_len * MAX_CHARS_PER_TOKEN:
            raise ContextTooLong(
                f"the prompt has {characters} characters, which is more than the {self._max_model_len} "
                f"tokens that the model takes: shorten {param}",
                param=param,
            )

    def _check_slots(
        self, token_ids: Sequence[int], slots: Sequence[str], messages: Sequence[Message]
    ) -> None:
        tokens = {modality: token for token, modality in self._items.items()}
        for modality in {**tokens, **dict.fromkeys(slots)}:
            expected = slots.count(modality)
            written = token_ids.count(tokens[modality]) if modality in tokens else 0
            if written != expected:
                for at, message in enumerate(messages):
                    if message.role != "user" and message.slots:
                        raise unwritten_items(at, message.role)
                raise InvalidRequest(
                    f"the model's chat template wrote {written} {modality} tokens for {expected} {modality}s "
                    "in messages",
                    param="messages",
                )

    def _expand(self, token_ids: Sequence[int], items: Sequence[Sequence[ItemPlan]]) -> Prompt:
        remaining = iter(items)
        expanded: list[int] = []
        features: list[MMFeature] = []
        done = 0
        # Text between items is copied as a whole: the interpreter, which the engine wants, walks over none.
        for at in _places_of(token_ids, self._items):
            expanded += token_ids[done:at]
            done = at + 1
            item = next(remaining)
            if self._items[token_ids[at]] != item[0].modality:
                raise InvalidRequest("the model's chat template changes the items' order", param="messages")
            for plan in item:
                placeholder = self._decoder.placeholder(plan)
                features.append(MMFeature(plan, Placement(len(expanded), len(placeholder), plan.runs)))
                expanded.extend(placeholder)
        expanded += token_ids[done:]
        return Prompt(tuple(expanded), tuple(features))


def _places_of(token_ids: Sequence[int], tokens: Iterable[int]) -> list[int]:
    """Where any of `tokens` stands."""
    places: list[int] = []
    for token in tokens:
        at = -1
        for _ in range(token_ids.count(token)):
            at = token_ids.index(token, at + 1)
            places.append(at)
    return sorted(places)


def _mark_end(message: Message, shaped: TemplateMessage) -> str:
    """Appends an unguessable mark to the message's text, and returns it."""
    content = message.content
    if isinstance(content, list):
        last = content[-1] if content else None
        ends_in_text = isinstance(last, TextPart)
    else:
        ends_in_text = bool(content)
    if message.role != "assistant" or message.tool_calls or not ends_in_text:
        raise InvalidRequest(
            "continue_final_message needs a last message of the assistant that ends in text", param="messages"
        )
    mark = f"{secrets.randbelow(10**32):032d}"
    # The blank shows whether the template strips its input.
    ending = shaped["content"]
    if isinstance(ending, str):
        shaped["content"] = f"{ending}{mark} "
    else:
        ending[-1]["text"] += f"{mark} "
    return mark


def _cut_at(text: str, mark: str) -> str:
    """The text before the mark, stripped where the template strips."""
    before, separator, after = text.rpartition(mark)
    if not separator:
        raise InvalidRequest(
            "the model's chat template does not write the last message: continue_final_message cannot be",
            param="messages",
        )
    return before if after.startswith(" ") else before.rstrip()


def open_checkpoint(
    path: Path,
    decoder: DecoderSide,
    max_model_len: int,
    *,
    chat_template: str = "",
    reasoning_parser: str = "auto",
    tool_call_parser: str = "auto",
) -> tuple[PromptBuilder, Tokenizer]:
    """The prompt builder of a checkpoint folder, and the tokenizer that decodes its output.

    `chat_template` is a source in place of the checkpoint's own.
    """
    tokenizer = load_tokenizer(path)
    variables = {
        name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)
    }
    backend, image = tokenizer.backend_tokenizer, decoder.image_token_id
    forms = "" if image is None else retriever_template(path)
    if image is not None and forms:
        variables["image_token"] = backend.decode([image], skip_special_tokens=False)
    # Encoder-decoder models have no chat template.
    source = ""
    if decoder.cross is None and not (
        source := chat_template or forms or read_template(path, tokenizer.chat_template)
    ):
        logger.warning(
            "%s has no chat template: chats are refused, prompts are served (--chat-template)", path
        )
    template = ChatTemplate(source, variables)
    if decoder.row_token_ids and image is not None:
        image = written_token(template, backend, image)
    others = written_others(template, backend, decoder) if decoder.row_token_ids else {}
    specials = {*decoder.row_token_ids, *others.values(), *(() if image is None else (image,))}
    guarded = GuardedTokenizer(
        backend, bos_token=variables.get("bos_token", ""), specials=tuple(sorted(specials))
    )
    decode = partial(backend.decode, skip_special_tokens=False)
    reasoning = find_reasoning(reasoning_parser, source, backend)
    tool_format = find_tool_format(tool_call_parser, source)
    kept, dropped = output_markers(tool_format, reasoning, backend)
    builder = PromptBuilder(
        template,
        guarded,
        decoder,
        max_model_len,
        image_token_id=image,
        others=others,
        decode=decode,
        reasoning=reasoning,
        tool_format=tool_format,
        kept=kept,
        dropped=dropped,
        adds_first=not forms,
    )
    return builder, backend
