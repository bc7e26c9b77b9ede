"""One call of vLLM: token ids and where items stand in them, never media."""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from triptych.base.source_tickets import PROOF
from triptych.base.types import ItemPlan, JsonObject, MMFeature, Placement
from triptych.base.vllm_classes import GRIDS, ROWS, SECONDS
from triptych.models.generic.layout import ItemLayout


@dataclass(frozen=True, slots=True)
class EngineCall:
    """What vLLM is asked for. `sampling_params` are vLLM's, as JSON.

    Calls with different salts share no blocks of vLLM's prefix cache.
    """

    token_ids: list[int]
    sampling_params: JsonObject
    cache_salt: str = ""
    features: Sequence[MMFeature] = ()
    #: The call's own id in vLLM, and the entries of items that are read at their encoder workers, by mm_hash.
    attempt: str = ""
    tickets: Mapping[str, JsonObject] = field(default_factory=dict)
    #: What vLLM's KV connector is given.
    kv_transfer_params: JsonObject | None = None
    #: The adapter's name in vLLM; empty: the model alone.
    adapter: str = ""
    #: What vLLM calls pictures.
    image_kind: str = "image"

    @property
    def by_modality(self) -> dict[str, list[MMFeature]]:
        """The items in their order, by vLLM's name of their kind."""
        features: dict[str, list[MMFeature]] = {}
        for feature in self.features:
            kind = feature.plan.modality
            features.setdefault(self.image_kind if kind == "image" else kind, []).append(feature)
        return features

    @property
    def ec_transfer_params(self) -> JsonObject:
        """What vLLM's EC connector is given of each item."""
        return {feature.mm_hash: self._entry(feature) for feature in self.features}

    def _entry(self, feature: MMFeature) -> JsonObject:
        entry = self.tickets.get(feature.mm_hash, {"namespace": feature.plan.namespace})
        runs = place_of(feature)[1]
        # vLLM's endpoint knows no tokens without rows inside a placeholder: its connector does.
        return {**entry, "runs": runs} if runs else entry


def size_of(plan: ItemPlan) -> tuple[str, tuple[int, ...]]:
    """The field that stands for an item without media: its grid, which decides positions, else its rows.

    vLLM 0.32 ends its engine on an item without fields. The connector knows that neither is media.
    """
    if not plan.grid_thw or plan.modality == "audio":
        return ROWS, (plan.rows,)
    return GRIDS[plan.modality == "video"], tuple(plan.grid_thw)


def seconds_of(plan: ItemPlan) -> float | None:
    """The seconds between two rows of a video's grid, where positions in time depend on them."""
    if plan.modality != "video" or not plan.layout:
        return None
    grids = ItemLayout.decode(plan.layout).grids.values()
    return next((float(grid) for grid in grids if grid.is_floating_point() and grid.numel() == 1), None)


def place_of(feature: MMFeature) -> tuple[JsonObject, list[list[int]]]:
    """An item's placeholder as vLLM has it, and the (start, count) of its tokens that take a row.

    The second is empty where all do. A video's has the marks and times of its frames, by which vLLM counts
    positions; that of a picture is cut to the tokens that take rows where they stand side by side.
    """
    placement = feature.placement
    if placement.runs is None or (len(placement.runs) == 1 and feature.plan.modality != "video"):
        return range_of(placement), []
    whole = {"offset": placement.offset, "length": placement.length}
    return whole, [[start, count] for start, count in placement.runs]


def range_of(placement: Placement) -> JsonObject:
    """The tokens that take a row: vLLM takes no others for a placeholder's."""
    start, length = placement.runs[0] if placement.runs else (0, placement.length)
    return {"offset": placement.offset + start, "length": length}


def probe_call() -> EngineCall:
    """A call that takes one step of the engine."""
    return EngineCall([0], {"max_tokens": 1, "temperature": 0.0, "detokenize": False, "ignore_eos": True})


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
    if call.attempt:
        body["request_id"] = call.attempt
    if call.adapter:
        body["model"] = call.adapter
    if call.kv_transfer_params is not None:
        body["kv_transfer_params"] = call.kv_transfer_params
    return body


def whole_body_of(call: EngineCall) -> JsonObject:
    """The body of a call that is answered in one piece: such answers alone say where KV is kept."""
    body = {**body_of(call), "stream": False}
    del body["stream_options"]
    return body


def probe_body() -> JsonObject:
    """The body of a call that takes one step of the engine."""
    call = probe_call()
    return {"token_ids": call.token_ids, "sampling_params": call.sampling_params, "stream": False}


def question_body(question: str) -> JsonObject:
    """The body of a call of one step, whose answer says whether the connector has the cluster's token."""
    return {**probe_body(), "ec_transfer_params": {PROOF: {"question": question}}}


#: The most that vLLM's own VLLM_MAX_N_SEQUENCES lets through, and far more than any server computes at once.
_TOO_MANY = 16384


def too_many_body() -> JsonObject:
    """The body of a call of more sequences than the server computes at once, which it refuses by that number.

    A release that does not look at the number refuses the scores, which a stream has no place for.
    """
    refused = {"n": _TOO_MANY, "max_tokens": 1, "temperature": 1.0, "prompt_logprob_token_ids": [[0]]}
    return {"token_ids": [0], "sampling_params": refused, "stream": True}


def _features(by_modality: Mapping[str, Sequence[MMFeature]]) -> JsonObject:
    """vLLM's `features`: the key of each item, its place, and its grid."""
    return {
        "mm_hashes": {
            modality: [feature.mm_hash for feature in features] for modality, features in by_modality.items()
        },
        "mm_placeholders": {
            modality: [place_of(feature)[0] for feature in features]
            for modality, features in by_modality.items()
        },
        "mm_metadata": {
            modality: [_metadata(feature.plan) for feature in features]
            for modality, features in by_modality.items()
        },
    }


def _metadata(plan: ItemPlan) -> str:
    """The item without pixels, in vLLM's encoding."""
    name, numbers = size_of(plan)
    item = {name: _field("int64", struct.pack(f"<{len(numbers)}q", *numbers), len(numbers))}
    if (seconds := seconds_of(plan)) is not None:
        item[SECONDS] = _field("float32", struct.pack("<f", seconds), 1)
    return base64.b64encode(msgspec.msgpack.encode(item)).decode()


def _field(dtype: str, data: bytes, count: int) -> JsonObject:
    tensor = [dtype, [count], msgspec.msgpack.Ext(_RAW_TENSOR, data)]
    return {"data": tensor, "field": ["batched", {"keep_on_cpu": True}]}
