"""The packages that only some commands need, and the error of a command without its own."""

from __future__ import annotations

from typing import Any

import click

from triptych.errors import ConfigError

_WORKER = (
    "jinja2",
    "llguidance",
    "numpy",
    "safetensors",
    "soundfile",
    "soxr",
    "tokenizers",
    "torch",
    "transformers",
)
#: The extra that installs each module; `_BENCH` need numpy and PIL for themselves.
_EXTRAS = {
    **dict.fromkeys((*_WORKER, "PIL"), "worker"),
    "cryptography": "cert",
    "matplotlib": "bench",
    "ray": "ray",
    "vllm": "vllm",
}
_BENCH = ("bench", "plan")


class Commands(click.Group):
    """A group whose commands end with one sentence where a package of an extra is missing."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            module, command = (error.name or "").partition(".")[0], ctx.invoked_subcommand
            extra = _EXTRAS.get(module)
            if extra is None:
                raise
            if extra == "worker" and command in _BENCH:
                extra = "bench"
            raise ConfigError(
                f"`triptych {command}` needs {module}, not installed here: pip install 'triptych[{extra}]'"
            ) from error
