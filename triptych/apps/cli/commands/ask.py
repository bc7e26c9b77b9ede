"""The commands that ask a running cluster: `triptych ask`, `triptych embed` and `triptych transcribe`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import click

from triptych.apps.cli.options import configured
from triptych.base.config.flags import CommandOptions, flag
from triptych.base.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from triptych.apps.client import Client
    from triptych.apps.client.fields import (
        ChatFields,
        EmbeddingFields,
        Messages,
        SpeechFields,
        TokenVectorFields,
    )

FORMATS = ("text", "json", "verbose_json", "srt", "vtt")
#: Longest silence in seconds: nothing comes before the whole file is transcribed.
_TRANSCRIBE_TIMEOUT = 3600.0


@dataclass(frozen=True, slots=True)
class ServerOptions(CommandOptions):
    """The address of the cluster, and how to log in there."""

    url: str = flag("http://127.0.0.1:8000", "where the cluster answers", variable="TRIPTYCH_URL")
    api_key: str = flag("", "key to send", variable="TRIPTYCH_API_KEY")
    ca_file: str = flag("", "CA certificates (PEM) of an https:// address", variable="TRIPTYCH_CA_FILE")


@dataclass(frozen=True, slots=True)
class AskOptions(ServerOptions):
    """The arguments and options of `triptych ask`."""

    question: str = ""
    image: tuple[str, ...] = flag((), "picture file or URL; may be given several times", kind=str)
    video: tuple[str, ...] = flag((), "video file or URL; may be given several times", kind=str)
    audio: tuple[str, ...] = flag((), "audio file or URL; may be given several times", kind=str)
    model: str = flag("", "a name that the cluster serves, where it serves several")
    system: str = flag("", "a system message before the question")
    temperature: float = flag(0.0, "0 takes the likeliest token", minimum=0, maximum=2)
    max_tokens: int = flag(256, "longest answer", minimum=1)
    json: bool = flag(False, "print the whole reply as JSON, once it is complete")


@dataclass(frozen=True, slots=True)
class EmbedOptions(ServerOptions):
    """The arguments and options of `triptych embed`."""

    text: str = ""
    image: tuple[str, ...] = flag((), "picture file or URL; may be given several times", kind=str)
    tokens: bool = flag(False, "a vector for each token, of a late-interaction model")
    query: bool = flag(False, "with --tokens: the text is a query, not a document")
    dimensions: int = flag(0, "length of a vector, of a model that can shorten them; 0: its own", minimum=0)
    model: str = flag("", "a name that the cluster serves, where it serves several")

    def check(self) -> None:
        """Raises ConfigError for what cannot be sent."""
        if not self.text.strip() and not self.image:
            raise ConfigError("there is nothing to embed: give a text or --image")
        if self.query and not self.tokens:
            raise ConfigError("--query goes with --tokens: other models take an instruction in the text")
        if self.query and self.image:
            raise ConfigError("a query is a text: give --image without --query")


@dataclass(frozen=True, slots=True)
class TranscribeOptions(ServerOptions):
    """The arguments and options of `triptych transcribe`."""

    file: str = ""
    format: str = flag("text", "what to print; srt and vtt are subtitles", choices=FORMATS)
    language: str = flag("", "spoken language as a code such as en; default: detected")
    prompt: str = flag("", "text before the recording, or the spelling of names")
    translate: bool = flag(False, "write it down in English; goes without --language")
    model: str = flag("", "a name that the cluster serves, where it serves several")


@click.command()
@click.argument("question")
@configured(AskOptions)
def ask(options: AskOptions) -> None:
    """Sends QUESTION (- for standard input) to a running cluster and prints the answer as it streams in."""
    from triptych.apps.client.wire import conversation

    question = sys.stdin.read() if options.question == "-" else options.question
    with _connected(options, timeout=300.0) as client:
        messages = [*conversation(question, options.image, options.video, options.audio)]
        if options.system:
            messages.insert(0, {"role": "system", "content": options.system})
        fields: ChatFields = {"temperature": options.temperature, "max_tokens": options.max_tokens}
        if options.json:
            answer = client.chat(messages, model=options.model, **fields)
            click.echo(json.dumps(answer.raw, indent=1, ensure_ascii=False))
            return
        begun = False
        try:
            for chunk in client.stream(messages, model=options.model, **fields):
                begun = begun or bool(chunk.text)
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
        except RequestError:
            sys.stderr.write("\n" * begun)
            raise
    sys.stdout.write("\n")


@click.command()
@click.argument("text", default="")
@configured(EmbedOptions)
def embed(options: EmbedOptions) -> None:
    """Embeds TEXT (- for standard input), pictures or both; each line of the output is a vector, as JSON."""
    if options.text == "-":
        options = replace(options, text=sys.stdin.read())
    options.check()
    inputs = _inputs(options)
    of_tokens: TokenVectorFields = {"dimensions": options.dimensions} if options.dimensions else {}
    of_all: EmbeddingFields = {"dimensions": options.dimensions} if options.dimensions else {}
    with _connected(options, timeout=300.0) as client:
        vectors: Sequence[Sequence[float]]
        if options.tokens:
            (vectors,) = client.embed_tokens(inputs, model=options.model, **of_tokens).vectors
        else:
            vectors = client.embed(inputs, model=options.model, **of_all).vectors
    for vector in vectors:
        click.echo(json.dumps(vector))


def _inputs(options: EmbedOptions) -> str | Messages:
    """The text, or a message of pictures and text. An error ends the program."""
    from triptych.apps.client.wire import image_part

    if not options.image and not options.query:
        return options.text
    try:
        parts = [*map(image_part, options.image)]
    except (RequestError, OSError) as error:
        sys.exit(f"triptych: {error}")
    if options.text:
        parts.append({"type": "text", "text": options.text})
    return [{"role": "query" if options.query else "user", "content": parts}]


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@configured(TranscribeOptions)
def transcribe(options: TranscribeOptions) -> None:
    """Transcribes the audio FILE (WAV, FLAC, MP3, Ogg, M4A, WebM) with the speech model of a cluster."""
    fields: SpeechFields = {}
    if options.language:
        fields["language"] = options.language
    if options.prompt:
        fields["prompt"] = options.prompt
    with _connected(options, _TRANSCRIBE_TIMEOUT) as client:
        text = client.transcribe_to(
            options.file, options.format, translate=options.translate, model=options.model, **fields
        )
    sys.stdout.write(text.rstrip("\n") + "\n")


@contextmanager
def _connected(options: ServerOptions, timeout: float) -> Iterator[Client]:
    """A client of the cluster. An error ends the program with one sentence and exit code 1."""
    from triptych.apps.client import Client

    try:
        # The variable may hold all the keys of a server.
        key = options.api_key.partition(",")[0].strip()
        with Client(options.url, api_key=key, timeout=timeout, ca_file=options.ca_file) as client:
            yield client
    except RequestError as error:
        sys.exit(f"triptych: {error.message}")
    except OSError as error:
        sys.exit(f"triptych: {error}")
