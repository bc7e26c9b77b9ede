"""A small client of a running cluster, blocking or for asyncio: `triptych.Client(url)`."""

from triptych.apps.client.answers import (
    Answer,
    Chunk,
    Completion,
    Embeddings,
    Ranked,
    Ranking,
    Segment,
    ToolCall,
    Transcript,
)
from triptych.apps.client.async_client import AsyncClient
from triptych.apps.client.client import Client
from triptych.apps.client.fields import File

__all__ = [
    "Answer",
    "AsyncClient",
    "Chunk",
    "Client",
    "Completion",
    "Embeddings",
    "File",
    "Ranked",
    "Ranking",
    "Segment",
    "ToolCall",
    "Transcript",
]
