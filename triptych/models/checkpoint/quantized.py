"""Which tensors of a checkpoint are quantized, by their stored dtypes and names, and which are read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from triptych.base.config import PDConfig
from triptych.base.errors import ConfigError
from triptych.base.machine.resources import cpu_flags
from triptych.base.types import Options
from triptych.base.vllm_classes import CLASSES
from triptych.models.checkpoint.conversion_lists import ConversionLists
from triptych.models.checkpoint.folder import read_config, safetensors_files
from triptych.models.checkpoint.scaled_weights import ScaledWeights, StoredTensor, find_scaled

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


def read_stored(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a folder as its files' headers have them; ConfigError for damaged files."""
    stored: dict[str, StoredTensor] = {}
    for file in safetensors_files(path):
        try:
            with safe_open(file, framework="pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118 - not a mapping
                    tensor = tensors.get_slice(key)
                    stored[key] = StoredTensor(tensor.get_dtype(), tuple(tensor.get_shape()))
        except (OSError, ValueError, SafetensorError) as error:
            raise ConfigError(f"{file} is damaged ({error}): fetch the checkpoint again") from error
    return stored


def read_quantized(path: Path) -> list[str]:
    """`quantized_tensors` of a folder; ConfigError for damaged files."""
    return _quantized(read_stored(path), quantization_of(read_config(path)))


def _quantized(stored: Mapping[str, StoredTensor], quantization: Options) -> list[str]:
    return quantized_tensors({key: tensor.dtype for key, tensor in stored.items()}, quantization)


def read_scaled(path: Path) -> ScaledWeights:
    """The weights of a folder that become floats while they are read; ConfigError for damaged files."""
    stored, quantization = read_stored(path), quantization_of(read_config(path))
    return find_scaled(stored, _quantized(stored, quantization), quantization)


def check_tower(path: Path, names_of: Callable[[Iterable[str]], Mapping[str, str]]) -> None:
    """ConfigError where tensors of the tower or projector are quantized in a way that is not read, or where
    the file and the lists of its config.json contradict each other.

    `names_of` picks the encoder's keys.
    """
    stored, quantization = read_stored(path), quantization_of(read_config(path))
    lists = ConversionLists(quantization)
    found = find_scaled(stored, _quantized(stored, quantization), quantization)
    quantized = sorted(names_of([*found.weights, *found.unread]))
    remedy = "correct the list if the file is right, or fetch or quantize the checkpoint again"
    for key in quantized:
        if entry := lists.unconverted(module_of(key)):
            raise ConfigError(
                f"MODEL={path}: {key} is stored quantized ({_dtype(key, stored, found)}), and {entry}, by "
                f"which it is not: {remedy}"
            )
    if unread := [key for key in quantized if key in found.unread]:
        raise ConfigError(
            f"MODEL={path}: {_named(unread, found)} of its tower or projector, quantized as "
            f"{format_of(quantization)}, which encoder workers do not read: {_READ}, one whose tower is not "
            "quantized (of most only the decoder is), or an unquantized one"
        )
    for key in sorted(names_of(set(stored) - set(quantized) - found.beside)):
        matrix = len(stored[key].shape) == 2 and key.endswith(".weight")
        if matrix and (entry := lists.converted(module_of(key))):
            raise ConfigError(
                f"MODEL={path}: {key} is stored as {stored[key].dtype}, and {entry}, by which it is "
                f"quantized: {remedy}"
            )


def _dtype(key: str, stored: Mapping[str, StoredTensor], found: ScaledWeights) -> str:
    weight = found.weights.get(key)
    return stored[weight.packed if weight is not None and weight.packed else key].dtype


_READ = "give one in FP8 or in 8 bits of compressed-tensors, with scales per tensor, row, group or block"


def _named(keys: list[str], found: ScaledWeights) -> str:
    more = f" and {len(keys) - 1} more tensors" if len(keys) > 1 else ""
    return f"{keys[0]} {found.unread[keys[0]]}{more}"


#: Formats all of whose weights may be numbers times scales, by `quant_method`.
_SCALED_METHODS = frozenset({"fp8", "compressed-tensors", "modelopt", "fbgemm_fp8"})


def format_of(quantization: Options) -> str:
    """What a config.json calls its quantization, for people."""
    method = quantization.get("quant_method")
    if not isinstance(method, str):
        method = "bitsandbytes" if "load_in_4bit" in quantization else "a method without a name"
    detail = quantization.get("format") or quantization.get("quant_algo")
    if not detail and isinstance(bits := quantization.get("bits"), int):
        detail = f"{bits} bits"
    return f"{method} ({detail})" if isinstance(detail, str) else method


def check_decoder(path: Path, device: object = "cpu") -> None:
    """ConfigError for a checkpoint whose quantized weights a native decoder on `device` does not read."""
    config = read_config(path)
    quantization = quantization_of(config)
    if not any(path.glob("*.safetensors")):
        # Only its config.json is there.
        if quantization and quantization.get("quant_method") not in _SCALED_METHODS:
            raise _refusal(path, config, device, f"it is quantized as {format_of(quantization)}")
        return
    found = read_scaled(path)
    if found.unread:
        which = f"{_named(sorted(found.unread), found)}, quantized as {format_of(quantization)}"
        raise _refusal(path, config, device, which)
    if quantization and not found.weights:
        raise ConfigError(
            f"MODEL={path}: its config.json names {format_of(quantization)}, and none of its tensors is "
            "quantized: remove quantization_config from it if that is right, or fetch the checkpoint again"
        )


def _refusal(path: Path, config: Options, device: object, which: str) -> ConfigError:
    """Names what is quantized, and a remedy that is true for this class and device."""
    through_vllm = any(name in CLASSES for name in config.get("architectures") or ())
    # vLLM 0.32 has dropped the method.
    through_vllm &= not format_of(quantization_of(config)).startswith("bitsandbytes")
    remedy = f"{_READ}, or an unquantized one"
    if through_vllm:
        remedy += f", or take --engine vllm{_where(quantization_of(config), device)}"
    return ConfigError(f"MODEL={path}: {which}, which a native decoder does not read: {remedy}")


def _where(quantization: Options, device: object) -> str:
    """On what, and with which flag, vLLM computes with weights that a native decoder does not read."""
    if str(device).startswith("cuda"):
        return ""
    if _four_bits(quantization) == "int" and cpu_flags() >= _AVX512:
        return " with --dtype float16, to all workers of the model"
    return " on a GPU (--device cuda)"


#: By `quant_method`: formats with which vLLM does not compute in float32, and the dtype to take on a CPU.
IN_16_BITS = {"awq": "float16", "gptq": "float16", "fp8": "bfloat16", "modelopt": "bfloat16"}


def _check_float32(path: Path, flags: PDConfig) -> None:
    quantization = quantization_of(read_config(path))
    own = not flags.engine_url
    in_float32 = flags.dtype == "float32" or (own and flags.dtype == "auto" and flags.device == "cpu")
    if in_float32 and (dtype := IN_16_BITS.get(str(quantization.get("quant_method")))):
        where = f" on {flags.device}" if own else ""
        remedy = f"give --dtype {dtype} to all workers of the model"
        # The server has started in one of 16 bits.
        remedy = remedy if own else f"give --dtype as that server has it, such as {dtype}, to all workers"
        raise ConfigError(
            f"MODEL={path}: it is quantized as {format_of(quantization)}, with which vLLM does not compute "
            f"in float32 (--dtype {flags.dtype}{where}): {remedy}"
        )


#: What torch, and with it vLLM, calls a CPU with AVX-512.
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"})


def _four_bits(quantization: Options) -> str:
    """Whether weights are integers of 4 bits, "int", or FP4, "float"; "" for neither."""
    if quantization.get("quant_method") in ("awq", "gptq"):
        return "int" if quantization.get("bits", 4) == 4 else ""
    if "FP4" in str(quantization.get("quant_algo")):
        return "float"
    groups = quantization.get("config_groups")
    weights = [group.get("weights") or {} for group in groups.values()] if isinstance(groups, dict) else []
    return next((str(one.get("type", "int")) for one in weights if one.get("num_bits") == 4), "")


def _check_cpu(path: Path, flags: PDConfig) -> None:
    """ConfigError where vLLM's build for this CPU has no product with the checkpoint's weights."""
    quantization, found = quantization_of(read_config(path)), cpu_flags()
    kind = _four_bits(quantization) if flags.device == "cpu" else ""
    if kind == "float":
        why = "FP4, a product with which vLLM has on no CPU"
    elif kind == "int" and found and not found >= _AVX512:
        why = "4 bits, a product with which (cpu_gemm_wna16) vLLM has on CPUs with AVX-512 alone"
    else:
        return
    raise ConfigError(
        f"MODEL={path}: it is quantized as {format_of(quantization)}, in {why}: {_READ}, an unquantized one, "
        "or --device cuda"
    )


def check_for_engine(path: Path, flags: PDConfig) -> None:
    """`check_decoder` where a PD worker with these flags will decode itself, as far as flags alone tell.

    ConfigError, too, for a format in which a vLLM that it starts does not compute, and for a dtype in which
    none does.
    """
    by_vllm = flags.engine == "vllm" or bool(flags.engine_url)
    if by_vllm and not flags.engine_url:
        _check_cpu(path, flags)
    if by_vllm:
        _check_float32(path, flags)
    if not by_vllm and not (flags.engine == "auto" and flags.device.startswith("cuda")):
        check_decoder(path, flags.device)
