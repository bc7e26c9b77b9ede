"""JPEG files decoded by simplejpeg, faster than by Pillow, where it gives Pillow's bits."""

from __future__ import annotations

import functools
import io
import logging
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from PIL import Image

if TYPE_CHECKING:
    # A process that decodes one picture is not to wait for it.
    import numpy as np

logger = logging.getLogger(__name__)

#: Shapes, subsamplings and modes of the files on which the decoder must equal Pillow.
_PROOFS: tuple[dict[str, Any], ...] = (
    {"size": (64, 48), "subsampling": 0},
    {"size": (33, 17), "subsampling": 1},
    {"size": (97, 61), "subsampling": 2},
    {"size": (70, 131), "subsampling": 2, "progressive": True},
    {"size": (1, 1), "subsampling": 2},
    {"size": (45, 30), "mode": "L"},
)
#: numpy's way to each of EXIF's orientations, of the axes of rows and columns.
_TURNS: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: a[::-1].swapaxes(0, 1),
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: a[:, ::-1].swapaxes(0, 1),
}


class ArrayImage(Image.Image):
    """An RGB picture whose pixels are a numpy array; Pillow's own memory is filled when a method needs it."""

    def __init__(self, pixels: np.ndarray) -> None:
        super().__init__()
        self._mode, self._size = "RGB", (pixels.shape[1], pixels.shape[0])
        self.pixels = pixels

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self.pixels.__array_interface__

    def load(self) -> Any:
        if self._im is None:
            self._im = Image.fromarray(self.pixels).im
        return super().load()


def decode_jpeg(data: bytes, header: Image.Image, orientation: int) -> Image.Image | None:
    """The upright RGB picture of a file that Pillow has opened as `header`, equal to Pillow's.

    None for what is Pillow's to decode or to refuse: other modes, and files with anything amiss.
    """
    codec = _codec()
    if codec is None or header.mode not in ("RGB", "L") or orientation not in _TURNS:
        return None
    try:
        height, width = codec.decode_jpeg_header(data)[:2]
        if (width, height) != header.size:  # the size that was checked
            return None
        pixels = codec.decode_jpeg(data, "RGB")
    except ValueError:
        return None
    import numpy as np

    return ArrayImage(np.ascontiguousarray(_TURNS[orientation](pixels)))


@functools.cache
def _codec() -> ModuleType | None:
    """simplejpeg; None where it is missing or gives other bits than Pillow."""
    try:
        import simplejpeg
    except ImportError as error:
        logger.warning("JPEG files are decoded by Pillow, a third slower (%s): pip install simplejpeg", error)
        return None
    import numpy as np

    for proof in _proofs():
        with Image.open(io.BytesIO(proof)) as picture:
            if not np.array_equal(simplejpeg.decode_jpeg(proof, "RGB"), np.asarray(picture.convert("RGB"))):
                logger.warning(
                    "JPEG files are decoded by Pillow, a third slower: simplejpeg gives other bits"
                )
                return None
    codec: ModuleType = simplejpeg
    return codec


def _proofs() -> Iterator[bytes]:
    import numpy as np

    noise = np.random.default_rng(0)
    for proof in _PROOFS:
        width, height = proof["size"]
        picture = Image.fromarray(noise.integers(0, 256, (height, width, 3), dtype=np.uint8))
        settings = {name: proof[name] for name in ("subsampling", "progressive") if name in proof}
        file = io.BytesIO()
        picture.convert(proof.get("mode", "RGB")).save(file, "JPEG", quality=90, **settings)
        yield file.getvalue()
