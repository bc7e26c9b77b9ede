"""Which tensors of a checkpoint are quantized, by their stored dtypes and names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from safetensors import safe_open

from triptych.base.config import PDConfig
from triptych.base.errors import ConfigError
from triptych.base.types import Options
from triptych.models.checkpoint.conversion_lists import ConversionLists
from triptych.models.checkpoint.folder import read_config, safetensors_files
from triptych.models.checkpoint.support import check_supported

#: Dtypes that only quantized weights have, and those of packed ones: other integers are 64 bits, or flags.
_SMALL_FLOATS = ("F8_", "F6_", "F4")
_PACKED = frozenset(("I8", "U8", "I16", "U16", "I32", "U32"))
#: What stands beside a quantized weight, or in its place.
_COMPANION = re.compile(
    r"(^|\.)(weight_scale(_inv|_2)?|weight_(packed|global_scale|zero_point|g_idx)|qweight|qzeros|g_idx|SCB"
    r"|weight\.(absmax|quant_map|quant_state\..+|nested_.+))$"
)


def quantization_of(config: Options) -> Options:
    """The quantization that a config.json names, of the whole or of a part; empty for none."""
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    named = (part.get("quantization_config") for part in parts)
    return next((one for one in named if isinstance(one, dict) and one), {})


def module_of(key: str) -> str:
    """The module that a tensor belongs to."""
    name, found = _COMPANION.subn("", key)
    return name if found else key.rpartition(".")[0]


def quantized_tensors(dtypes: Mapping[str, str], quantization: Options) -> list[str]:
    """The keys, sorted, of weights that are quantized and of their scales; `dtypes` are safetensors' names.

    Packed integers count where the checkpoint names a quantization; without scales beside them only where its
    lists do not leave their module as it was: it may have tables.
    """
    lists = ConversionLists(quantization)
    scaled = {module_of(key) for key in dtypes if _COMPANION.search(key)}

    def packed(key: str) -> bool:
        return module_of(key) in scaled or lists.unconverted(module_of(key)) is None

    return sorted(
        key
        for key, dtype in dtypes.items()
        if dtype.startswith(_SMALL_FLOATS)
        or _COMPANION.search(key)
        or (quantization and dtype in _PACKED and packed(key))
    )


def _read_dtypes(path: Path) -> tuple[dict[str, str], set[str]]:
    """The stored dtypes of a folder by key, and the keys of matrices; ConfigError for damaged files."""
    dtypes: dict[str, str] = {}
    matrices = set()
    for file in safetensors_files(path):
        try:
            with safe_open(file, framework="pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118 - not a mapping
                    tensor = tensors.get_slice(key)
                    dtypes[key] = tensor.get_dtype()
                    if len(tensor.get_shape()) == 2:
                        matrices.add(key)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file} is damaged ({error}): fetch the checkpoint again") from error
    return dtypes, matrices


def read_quantized(path: Path) -> list[str]:
    """`quantized_tensors` of a folder; ConfigError for damaged files."""
    return quantized_tensors(_read_dtypes(path)[0], quantization_of(read_config(path)))


def check_tower(path: Path, names_of: Callable[[Iterable[str]], Mapping[str, str]]) -> None:
    """ConfigError where tensors of the tower or projector are quantized, which encoder workers do not compute
    with, or where the file and the lists of its config.json contradict each other.

    `names_of` picks the encoder's keys.
    """
    dtypes, matrices = _read_dtypes(path)
    quantization = quantization_of(read_config(path))
    lists = ConversionLists(quantization)
    keys = sorted(names_of(dtypes))
    quantized = list(names_of(quantized_tensors(dtypes, quantization)))
    remedy = "correct the list if the file is right, or fetch or quantize the checkpoint again"
    for key in quantized:
        if entry := lists.unconverted(module_of(key)):
            raise ConfigError(
                f"MODEL={path}: {key} is stored quantized ({dtypes[key]}), and {entry}, by which it is not: "
                f"{remedy}"
            )
    if quantized:
        raise ConfigError(
            f"MODEL={path}: {quantized[0]} and {len(quantized) - 1} more tensors of its tower or projector "
            "are quantized, which encoder workers do not compute with: give a checkpoint whose tower is not "
            "(of most FP8, AWQ and GPTQ ones only the decoder is), or an unquantized one"
        )
    for key in keys:
        if key in matrices and key.endswith(".weight") and (entry := lists.converted(module_of(key))):
            raise ConfigError(
                f"MODEL={path}: {key} is stored as {dtypes[key]}, and {entry}, by which it is quantized: "
                f"{remedy}"
            )


def check_decoder(path: Path) -> None:
    """ConfigError for a checkpoint that only vLLM can decode: one that names a quantization, or has one."""
    if quantization_of(read_config(path)) or (any(path.glob("*.safetensors")) and read_quantized(path)):
        check_supported(path, ["quantization"])


def check_for_engine(path: Path, flags: PDConfig) -> None:
    """`check_decoder` where a PD worker with these flags will decode itself, as far as flags alone tell."""
    by_vllm = flags.engine == "vllm" or bool(flags.engine_url)
    if not by_vllm and not (flags.engine == "auto" and flags.device.startswith("cuda")):
        check_decoder(path)
