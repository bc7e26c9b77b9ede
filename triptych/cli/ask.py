"""`triptych ask`: one question to a running cluster, the answer as it comes."""

from __future__ import annotations

import base64
import json
import mimetypes
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: Longest silence between two pieces of an answer, in seconds.
READ_TIMEOUT = 300.0


def ask_cluster(question: str, images: list[str], url: str, max_tokens: int, api_key: str = "") -> None:
    """Prints the answer; exits with 1 and one sentence when there is none."""
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": _parts(question, images)}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
        }
    ).encode()
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    request = urllib.request.Request(f"{url.rstrip('/')}/v1/chat/completions", data=body, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=READ_TIMEOUT) as reply:
            for text in _texts(reply):
                sys.stdout.write(text)
                sys.stdout.flush()
    except urllib.error.HTTPError as error:
        sys.exit(f"triptych: {_message(error.read())}")
    except (urllib.error.URLError, OSError) as error:
        reason = getattr(error, "reason", error)
        sys.exit(f"triptych: nobody answers at {url} ({reason}): start a cluster with `triptych serve`")
    sys.stdout.write("\n")


def _parts(question: str, images: list[str]) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for image in images:
        kind = mimetypes.guess_type(image)[0] or "image/png"
        data = base64.b64encode(Path(image).read_bytes()).decode()
        parts.append({"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}})
    return [*parts, {"type": "text", "text": question}]


def _texts(reply: Any) -> Iterator[str]:
    for line in reply:
        if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
            continue
        chunk = json.loads(line[6:])
        if "error" in chunk:
            sys.exit(f"\ntriptych: {chunk['error']['message']}")
        for choice in chunk.get("choices", []):
            yield choice["delta"].get("content") or ""


def _message(raw: bytes) -> str:
    try:
        return str(json.loads(raw)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return raw[:200].decode(errors="replace")
