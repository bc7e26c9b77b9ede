"""Protobuf messages as our values, and our events as protobuf messages."""

from __future__ import annotations

from triptych.errors import InvalidRequest, RequestError
from triptych.hashing import MM_HASH, check_mm_hash
from triptych.pd_worker.messages import TemplateOptions
from triptych.pd_worker.outputs import (
    ItemLoaded,
    ItemMissing,
    RawLogprobs,
    RequestAdmitted,
    RequestFinished,
)
from triptych.pd_worker.token_texts import TokenTexts
from triptych.protos import common_pb2, pd_pb2
from triptych.types import DTYPE_BYTES, ItemPlan, OutputFormat, SamplingParams


def plan_from_proto(message: common_pb2.ItemPlan) -> ItemPlan:
    """An item's plan; InvalidRequest when it contradicts itself."""
    plan = ItemPlan(
        mm_hash=check_mm_hash(message.mm_hash),
        namespace=message.namespace,
        modality=message.modality,
        rows=message.rows,
        width=message.width,
        dtype=message.dtype,
        length=message.length,
        runs=tuple((run.start, run.count) for run in message.runs) or None,
        grid_thw=tuple(message.grid_thw),
    )
    if not MM_HASH.fullmatch(plan.namespace):
        raise InvalidRequest("an item's namespace must be 64 lower-case hex characters", param="items")
    if plan.dtype not in DTYPE_BYTES:
        raise InvalidRequest(f"an item's dtype must be one of {', '.join(DTYPE_BYTES)}", param="items")
    if not (plan.rows and plan.width and plan.length):
        raise InvalidRequest("an item needs rows, width and length above 0", param="items")
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


def sampling_from_proto(message: common_pb2.SamplingParams) -> SamplingParams:
    """What the client said; None where it was silent."""
    return SamplingParams(
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        min_tokens=message.min_tokens,
        temperature=message.temperature if message.HasField("temperature") else None,
        top_p=message.top_p if message.HasField("top_p") else None,
        top_k=message.top_k if message.HasField("top_k") else None,
        seed=message.seed,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else None,
        min_p=message.min_p if message.HasField("min_p") else None,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        choice=message.choice,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        output_format=_output_format(message.output_format),
    )


def _output_format(message: common_pb2.OutputFormat) -> OutputFormat | None:
    match message.WhichOneof("body"):
        case "json_object":
            return OutputFormat("json_object") if message.json_object else None
        case "json_schema":
            return OutputFormat("json_schema", message.json_schema)
        case "regex":
            return OutputFormat("regex", message.regex)
        case "choices":
            return OutputFormat("choices", choices=tuple(message.choices.texts))
    return None


def template_from_proto(message: pd_pb2.TemplateOptions) -> TemplateOptions:
    return TemplateOptions(
        tools=message.tools,
        variables=message.variables,
        generation_prompt=not message.no_generation_prompt,
        continue_final_message=message.continue_final_message,
    )


def error_to_proto(error: RequestError) -> common_pb2.Error:
    return common_pb2.Error(
        code=error.code,
        message=error.message,
        param=error.param or "",
        retry_after=error.retry_after or 0.0,
    )


def admitted_to_proto(event: RequestAdmitted) -> pd_pb2.Admitted:
    return pd_pb2.Admitted(
        prompt_token_ids=event.prompt_token_ids,
        placements=[
            pd_pb2.ItemPlacement(offset=place.offset, length=place.length) for place in event.placements
        ],
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
