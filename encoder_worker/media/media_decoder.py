"""The program that decodes one picture or sound whose decode takes long, in a process of its own.

It runs the worker's own decoders, so that their bits are those of a thread, and prints a line of JSON before
the bytes. It is run by its path, isolated; `limits` name the folder that this project is imported from.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from typing import Any, BinaryIO

#: Address space of this process.
_MEMORY = 3 << 30


def write_picture(data: bytes, limits: dict[str, Any], out: BinaryIO) -> None:
    """The size of the upright RGB picture, and its pixels."""
    from triptych.encoder_worker.media.formats import decode_image
    from triptych.encoder_worker.media.jpeg import ArrayImage

    picture = decode_image(data, max_pixels=int(limits["pixels"]))
    out.write(json.dumps(dict(zip(("width", "height"), picture.size, strict=True))).encode() + b"\n")
    out.write(picture.pixels.data if isinstance(picture, ArrayImage) else picture.tobytes())


def write_sound(data: bytes, limits: dict[str, Any], out: BinaryIO) -> None:
    """The number of samples at the rate that is asked for, and the samples."""
    from triptych.encoder_worker.media.audio import AudioLimits, decode_audio

    waveform = decode_audio(data, int(limits["rate"]), AudioLimits(float(limits["seconds"])))
    out.write(json.dumps({"samples": len(waveform)}).encode() + b"\n")
    out.write(waveform.data)


def main(descriptor: int, limits: dict[str, Any]) -> None:
    """One file; a refused one is a line with `error`."""
    sys.path.insert(0, limits["root"])
    from triptych.base.errors import InvalidRequest, TooLarge

    out = sys.stdout.buffer
    with os.fdopen(descriptor, "rb") as file:
        data = file.read()
    try:
        (write_sound if "rate" in limits else write_picture)(data, limits, out)
    except InvalidRequest as error:
        # The parent puts the noun in front again.
        said = error.message.partition(": ")[2]
        out.write(json.dumps({"error": said, "large": isinstance(error, TooLarge)}).encode() + b"\n")
    except MemoryError:
        out.write(b'{"error": "", "cause": "MemoryError"}\n')
    out.flush()


if __name__ == "__main__":
    given = json.loads(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (given["cpu_seconds"], given["cpu_seconds"] + 1))
    main(int(sys.argv[1]), given)
