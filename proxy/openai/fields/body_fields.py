"""Fields of request bodies that several endpoints share, with their descriptions for the OpenAPI page."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from triptych.base.request.limits import Logprobs
from triptych.proxy.openai.fields import schemas
from triptych.proxy.openai.fields.sampling import CacheSalt


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


ChatMessages = Annotated[
    schemas.Messages, Meta(description="The conversation. Images are parts of a message's content.")
]
ModelName = Annotated[
    str | None, Meta(description="A name from GET /v1/models; optional when only one model is served.")
]
Stream = Annotated[
    bool | None, Meta(description="Send the answer as server-sent events while it is generated.")
]
StreamUsage = Annotated[
    StreamOptions | None, Meta(description="include_usage: send the usage in a last event.")
]
ChoiceCount = Annotated[int | None, Meta(description="Number of answers, at most --max-choices.")]
TopLogprobs = Annotated[
    Logprobs | None, Meta(description="Number of most likely tokens to report beside each chosen one.")
]
ChatTools = Annotated[schemas.Tools | None, Meta(description="Functions that the model may call.")]
ParallelCalls = Annotated[
    bool | None, Meta(description="Whether an answer may hold several calls; true by default.")
]
TemplateVariables = Annotated[
    dict[str, object] | None, Meta(description="Additional variables for the chat template.")
]
GenerationPrompt = Annotated[
    bool | None, Meta(description="Open the assistant's turn at the end of the prompt; true by default.")
]
ContinueFinal = Annotated[
    bool | None, Meta(description="Continue the last message instead of starting a new one.")
]
ReturnTokenIds = Annotated[bool | None, Meta(description="Report the token ids of prompt and output.")]
ProcessorOptions = Annotated[
    dict[str, object] | None,
    Meta(description="Options of the image processor; they change embeddings and their keys."),
]
Salt = Annotated[
    CacheSalt | None, Meta(description="Requests with different salts share no embeddings and no KV blocks.")
]
TimingsWanted = Annotated[bool | None, Meta(description="Report how long each stage of the request took.")]
SpecialTokens = Annotated[
    schemas.OnlyTrue,
    Meta(description="Only true is supported: the tokenizer adds its own special tokens to a text."),
]
