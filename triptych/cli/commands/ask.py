"""`triptych ask`: one question to a running cluster, the answer as it comes."""

from __future__ import annotations

import sys

from triptych.client import Client
from triptych.errors import RequestError, Unavailable


def ask_cluster(question: str, images: list[str], url: str, max_tokens: int, api_key: str = "") -> None:
    """Prints the answer; exits with 1 and one sentence when there is none."""
    begun = False
    try:
        with Client(url, api_key=api_key) as client:
            for chunk in client.stream(question, files=images, temperature=0, max_tokens=max_tokens):
                begun = begun or bool(chunk.text)
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
    except RequestError as error:
        advice = ": start a cluster with `triptych serve`" if isinstance(error, Unavailable) else ""
        sys.exit("\n" * begun + f"triptych: {error.message}{advice}")
    except OSError as error:
        sys.exit(f"triptych: {error}")
    sys.stdout.write("\n")
