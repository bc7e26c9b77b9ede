"""The folder for temporary files, which a container with a read-only root may lack."""

from __future__ import annotations

import tempfile

from triptych.base.errors import ConfigError


def check_temporary_folder() -> None:
    """ConfigError with the remedy where no temporary file can be written: torch and the media need one."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        raise ConfigError(
            "no temporary file can be written: mount a folder at /tmp (Docker: --tmpfs /tmp, Kubernetes: an "
            "emptyDir), or name one by TMPDIR"
        ) from None
