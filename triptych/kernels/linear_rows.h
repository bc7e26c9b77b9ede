// The product of one block of outputs with all rows.
//
// No include guard: instruction_sets.h includes this once for each instruction set, after vectors.h.

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

// Outputs [B n, B n + B) of all rows of `x`, which is the call's or its normalised copy.
template <int B>
void LinearBlock(const LinearCall &call, const uint16_t *x, int64_t x_row, int n) {
  alignas(64) float sums[kSums * B], gates[kSums * B];
  size_t block = static_cast<size_t>(call.ins) * B;
  int groups = (call.rows + kSums - 1) / kSums, first = 0;
  for (int group = 0; group < groups; group++) {
    int rows = (call.rows - first + groups - group - 1) / (groups - group);
    const uint16_t *from = x + first * x_row;
    int at = n;
    if (call.gated) {
      MultiplyRows<B>(rows, from, x_row, call.weight + block * n, call.ins, gates);
      at += call.outs / B / 2;
    }
    MultiplyRows<B>(rows, from, x_row, call.weight + block * at, call.ins, sums);
    for (int row = 0; row < rows; row++) {
      float *own = sums + row * B, *gate = gates + row * B;
      uint16_t *out = call.out + (first + row) * call.out_row + n * B;
      if (call.bias)
        for (int i = 0; i < B; i++) own[i] += ToFloat(call.bias[at * B + i]);
      if (call.gated) {
        if (call.bias)
          for (int i = 0; i < B; i++) gate[i] += ToFloat(call.bias[n * B + i]);
        for (int i = 0; i < B; i += LANES) {
          // Below -80 it is 0, and an exponential that overflows.
          Vec g = Load(gate + i), bounded = Max(g, Splat(-80.0f));
          Vec silu = g < Splat(-80.0f) ? Splat(0.0f) : g / (Exp(Splat(0.0f) - bounded) + 1.0f);
          Store(own + i, silu * Load(own + i));
        }
      }
      if (call.residual) {
        const uint16_t *added = call.residual + (first + row) * call.residual_row + n * B;
        for (int i = 0; i < B; i++) own[i] += ToFloat(added[i]);
      }
      for (int i = 0; i < B; i++) FromFloat(own[i], out + i);
    }
    first += rows;
  }
}

// One row of `ins` numbers, normalised.
void NormRow(const LinearCall &call, const uint16_t *x, uint16_t *to) {
  Vec sum = {};
  int i = 0;
  for (; i + LANES <= call.ins; i += LANES) {
    Vec part = Load(x + i);
    sum = Fma(part, part, sum);
  }
  float squares = Sum(sum);
  for (; i < call.ins; i++) squares += ToFloat(x[i]) * ToFloat(x[i]);
  float scale = 1.0f / sqrtf(squares / call.ins + call.epsilon);
  for (i = 0; i < call.ins; i++) FromFloat(ToFloat(x[i]) * scale * ToFloat(call.norm[i]), to + i);
}
