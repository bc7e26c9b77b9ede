// What calls on the heads of queries, keys and values are.
#pragma once
#include "export.h"

// Rotary positions of heads, in place.
struct RotaryCall {
  // [tokens, heads, dim], heads side by side, tokens by a stride in elements.
  void *x;
  int64_t x_token;
  // [tokens, dim], contiguous, of `angle_bytes`. What the second half of a head adds to the first is negated in `sin`.
  const void *cos, *sin;
  // null or [heads, dim]: a head is normalised before, x / sqrt(mean(x^2) + epsilon) * norm.
  const void *norm;
  int64_t tokens;
  int32_t heads, dim;
  // 2: bfloat16, 4: float32. That of `cos` and `sin` is x's or 4.
  int32_t bytes, angle_bytes;
  float epsilon;
  // As of AttentionCall.
  int32_t instructions, threads;
  void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
};

// Tokens that a thread takes at once.
constexpr int64_t kPieceTokens = 4;

// Rows of keys, or values, on their way into the cache: strides and sizes in bytes.
struct CachedRows {
  const uint8_t *from;
  int64_t from_token, from_head;
  uint8_t *to;
  int64_t to_head, bytes;
};

struct WriteCall {
  CachedRows keys, values;
  // Of each token, below `slots`.
  const int64_t *at;
  int64_t tokens, slots;
  int32_t heads, threads;
  void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
};
