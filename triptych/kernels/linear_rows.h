// The product of one block of outputs with all rows.
//
// No include guard: instruction_sets.h includes this once for each instruction set, after vectors.h.

// x / (1 + e^-x). Below -80 it is 0, and an exponential that overflows.
INLINE Vec Silu(Vec x) {
  Vec bounded = Max(x, Splat(-80.0f));
  return x < Splat(-80.0f) ? Splat(0.0f) : x / (Exp(Splat(0.0f) - bounded) + 1.0f);
}

// Two neighbouring inputs of a row.
INLINE uint32_t Pair(const uint16_t *from) {
  uint32_t pair;
  memcpy(&pair, from, sizeof pair);
  return pair;
}

// sums [R][B] of R rows `x` (x_row apart) by one block of B outputs.
template <int B, int R>
INLINE void Multiply(const uint16_t *x, int64_t x_row, const uint16_t *block, int ins, float *sums) {
  // As many vectors of outputs as registers hold for R rows.
  constexpr int kVectors = LANES == 16 ? B / 16 : 2;
  for (int first = 0; first < B; first += kVectors * LANES) {
    Vec parts[R][kVectors] = {};
    const uint16_t *weight = block + 2 * first;
    for (int k = 0; k < ins; k += 2, weight += 2 * B) {
#ifdef BF16_DOTS
      __m512bh w[kVectors];
      for (int v = 0; v < kVectors; v++) w[v] = (__m512bh)_mm512_loadu_si512(weight + 2 * v * LANES);
      for (int row = 0; row < R; row++) {
        __m512bh both = (__m512bh)_mm512_set1_epi32(static_cast<int>(Pair(x + row * x_row + k)));
        for (int v = 0; v < kVectors; v++) parts[row][v] = (Vec)_mm512_dpbf16_ps((__m512)parts[row][v], w[v], both);
      }
#else
      Vec even[kVectors], odd[kVectors];
      for (int v = 0; v < kVectors; v++) {
        Ints pairs;
        memcpy(&pairs, weight + 2 * v * LANES, sizeof pairs);
        even[v] = (Vec)(pairs << 16), odd[v] = (Vec)(pairs & SplatInt(static_cast<int32_t>(0xffff0000)));
      }
      for (int row = 0; row < R; row++) {
        Vec low = Splat(ToFloat(x[row * x_row + k])), high = Splat(ToFloat(x[row * x_row + k + 1]));
        for (int v = 0; v < kVectors; v++)
          parts[row][v] = Fma(odd[v], high, Fma(even[v], low, parts[row][v]));
      }
#endif
    }
    for (int row = 0; row < R; row++)
      for (int v = 0; v < kVectors; v++) Store(sums + row * B + first + v * LANES, parts[row][v]);
  }
}

template <int B>
INLINE void MultiplyRows(int rows, const uint16_t *x, int64_t x_row, const uint16_t *block, int ins, float *sums) {
  switch (rows) {
    case 1: return Multiply<B, 1>(x, x_row, block, ins, sums);
    case 2: return Multiply<B, 2>(x, x_row, block, ins, sums);
    case 3: return Multiply<B, 3>(x, x_row, block, ins, sums);
    case 4: return Multiply<B, 4>(x, x_row, block, ins, sums);
    case 5: return Multiply<B, 5>(x, x_row, block, ins, sums);
    default: return Multiply<B, kSums>(x, x_row, block, ins, sums);
  }
}

#include "linear_plain.h"

#ifdef AMX_TILES
constexpr int kAtOnce = kTileRows;

// Tile 0 and 1 are sums of `rows` rows by 16 outputs, 2 is 32 inputs of the rows, 3 and 4 of 16 outputs each.
INLINE void SetTiles(int rows) {
  struct alignas(64) {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  } tiles;
  for (int i = 0; i < 5; i++) tiles.bytes[i] = 64, tiles.rows[i] = static_cast<uint8_t>(i < 3 ? rows : 16);
  _tile_loadconfig(&tiles);
}

// As Multiply, of as many rows as the tiles are set for; `ins` is a multiple of 32.
template <int B>
INLINE void MultiplyTiles(const uint16_t *x, int64_t x_row, const uint16_t *block, int ins, float *sums) {
  // The processor's own prefetch stops at the end of a page of 4 KiB.
  constexpr int kAhead = 4096;
  for (int first = 0; first < B; first += 32) {
    const uint16_t *weight = block + 2 * first;
    _tile_zero(0);
    _tile_zero(1);
    for (int k = 0; k < ins; k += 32, weight += 32 * B) {
      for (int pair = 0; pair < 16; pair++)
        for (int line = 0; line < 2; line++)
          _mm_prefetch(reinterpret_cast<const char *>(weight + 2 * B * pair + 32 * line + kAhead), _MM_HINT_T1);
      _tile_loadd(2, x + k, x_row * 2);
      _tile_loadd(3, weight, 4 * B);
      _tile_loadd(4, weight + 32, 4 * B);
      _tile_dpbf16ps(0, 2, 3);
      _tile_dpbf16ps(1, 2, 4);
    }
    _tile_stored(0, sums + first, 4 * B);
    _tile_stored(1, sums + first + 16, 4 * B);
  }
}
#else
constexpr int kAtOnce = kSums;
#endif

