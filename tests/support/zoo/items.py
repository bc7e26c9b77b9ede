"""What processors make of pictures, clips and sounds, in the forms that classes take them in."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from support.zoo.recipe import AUDIO, AUDIO_END, AUDIO_START, BREAK, END, FIRST_TILE, IMAGE, START, Item

#: Grids of the items 0, 1 and 2, in patches.
GRIDS = ((1, 4, 6), (1, 8, 4), (1, 6, 6))


def pixels(number: int, *shape: int) -> torch.Tensor:
    """Values of an item's picture: another number gives another picture."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 + number))


def grid_item(*patch: int, key: str = "image_grid_thw", merge: int = 2) -> Callable[[int], Item]:
    """Pictures as rows of patches [patches, *patch] with their grid."""

    def make(number: int) -> Item:
        grid = GRIDS[number]
        count = grid[0] * grid[1] * grid[2]
        tensors = {"pixel_values": pixels(number, count, *(patch or (96,))), key: torch.tensor([grid])}
        return Item(tensors, [START, *[IMAGE] * (count // merge**2), END])

    return make


def sized_item(
    sizes: tuple[tuple[int, int], ...], shape: tuple[int, ...], key: str, *, padded: int = 0, per_row: int = 4
) -> Callable[[int], Item]:
    """Patches of `shape`, of pictures of these sizes in patches, which the input `key` tells."""

    def make(number: int) -> Item:
        height, width = sizes[number]
        count = height * width
        tensors = {"pixel_values": pixels(number, count, *shape), key: torch.tensor([[height, width]])}
        if padded:
            blank = (*(0 for _ in shape for _ in range(2)), 0, padded - count)
            tensors["pixel_values"] = torch.nn.functional.pad(tensors["pixel_values"], blank)[None]
            tensors["pixel_attention_mask"] = (torch.arange(padded) < count).int()[None]
        return Item(tensors, [START, *[IMAGE] * (count // per_row), END])

    return make


def square_item(
    size: int,
    rows: int,
    before: tuple[int, ...] = (START,),
    after: tuple[int, ...] = (END,),
    *,
    key: str = "pixel_values",
    ones: Mapping[str, tuple[int, ...]] | None = None,
    tiles: bool = False,
) -> Callable[[int], Item]:
    """Pictures of one size; `ones` names masks by their shapes. With `tiles` each is one tile of one."""

    def make(number: int) -> Item:
        shape = (1, 1, 3, size, size) if tiles else (1, 3, size, size)
        tensors = {key: pixels(number, *shape)}
        tensors |= {name: torch.ones(shape, dtype=torch.bool) for name, shape in (ones or {}).items()}
        return Item(tensors, [*before, *[IMAGE] * rows, *after])

    return make


def tiled_item(size: int, rows: int, *, mask: bool = True) -> Callable[[int], Item]:
    """Pictures of one or three tiles, each with a token before its rows: runs with text between."""

    def make(number: int) -> Item:
        tiles = 1 if number == 1 else 3
        tensors = {"pixel_values": pixels(number, 1, tiles, 3, size, size)}
        if mask:
            tensors["pixel_attention_mask"] = torch.ones(1, tiles, size, size, dtype=torch.long)
        token_ids = [token for t in range(tiles) for token in (START, FIRST_TILE + t, *[IMAGE] * rows)]
        return Item(tensors, [*token_ids, END])

    return make


def unpadded_item(rows: int, side: int) -> Callable[[int], Item]:
    """Pictures of a base view and tiles, whose rows of the grid end with a newline (LLaVA-NeXT)."""

    def make(number: int) -> Item:
        height, width = ((16, 32), (32, 32), (32, 16))[number]
        tiles = 1 + height * width // 256
        grid = (height // side) * (width // side + 1)
        tensors = {
            "pixel_values": pixels(number, 1, tiles, 3, 16, 16),
            "image_sizes": torch.tensor([[height, width]]),
        }
        return Item(tensors, [START, *[IMAGE] * (rows + grid), END])

    return make


def pixtral_item(number: int) -> Item:
    """Pictures of any size, each row of placeholders followed by a break."""
    height, width = ((16, 24), (32, 16), (24, 24))[number]
    padding = (0, 32 - width, 0, 32 - height)
    body = [*[IMAGE] * (width // 8), BREAK] * (height // 8)
    tensors = {
        "pixel_values": torch.nn.functional.pad(pixels(number, 1, 3, height, width), padding),
        "image_sizes": torch.tensor([[height, width]]),
    }
    return Item(tensors, [*body[:-1], END])


def codes_item(per_row: int = 0) -> Callable[[int], Item]:
    """Pictures of any size, of which a row of the code book stands for 4 x 4 pixels each.

    Each row of codes has `per_row` further ones at its end.
    """

    def make(number: int) -> Item:
        height, width = ((16, 24), (32, 16), (24, 24))[number]
        padding = (0, 32 - width, 0, 32 - height)
        tensors = {
            "pixel_values": torch.nn.functional.pad(pixels(number, 1, 3, height, width), padding),
            "image_sizes": torch.tensor([[height, width]]),
        }
        return Item(tensors, [START, *[IMAGE] * (height // 4 * (width // 4 + per_row)), END])

    return make


def sound_item(
    frames: tuple[int, int, int],
    rows: tuple[int, int, int],
    mask: str = "",
    *,
    padded: int = 16,
    swapped: bool = False,
) -> Callable[[int], Item]:
    """Sounds of 16 mel bins, padded to one length; `mask` is the input that tells it.

    With `swapped` frames come before bins.
    """

    def make(number: int) -> Item:
        shape = (1, padded, 16) if swapped else (1, 16, padded)
        tensors = {"input_features": pixels(number, *shape)}
        if mask:
            tensors[mask] = (torch.arange(padded) < frames[number]).int()[None]
        return Item(tensors, [AUDIO_START, *[AUDIO] * rows[number], AUDIO_END])

    return make


def strip_item(number: int) -> Item:
    """Patches side by side in one row, with the grid that they make (MiniCPM-V)."""
    height, width = ((4, 8), (8, 8), (8, 4))[number]
    tensors = {
        "pixel_values": pixels(number, 1, 3, 4, height * width * 4),
        "target_sizes": torch.tensor([[height, width]]),
    }
    return Item(tensors, [START, *[IMAGE] * (height * width // 16), END])


def placed_item(per_row: int) -> Callable[[int], Item]:
    """Patches with their places, padded to 36 (Gemma 4)."""

    def make(number: int) -> Item:
        height, width = ((4, 6), (4, 4), (6, 6))[number]
        count = height * width
        places = torch.cartesian_prod(torch.arange(height), torch.arange(width)).flip(1)[None]
        blank = (0, 0, 0, 36 - count)
        tensors = {
            "pixel_values": torch.nn.functional.pad(pixels(number, 1, count, 48).sigmoid(), blank),
            "image_position_ids": torch.nn.functional.pad(places, blank, value=-1),
        }
        return Item(tensors, [START, *[IMAGE] * (count // per_row), END])

    return make


def two_scales_item(number: int) -> Item:
    """Pictures at two resolutions."""
    item = square_item(16, 16)(number)
    return Item({**item.tensors, "high_res_pixel_values": pixels(number + 10, 1, 3, 64, 64)}, item.token_ids)


def with_newlines_item(number: int) -> Item:
    """Rows that hold newlines, begin and end themselves (HunYuan)."""
    item = grid_item(48)(number)
    _, height, width = GRIDS[number]
    return Item(item.tensors, [START, *[IMAGE] * ((height // 2) * (width // 2 + 1) + 2), END])


def merged_item(number: int) -> Item:
    """Patches with a grid and a merge size of each picture (VideoLLaMA 3)."""
    item = grid_item(48)(number)
    return Item({**item.tensors, "image_merge_sizes": torch.tensor([2])}, item.token_ids)


def patches_item(number: int) -> Item:
    """Patches in rows of a batch, without a grid (Fuyu)."""
    return Item({"pixel_values": pixels(number, 1, 8, 48)}, [*[IMAGE] * 8, END])
