"""Protobuf messages as our values, and our events as protobuf messages."""

from __future__ import annotations

from triptych.chat import TemplateOptions
from triptych.errors import InvalidRequest
from triptych.hashing import MM_HASH
from triptych.pd_worker.core.outputs import (
    ItemLoaded,
    ItemMissing,
    RawLogprobs,
    RequestAdmitted,
    RequestFinished,
)
from triptych.pd_worker.frontend.token_texts import TokenTexts
from triptych.protos import common_pb2, pd_pb2
from triptych.protos.convert import error_to_proto, plan_from_proto
from triptych.types import ItemPlan


def checked_plan(message: common_pb2.ItemPlan) -> ItemPlan:
    """An item's plan; InvalidRequest when it contradicts itself."""
    plan = plan_from_proto(message)
    if not MM_HASH.fullmatch(plan.namespace):
        raise InvalidRequest("an item's namespace must be 64 lower-case hex characters", param="items")
    if not (plan.rows and plan.width):
        raise InvalidRequest("an item needs rows and width above 0", param="items")
    if plan.length == 0 and plan.runs is None:
        return plan  # reaches the decoder by cross-attention: no placeholder stands for it
    if _embeds(plan) != plan.rows:
        raise InvalidRequest(
            f"an item's runs take {_embeds(plan)} embeddings, but it has {plan.rows} rows", param="items"
        )
    return plan


def _embeds(plan: ItemPlan) -> int:
    """Embeddings that the placeholder takes; -1 when its runs are out of order or out of the span."""
    if plan.runs is None:
        return plan.length
    end, total = 0, 0
    for start, count in plan.runs:
        if start < end or count < 1 or start + count > plan.length:
            return -1
        end, total = start + count, total + count
    return total


def template_from_proto(message: pd_pb2.TemplateOptions) -> TemplateOptions:
    return TemplateOptions(
        tools=message.tools,
        variables=message.variables,
        generation_prompt=not message.no_generation_prompt,
        continue_final_message=message.continue_final_message,
    )


def admitted_to_proto(event: RequestAdmitted) -> pd_pb2.Admitted:
    return pd_pb2.Admitted(
        prompt_token_ids=event.prompt_token_ids,
        placements=[
            pd_pb2.ItemPlacement(offset=place.offset, length=place.length) for place in event.placements
        ],
        encoder_prompt_token_ids=event.encoder_prompt_token_ids,
        timestamps=None
        if event.timestamps is None
        else pd_pb2.TimestampTokens(first=event.timestamps.first, seconds=event.timestamps.seconds),
    )


def loaded_to_proto(event: ItemLoaded) -> pd_pb2.ItemLoaded:
    return pd_pb2.ItemLoaded(mm_hash=event.mm_hash, seconds=event.seconds)


def missing_to_proto(event: ItemMissing) -> pd_pb2.ItemMissing:
    return pd_pb2.ItemMissing(mm_hash=event.mm_hash, damaged_digest=event.damaged_digest)


def logprobs_to_proto(raw: RawLogprobs, texts: TokenTexts) -> common_pb2.PositionLogprobs:
    def token(token_id: int, logprob: float) -> common_pb2.TokenLogprob:
        text, utf8 = texts[token_id]
        return common_pb2.TokenLogprob(token_id=token_id, logprob=logprob, text=text, utf8=utf8)

    return common_pb2.PositionLogprobs(chosen=token(*raw.chosen), top=[token(*pair) for pair in raw.top])


def finished_to_proto(event: RequestFinished) -> pd_pb2.Finished:
    return pd_pb2.Finished(
        reason=event.reason.value,
        error=error_to_proto(event.error) if event.error else None,
        prompt_tokens=event.usage.prompt_tokens,
        completion_tokens=event.usage.completion_tokens,
        cached_tokens=event.usage.cached_tokens,
        queue_seconds=event.timings.queue,
        load_seconds=event.timings.load,
        prefill_seconds=event.timings.prefill,
        decode_seconds=event.timings.decode,
    )
