"""The limits of the scheduler, and the check of requests against them."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.base.errors import ContextTooLong, InvalidRequest
from triptych.base.types import MMFeature
from triptych.pd_worker.core.request import EngineRequest


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The limits of PDConfig; `max_num_batched_tokens` is the token budget of a step."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int

    @property
    def prefill_cap(self) -> int:
        """Prefill tokens of a step while text decodes: half the budget, so that tokens keep coming."""
        return max(1, self.max_num_batched_tokens // 2)

    @property
    def fewest_overlap_tokens(self) -> int:
        """Prompt tokens of waiting requests for which alone a step is made."""
        return self.max_num_batched_tokens // 16


@dataclass(frozen=True, slots=True)
class CrossLimits:
    """Limits of an encoder-decoder model: rows of `width` elements, at most `max_rows` (None: no limit).

    A request's cross table and its own blocks have to fit `num_blocks` of `block_size` tokens together.
    """

    width: int
    max_rows: int | None
    num_blocks: int
    block_size: int


def check_request(request: EngineRequest, limits: SchedulerLimits, cross: CrossLimits | None) -> None:
    """Raises InvalidRequest for a request that can never run; `cross` is None for a decoder-only model."""
    num_prompt = len(request.prompt_token_ids)
    num_tokens = num_prompt + len(request.output_token_ids)
    room = limits.max_model_len - num_tokens
    # A resumed request may be at the limit: then only the end of its output is still to be sent.
    if room < 0 or (room == 0 and request.output.finished is None and request.pooling is None):
        raise ContextTooLong(
            f"the prompt has {num_tokens} tokens, but the model takes "
            f"{limits.max_model_len} with the output: shorten messages or send fewer images",
            param="messages",
        )
    if cross is not None:
        _check_cross(request, limits, cross)
        return
    for feature in request.features:
        _check_placement(feature, num_prompt, limits)
    for first, last in request.both_ways:
        if last - first > limits.max_num_batched_tokens:
            raise InvalidRequest(
                f"{last - first} tokens of the prompt at once are above --max-num-batched-tokens "
                f"{limits.max_num_batched_tokens}: shorten the prompt, or raise it",
                param="messages",
            )


def _check_placement(feature: MMFeature, num_prompt: int, limits: SchedulerLimits) -> None:
    placement = feature.placement
    if placement.length == 0 or placement.end > num_prompt:
        raise InvalidRequest("an item's placeholder lies outside the prompt", param="messages")
    if placement.num_embeds() != feature.plan.rows:
        raise InvalidRequest(
            f"an item has {feature.plan.rows} embeddings for {placement.num_embeds()} placeholders",
            param="messages",
        )
    if placement.atomic and placement.length > limits.max_num_batched_tokens:
        raise InvalidRequest(
            f"an item takes {placement.length} tokens at once, above --max-num-batched-tokens "
            f"{limits.max_num_batched_tokens}: send a smaller item, or raise it",
            param="messages",
        )


def _check_cross(request: EngineRequest, limits: SchedulerLimits, cross: CrossLimits) -> None:
    feature = request.cross
    if feature is None or len(request.features) != 1 or feature.placement.offset != 0:
        raise InvalidRequest(
            f"an encoder-decoder model takes exactly one encoder prompt, not {len(request.features)}: "
            "send one text or one audio file",
            param="encoder_prompt",
        )
    plan = feature.plan
    if plan.width != cross.width or plan.rows < 1:
        raise InvalidRequest(
            f"the encoder's output has {plan.rows} rows of {plan.width}, but this model takes rows of "
            f"{cross.width}",
            param="encoder_prompt",
        )
    if cross.max_rows is not None and plan.rows > cross.max_rows:
        raise InvalidRequest(
            f"the encoder prompt has {plan.rows} positions, but the model takes {cross.max_rows}: shorten it",
            param="encoder_prompt",
        )
    longest = min(limits.max_model_len, request.num_prompt_tokens + request.sampling.max_tokens)
    need = -(-plan.rows // cross.block_size) - (-longest // cross.block_size)
    if need > cross.num_blocks:
        raise InvalidRequest(
            f"{plan.rows} encoder positions and {longest} tokens need {need} KV blocks, but --kv-memory "
            f"holds {cross.num_blocks}: shorten the encoder prompt, ask for fewer tokens or raise it",
            param="encoder_prompt",
        )
