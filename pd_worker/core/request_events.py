"""What is told of a request, made from its state."""

from __future__ import annotations

from triptych.errors import RequestError
from triptych.pd_worker.core.outputs import NewTokens, RawLogprobs, RequestAdmitted, RequestFinished
from triptych.pd_worker.core.request import EngineRequest, RequestState
from triptych.types import FinishReason, PDTimings, Usage


def admitted(state: RequestState) -> RequestAdmitted:
    """Room for its items is promised; what its prompt has become."""
    request = state.request
    return RequestAdmitted(
        **request.names(),
        prompt_token_ids=tuple(request.prompt_token_ids),
        placements=tuple(feature.placement for feature in request.features),
        encoder_prompt_token_ids=request.encoder_prompt_token_ids,
        timestamps=request.timestamps,
    )


def new_tokens(
    state: RequestState, tokens: tuple[int, ...], text: str, logprobs: tuple[RawLogprobs, ...] = ()
) -> NewTokens:
    """The last `tokens` of its output, and the text that they complete."""
    position = len(state.request.output_token_ids) - len(tokens)
    return NewTokens(
        **state.request.names(), position=position, token_ids=tokens, text=text, logprobs=logprobs
    )


def finished(state: RequestState, reason: FinishReason, error: RequestError | None) -> RequestFinished:
    """Its end, with what it took."""
    request = state.request
    usage = Usage(request.num_prompt_tokens, len(request.output_token_ids), state.num_cached_tokens)
    return RequestFinished(
        **request.names(), reason=reason, error=error, usage=usage, timings=state.timings()
    )


def refused(request: EngineRequest, error: RequestError) -> RequestFinished:
    """The end of a request that was not taken in."""
    usage = Usage(request.num_prompt_tokens, len(request.output_token_ids), 0)
    return RequestFinished(
        **request.names(), reason=FinishReason.ERROR, error=error, usage=usage, timings=PDTimings()
    )
