"""Conversions between shared values and the messages of common.proto, and what a Submit says of its items."""

from __future__ import annotations

import re
from typing import Any

from triptych.base.errors import InvalidRequest, RequestError, error_from_code
from triptych.base.hashing import check_mm_hash
from triptych.base.request import MAX_KV_PARAMS
from triptych.base.types import (
    DTYPE_BYTES,
    SCALE_BYTES,
    EmbeddingSource,
    ItemPlan,
    KeptKV,
    OutputFormat,
    PositionLogprobs,
    SamplingParams,
    TokenLogprob,
    scales_fit,
)
from triptych.protos import common_pb2, pd_pb2

#: Longest wait that a worker may advise, in seconds.
MAX_RETRY_AFTER = 3600.0
_SOURCE_NAME = re.compile("[0-9a-f]{32}")


def plan_from_proto(message: common_pb2.ItemPlan) -> ItemPlan:
    """An item's plan; InvalidRequest when its key or its dtype cannot be one."""
    if message.dtype not in DTYPE_BYTES:
        raise InvalidRequest(f"an item's dtype must be one of {', '.join(DTYPE_BYTES)}", param="items")
    if not scales_fit(message.dtype, message.width, message.scales):
        raise InvalidRequest("an item of int8 has a scale for each equal part of a row", param="items")
    return ItemPlan(
        mm_hash=check_mm_hash(message.mm_hash),
        namespace=message.namespace,
        modality=message.modality,
        rows=message.rows,
        width=message.width,
        dtype=message.dtype,
        length=message.length,
        runs=tuple((run.start, run.count) for run in message.runs) or None,
        grid_thw=tuple(message.grid_thw),
        layout=tuple(message.layout),
        scales=message.scales,
    )


def plan_to_proto(plan: ItemPlan) -> common_pb2.ItemPlan:
    return common_pb2.ItemPlan(
        mm_hash=plan.mm_hash,
        namespace=plan.namespace,
        modality=plan.modality,
        rows=plan.rows,
        width=plan.width,
        dtype=plan.dtype,
        length=plan.length,
        runs=[common_pb2.Run(start=start, count=count) for start, count in plan.runs or ()],
        grid_thw=plan.grid_thw,
        layout=plan.layout,
        scales=plan.scales,
    )


def plan_nbytes(plan: common_pb2.ItemPlan) -> int:
    """As `ItemPlan.nbytes`, of a plan that has been checked."""
    return plan.rows * (plan.width + SCALE_BYTES * plan.scales) * DTYPE_BYTES[plan.dtype]


def source_from_proto(message: common_pb2.EmbeddingSource) -> EmbeddingSource | None:
    """Where an embedding can be read; None where the message names nothing that could be a source."""
    if not _SOURCE_NAME.fullmatch(message.name) or max(len(message.socket), len(message.address)) > 256:
        return None
    return EmbeddingSource(message.name, message.socket, message.address)


def source_to_proto(source: EmbeddingSource | None) -> common_pb2.EmbeddingSource:
    if source is None:
        return common_pb2.EmbeddingSource()
    return common_pb2.EmbeddingSource(name=source.name, socket=source.socket, address=source.address)


def kv_from_proto(message: pd_pb2.KVHandOff, now: float) -> KeptKV | None:
    """The KV that is kept for so many seconds from `now` on; None for what no worker sends."""
    if len(message.params) > MAX_KV_PARAMS:
        return None
    return KeptKV(message.params, now + message.seconds)


def kv_to_proto(kept: KeptKV | None, now: float) -> pd_pb2.KVHandOff | None:
    """What is kept, for the time that is left of it; None where that is over."""
    if kept is None or kept.until <= now:
        return None
    return pd_pb2.KVHandOff(params=kept.params, seconds=kept.until - now)


