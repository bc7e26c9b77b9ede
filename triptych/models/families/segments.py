"""Attention inside segments of packed rows, with offsets of any number or in fixed shape."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn

from triptych.kernels.cpu_attention import rotate, rotates


@dataclass(frozen=True, slots=True)
class Segments:
    """Segments of fixed shape over all rows of a call, those of padding included.

    `offsets`, int32 [segments + 1], go from 0 to the number of rows; `longest` is the longest segment that
    the shape allows. Where no kernel takes offsets, `mask`, bool [rows, rows], is true inside a segment.
    """

    mask: torch.Tensor | None
    offsets: torch.Tensor
    longest: int

    @classmethod
    def of(cls, cu_seqlens: torch.Tensor, rows: int, longest: int, *, varlen: bool) -> Segments:
        """Of offsets [n + 1] whose unused tail repeats the last one: the rows behind it are a segment too.

        Its operations depend on shapes only.
        """
        end = torch.full((1,), rows, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
        # Padding may be laid out in segments too, past the end.
        cu_seqlens = cu_seqlens.clamp(max=rows)
        offsets = torch.cat([cu_seqlens, end])
        if varlen:
            return cls(None, offsets, longest)
        # A row is in the segment that as many offsets end before: those behind the last are in one together.
        index = torch.arange(rows, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
        ids = torch.searchsorted(cu_seqlens[1:].contiguous(), index, right=True)
        return cls(ids[:, None] == ids[None, :], offsets, longest)


def has_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch has a kernel of packed segments here: CUDA, with halves. Elsewhere a mask is used."""
    return device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)


def rotated(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of queries and keys together, computed in float32.

    x [rows, 2, heads, head_dim] and the cosines and sines [rows, head_dim] of its rows give x's shape and
    dtype. The same sums as transformers', to the bit. Where a kernel takes x, it is rotated in place.
    """
    half = x.shape[-1] // 2
    sines = torch.cat((-sines[:, :half], sines[:, half:]), dim=1)
    if not torch.compiler.is_compiling() and rotates(x, cosines, sines):
        rotate(x.view(len(x), x.shape[1] * x.shape[2], x.shape[3]), cosines, sines)
        return x
    cosines, sines = (part.float()[:, None, None] for part in (cosines, sines))
    wide = x.float()
    turned = torch.cat((wide[..., half:], wide[..., :half]), dim=-1)
    return turned.mul_(sines).add_(wide * cosines).to(x.dtype)


class SegmentAttention(nn.Module):
    """The attention of a Qwen tower in place of transformers', with the same parameters and results.

    `cu_seqlens` are int32 offsets [segments + 1], read on the host, or `Segments`, which nothing reads there.
    """

    qkv: nn.Module
    proj: nn.Module

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.add_module("qkv", original.get_submodule("qkv"))
        self.add_module("proj", original.get_submodule("proj"))
        self.num_heads, self.scaling = int(original.num_heads), float(original.scaling)  # type: ignore[arg-type]

    def forward(
        self,
        hidden_states: torch.Tensor,
        cu_seqlens: torch.Tensor | Segments,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **_: object,
    ) -> torch.Tensor:
        """[rows, hidden] of hidden_states [rows, hidden] and their cosines and sines [rows, head_dim]."""
        rows = hidden_states.shape[0]
        packed = self.qkv(hidden_states).view(rows, 3, self.num_heads, -1)
        query, key = rotated(packed[:, :2], *position_embeddings).unbind(1)
        value = packed[:, 2]
        if not isinstance(cu_seqlens, Segments):
            out = self._one_by_one(query, key, value, cu_seqlens)
        elif cu_seqlens.mask is not None:
            out = self._attend(query, key, value, cu_seqlens.mask)
        else:
            # Its own scale is the same, the root of head_dim.
            bounds, longest = cu_seqlens.offsets, cu_seqlens.longest
            attended = varlen_attn(query, key, value, bounds, bounds, longest, longest)
            assert isinstance(attended, torch.Tensor)
            out = attended
        projected: torch.Tensor = self.proj(out.reshape(rows, -1))
        return projected

    def _one_by_one(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: torch.Tensor
    ) -> torch.Tensor:
        lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
        parts = zip(*(torch.split(part, lengths) for part in (query, key, value)), strict=True)
        out = [self._attend(*part) for part in parts]
        return out[0] if len(out) == 1 else torch.cat(out)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        query, key, value = (part.transpose(0, 1).unsqueeze(0) for part in (query, key, value))
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=self.scaling)
        return out.squeeze(0).transpose(0, 1)
