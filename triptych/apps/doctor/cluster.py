"""Checks of a running cluster over HTTP: whether it answers, is ready, and which models it serves."""

from __future__ import annotations

import json
import ssl
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException

from triptych.apps.doctor.finding import CheckResult, fail, note, ok

_SECONDS = 5.0
_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PageReply:
    """The answer to a GET: status and body, or the `error` that came in place of one."""

    status: int = 0
    body: str = ""
    error: str = ""
    seconds: float = 0.0


def ask(url: str, key: str = "") -> PageReply:
    """GET of one address; never raises for what the other side does."""
    began = time.monotonic()
    try:
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
        with urllib.request.urlopen(request, timeout=_SECONDS) as reply:
            body = reply.read(_MAX_BYTES).decode(errors="replace")
            return PageReply(reply.status, body, seconds=time.monotonic() - began)
    except urllib.error.HTTPError as error:
        with error:
            return PageReply(error.code, error.read(_MAX_BYTES).decode(errors="replace"))
    except (OSError, ValueError, HTTPException) as error:  # the last: no HTTP at all
        reason = getattr(error, "reason", error)
        return PageReply(error=f"{'TLS: ' if isinstance(reason, ssl.SSLError) else ''}{reason}")


def look_at_cluster(url: str, key: str = "") -> list[CheckResult]:
    """The findings on the proxy at `url`, like http://10.0.0.5:8000."""
    url = url.rstrip("/")
    if not url.startswith(("http://", "https://")):
        return [fail("--url", url, "give an address like http://10.0.0.5:8000")]
    health = ask(f"{url}/health")
    if health.error:
        return [_unreached(url, health.error)]
    return [
        check_health(health),
        check_ready(ask(f"{url}/ready")),
        check_models(ask(f"{url}/v1/models", key)),
    ]


def _unreached(url: str, error: str) -> CheckResult:
    if error.startswith("TLS: "):
        return fail("proxy", f"{url}: {error}", "give SSL_CERT_FILE the CA, or the name in the certificate")
    return fail("proxy", f"{url}: {error}", "start it, or correct --url; a firewall may be between")


def check_health(answer: PageReply) -> CheckResult:
    """GET /health."""
    if answer.status == 200:
        return ok("proxy", f"answers in {answer.seconds * 1000:.0f} ms")
    return fail("proxy", f"/health says {answer.status}", "see its log; is it a Triptych proxy?")


def check_ready(answer: PageReply) -> CheckResult:
    """GET /ready."""
    try:
        said = json.loads(answer.body)
    except ValueError:
        said = {}
    said = said if isinstance(said, dict) else {}
    if answer.status != 200:
        text = str(said.get("status") or answer.error or f"/ready says {answer.status}")
        return fail("ready", text, "start PD workers with the proxy's --store, and see their logs")
    if said.get("degraded"):
        return fail("ready", f"without the {said['degraded']}", "see the checks of the store: give --store")
    return ok("ready", "takes requests")


def check_models(answer: PageReply) -> CheckResult:
    """GET /v1/models."""
    if answer.status == 401:
        return note("models", "the API key is missing or wrong", "give one of the cluster's by --api-key")
    try:
        names = [str(model["id"]) for model in json.loads(answer.body)["data"]]
    except (ValueError, KeyError, TypeError):
        return fail("models", answer.error or f"/v1/models says {answer.status}", "is it a Triptych proxy?")
    return ok("models", ", ".join(names)) if names else fail("models", "none", "start PD workers")