_SAMPLING = common_pb2.SamplingParams.DESCRIPTOR.fields
#: The sampling parameters that are the message's fields of the same names; lists are tuples here.
_LISTS = tuple(field.name for field in _SAMPLING if field.is_repeated and not field.message_type)
_VALUES = tuple(field.name for field in _SAMPLING if not field.is_repeated and not field.message_type)
_OPTIONAL = frozenset(field.name for field in _SAMPLING if field.has_presence)


def sampling_from_proto(message: common_pb2.SamplingParams) -> SamplingParams:
    """The client's sampling parameters; None where it gave none."""
    given: dict[str, Any] = {
        name: getattr(message, name) for name in _VALUES if name not in _OPTIONAL or message.HasField(name)
    }
    given |= {name: tuple(getattr(message, name)) for name in _LISTS}
    return SamplingParams(
        **given,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        output_format=format_from_proto(message.output_format),
    )


def sampling_to_proto(sampling: SamplingParams) -> common_pb2.SamplingParams:
    given: dict[str, Any] = {
        name: value
        for name in (*_VALUES, *_LISTS)
        # What a message has anyway costs as much as the rest.
        if (value := getattr(sampling, name)) or (value is not None and name in _OPTIONAL)
    }
    form = sampling.output_format
    return common_pb2.SamplingParams(
        **given,
        logit_bias=dict(sampling.logit_bias) or None,
        output_format=None if form is None else format_to_proto(form),
    )


def format_from_proto(message: common_pb2.OutputFormat) -> OutputFormat | None:
    match message.WhichOneof("body"):
        case "json_object":
            return OutputFormat("json_object") if message.json_object else None
        case "json_schema":
            return OutputFormat("json_schema", message.json_schema, open=message.open)
        case "regex":
            return OutputFormat("regex", message.regex)
        case "choices":
            return OutputFormat("choices", choices=tuple(message.choices.texts))
    return None


def format_to_proto(form: OutputFormat) -> common_pb2.OutputFormat:
    if form.kind == "json_object":
        return common_pb2.OutputFormat(json_object=True)
    if form.kind == "json_schema":
        return common_pb2.OutputFormat(json_schema=form.text, open=form.open)
    if form.kind == "regex":
        return common_pb2.OutputFormat(regex=form.text)
    return common_pb2.OutputFormat(choices=common_pb2.TextChoices(texts=form.choices))


def logprobs_from_proto(message: common_pb2.PositionLogprobs) -> PositionLogprobs:
    return PositionLogprobs(
        _token_from_proto(message.chosen), tuple(_token_from_proto(token) for token in message.top)
    )


def logprobs_to_proto(position: PositionLogprobs) -> common_pb2.PositionLogprobs:
    return common_pb2.PositionLogprobs(
        chosen=_token_to_proto(position.chosen), top=[_token_to_proto(token) for token in position.top]
    )


def _token_from_proto(message: common_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(message.token_id, message.logprob, message.text, message.utf8)


def _token_to_proto(token: TokenLogprob) -> common_pb2.TokenLogprob:
    return common_pb2.TokenLogprob(
        token_id=token.token_id, logprob=token.logprob, text=token.text, utf8=token.utf8
    )


def error_from_proto(message: common_pb2.Error) -> RequestError:
    return error_from_code(
        message.code,
        message.message or "the worker gave no reason",
        param=message.param or None,
        retry_after=message.retry_after if 0 < message.retry_after <= MAX_RETRY_AFTER else None,
    )


def error_to_proto(error: RequestError) -> common_pb2.Error:
    return common_pb2.Error(
        code=error.code,
        # Half a surrogate pair, of a client's own text, is in no message.
        message=error.message.encode(errors="replace").decode(),
        param=error.param or "",
        retry_after=error.retry_after or 0.0,
    )


def in_state(message: pd_pb2.SubmitRequest, state: pd_pb2.ItemState) -> frozenset[str]:
    """The keys of the request's items in this state."""
    return frozenset(slot.plan.mm_hash for slot in message.items if slot.state == state)
