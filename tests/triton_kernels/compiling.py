"""Compiles the attention kernels for a GPU that need not be here, and prints what each takes, as JSON lines.

python tests/triton_kernels/compiling.py 90
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from triptych.kernels import paged_attention

_POINTERS = ("query", "keys", "values", "partial", "out", "sums", "bias", "sinks")
#: Numbers of these are strides.
_STRIDED = ("query_", "key_", "value_", "out_", "partial_", "sum_")
_INDICES = ("tables", "lengths", "starts", "spans")
#: As `attend` calls it on a GPU: dtype, width of the heads, of the values, queries of a sequence, and flags.
CASES: tuple[tuple[str, int, int, int, dict[str, Any]], ...] = (
    *((dtype, dim, dim, 1, {"SPLIT": True}) for dtype in ("bf16", "fp32") for dim in (64, 128, 256)),
    *((dtype, dim, dim, 99, {}) for dtype in ("bf16", "fp32") for dim in (64, 128, 256)),
    ("fp16", 72, 72, 1, {}),
    ("bf16", 96, 64, 99, {"SPANS": True, "WHOLE": True, "WINDOW": True, "SOFTCAP": True}),
    ("bf16", 64, 64, 99, {"SPANS": True, "CHUNK": True, "BIAS": 2}),
    ("bf16", 64, 64, 1, {"SPLIT": True, "BIAS": 1}),
    ("bf16", 64, 64, 99, {"CAUSAL": False}),
    ("bf16", 64, 64, 99, {"WINDOW": True, "SINKS": True}),
    ("bf16", 64, 64, 1, {"SINKS": True, "SPLIT": True}),
    ("bf16", 64, 64, 1, {"CAUSAL": False, "SPLIT": True}),
)
_OFF: dict[str, Any] = dict.fromkeys(
    ("WINDOW", "CHUNK", "SOFTCAP", "SPANS", "WHOLE", "SINKS", "SPLIT"), False
)


def compiled(kernel: Any, capability: int, dtype: str, constants: dict[str, Any], *, split: bool) -> Any:
    """A kernel with these constants; all its other arguments are as on a call."""
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in _INDICES:
            signature[name] = "*i64"
        elif name in _POINTERS:
            signature[name] = (
                "*fp32" if name in ("partial", "sums", "sinks") or (split and name == "out") else f"*{dtype}"
            )
        else:
            signature[name] = "fp32" if name in ("scale", "softcap") else "i32"
    # Strides are multiples of 16, and so are addresses but those of a step's numbers.
    strides = [name for name in kernel.arg_names if name.startswith(_STRIDED) and name not in _POINTERS]
    known = {*_POINTERS, *strides} - {"bias_head", "bias_query", "bias_length"}
    aligned = [i for i, name in enumerate(kernel.arg_names) if name in known]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs={(index,): [["tt.divisibility", 16]] for index in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32))


def main(capability: int) -> None:
    for dtype, dim, value_dim, longest, flags in CASES:
        sizes = paged_attention.tile_sizes(4, dim, value_dim, longest, 4 if dtype == "fp32" else 2)
        constants = {"GROUP": 4, "DIM": dim, "VALUE_DIM": value_dim, "PAGE": 16, "CAUSAL": True, "BIAS": 0}
        constants |= _OFF | flags | sizes
        split = bool(constants["SPLIT"])
        kernel = compiled(paged_attention._attend, capability, dtype, constants, split=split)
        case = f"{dtype} {dim} {value_dim} {longest} {flags}"
        print(json.dumps([case, kernel.metadata.shared, len(kernel.asm["cubin"])]), flush=True)
    merge = {"VALUE_DIM": 80, "BLOCK_V": 128, "PARTS": paged_attention._MAX_PARTS}
    # `out` is of the model's dtype there.
    kernel = compiled(paged_attention._merge, capability, "bf16", merge, split=False)
    print(json.dumps(["merge", kernel.metadata.shared, len(kernel.asm["cubin"])]))


if __name__ == "__main__":
    main(int(sys.argv[1]))
