"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from triptych.proxy.admission import RequestAdmission
from triptych.proxy.dispatcher import Dispatcher
from triptych.proxy.http.endpoint import HttpReply, PostEndpoint
from triptych.proxy.http.sse import to_json
from triptych.proxy.openai.tokenize.request import (
    DetokenizeBody,
    TokenizeBody,
    TokenizeQuery,
    parse_detokenize,
    parse_tokenize,
)
from triptych.proxy.pd.queries import PDQueries


class TokenizeEndpoint(PostEndpoint[TokenizeQuery]):
    """The token ids of a prompt; an item is one placeholder token in it."""

    known = TokenizeBody.__struct_fields__

    def __init__(
        self,
        dispatcher: Dispatcher,
        queries: PDQueries,
        admission: RequestAdmission,
        *,
        max_images: int,
        max_body: int,
    ) -> None:
        super().__init__(dispatcher.quotas["parser"], max_body=max_body)
        self._dispatcher = dispatcher
        self._queries = queries
        self._admission = admission
        self._max_images = max_images

    def parse(self, raw: bytes, request_id: str, content_type: bytes = b"") -> TokenizeQuery:
        return parse_tokenize(raw, request_id, max_images=self._max_images)

    async def answer(self, request: TokenizeQuery, reply: HttpReply) -> None:
        model = self._dispatcher.resolve_model(request.model)
        async with self._admission.query():
            found = await self._queries.tokenize(model, request.message)
        count = len(found.token_ids)
        await reply.whole(
            to_json({"count": count, "max_model_len": found.max_model_len, "tokens": found.token_ids})
        )


class DetokenizeEndpoint(PostEndpoint[DetokenizeBody]):
    """The text of token ids, special tokens included."""

    known = DetokenizeBody.__struct_fields__

    def __init__(
        self, dispatcher: Dispatcher, queries: PDQueries, admission: RequestAdmission, *, max_body: int
    ) -> None:
        super().__init__(dispatcher.quotas["parser"], max_body=max_body)
        self._dispatcher = dispatcher
        self._queries = queries
        self._admission = admission

    def parse(self, raw: bytes, request_id: str, content_type: bytes = b"") -> DetokenizeBody:
        return parse_detokenize(raw)

    async def answer(self, request: DetokenizeBody, reply: HttpReply) -> None:
        model = self._dispatcher.resolve_model(request.model or "")
        async with self._admission.query():
            text = await self._queries.detokenize(model, request.tokens)
        await reply.whole(to_json({"prompt": text}))
