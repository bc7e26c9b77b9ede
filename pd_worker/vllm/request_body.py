"""The body of a call of vLLM's token endpoint: token ids and where items stand in them, never media."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence

import msgpack

from triptych.errors import InvalidRequest
from triptych.pd_worker.core.request import EngineRequest
from triptych.pd_worker.vllm.formats import EngineFormat
from triptych.pd_worker.vllm.sampling import check_sampling, sampling_params
from triptych.types import ItemPlan, JsonObject, MMFeature, OutputFormat

#: msgpack's extension type for the bytes of a small tensor, as vLLM encodes them.
_RAW_TENSOR = 3


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


def request_body(request: EngineRequest, *, replay: bool = False) -> JsonObject:
    """The call that continues `request` after the tokens it has put out.

    With `replay` it begins at the prompt: those tokens are generated again.
    """
    received = request.output_token_ids
    body: JsonObject = {
        "token_ids": [*request.prompt_token_ids, *(() if replay else received)],
        "sampling_params": sampling_params(request.sampling, received, output_format(request), replay=replay),
        "stream": True,
        "stream_options": {"include_usage": True},
        # Of model and tenant: tenants share no blocks of vLLM's prefix cache.
        "cache_salt": request.prefix_root.hex(),
    }
    if request.features:
        body["features"] = _features(request.features)
        body["ec_transfer_params"] = {
            plan.mm_hash: {"namespace": plan.namespace} for plan in _distinct(request.features)
        }
    return body


def probe_body(token_id: int) -> JsonObject:
    """A call that takes one step of the engine."""
    params = {"max_tokens": 1, "temperature": 0.0, "detokenize": False, "ignore_eos": True}
    return {"token_ids": [token_id], "sampling_params": params, "stream": False}


def _features(features: Sequence[MMFeature]) -> JsonObject:
    """vLLM's `features`: the key of each item, its place, and its grid."""
    by_modality: dict[str, list[MMFeature]] = {}
    for feature in features:
        by_modality.setdefault(feature.plan.modality, []).append(feature)
    return {
        "mm_hashes": {
            modality: [feature.mm_hash for feature in found] for modality, found in by_modality.items()
        },
        "mm_placeholders": {
            modality: [
                {"offset": feature.placement.offset, "length": feature.placement.length} for feature in found
            ]
            for modality, found in by_modality.items()
        },
        "mm_metadata": {
            modality: [_metadata(feature.plan) for feature in found]
            for modality, found in by_modality.items()
        },
    }


def _metadata(plan: ItemPlan) -> str:
    """The item as vLLM's processor would give it, without pixels: its grid, which decides positions."""
    item = {}
    if plan.grid_thw:
        grid = struct.pack(f"<{len(plan.grid_thw)}q", *plan.grid_thw)
        tensor = ["int64", [len(plan.grid_thw)], msgpack.ExtType(_RAW_TENSOR, grid)]
        item["image_grid_thw"] = {"data": tensor, "field": ["batched", {"keep_on_cpu": True}]}
    packed: bytes = msgpack.packb(item)
    return base64.b64encode(packed).decode()


def _distinct(features: Sequence[MMFeature]) -> list[ItemPlan]:
    return list({feature.mm_hash: feature.plan for feature in features}.values())
