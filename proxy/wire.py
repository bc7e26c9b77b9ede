"""Our values as protobuf messages and back."""

from __future__ import annotations

from collections.abc import Iterable

from triptych.errors import InvalidRequest, RequestError, error_from_code
from triptych.hashing import check_mm_hash
from triptych.protos import common_pb2, pd_pb2
from triptych.proxy.chat import Delta, RawPrompt, TemplateOptions
from triptych.proxy.lifecycle import ResumeState
from triptych.types import (
    DTYPE_BYTES,
    ItemPlan,
    OutputFormat,
    PositionLogprobs,
    SamplingParams,
    TokenLogprob,
)

#: Longest wait that a worker may advise, in seconds.
MAX_RETRY_AFTER = 3600.0


def plan_from_proto(message: common_pb2.ItemPlan) -> ItemPlan:
    """InvalidRequest when the plan cannot be one."""
    if message.dtype not in DTYPE_BYTES:
        raise InvalidRequest(f"unknown dtype {message.dtype!r} in an item's plan")
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
    )


def sampling_to_proto(sampling: SamplingParams) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        min_p=sampling.min_p,
        logit_bias=dict(sampling.logit_bias),
        choice=sampling.choice,
        logprobs=sampling.logprobs,
        output_format=None if sampling.output_format is None else format_to_proto(sampling.output_format),
    )


def format_to_proto(form: OutputFormat) -> common_pb2.OutputFormat:
    if form.kind == "json_object":
        return common_pb2.OutputFormat(json_object=True)
    if form.kind == "json_schema":
        return common_pb2.OutputFormat(json_schema=form.text)
    if form.kind == "regex":
        return common_pb2.OutputFormat(regex=form.text)
    return common_pb2.OutputFormat(choices=common_pb2.TextChoices(texts=form.choices))


def template_to_proto(options: TemplateOptions) -> pd_pb2.TemplateOptions:
    return pd_pb2.TemplateOptions(
        tools=options.tools,
        variables=options.variables,
        no_generation_prompt=not options.generation_prompt,
        continue_final_message=options.continue_final_message,
    )


def prompt_to_proto(prompt: RawPrompt) -> pd_pb2.RawPrompt:
    if isinstance(prompt, str):
        return pd_pb2.RawPrompt(text=prompt)
    return pd_pb2.RawPrompt(token_ids=pd_pb2.TokenIds(ids=prompt))


def with_logprobs(delta: Delta, positions: Iterable[common_pb2.PositionLogprobs]) -> Delta:
    return Delta(delta.text, delta.token_ids, [logprobs_from_proto(position) for position in positions])


def logprobs_from_proto(message: common_pb2.PositionLogprobs) -> PositionLogprobs:
    return PositionLogprobs(
        _token_from_proto(message.chosen), tuple(_token_from_proto(token) for token in message.top)
    )


def logprobs_to_proto(position: PositionLogprobs) -> common_pb2.PositionLogprobs:
    return common_pb2.PositionLogprobs(
        chosen=_token_to_proto(position.chosen), top=[_token_to_proto(token) for token in position.top]
    )


def _token_to_proto(token: TokenLogprob) -> common_pb2.TokenLogprob:
    return common_pb2.TokenLogprob(
        token_id=token.token_id, logprob=token.logprob, text=token.text, utf8=token.utf8
    )


def _token_from_proto(message: common_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(message.token_id, message.logprob, message.text, message.utf8)


def resume_to_proto(resume: ResumeState) -> pd_pb2.Resume:
    return pd_pb2.Resume(
        prompt_token_ids=resume.prompt_token_ids,
        placements=[
            pd_pb2.ItemPlacement(offset=offset, length=length) for offset, length in resume.placements
        ],
        output_token_ids=resume.output_token_ids,
        text_sent_chars=resume.text_sent_chars,
    )


def error_from_proto(message: common_pb2.Error) -> RequestError:
    return error_from_code(
        message.code,
        message.message or "the worker gave no reason",
        param=message.param or None,
        retry_after=message.retry_after if 0 < message.retry_after <= MAX_RETRY_AFTER else None,
    )
