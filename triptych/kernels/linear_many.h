// The product of many rows, such as those of prompts, in tiles: twice as many rows and outputs at once as registers hold.
//
// No include guard: linear_rows.h includes this once, for the instruction set that has tiles.

constexpr int kGroup = kTileRows * 32;  // numbers of a tile: 32 inputs of 16 rows

// All eight tiles whole.
struct WholeTiles {
  uint8_t palette = 1, start = 0, none[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Writes rows [16 group, 16 group + 16) of the call, normalised where it says so, to [ins / 32][16][32]; those behind the
// last are zeros. `row`: memory for one.
void PackGroup(const LinearCall &call, int group, uint16_t *row, uint16_t *to) {
  for (int i = 0; i < kTileRows; i++, to += 32) {
    int at = group * kTileRows + i;
    const uint16_t *from = call.x + at * call.x_row;
    if (at >= call.rows) {
      memset(row, 0, call.ins * sizeof(uint16_t));
      from = row;
    } else if (call.norm) {
      NormRow(from, call.norm, call.epsilon, call.ins, row);
      from = row;
    }
    for (int k = 0; k < call.ins; k += 32) memcpy(to + k / 32 * kGroup, from + k, 32 * sizeof(uint16_t));
  }
}

// Lines of weights that are brought into the second cache while others are multiplied: of blocks [first, last) of
// outputs, and where gated, of those that they gate.
template <int B>
struct Fetch {
  const LinearCall &call;
  int64_t at, end;  // lines
  int each;         // for each 32 inputs that are multiplied

  Fetch(const LinearCall &call, ManyBlocks ahead, int64_t products) : call(call) {
    int64_t lines = static_cast<int64_t>(call.ins) * B / 32;
    at = ahead.first * lines, end = ahead.last * lines;
    int64_t all = (end - at) * (call.gated ? 2 : 1);
    each = static_cast<int>((all + products - 1) / products);
  }
  ALWAYS_INLINE void Some() {
    const int64_t half = call.gated ? static_cast<int64_t>(call.ins) * (call.outs / 2) : 0;
    for (int i = 0; i < each && at < end; i += half ? 2 : 1, at++) {
      _mm_prefetch(reinterpret_cast<const char *>(call.weight + at * 32), _MM_HINT_T1);
      if (half) _mm_prefetch(reinterpret_cast<const char *>(call.weight + half + at * 32), _MM_HINT_T1);
    }
  }
};

// sums [16 G][32] of G groups of packed rows by 32 outputs of a block of B.
template <int B, int G>
INLINE void MultiplyGroups(const uint16_t *packed, const uint16_t *weight, int ins, Fetch<B> &fetch, float *sums) {
  const uint16_t *other = packed + static_cast<int64_t>(ins) * kTileRows;
  _tile_zero(0);
  _tile_zero(1);
  if (G > 1) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int k = 0; k < ins; k += 32, packed += kGroup, other += kGroup, weight += 32 * B) {
    fetch.Some();
    _tile_loadd(4, packed, 64);
    _tile_loadd(6, weight, 4 * B);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, weight + 32, 4 * B);
    _tile_dpbf16ps(1, 4, 7);
    if (G > 1) {
      _tile_loadd(5, other, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, 128);
  _tile_stored(1, sums + 16, 128);
  if (G > 1) {
    _tile_stored(2, sums + 16 * 32, 128);
    _tile_stored(3, sums + 16 * 32 + 16, 128);
  }
}

// Outputs of the blocks [first, last) of all rows, which are `packed`.
template <int B, int G>
INLINE void ManyRowsOf(const LinearCall &call, int group, const uint16_t *packed, ManyBlocks blocks, Fetch<B> &fetch) {
  alignas(64) float sums[G * kTileRows * 32], gates[G * kTileRows * 32];
  const int first = group * kTileRows, rows = call.rows - first < G * kTileRows ? call.rows - first : G * kTileRows;
  packed += static_cast<int64_t>(group) * kTileRows * call.ins;
  for (int column = blocks.first * B; column < blocks.last * B; column += 32) {
    auto multiply = [&](int from, float *to) {
      const uint16_t *weight = call.weight + static_cast<int64_t>(from / B) * B * call.ins + 2 * (from % B);
      MultiplyGroups<B, G>(packed, weight, call.ins, fetch, to);
    };
    int from = call.gated ? column + call.outs / 2 : column;
    if (call.gated) multiply(column, gates);
    multiply(from, sums);
    Finish<32>(call, first, rows, column, from, sums, gates);
  }
}

template <int B>
void ManyRows(const LinearCall &call, const uint16_t *packed, ManyBlocks blocks, ManyBlocks ahead) {
  const WholeTiles tiles;
  _tile_loadconfig(&tiles);
  const int groups = (call.rows + kTileRows - 1) / kTileRows;
  int64_t each = static_cast<int64_t>(blocks.last - blocks.first) * (B / 32) * (call.ins / 32) * (call.gated ? 2 : 1);
  Fetch<B> fetch(call, ahead, each * ((groups + 1) / 2));
  int group = 0;
  for (; group + 2 <= groups; group += 2) ManyRowsOf<B, 2>(call, group, packed, blocks, fetch);
  if (group < groups) ManyRowsOf<B, 1>(call, group, packed, blocks, fetch);
  _tile_release();
}
