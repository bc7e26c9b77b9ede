"""Calls of vLLM that requests become: token ids and where items stand in them, never media."""

from __future__ import annotations

from triptych.base.errors import InvalidRequest
from triptych.base.types import OutputFormat
from triptych.pd_worker.core.request import EngineRequest
from triptych.pd_worker.vllm.formats import EngineFormat
from triptych.pd_worker.vllm.http.call import EngineCall
from triptych.pd_worker.vllm.sampling import check_sampling, sampling_params


def check_request(request: EngineRequest) -> None:
    """InvalidRequest for what vLLM cannot do as it is asked for."""
    check_sampling(request.sampling, output_format(request))
    if any(feature.placement.runs is not None for feature in request.features):
        raise InvalidRequest(
            "messages: an item's placeholder has tokens without embeddings, which this worker's engine, "
            "vLLM, cannot be given: send it to a worker of --engine native",
            param="messages",
        )


def output_format(request: EngineRequest) -> OutputFormat | None:
    grammar = request.grammar
    return grammar.output_format if isinstance(grammar, EngineFormat) else None


def call_of(request: EngineRequest, *, replay: bool = False) -> EngineCall:
    """The call that continues `request` after the tokens it has put out.

    With `replay` it begins at the prompt: those tokens are generated again.
    """
    received = request.output_token_ids
    return EngineCall(
        [*request.prompt_token_ids, *(() if replay else received)],
        sampling_params(request.sampling, received, output_format(request), replay=replay),
        # Of model and tenant: tenants share no blocks of vLLM's prefix cache.
        request.prefix_root.hex(),
        request.features,
    )
