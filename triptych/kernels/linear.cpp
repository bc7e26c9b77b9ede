// Linear layers over few rows of bfloat16, which read their blocked weights at the speed of the memory.
//
// With them what stands beside a layer in a decode step: RMSNorm before it; SiLU of a half, or a sum, after it.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "linear.h"

namespace {

#define ROWS "linear_rows.h"
#include "instruction_sets.h"

struct Variant {
  void (*block)(const LinearCall &, const uint16_t *, int64_t, int);
  void (*norm)(const LinearCall &, const uint16_t *, uint16_t *);
};

Variant Choose(const LinearCall &call) {
  int set = Widest(call.instructions);
  return {call.block == 32 ? PICK(set, LinearBlock<32>) : PICK(set, LinearBlock<64>), PICK(set, NormRow)};
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
  if (c.rows < 1 || c.ins < 2 || c.ins % 2 || c.outs < 1 || c.threads < 1) return 2;
  if ((c.block != 32 && c.block != 64) || c.outs % (c.gated ? 2 * c.block : c.block)) return 2;
  Variant variant = Choose(c);
  uint16_t *normed = nullptr;
  if (c.norm) {
    normed = static_cast<uint16_t *>(malloc(static_cast<size_t>(c.rows) * c.ins * sizeof(uint16_t)));
    if (!normed) return 1;
    for (int row = 0; row < c.rows; row++) variant.norm(c, c.x + row * c.x_row, normed + static_cast<int64_t>(row) * c.ins);
  }
  Blocks blocks = {c, variant, normed ? normed : c.x, normed ? c.ins : c.x_row, c.outs / c.block / (c.gated ? 2 : 1)};
  auto work = [](void *data) { static_cast<Blocks *>(data)->Work(); };
  int threads = c.parallel ? (c.threads < blocks.count ? c.threads : blocks.count) : 1;
  if (threads > 1)
    c.parallel(work, &blocks, threads, 0);
  else
    work(&blocks);
  free(normed);
  return 0;
}
