"""Our values as protobuf messages and back."""

from __future__ import annotations

from collections.abc import Iterable

from triptych.protos import common_pb2, pd_pb2
from triptych.protos.convert import logprobs_from_proto
from triptych.proxy.chat import Delta, RawPrompt, TemplateOptions
from triptych.proxy.lifecycle import ResumeState


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
    return pd_pb2.RawPrompt(token_ids=common_pb2.TokenIds(ids=prompt))


def with_logprobs(delta: Delta, positions: Iterable[common_pb2.PositionLogprobs]) -> Delta:
    return Delta(delta.text, delta.token_ids, [logprobs_from_proto(position) for position in positions])


def resume_to_proto(resume: ResumeState) -> pd_pb2.Resume:
    return pd_pb2.Resume(
        prompt_token_ids=resume.prompt_token_ids,
        placements=[
            pd_pb2.ItemPlacement(offset=offset, length=length) for offset, length in resume.placements
        ],
        output_token_ids=resume.output_token_ids,
        text_sent_chars=resume.text_sent_chars,
    )
