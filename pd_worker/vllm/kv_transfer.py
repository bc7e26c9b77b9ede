"""KV of prompts that one vLLM keeps and another one reads, by the NixlConnector in both."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import msgspec

from triptych.base.request import MAX_KV_PARAMS
from triptych.base.types import JsonObject, KeptKV
from triptych.pd_worker.core.request import EngineRequest
from triptych.pd_worker.vllm.calls import DirectItems, call_of, output_format, replays
from triptych.pd_worker.vllm.http.client import VLLMClient
from triptych.pd_worker.vllm.http.replies import EngineError
from triptych.registry.matching import PREFILL

logger = logging.getLogger(__name__)

#: How long vLLM keeps the blocks of a prompt, and how long they are offered: what is read later may be
#: another request's, and messages may be on their way for long.
LEASE_SECONDS, KEPT_SECONDS = 60, 20.0
#: After so long the prompt is computed.
READ_SECONDS = 10.0
#: Above this share of vLLM's KV cache in use nothing more is kept in it: others' prompts need the room, and
#: what nobody reads stays for its lease.
MOST_USED = 0.5

#: One step: what it puts out is not looked at.
_READ: JsonObject = {"max_tokens": 1, "temperature": 0.0, "detokenize": False, "ignore_eos": True}

#: The id of a call of ours in the words of vLLM, which adds eight characters of its own.
_CALL_ID = re.compile(r"generate-tokens-(.+)-[0-9a-f]{8}")

#: Offers a request to a decode worker, for which its KV is kept.
Offer = Callable[[EngineRequest, KeptKV], None]


def transfer_config(role: str) -> JsonObject:
    """vLLM's --kv-transfer-config of a worker of this role."""
    return {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_producer" if role == PREFILL else "kv_consumer",
        "kv_connector_extra_config": {"kv_lease_duration": LEASE_SECONDS},
    }


def pushed_call(params: Mapping[str, object]) -> str:
    """The id of the call whose KV is kept, where vLLM pushes it, to a call of the same id; else empty.

    "transfer_mode" is NixlPushConnector's own word; with NixlConnector the reading vLLM pulls.
    """
    found = _CALL_ID.fullmatch(str(params.get("remote_request_id", "")))
    return found[1] if found and params.get("transfer_mode") == "push" else ""


class KVTransfer:
    """What is kept of one worker's requests, and what they read. `count` hears how each has come out.

    A read fills vLLM's prefix cache and nothing else: one that fails is computed.
    """

    def __init__(
        self,
        client: VLLMClient,
        offer: Offer | None,
        count: Callable[[str], None],
        kv_usage: Callable[[], float],
        speculates: Callable[[], bool] = lambda: False,
        image_kind: str = "image",
    ) -> None:
        """`offer` of a prefill worker alone; `kv_usage` is the share of vLLM's KV cache in use."""
        self._image_kind = image_kind
        self._speculates = speculates
        self._client = client
        self._offer = offer
        self._kv_usage = kv_usage
        self._count = count
        self._warned = False

    def keeps(self, request: EngineRequest) -> bool:
        """Whether the request's KV is to be kept: it is new, and could go on anywhere from any token."""
        if self._offer is None or not request.may_hand_over or request.output_token_ids:
            return False
        if self._kv_usage() > MOST_USED:
            self._count("full")
            return False
        speculates = self._speculates()
        return not replays(request.sampling, (0,), output_format(request), speculates=speculates)

    def kept(self, request: EngineRequest, params: JsonObject | None) -> None:
        """The prompt is computed, and its KV kept where `params` say; None: vLLM keeps nothing."""
        if not params:
            self._count("not_kept")
            if not self._warned:
                self._warned = True
                logger.warning(
                    "vLLM keeps no KV for decode workers: start it with --kv-transfer-config '%s', or leave "
                    "out --kv-connector",
                    msgspec.json.encode(transfer_config(PREFILL)).decode(),
                )
            return
        assert self._offer is not None
        if len(words := msgspec.json.encode(params)) > MAX_KV_PARAMS:
            self._count("not_kept")
            return
        self._count("kept")
        self._offer(request, KeptKV(words, time.monotonic() + KEPT_SECONDS))

    async def read(self, request: EngineRequest, direct: DirectItems | None) -> None:
        """Has vLLM read the KV that is kept for the request, if any is; at most once."""
        kept, request.kv = request.kv, None
        if kept is None:
            return
        self._count(await self._read(request, kept, direct))

    async def _read(self, request: EngineRequest, kept: KeptKV, direct: DirectItems | None) -> str:
        if not time.monotonic() < kept.until:
            return "late"
        try:
            params = msgspec.json.decode(kept.params, type=dict[str, object])
            same = pushed_call(params)
            call = call_of(request, replay=True, direct=direct, image_kind=self._image_kind, attempt=same)
            call = replace(call, sampling_params=_READ, kv_transfer_params=params)
            await self._client.whole(call, min(READ_SECONDS, kept.until - time.monotonic()))
        except (EngineError, msgspec.MsgspecError) as failure:
            logger.info("request %s: its KV was not read: %s", request.name, failure, extra=request.log_extra)
            return "failed"
        return "read"
