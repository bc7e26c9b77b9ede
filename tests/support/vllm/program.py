"""`vllm serve` as a program that generates nothing: the scripted server, in a version of vLLM that is chosen.

    vllm serve MODEL --host HOST --port PORT --served-model-name NAME ...

FAKE_VERSION is its version. From 0.33 on its events have a further field, and requests and the count of
steps have other names. A token takes 20 ms.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys

from aiohttp import web

from support.vllm.scripted_server import Call, ScriptedServer, data, greedy

_PACE = 0.02


class FakeServer(ScriptedServer):
    """A server whose answers take their time, and end only with their last token."""

    def __init__(self, version: str, words: list[str]) -> None:
        super().__init__()
        self.version, self.later = version, version.startswith("0.33")
        self.host = words[words.index("--host") + 1]
        self._port = int(words[words.index("--port") + 1])
        self.default = self._paced

    async def _paced(self, call: Call) -> web.StreamResponse:
        response = await call.stream()
        tokens = greedy(call.body, call.max_tokens)
        name = "gen-2" if self.later else "generate-tokens-1"
        for index, token in enumerate(tokens):
            self.steps += 1
            reason = "length" if index == len(tokens) - 1 else None
            choice = {"index": 0, "token_ids": [token], "finish_reason": reason}
            event = {"request_id": name, "usage": None, "output_mode": "tokens", "choices": [choice]}
            await response.write(data(event | ({"kv_transfer_params": None} if self.later else {})))
            await asyncio.sleep(_PACE)
        await response.write(data({"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 0}}}))
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _metrics(self, request: web.Request) -> web.Response:
        name = "vllm:engine_steps_total" if self.later else "vllm:iteration_tokens_total_count"
        return web.Response(text=f'{name}{{engine="0"}} {self.steps}\n')


async def _main(words: list[str]) -> None:
    # What the connector would be given has to be there.
    json.loads(words[words.index("--ec-transfer-config") + 1])
    server = FakeServer(os.environ["FAKE_VERSION"], words)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await server.start()
    sys.stdout.write(f"vLLM {server.version} at {server.host}\n")
    sys.stdout.flush()
    await stop.wait()
    await server.stop()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1:]))
