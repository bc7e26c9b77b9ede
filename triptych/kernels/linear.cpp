// Linear layers over few rows, which read their weights, blocked or plain, at the speed of the memory.
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
  void (*floats)(const LinearCall &, int);
  void (*norm)(const uint16_t *, const uint16_t *, float, int, uint16_t *);
  void (*gate)(const uint16_t *, int, uint16_t *);
};

// Of many rows, with the instruction set that has tiles.
struct ManyVariant {
  void (*pack)(const LinearCall &, int, uint16_t *, uint16_t *);
  void (*multiply)(const LinearCall &, const uint16_t *, ManyBlocks, ManyBlocks);
};

ManyVariant ChooseMany(int set, int block) {
  return {PICK(set, PackGroup), block == 32 ? PICK(set, ManyRows<32>) : PICK(set, ManyRows<64>)};
}

Variant Choose(int set, int block) {
  auto multiply = block == 1    ? PICK(set, PlainBlock)
                  : block == 32 ? PICK(set, LinearBlock<32>)
                                : PICK(set, LinearBlock<64>);
  return {multiply, PICK(set, FloatBlock), PICK(set, NormRow), PICK(set, GateRow)};
}

// The set of instructions with tiles.
constexpr int kTiles = 4;

// Numbers of the rows as PackRows lays them out.
size_t PackedSize(const LinearCall &call) {
  return static_cast<size_t>(RowGroups(call.rows, kTileRows).count) * call.ins * kTileRows;
}

// Writes `to` [groups of rows][ins / 2][kTileRows][2], as tiles take the second factor; rows that are missing stay.
void PackRows(const LinearCall &call, const uint16_t *x, int64_t x_row, uint16_t *to) {
  RowGroups groups(call.rows, kTileRows);
  for (int group = 0, first = 0; group < groups.count; group++) {
    int rows = groups.Of(group, first);
    for (int k = 0; k < call.ins; k += 2)
      for (int row = 0; row < rows; row++)
        memcpy(to + (static_cast<size_t>(group) * call.ins + k) * kTileRows + 2 * row, x + (first + row) * x_row + k, 4);
    first += rows;
  }
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
    for (int n = next.fetch_add(1); n < count; n = next.fetch_add(1))
      call.bytes == 4 ? variant.floats(call, n) : variant.block(call, x, x_row, n);
  }
};

// The groups of rows of a call, which threads pack one by one, and then its blocks, some at a time.
struct Many {
  const LinearCall &call;
  ManyVariant variant;
  uint16_t *packed;
  int groups, count, each;
  std::atomic<int> next_group{0}, next{0}, threads{0};

  // A row for each thread lies behind the packed ones.
  void Pack() {
    uint16_t *row = packed + (static_cast<size_t>(groups) * kTileRows + threads.fetch_add(1)) * call.ins;
    for (int group = next_group.fetch_add(1); group < groups; group = next_group.fetch_add(1))
      variant.pack(call, group, row, packed + static_cast<size_t>(group) * kTileRows * call.ins);
  }
  ManyBlocks Take() {
    int first = next.fetch_add(each), last = first + each;
    return {first < count ? first : count, last < count ? last : count};
  }
  void Work() {
    for (ManyBlocks now = Take(), ahead; now.first < now.last; now = ahead) {
      ahead = Take();
      variant.multiply(call, packed, now, ahead);
    }
  }
};

int MultiplyMany(const LinearCall &call, int set, int threads) {
  const int groups = (call.rows + kTileRows - 1) / kTileRows, count = call.outs / call.block / (call.gated ? 2 : 1);
  const int64_t bytes = static_cast<int64_t>(call.ins) * call.block * (call.gated ? 4 : 2);
  // As many as the cache holds, but some for each thread.
  int64_t most = kManyBytes / bytes, some = count / (4 * threads), each = most < some ? most : some;
  auto *packed = static_cast<uint16_t *>(
      aligned_alloc(64, (static_cast<size_t>(groups) * kTileRows + threads) * call.ins * sizeof(uint16_t)));
  if (!packed) return 1;
  Many many = {call, ChooseMany(set, call.block), packed, groups, count, each < 1 ? 1 : static_cast<int>(each)};
  auto run = [&](void (*work)(void *)) { threads > 1 ? call.parallel(work, &many, threads, 0) : work(&many); };
  run([](void *data) { static_cast<Many *>(data)->Pack(); });
  run([](void *data) { static_cast<Many *>(data)->Work(); });
  free(packed);
  return 0;
}

}  // namespace

// Writes `out` of the call. 0; 1: no memory; 2: sizes that are not taken.
EXPORT int triptych_linear(const LinearCall *call) {
  const LinearCall &c = *call;
  if (c.rows < 1 || c.ins < 2 || c.ins % 2 || c.outs < 1 || c.threads < 1) return 2;
  int each = c.block == 1 ? kPlainOuts : c.block;
  if (c.bytes != 2 && (c.bytes != 4 || c.block != 1 || c.norm || c.residual || c.gated)) return 2;
  if ((each != 32 && each != 64) || c.outs % (c.gated ? 2 * each : each)) return 2;
  // A tile has 32 inputs; without them, the widest set that has none.
  int set = Widest(c.ins % 32 && c.instructions >= kTiles ? kTiles - 1 : c.instructions);
  if (set == kTiles && c.block > 1 && c.rows >= kManyRows) return MultiplyMany(c, set, c.parallel ? c.threads : 1);
  Variant variant = Choose(set, c.block);
  bool packs = c.block == 1 && c.bytes == 2 && set == kTiles;
  size_t numbers = c.norm ? static_cast<size_t>(c.rows) * c.ins : 0, packed = packs ? PackedSize(c) : 0;
  uint16_t *copies = nullptr;
  if (numbers + packed) {
    copies = static_cast<uint16_t *>(malloc((numbers + packed) * sizeof(uint16_t)));
    if (!copies) return 1;
  }
  const uint16_t *x = c.x;
  int64_t x_row = c.x_row;
  if (c.norm) {
    for (int row = 0; row < c.rows; row++)
      variant.norm(c.x + row * c.x_row, c.norm, c.epsilon, c.ins, copies + static_cast<int64_t>(row) * c.ins);
    x = copies, x_row = c.ins;
  }
  if (packs) {
    PackRows(c, x, x_row, copies + numbers);
    x = copies + numbers;
  }
  Blocks blocks = {c, variant, x, x_row, c.outs / each / (c.gated ? 2 : 1)};
  auto work = [](void *data) { static_cast<Blocks *>(data)->Work(); };
  int threads = c.parallel ? (c.threads < blocks.count ? c.threads : blocks.count) : 1;
  if (threads > 1)
    c.parallel(work, &blocks, threads, 0);
  else
    work(&blocks);
  free(copies);
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
  } pieces = {*call, Choose(Widest(call->instructions), 64)};
  auto work = [](void *data) { static_cast<Pieces *>(data)->Work(); };
  if (call->parallel && call->threads > 1 && call->rows > kPieceRows)
    call->parallel(work, &pieces, call->threads, 0);
  else
    work(&pieces);
  return 0;
}

// The widest instruction set of this CPU that the kernels have, see Widest.
EXPORT int triptych_instructions() { return Widest(4); }
