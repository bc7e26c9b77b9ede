"""Probes as a kubelet makes them."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any


def probe(port: int, path: str, host: str = "127.0.0.1") -> dict[str, Any]:
    """The JSON body of /health or /ready with the `code`; a code of 0 where nobody answers."""
    try:
        with urllib.request.urlopen(f"http://{host}:{port}{path}", timeout=10) as reply:
            return {"code": reply.status, **json.loads(reply.read())}
    except urllib.error.HTTPError as error:
        with error:
            return {"code": error.code, **json.loads(error.read())}
    except OSError:
        return {"code": 0}
