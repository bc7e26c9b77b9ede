// What an attention call is, for all instruction sets.
#pragma once
#include <atomic>

#include "export.h"

// Rows are query heads of query tokens: attention over the keys and values of one kv head.
struct AttentionCall {
  // [heads, tokens, dim] by strides in elements; the last dimension is contiguous.
  const void *query;
  int64_t query_head, query_token;
  // [blocks, kv heads, block size, dim] and with value dim: a block's rows of one head are contiguous. Strides of a
  // block and a kv head in elements.
  const void *keys, *values;
  int64_t key_block, key_head, value_block, value_head;
  // [tokens, heads, value dim], contiguous.
  void *out;
  // Sequence s has tokens [starts[s], starts[s + 1]) and its blocks' numbers at tables[s].
  const int64_t *starts;
  const int64_t *const *tables;
  // Token t attends to the keys from bounds[2t] up to but without bounds[2t + 1], by their index in its sequence.
  const int32_t *bounds;
  int32_t sequences, kv_heads, groups, dim, value_dim, block_size;
  // 2: bfloat16, 4: float32.
  int32_t bytes;
  // Of the instruction sets: 0 what every CPU has, 1 AVX2, 2 AVX-512, 3 with bfloat16, 4 with AMX.
  int32_t instructions;
  int32_t threads;
  float scale, softcap;
  // Added to the scores where it is not null, and then without a softcap: [heads][distances], where number d is for
  // the key d positions before the token's last key and the last one for all greater distances; or
  // [heads][tokens][keys] by index in the sequence, the token's that of its last key. Strides of a head and of a token
  // in numbers; the token's is 0 by distance.
  const float *bias;
  int64_t bias_head, bias_token;
  int32_t distances;
  // null or [heads]: the score of one more key, whose value is zero.
  const float *sinks;
  // GOMP_parallel of the OpenMP that torch runs on; null: one thread.
  void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
};

// Rows of one task at most: the rows of a sequence and kv head are cut into so many.
constexpr int kRows = 64;
// Keys that are scored before their values are summed.
constexpr int kKeys = 64;

// Keys of a part at least, and parts of a sequence at most.
constexpr int kPartKeys = 256, kMaxParts = 64;

// One task: rows [first, last) of the token-major rows of a sequence and a kv head.
struct AttentionTask {
  const AttentionCall *call;
  int64_t sequence, first, last;
  int32_t kv_head;
  // The keys of all rows are cut into parts, of which this task takes one; with several, what they give is in
  // `partials` [the sequence's tokens][heads][parts][maximum, total, value dim].
  int32_t part, parts;
  float *partials;
  float *scratch;
  // What the thread computes after it, or null: its first keys and values are fetched meanwhile.
  const AttentionTask *next;
};

// Floats of scratch of a thread: queries, sums, scores, a piece's keys and values, its weights, and a row of zeros.
inline size_t ScratchFloats(const AttentionCall &call) {
  size_t dim = (call.dim + 31) / 32 * 32, value_dim = (call.value_dim + 31) / 32 * 32, wider = dim > value_dim ? dim : value_dim;
  return kRows * (dim + value_dim) + 2 * kRows * kKeys + 2 * kKeys * wider + value_dim;
}
