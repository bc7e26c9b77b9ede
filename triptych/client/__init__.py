"""A client of a running cluster, for programs that want no more than answers: `triptych.Client(url)`."""

from triptych.client.answers import Answer, Chunk, Completion, Segment, ToolCall, Transcript
from triptych.client.clients import AsyncClient, Client
from triptych.client.messages import File

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
