"""The command group `triptych`."""

from __future__ import annotations

from typing import Any

import click

from triptych import __version__
from triptych.apps.cli.commands.cluster import serve
from triptych.apps.cli.commands.local import cert, key, namespace, tones
from triptych.apps.cli.commands.services import colocated, encoder, pd, proxy
from triptych.base.edges import load_edge
from triptych.base.errors import ConfigError

_WORKER = ("PIL", "jinja2", "llguidance", "numpy", "safetensors", "soundfile", "soxr", "tokenizers", "torch")
#: The extra that installs each module.
_EXTRAS = dict.fromkeys((*_WORKER, "transformers"), "worker")
_EXTRAS |= {"cryptography": "cert", "matplotlib": "bench", "ray": "ray", "vllm": "vllm"}
_EXTRAS |= {"httpx2": "client", "rich": "top", "packaging": "doctor"}
#: Commands with an extra of their own, whatever module is missing.
_WHOLE = {"bench": "bench", "plan": "bench", "top": "top"}


class CommandGroup(click.Group):
    """A group whose commands end with one sentence where a package of an extra is missing."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            module, command = (error.name or "").partition(".")[0], ctx.invoked_subcommand
            if module not in _EXTRAS:
                raise
            extra = _WHOLE.get(command or "", _EXTRAS[module])
            raise ConfigError(
                f"`triptych {command}` needs {module}, not installed here: pip install 'triptych[{extra}]'"
            ) from error


@click.group(
    cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(__version__, message="%(prog)s %(version)s")
def app() -> None:
    """Serves multimodal models with the encoder disaggregated from prefill and decode."""


for command in (serve, proxy, encoder, pd, colocated, key, cert, namespace, tones):
    app.add_command(command)
#: Commands of edges, by their module.
_EDGES = {
    "doctor": ("check", "doctor", "store"),
    "ask": ("ask", "transcribe"),
    "top": ("top",),
    "bench": ("bench",),
    "plan": ("plan", "profile"),
}
for _module, _names in _EDGES.items():
    if (_edge := load_edge(f"triptych.apps.cli.commands.{_module}")) is not None:
        for _name in _names:
            app.add_command(getattr(_edge, _name))
