// Linear layers over few rows of bfloat16, which read their blocked weights at the speed of the memory.
//
// With them what stands beside a layer in a decode step: RMSNorm before it; SiLU of a half, or a sum, after it.
#include <math.h>
#include <stdlib.h>
#include <string.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "linear.h"

namespace {

#define ROWS "linear_rows.h"
#define WITH_TILES
#include "instruction_sets.h"

struct Variant {
  void (*block)(const LinearCall &, const uint16_t *, int64_t, int);
  void (*norm)(const uint16_t *, const uint16_t *, float, int, uint16_t *);
  void (*gate)(const uint16_t *, int, uint16_t *);
};

Variant Choose(int limit, int block) {
  int set = Widest(limit);
  return {block == 32 ? PICK(set, LinearBlock<32>) : PICK(set, LinearBlock<64>), PICK(set, NormRow), PICK(set, GateRow)};
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
  // A tile has 32 inputs; without them, the widest set that has none.
  constexpr int kNoTiles = 3;
  Variant variant = Choose(c.ins % 32 && c.instructions > kNoTiles ? kNoTiles : c.instructions, c.block);
  uint16_t *normed = nullptr;
  if (c.norm) {
    normed = static_cast<uint16_t *>(malloc(static_cast<size_t>(c.rows) * c.ins * sizeof(uint16_t)));
    if (!normed) return 1;
    for (int row = 0; row < c.rows; row++)
      variant.norm(c.x + row * c.x_row, c.norm, c.epsilon, c.ins, normed + static_cast<int64_t>(row) * c.ins);
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

// Normalises or gates the call's rows. 0; 2: sizes that are not taken.
EXPORT int triptych_rows(const RowsCall *call) {
  if (call->rows < 1 || call->width < 1 || call->threads < 1) return 2;
  struct Pieces {
    const RowsCall &call;
    Variant variant;
    std::atomic<int> next{0};

    void Work() {
      for (int row = next.fetch_add(kPieceRows); row < call.rows; row = next.fetch_add(kPieceRows))
        for (int at = row; at < call.rows && at < row + kPieceRows; at++) {
          const uint16_t *x = call.x + at * call.x_row;
          uint16_t *out = call.out + at * call.out_row;
          call.norm ? variant.norm(x, call.norm, call.epsilon, call.width, out) : variant.gate(x, call.width, out);
        }
    }
  } pieces = {*call, Choose(call->instructions, 64)};
  auto work = [](void *data) { static_cast<Pieces *>(data)->Work(); };
  if (call->parallel && call->threads > 1 && call->rows > kPieceRows)
    call->parallel(work, &pieces, call->threads, 0);
  else
    work(&pieces);
  return 0;
}

// The widest instruction set of this CPU that the kernels have, see Widest.
EXPORT int triptych_instructions() { return Widest(4); }
