// Linear layers over few rows of bfloat16, which read their blocked weights at the speed of the memory.
//
// With them what stands beside a layer in a decode step: RMSNorm before it; SiLU of a half, or a sum, after it.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "linear.h"

namespace {

namespace plain {
#define LANES 4
#include "vectors.h"
#include "linear_rows.h"
#undef LANES
}  // namespace plain

#ifdef X86_VARIANTS
#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace avx2 {
#define LANES 8
#include "vectors.h"
#include "linear_rows.h"
#undef LANES
}  // namespace avx2
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq")
namespace avx512 {
#define LANES 16
#include "vectors.h"
#include "linear_rows.h"
#undef LANES
}  // namespace avx512
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")
namespace avx512_bf16 {
#define LANES 16
#define BF16_DOTS
#include "vectors.h"
#include "linear_rows.h"
#undef BF16_DOTS
#undef LANES
}  // namespace avx512_bf16
#pragma GCC pop_options
#endif

struct Variant {
  void (*block)(const LinearCall &, const uint16_t *, int64_t, int);
  void (*norm)(const LinearCall &, const uint16_t *, uint16_t *);
};

Variant Choose([[maybe_unused]] int limit) {
#ifdef X86_VARIANTS
  bool wide = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (limit >= 3 && wide && __builtin_cpu_supports("avx512bf16")) return {avx512_bf16::LinearBlock, avx512_bf16::NormRow};
  if (limit >= 2 && wide) return {avx512::LinearBlock, avx512::NormRow};
  if (limit >= 1 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return {avx2::LinearBlock, avx2::NormRow};
#endif
  return {plain::LinearBlock, plain::NormRow};
}

// The blocks of a call, which threads take one by one.
struct Blocks {
  const LinearCall &call;
  Variant variant;
  const uint16_t *x;
  int64_t x_row;
  int count;
  std::atomic<int> next{0};

  void Work() {
    for (int n = next.fetch_add(1); n < count; n = next.fetch_add(1)) variant.block(call, x, x_row, n);
  }
};

}  // namespace

// Writes `out` of the call. 0; 1: no memory; 2: sizes that are not taken.
EXPORT int triptych_linear(const LinearCall *call) {
  const LinearCall &c = *call;
  if (c.rows < 1 || c.ins < 2 || c.ins % 2 || c.outs < 1 || c.threads < 1 || c.outs % (c.gated ? 2 * kBlock : kBlock)) return 2;
  Variant variant = Choose(c.instructions);
  uint16_t *normed = nullptr;
  if (c.norm) {
    normed = static_cast<uint16_t *>(malloc(static_cast<size_t>(c.rows) * c.ins * sizeof(uint16_t)));
    if (!normed) return 1;
    for (int row = 0; row < c.rows; row++) variant.norm(c, c.x + row * c.x_row, normed + static_cast<int64_t>(row) * c.ins);
  }
  Blocks blocks = {c, variant, normed ? normed : c.x, normed ? c.ins : c.x_row, c.outs / kBlock / (c.gated ? 2 : 1)};
  auto work = [](void *data) { static_cast<Blocks *>(data)->Work(); };
  int threads = c.parallel ? (c.threads < blocks.count ? c.threads : blocks.count) : 1;
  if (threads > 1)
    c.parallel(work, &blocks, threads, 0);
  else
    work(&blocks);
  free(normed);
  return 0;
}
