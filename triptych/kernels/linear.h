// What a linear layer's call is, for all instruction sets.
#pragma once
#include <atomic>

#include "export.h"

// Few rows of bfloat16 by a blocked weight: out = x W^T, with what stands before and after it in a decoder layer.
struct LinearCall {
  // [rows, ins] and [rows, outs], contiguous rows by strides in elements.
  const uint16_t *x;
  int64_t x_row;
  // [outs / block][ins / 2][block][2], as oneDNN blocks bfloat16; a block of 1 is a weight that nothing blocks.
  const uint16_t *weight;
  uint16_t *out;
  int64_t out_row;
  // null or [outs].
  const uint16_t *bias;
  // null or [ins]: x is normalised first, x / sqrt(mean(x^2) + epsilon) * norm.
  const uint16_t *norm;
  // null or [rows, outs], added to the product; may be `out`.
  const uint16_t *residual;
  int64_t residual_row;
  int32_t rows, ins, outs;
  // Outputs of a block: 32, as for AMX, or 64, or 1.
  int32_t block;
  // 2: bfloat16; 4: float32 by a weight that nothing blocks, with a bias at most.
  int32_t bytes;
  // The second half of the outputs are multiplied by SiLU of the first: `out` is [rows, outs / 2].
  int32_t gated;
  float epsilon;
  // As of AttentionCall.
  int32_t instructions, threads;
  void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
};

// Rows of bfloat16 that are normalised, or gated, beside a product that another library computes.
struct RowsCall {
  // [rows, width], or [rows, 2 width] to be gated; `out` is [rows, width].
  const uint16_t *x;
  int64_t x_row;
  uint16_t *out;
  int64_t out_row;
  // [width]: as of LinearCall; null: SiLU of the first half of a row times the second is the result.
  const uint16_t *norm;
  int32_t rows, width;
  float epsilon;
  // As of AttentionCall.
  int32_t instructions, threads;
  void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
};

// Rows whose sums are in registers at once, and rows of a tile.
constexpr int kSums = 6, kTileRows = 16;
// Outputs that a thread takes at once of a weight in blocks of 1.
constexpr int kPlainOuts = 32;

// Rows from which on they are packed into tiles, and bytes of weights that stay in the second cache beside them.
constexpr int kManyRows = 33, kManyBytes = 512 << 10;
// Blocks [first, last) of outputs that a thread takes at once of many rows.
struct ManyBlocks {
  int first, last;
};

// Groups of nearly as many rows, at most `at_once` in each.
struct RowGroups {
  int rows, count;

  RowGroups(int all, int at_once) : rows(all), count((all + at_once - 1) / at_once) {}
  // Rows of a group behind `first` rows of those before it.
  int Of(int group, int first) const { return (rows - first + count - group - 1) / (count - group); }
};
// Rows of a RowsCall that a thread takes at once.
constexpr int kPieceRows = 8;
