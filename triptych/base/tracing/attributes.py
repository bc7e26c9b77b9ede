"""Names of span attributes: OpenTelemetry's, written out since most are not stable yet, and our own.

Never a prompt, an answer, a media URL, a key, a tenant or a client's own label; of an mm_hash 12 characters.
"""

from __future__ import annotations

from collections.abc import Mapping

from triptych.base.log import short
from triptych.base.types import SamplingParams

Value = str | bool | int | float | tuple[str, ...]
Attributes = Mapping[str, Value]

OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
RESPONSE_MODEL = "gen_ai.response.model"
MAX_TOKENS = "gen_ai.request.max_tokens"
TEMPERATURE = "gen_ai.request.temperature"
TOP_P = "gen_ai.request.top_p"
TOP_K = "gen_ai.request.top_k"
FREQUENCY_PENALTY = "gen_ai.request.frequency_penalty"
PRESENCE_PENALTY = "gen_ai.request.presence_penalty"
CHOICES = "gen_ai.request.choice.count"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
FINISH_REASONS = "gen_ai.response.finish_reasons"
TIME_TO_FIRST_TOKEN = "gen_ai.response.time_to_first_chunk"

HTTP_METHOD = "http.request.method"
HTTP_ROUTE = "http.route"
HTTP_STATUS = "http.response.status_code"
RPC_SYSTEM = "rpc.system"
RPC_SERVICE = "rpc.service"
RPC_METHOD = "rpc.method"
RPC_STATUS = "rpc.grpc.status_code"
SERVER_ADDRESS = "server.address"
SERVER_PORT = "server.port"
ERROR_TYPE = "error.type"

REQUEST_ID = "triptych.request.id"
ATTEMPT = "triptych.request.attempt"
CHOICE = "triptych.request.choice"
ITEMS = "triptych.request.items"
RESUMED_TOKENS = "triptych.request.resumed_tokens"
MM_HASH = "triptych.item.mm_hash"
MODALITY = "triptych.item.modality"
SOURCE = "triptych.item.source"
RE_ENCODE = "triptych.item.re_encode"
ROWS = "triptych.item.rows"
BYTES = "triptych.item.bytes"
SHARED = "triptych.item.shared"
STORED = "triptych.item.already_stored"

PROVIDER_NAME = "triptych"


def item(mm_hash: str) -> dict[str, Value]:
    """What names an item."""
    return {MM_HASH: short(mm_hash)}


def sampling(params: SamplingParams, choices: int) -> dict[str, Value]:
    """The sampling parameters that the client has set."""
    given: Mapping[str, int | float | None] = {
        MAX_TOKENS: params.max_tokens,
        TEMPERATURE: params.temperature,
        TOP_P: params.top_p,
        TOP_K: params.top_k or None,
        FREQUENCY_PENALTY: params.frequency_penalty or None,
        PRESENCE_PENALTY: params.presence_penalty or None,
        CHOICES: choices if choices > 1 else None,
    }
    return {name: value for name, value in given.items() if value is not None}


def server(address: str) -> dict[str, Value]:
    """The worker at the other end, by its `host:port`; nothing for an address in another form."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        return {SERVER_ADDRESS: address} if address else {}
    return {SERVER_ADDRESS: host.strip("[]"), SERVER_PORT: int(port)}
