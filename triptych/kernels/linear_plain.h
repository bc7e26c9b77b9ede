// The product of rows by a weight as torch keeps it, [outs][ins], such as that of a head which embeds the tokens too.
//
// No include guard: linear_rows.h includes this once for each instruction set.

#ifdef BF16_DOTS
// Sums of the products of R rows with four rows of weights, in the lanes.
template <int R>
INLINE int PlainDots(const uint16_t *x, int64_t x_row, const uint16_t *weight, int ins, Vec (*parts)[4]) {
  const uint16_t *ahead = weight + 4 * static_cast<int64_t>(ins);
  for (int k = 0; k < ins; k += 32, ahead += 4 * 32) {
    // Inputs behind the last one are zeros.
    __mmask32 mask = ins - k < 32 ? (1u << (ins - k)) - 1 : ~0u;
    __m512bh w[4];
    for (int i = 0; i < 4; i++) {
      _mm_prefetch(reinterpret_cast<const char *>(ahead + 32 * i), _MM_HINT_T0);
      w[i] = (__m512bh)_mm512_maskz_loadu_epi16(mask, weight + static_cast<int64_t>(i) * ins + k);
    }
    for (int row = 0; row < R; row++) {
      __m512bh inputs = (__m512bh)_mm512_maskz_loadu_epi16(mask, x + row * x_row + k);
      for (int i = 0; i < 4; i++) parts[row][i] = (Vec)_mm512_dpbf16_ps((__m512)parts[row][i], w[i], inputs);
    }
  }
  return ins;
}
#endif

// The same of as many inputs as whole vectors have, whose number it returns.
template <int R, typename T>
INLINE int PlainDots(const T *x, int64_t x_row, const T *weight, int ins, Vec (*parts)[4]) {
  constexpr int kLine = 64 / sizeof(T);
  int k = 0;
  for (; k + LANES <= ins; k += LANES) {
    Vec inputs[R];
    for (int row = 0; row < R; row++) inputs[row] = Load(x + row * x_row + k);
    for (int i = 0; i < 4; i++) {
      if (k % kLine == 0) __builtin_prefetch(weight + (4 * static_cast<int64_t>(ins) + 4 * k + kLine * i));
      Vec w = Load(weight + static_cast<int64_t>(i) * ins + k);
      for (int row = 0; row < R; row++) parts[row][i] = Fma(w, inputs[row], parts[row][i]);
    }
  }
  return k;
}

// sums [R][B] of R rows `x` (x_row apart) by B rows of weights.
template <int B, int R, typename T>
INLINE void MultiplyPlain(const T *x, int64_t x_row, const T *weight, int ins, float *sums) {
  for (int out = 0; out < B; out += 4) {
    const T *own = weight + static_cast<int64_t>(out) * ins;
    Vec parts[R][4] = {};
    int done = PlainDots<R>(x, x_row, own, ins, parts);
    for (int row = 0; row < R; row++) {
      float *to = sums + row * B + out;
      Sum4(parts[row], to);
      for (int rest = done; rest < ins; rest++)
        for (int i = 0; i < 4; i++)
          to[i] += ToFloat(x[row * x_row + rest]) * ToFloat(own[static_cast<int64_t>(i) * ins + rest]);
    }
  }
}

template <int B, typename T>
INLINE void MultiplyPlainRows(int rows, const T *x, int64_t x_row, const T *weight, int ins, float *sums) {
  switch (rows) {
    case 1: return MultiplyPlain<B, 1>(x, x_row, weight, ins, sums);
    case 2: return MultiplyPlain<B, 2>(x, x_row, weight, ins, sums);
    case 3: return MultiplyPlain<B, 3>(x, x_row, weight, ins, sums);
    case 4: return MultiplyPlain<B, 4>(x, x_row, weight, ins, sums);
    case 5: return MultiplyPlain<B, 5>(x, x_row, weight, ins, sums);
    default: return MultiplyPlain<B, kSums>(x, x_row, weight, ins, sums);
  }
}

// Outputs [kPlainOuts n, kPlainOuts n + kPlainOuts) of all rows of float32.
void FloatBlock(const LinearCall &call, int n) {
  alignas(64) float sums[kSums * kPlainOuts];
  const auto *weight = reinterpret_cast<const float *>(call.weight) + static_cast<int64_t>(n) * kPlainOuts * call.ins;
  const auto *bias = reinterpret_cast<const float *>(call.bias);
  RowGroups groups(call.rows, kSums);
  for (int group = 0, first = 0; group < groups.count; group++) {
    int rows = groups.Of(group, first);
    const auto *x = reinterpret_cast<const float *>(call.x) + first * call.x_row;
    MultiplyPlainRows<kPlainOuts>(rows, x, call.x_row, weight, call.ins, sums);
    for (int row = 0; row < rows; row++) {
      float *out = reinterpret_cast<float *>(call.out) + (first + row) * call.out_row + n * kPlainOuts;
      for (int i = 0; i < kPlainOuts; i++) out[i] = sums[row * kPlainOuts + i] + (bias ? bias[n * kPlainOuts + i] : 0.0f);
    }
    first += rows;
  }
}

#ifdef AMX_TILES
// Tile 0 and 1 are sums of 16 outputs by `rows` rows, 2 is 32 inputs of the rows, 3 and 4 of 16 outputs each.
INLINE void SetPlainTiles(int rows) {
  struct alignas(64) {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  } tiles;
  for (int i = 0; i < 5; i++) tiles.bytes[i] = static_cast<uint16_t>(i < 3 ? 4 * rows : 64), tiles.rows[i] = 16;
  _tile_loadconfig(&tiles);
}

// As MultiplyPlain with B 32, of `packed` rows [ins / 2][kTileRows][2]; `ins` is a multiple of 32.
INLINE void MultiplyPlainTiles(int rows, const uint16_t *packed, const uint16_t *weight, int ins, float *sums) {
  alignas(64) float across[32 * kTileRows];
  const uint16_t *second = weight + 16 * static_cast<int64_t>(ins), *ahead = second + 16 * static_cast<int64_t>(ins);
  _tile_zero(0);
  _tile_zero(1);
  for (int k = 0; k < ins; k += 32, ahead += 32 * 32) {
    for (int line = 0; line < 32; line++) _mm_prefetch(reinterpret_cast<const char *>(ahead + 32 * line), _MM_HINT_T1);
    _tile_loadd(2, packed + static_cast<int64_t>(k) * kTileRows, 4 * kTileRows);
    _tile_loadd(3, weight + k, 2 * static_cast<int64_t>(ins));
    _tile_loadd(4, second + k, 2 * static_cast<int64_t>(ins));
    _tile_dpbf16ps(0, 3, 2);
    _tile_dpbf16ps(1, 4, 2);
  }
  _tile_stored(0, across, 4 * kTileRows);
  _tile_stored(1, across + 16 * kTileRows, 4 * kTileRows);
  for (int row = 0; row < rows; row++)
    for (int out = 0; out < 32; out++) sums[row * 32 + out] = across[out * kTileRows + row];
}
#endif
