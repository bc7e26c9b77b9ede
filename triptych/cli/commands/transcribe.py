"""`triptych transcribe`: an audio file written down by a running cluster."""

from __future__ import annotations

import sys
from typing import Any

import click

FORMATS = ("text", "json", "verbose_json", "srt", "vtt")
#: Seconds of silence to bear: nothing comes before the whole file is written down.
_PATIENCE = 3600.0


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option(
    "--format",
    "form",
    default="text",
    show_default=True,
    type=click.Choice(FORMATS),
    help="what to print; srt and vtt are subtitles",
)
@click.option("--language", default="", help="what is spoken, a code such as en; heard where it is not said")
@click.option("--prompt", default="", help="what was said before, or names as they are spelled")
@click.option("--translate", is_flag=True, help="write it down in English; goes without --language")
@click.option("--model", default="", help="a name that the cluster serves, where it serves several")
@click.option(
    "--url",
    default="http://127.0.0.1:8000",
    show_default=True,
    envvar="TRIPTYCH_URL",
    show_envvar=True,
    help="where the cluster answers",
)
@click.option("--api-key", default="", envvar="TRIPTYCH_API_KEY", show_envvar=True, help="key to send")
def transcribe(
    file: str, form: str, translate: bool, model: str, url: str, api_key: str, **words: Any
) -> None:
    """Writes the audio FILE (WAV, FLAC, MP3 or Ogg) down with a running cluster's speech model."""
    from triptych.client import Client
    from triptych.errors import RequestError, Unavailable

    options = {name: value for name, value in words.items() if value}
    try:
        # The variable may hold all the keys of a server.
        with Client(url, api_key=api_key.partition(",")[0].strip(), timeout=_PATIENCE) as client:
            text = client.transcribe_to(file, form, translate=translate, model=model, **options)
    except RequestError as error:
        advice = ": start a cluster with `triptych serve`" if isinstance(error, Unavailable) else ""
        sys.exit(f"triptych: {error.message}{advice}")
    except OSError as error:
        sys.exit(f"triptych: {error}")
    sys.stdout.write(text.rstrip("\n") + "\n")
