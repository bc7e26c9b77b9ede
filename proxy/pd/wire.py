"""Our values as protobuf messages and back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from triptych.chat import TemplateOptions
from triptych.protos import common_pb2, pd_pb2
from triptych.protos.convert import logprobs_from_proto
from triptych.proxy.call.chat import Delta, RawPrompt, Started
from triptych.proxy.call.encoder_prompt import EncoderPrompt, Transcription
from triptych.proxy.requests.lifecycle import ResumeState
from triptych.types import TimestampTokens


def template_to_proto(options: TemplateOptions) -> pd_pb2.TemplateOptions:
    return pd_pb2.TemplateOptions(
        tools=options.tools,
        variables=options.variables,
        no_generation_prompt=not options.generation_prompt,
        continue_final_message=options.continue_final_message,
    )


def prompt_to_proto(prompt: RawPrompt, *, unmodified: bool = False) -> pd_pb2.RawPrompt:
    if isinstance(prompt, str):
        return pd_pb2.RawPrompt(text=prompt)
    return pd_pb2.RawPrompt(token_ids=common_pb2.TokenIds(ids=prompt), unmodified=unmodified)


def encoder_prompt_to_proto(encoder: EncoderPrompt) -> common_pb2.EncoderPrompt | None:
    """What a text encoder reads; None of audio, which is an item and nothing else."""
    if isinstance(encoder.source, str):
        return common_pb2.EncoderPrompt(text=encoder.source)
    if isinstance(encoder.source, tuple):
        return common_pb2.EncoderPrompt(token_ids=common_pb2.TokenIds(ids=encoder.source))
    return None


def transcription_to_proto(transcription: Transcription | None) -> common_pb2.Transcription | None:
    return None if transcription is None else common_pb2.Transcription(**asdict(transcription))


def started_from_proto(admitted: pd_pb2.Admitted) -> Started:
    timestamps = None
    if admitted.HasField("timestamps"):
        timestamps = TimestampTokens(admitted.timestamps.first, admitted.timestamps.seconds)
    return Started(tuple(admitted.prompt_token_ids), tuple(admitted.encoder_prompt_token_ids), timestamps)


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
