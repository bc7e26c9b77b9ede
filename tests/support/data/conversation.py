"""A chat that grows turn by turn, as a client sends it and as the oracle reads it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

from support.data.traffic import Answer, ask
from support.processes.cluster import PATIENCE, Cluster, data_url
from triptych.store import keys


@dataclass
class Conversation:
    """The history of one chat: user and assistant in turn. A `Case` for `ask`."""

    history: list[dict[str, Any]] = field(default_factory=list)
    pictures: list[Any] = field(default_factory=list)

    def say(self, text: str, *pictures: Any) -> None:
        """The user's next message, its pictures first."""
        self.pictures += pictures
        parts = [{"type": "image"} for _ in pictures]
        self.history.append({"role": "user", "content": [*parts, {"type": "text", "text": text}]})

    def oracle_messages(self) -> list[dict[str, Any]]:
        return self.history

    def client_messages(self) -> list[dict[str, Any]]:
        pictures = iter(self.pictures)
        return [self._sent(message, pictures) for message in self.history]

    def _sent(self, message: dict[str, Any], pictures: Any) -> dict[str, Any]:
        if message["role"] == "assistant":
            return {"role": "assistant", "content": message["content"][0]["text"]}
        parts = [
            {"type": "image_url", "image_url": {"url": data_url(next(pictures))}}
            if part["type"] == "image"
            else part
            for part in message["content"]
        ]
        return {"role": "user", "content": parts}

    async def turn(self, cluster: Cluster, tokens: int, model: str = "", **extra: Any) -> Answer:
        """The answer to all so far, which becomes the history's last message."""
        answer = await ask(cluster.url, self, tokens, model, **extra)  # type: ignore[arg-type]
        self.history.append({"role": "assistant", "content": [{"type": "text", "text": answer.text}]})
        return answer

    def expected(self, path: Path, tokens: int) -> Any:
        """The oracle's answer to all so far; asked before `turn`."""
        from support.data.oracle import oracle

        return oracle(path, self.oracle_messages(), self.pictures, max_new_tokens=tokens)


def lose_embeddings(cluster: Cluster) -> None:
    """The store loses all embeddings, and nothing else."""
    with redis.Redis.from_url(cluster.store_url, socket_timeout=PATIENCE) as client:
        for key in list(client.scan_iter(match=f"{keys.EMBEDDING}*", count=1000)):
            client.delete(key)
