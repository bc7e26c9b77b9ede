"""Processors that transformers has on torchvision only: rows for the table of processors."""

from __future__ import annotations

from typing import Any

from support.zoo.recipe import END, IMAGE, START, VIDEO

# fmt: off
_GRID = {"patch_size": 4, "merge_size": 2}
_SQUARE = {"size": {"height": 16, "width": 16}}
_TILES = {262 + 4 * row + col: f"<|img_row_{row + 1}_col_{col + 1}|>" for row in range(4) for col in range(4)}
_MUSE = {IMAGE: "<|patch|>", START: "<|image_start|>", END: "<|image_end|>"}

#: Names of the processor and of its image processor, settings, options, the template's picture, strings.
TORCHVISION: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], str, dict[int, str]]] = {
    "Cohere2Vision": ("Cohere2VisionProcessor", "Cohere2VisionImageProcessor",
                      {**_SQUARE, "patch_size": 2, "max_patches": 4}, {}, "<image>", {}),
    "Kimi_K25": ("Kimi_K25Processor", "Kimi_K25ImageProcessor",
                 {**_GRID, "max_patches": 64, "size": {"max_height": 32, "max_width": 32}}, {},
                 "<|vision_start|><image><|vision_end|>", {}),
    "Llama4": ("Llama4Processor", "Llama4ImageProcessor", {**_SQUARE, "max_patches": 4},
               {"patch_size": 4, "pixel_shuffle_ratio": 0.5}, "<|image|>",
               {**_MUSE, 309: "<|image|>", 310: "<|tile_x_separator|>", 311: "<|tile_y_separator|>"}),
    "Lfm2Vl": ("Lfm2VlProcessor", "Lfm2VlImageProcessor",
               {**_SQUARE, "encoder_patch_size": 4, "tile_size": 16, "min_image_tokens": 4,
                "max_image_tokens": 16, "max_tiles": 4}, {}, "<image>", {**_TILES, 278: "<|img_thumbnail|>"}),
    "MiniMaxM3Sparse": ("MiniMaxM3VLProcessor", "MiniMaxM3VLImageProcessor",
                        {**_GRID, "size": {"shortest_edge": 256, "longest_edge": 1024}}, {}, "]<]image[>[",
                        {IMAGE: "]<]image[>[", VIDEO: "]<]video[>[", START: "]<]start of image[>[",
                         END: "]<]end of image[>["}),
    "Step3p7": ("Step3p7Processor", "Step3p7ImageProcessor",
                {"size": {"height": 32, "width": 32}, "patch_size": 16, "vision_patch_size": 4}, {},
                "<im_patch>",
                {IMAGE: "<im_patch>", START: "<im_start>", END: "<im_end>", 262: "<patch_start>",
                 263: "<patch_end>", 264: "<patch_newline>"}),
    "MiniCPMOcr": ("MiniCPMOcrProcessor", "MiniCPMOcrImageProcessor",
                   {"scale_resolution": 16, "patch_size": 4, "max_slice_nums": 4, "downsample_mode": "16x",
                    "use_image_id": False}, {}, "<image>", {}),
    "NemotronH_Omni_Reasoning_V3": ("NemotronH_Omni_Reasoning_V3Processor",
                                    "NemotronH_Omni_Reasoning_V3ImageProcessor",
                                    {"patch_size": 4, "min_num_patches": 16, "max_num_patches": 64}, {},
                                    "<image>", {}),
    "Mistral3": ("PixtralProcessor", "PixtralImageProcessorPil",
                 {"size": {"longest_edge": 32}, "patch_size": 8},
                 {"patch_size": 4, "spatial_merge_size": 2, "image_token": "<image>",
                  "image_end_token": "<|vision_end|>"}, "<image>", {}),
    "Gemma4Unified": ("Gemma4UnifiedProcessor", "Gemma4UnifiedImageProcessor",
                      {"patch_size": 2, "pooling_kernel_size": 2, "max_soft_tokens": 70}, {}, "<image>", {}),
    "MuseGlimmer": ("MuseGlimmerProcessor", "MuseGlimmerImageProcessor", {**_GRID, "max_image_tokens": 16},
                    {}, "<|patch|>", _MUSE),
    "MuseSpark": ("MuseSparkProcessor", "MuseGlimmerImageProcessor", {**_GRID, "max_image_tokens": 16}, {},
                  "<|patch|>", _MUSE),
}
