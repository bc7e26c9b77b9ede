"""The tokens that a chat template writes for an item, found by a trial."""

from __future__ import annotations

from collections import Counter

from tokenizers import Tokenizer

from triptych.base.errors import ConfigError, InvalidRequest
from triptych.models.base import DecoderSide
from triptych.pd_worker.frontend.chat_template import ChatTemplate


def written_token(template: ChatTemplate, tokenizer: Tokenizer, image_token_id: int) -> int:
    """The token that the template writes for an image: the given one, or the only other special one.

    ConfigError where there is none, or more than one.
    """
    if not template.takes_parts:
        return image_token_id
    added = _added_tokens(template, tokenizer, "image")
    if added[image_token_id] == 1:
        return image_token_id
    special = tokenizer.get_added_tokens_decoder()
    singles = [token for token, count in added.items() if count == 1 and token in special]
    if len(singles) != 1:
        raise ConfigError(
            f"the checkpoint's chat template writes {len(singles)} special tokens for an image, not one: "
            "give MODEL=/folder with the template of this model"
        )
    return singles[0]


def written_others(template: ChatTemplate, tokenizer: Tokenizer, decoder: DecoderSide) -> dict[str, int]:
    """The only token that the template writes for a video, or a sound, and for nothing else."""
    if not template.takes_parts:
        return {}
    added = {}
    for kind in dict.fromkeys(("image", *decoder.modalities)):
        try:
            added[kind] = _added_tokens(template, tokenizer, kind)
        except InvalidRequest:
            continue
    special, written = tokenizer.get_added_tokens_decoder(), {}
    for kind in added.keys() - {"image"}:
        shared = sum((tokens for other, tokens in added.items() if other != kind), Counter[int]())
        singles = [
            token for token, count in (added[kind] - shared).items() if count == 1 and token in special
        ]
        named = decoder.token_ids.get(kind)
        if named in singles or len(singles) == 1:
            written[kind] = named if named in singles else singles[0]
    return written


def _added_tokens(template: ChatTemplate, tokenizer: Tokenizer, modality: str) -> Counter[int]:
    """The tokens that an item of the modality adds to a message, with their counts."""
    text = {"type": "text", "text": "a"}
    with_item, without = (
        Counter(tokenizer.encode(template.render(template.trial(*parts)), add_special_tokens=False).ids)
        for parts in (({"type": modality}, text), (text,))
    )
    return with_item - without
