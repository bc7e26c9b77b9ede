"""Manifests of one container that is a short Python program, for tests of the small Kubernetes itself."""

from __future__ import annotations

import sys
import textwrap
from typing import Any

Manifest = dict[str, Any]

#: An HTTP server of /ready and /health on port 9100, whose states are files in /state; it logs its signals.
PROGRAM = """
import http.server, os, pathlib, signal, sys, time
state = pathlib.Path(sys.argv[1])
def end(*_):
    print("SIGTERM", flush=True)
    time.sleep(float(os.environ.get("DRAIN", "0")))
    os._exit(0)
signal.signal(signal.SIGTERM, end)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        bad = (state / ("not" + self.path.replace("/", "-"))).exists()
        self.send_response(503 if bad else 200)
        self.end_headers()
        self.wfile.write(os.environ.get("REVISION", "").encode())
    def log_message(self, *_):
        pass
print("started", flush=True)
http.server.ThreadingHTTPServer((os.environ["POD_IP"], 9100), Handler).serve_forever()
"""


def container(**extra: Any) -> Manifest:
    env = [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
    return {
        "name": "main",
        "image": "none",
        "command": [sys.executable, "-c", textwrap.dedent(PROGRAM)],
        "args": ["/state"],
        "env": env + extra.pop("env", []),
        "ports": [{"name": "metrics", "containerPort": 9100}],
        "readinessProbe": {"httpGet": {"path": "/ready", "port": "metrics"}, "periodSeconds": 1},
        "volumeMounts": [{"name": "state", "mountPath": "/state"}],
    } | extra


def workload(
    one: Manifest,
    replicas: int = 1,
    *,
    kind: str = "Deployment",
    name: str = "web",
    grace: int = 10,
    **spec: Any,
) -> Manifest:
    pod = {
        "terminationGracePeriodSeconds": grace,
        "containers": [one],
        "volumes": [{"name": "state", "emptyDir": {}}],
    }
    if kind == "StatefulSet":
        spec["serviceName"] = name
    return {
        "kind": kind,
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {"app": name}},
            "template": {"metadata": {"labels": {"app": name}}, "spec": pod},
        }
        | spec,
    }


def service(name: str = "web", port: int = 80) -> Manifest:
    return {
        "kind": "Service",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"selector": {"app": name}, "ports": [{"port": port, "targetPort": "metrics"}]},
    }
