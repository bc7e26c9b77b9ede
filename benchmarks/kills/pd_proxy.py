"""The least proxy before vLLM's P/D by NIXL, after vLLM's own example: PORT PREFILL_URL DECODE_URL."""

from __future__ import annotations

import json
import sys

import aiohttp
from aiohttp import web

_REMOTE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class PdProxy:
    """Asks the prefill server for one token, and the decode server for all, with where the KV is."""

    def __init__(self, prefill: str, decode: str) -> None:
        self._prefill, self._decode = prefill, decode

    async def chat(self, request: web.Request) -> web.StreamResponse:
        wanted = json.loads(await request.read())
        first = {**wanted, "max_tokens": 1, "stream": False, "kv_transfer_params": _REMOTE}
        async with aiohttp.ClientSession(trust_env=False) as session:
            async with session.post(f"{self._prefill}/v1/chat/completions", json=first) as reply:
                if reply.status != 200:
                    return web.Response(status=reply.status, body=await reply.read())
                params = (await reply.json())["kv_transfer_params"]
            second = {**wanted, "kv_transfer_params": params}
            async with session.post(f"{self._decode}/v1/chat/completions", json=second) as reply:
                answer = web.StreamResponse(status=reply.status, headers={"Content-Type": reply.content_type})
                await answer.prepare(request)
                async for chunk in reply.content.iter_any():
                    await answer.write(chunk)
                return answer


def main() -> None:
    port, prefill, decode = sys.argv[1:]
    app = web.Application(client_max_size=64 << 20)
    app.add_routes([web.post("/v1/chat/completions", PdProxy(prefill, decode).chat)])
    web.run_app(app, host="127.0.0.1", port=int(port), print=None)


if __name__ == "__main__":
    main()
