"""A small client of a running cluster, blocking or for asyncio: `triptych.Client(url)`."""

from triptych.apps.client.answers import (
    Answer,
    Chunk,
    Completion,
    Ranked,
    Ranking,
    Segment,
    TokenVectors,
    ToolCall,
    Transcript,
    Vectors,
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
    "Vectors",
    "File",
    "Ranked",
    "Ranking",
    "Segment",
    "TokenVectors",
    "ToolCall",
    "Transcript",
]
