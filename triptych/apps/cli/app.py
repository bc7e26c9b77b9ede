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
#: What pip installs for each module that is not the core's.
_INSTALLS = dict.fromkeys((*_WORKER, "transformers"), "'triptych[worker]'")
_INSTALLS |= {"cryptography": "'triptych[cert]'", "ray": "'triptych[ray]'", "vllm": "'triptych[vllm]'"}
_INSTALLS |= {"httpx2": "'triptych[client]'", "rich": "'triptych[top]'", "packaging": "'triptych[doctor]'"}
_INSTALLS |= dict.fromkeys(("triptych_bench", "matplotlib"), "triptych-bench")
#: What it installs for a command, whatever of it is missing.
_WHOLE = {"bench": "triptych-bench", "plan": "triptych-bench", "top": "'triptych[top]'"}


class CommandGroup(click.Group):
    """A group whose commands end with one sentence where a package that is no part of the core is missing."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            module, command = (error.name or "").partition(".")[0], ctx.invoked_subcommand
            if module not in _INSTALLS:
                raise
            install = _WHOLE.get(command or "", _INSTALLS[module])
            raise ConfigError(
                f"`triptych {command}` needs {module}, not installed here: pip install {install}"
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
    "ask": ("ask", "embed", "transcribe"),
    "top": ("top",),
    "bench": ("bench",),
    "plan": ("plan", "profile"),
}
for _module, _names in _EDGES.items():
    if (_edge := load_edge(f"triptych.apps.cli.commands.{_module}")) is not None:
        for _name in _names:
            app.add_command(getattr(_edge, _name))
