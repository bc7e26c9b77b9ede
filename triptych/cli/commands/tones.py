"""`triptych tones`: a sound file for the audio demo."""

from __future__ import annotations

from pathlib import Path

from triptych.demo.tones import DIGITS, LONGEST, tones_file
from triptych.errors import ConfigError


def write_tones(digits: str, output: Path) -> None:
    """Writes a WAV file; ConfigError for anything but 1 to 8 digits, or a file that cannot be written."""
    if not 0 < len(digits) <= LONGEST or set(digits) - set(DIGITS):
        raise ConfigError(f"DIGITS={digits!r}: give 1 to {LONGEST} digits, like 5551234")
    try:
        output.write_bytes(tones_file(digits))
    except OSError as error:
        raise ConfigError(f"--output {output}: {error.strerror}: name a file that can be written") from error
