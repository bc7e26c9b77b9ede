from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from triptych.base.errors import ConfigError
from triptych.goodput.load import pictures
from triptych.goodput.load.pictures import CONTENTS, PHOTOGRAPHS, draw
from triptych.goodput.load.workload import Picture


@pytest.fixture
def photographs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package `skimage` whose photographs are one gradient each."""
    package = tmp_path / "skimage"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").touch()
    for name in PHOTOGRAPHS:
        Image.linear_gradient("L").resize((90, 60)).convert("RGB").save(package / "data" / name)
    monkeypatch.syspath_prepend(str(tmp_path))
    pictures._source.cache_clear()
    yield
    pictures._source.cache_clear()


@pytest.mark.usefixtures("photographs")
@pytest.mark.parametrize("content", CONTENTS)
def test_equal_values_draw_equal_pictures_and_other_seeds_others(content: str) -> None:
    first, again, other = (draw(Picture(seed, 64, 48, content)) for seed in (3, 3, 4))
    assert first.size == (64, 48)
    assert first.mode == "RGB"
    assert first.tobytes() == again.tobytes() != other.tobytes()


def test_most_of_two_screenshots_of_one_screen_is_the_same() -> None:
    def screen(seed: int) -> bytes:
        return draw(Picture(seed, 320, 200, "screenshots")).tobytes()

    first = screen(0)
    shares = [
        sum(a == b for a, b in zip(first, screen(seed), strict=True)) / len(first) for seed in range(1, 40)
    ]
    assert max(shares) > 0.9


def test_photographs_that_are_not_installed_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "find_spec", lambda _: None)
    pictures._source.cache_clear()
    with pytest.raises(ConfigError, match=r"pip install 'triptych\[photos\]'"):
        draw(Picture(0, 32, 32, "photos"))