// Writes outputs [column, column + W) of `rows` rows from row `first` on, of sums [rows][W] with what comes after them.
// `from`: the outputs of the weight that the sums are of; `gates` are of those at `column`.
template <int W>
INLINE void Finish(const LinearCall &call, int first, int rows, int column, int from, float *sums, float *gates) {
  for (int row = 0; row < rows; row++) {
    float *own = sums + row * W, *gate = gates + row * W;
    uint16_t *out = call.out + (first + row) * call.out_row + column;
    if (call.bias)
      for (int i = 0; i < W; i++) own[i] += ToFloat(call.bias[from + i]);
    if (call.gated) {
      if (call.bias)
        for (int i = 0; i < W; i++) gate[i] += ToFloat(call.bias[column + i]);
      for (int i = 0; i < W; i += LANES) Store(own + i, Silu(Load(gate + i)) * Load(own + i));
    }
    if (call.residual) {
      const uint16_t *added = call.residual + (first + row) * call.residual_row + column;
      for (int i = 0; i < W; i++) own[i] += ToFloat(added[i]);
    }
    for (int i = 0; i < W; i += LANES) Store(out + i, Load(own + i));
  }
}

// Outputs [B n, B n + B) of all rows of `x`: the call's, or a copy of them, normalised; of a plain weight, whose
// blocks are single outputs, and with tiles, its rows in pairs of inputs.
template <int B, bool Plain>
INLINE void MultiplyBlock(const LinearCall &call, const uint16_t *x, int64_t x_row, int n) {
  alignas(64) float sums[kAtOnce * B], gates[kAtOnce * B];
  size_t block = static_cast<size_t>(call.ins) * B;
  RowGroups groups(call.rows, kAtOnce);
  for (int group = 0, first = 0; group < groups.count; group++) {
    int rows = groups.Of(group, first), at = n;
    const uint16_t *from = x + first * x_row;
    auto multiply = [&](int outputs, float *to) {
      const uint16_t *weight = call.weight + block * outputs;
#ifdef AMX_TILES
      if (Plain)
        MultiplyPlainTiles(rows, x + group * static_cast<size_t>(call.ins) * kTileRows, weight, call.ins, to);
      else
        MultiplyTiles<B>(from, x_row, weight, call.ins, to);
#else
      if (Plain)
        MultiplyPlainRows<B>(rows, from, x_row, weight, call.ins, to);
      else
        MultiplyRows<B>(rows, from, x_row, weight, call.ins, to);
#endif
    };
#ifdef AMX_TILES
    Plain ? SetPlainTiles(rows) : SetTiles(rows);
#endif
    if (call.gated) {
      multiply(n, gates);
      at += call.outs / B / 2;
    }
    multiply(at, sums);
    Finish<B>(call, first, rows, n * B, at * B, sums, gates);
    first += rows;
  }
#ifdef AMX_TILES
  // What is left in tiles would be saved at each switch of threads.
  _tile_release();
#endif
}

template <int B>
void LinearBlock(const LinearCall &call, const uint16_t *x, int64_t x_row, int n) {
  MultiplyBlock<B, false>(call, x, x_row, n);
}

void PlainBlock(const LinearCall &call, const uint16_t *x, int64_t x_row, int n) {
  MultiplyBlock<kPlainOuts, true>(call, x, x_row, n);
}

// One row of `width` numbers, normalised.
void NormRow(const uint16_t *x, const uint16_t *norm, float epsilon, int width, uint16_t *to) {
  Vec sum = {};
  int i = 0;
  for (; i + LANES <= width; i += LANES) {
    Vec part = Load(x + i);
    sum = Fma(part, part, sum);
  }
  float squares = Sum(sum);
  for (; i < width; i++) squares += ToFloat(x[i]) * ToFloat(x[i]);
  float scale = 1.0f / sqrtf(squares / width + epsilon);
  for (i = 0; i + LANES <= width; i += LANES) Store(to + i, Load(x + i) * scale * Load(norm + i));
  for (; i < width; i++) FromFloat(ToFloat(x[i]) * scale * ToFloat(norm[i]), to + i);
}

// SiLU of the first `width` numbers of a row times the second.
void GateRow(const uint16_t *x, int width, uint16_t *to) {
  int i = 0;
  for (; i + LANES <= width; i += LANES) Store(to + i, Silu(Load(x + i)) * Load(x + width + i));
  for (; i < width; i++) FromFloat(Silu(Splat(ToFloat(x[i])))[0] * ToFloat(x[width + i]), to + i);
}

#ifdef AMX_TILES
#include "linear_many.h"
#else
void PackGroup(const LinearCall &, int, uint16_t *, uint16_t *) {}
template <int B>
void ManyRows(const LinearCall &, const uint16_t *, ManyBlocks, ManyBlocks) {}
#endif
