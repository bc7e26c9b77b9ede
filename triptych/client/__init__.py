"""A small client of a running cluster, blocking or for asyncio: `triptych.Client(url)`."""

from triptych.client.answers import Answer, Chunk, Completion, Segment, ToolCall, Transcript
from triptych.client.async_client import AsyncClient
from triptych.client.client import Client
from triptych.client.fields import File

__all__ = [
    "Answer",
    "AsyncClient",
    "Chunk",
    "Client",
    "Completion",
    "File",
    "Segment",
    "ToolCall",
    "Transcript",
]
