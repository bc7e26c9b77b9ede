"""The body of a call of vLLM's token endpoint."""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping, Sequence

import msgpack

from triptych.base.types import ItemPlan, JsonObject, MMFeature
from triptych.pd_worker.vllm.http.call import EngineCall, probe_call, size_of

#: msgpack's extension type for the bytes of a small tensor, as vLLM encodes them.
_RAW_TENSOR = 3


def body_of(call: EngineCall) -> JsonObject:
    """The body of a streamed call."""
    body: JsonObject = {
        "token_ids": call.token_ids,
        "sampling_params": call.sampling_params,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_salt": call.cache_salt,
    }
    if call.features:
        body["features"] = _features(call.by_modality)
        body["ec_transfer_params"] = call.ec_transfer_params
    return body


def probe_body() -> JsonObject:
    """The body of a call that takes one step of the engine."""
    call = probe_call()
    return {"token_ids": call.token_ids, "sampling_params": call.sampling_params, "stream": False}


def _features(by_modality: Mapping[str, Sequence[MMFeature]]) -> JsonObject:
    """vLLM's `features`: the key of each item, its place, and its grid."""
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
    """The item without pixels, in vLLM's encoding."""
    name, numbers = size_of(plan)
    tensor = [
        "int64",
        [len(numbers)],
        msgpack.ExtType(_RAW_TENSOR, struct.pack(f"<{len(numbers)}q", *numbers)),
    ]
    item = {name: {"data": tensor, "field": ["batched", {"keep_on_cpu": True}]}}
    packed: bytes = msgpack.packb(item)
    return base64.b64encode(packed).decode()
