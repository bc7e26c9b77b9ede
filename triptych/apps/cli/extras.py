"""The packages that only some commands need, and the error of a command without its own."""

from __future__ import annotations

from typing import Any

import click

from triptych.base.errors import ConfigError

_WORKER = ("PIL", "jinja2", "llguidance", "numpy", "safetensors", "soundfile", "soxr", "tokenizers", "torch")
#: The extra that installs each module.
_EXTRAS = dict.fromkeys((*_WORKER, "transformers"), "worker")
_EXTRAS |= {"cryptography": "cert", "matplotlib": "bench", "ray": "ray", "vllm": "vllm"}


class CommandGroup(click.Group):
    """A group whose commands end with one sentence where a package of an extra is missing."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            module, command = (error.name or "").partition(".")[0], ctx.invoked_subcommand
            if module not in _EXTRAS:
                raise
            # They need numpy and PIL for themselves.
            extra = "bench" if command in ("bench", "plan") else _EXTRAS[module]
            raise ConfigError(
                f"`triptych {command}` needs {module}, not installed here: pip install 'triptych[{extra}]'"
            ) from error
