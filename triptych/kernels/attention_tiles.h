// Attention of many rows of bfloat16 by the tiles of AMX: 16 rows of 64 bytes, multiplied in pairs.

// Rows of a tile, keys or rows of queries, and keys of one product with weights.
constexpr int kTile = 16, kPairKeys = 32;

// All eight tiles whole.
struct TileConfig {
  uint8_t palette = 1, start = 0, none[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// GCC's tiles do not say which memory they read and write: nothing moves across this.
INLINE void Barrier() { __asm__ volatile("" ::: "memory"); }

// A vector's 16 numbers of each of 16 vectors, in their place.
INLINE void Transpose(__m512i *v) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 4) {
    __m512i a = _mm512_unpacklo_epi32(v[i], v[i + 1]), b = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    __m512i c = _mm512_unpacklo_epi32(v[i + 2], v[i + 3]), d = _mm512_unpackhi_epi32(v[i + 2], v[i + 3]);
    t[i] = _mm512_unpacklo_epi64(a, c), t[i + 1] = _mm512_unpackhi_epi64(a, c);
    t[i + 2] = _mm512_unpacklo_epi64(b, d), t[i + 3] = _mm512_unpackhi_epi64(b, d);
  }
  for (int i = 0; i < 4; i++) {
    __m512i a = _mm512_shuffle_i32x4(t[i], t[4 + i], 0x88), b = _mm512_shuffle_i32x4(t[i], t[4 + i], 0xdd);
    __m512i c = _mm512_shuffle_i32x4(t[8 + i], t[12 + i], 0x88), d = _mm512_shuffle_i32x4(t[8 + i], t[12 + i], 0xdd);
    v[i] = _mm512_shuffle_i32x4(a, c, 0x88), v[8 + i] = _mm512_shuffle_i32x4(a, c, 0xdd);
    v[4 + i] = _mm512_shuffle_i32x4(b, d, 0x88), v[12 + i] = _mm512_shuffle_i32x4(b, d, 0xdd);
  }
}

// The first key of a tile, whose rows lie side by side; they are copied where they do not.
INLINE const uint16_t *KeyTile(const Rows<uint16_t> &rows, int first, bool aligned, uint16_t *copy) {
  const Piece<uint16_t> &piece = *rows.piece;
  if (aligned) return piece.keys[first];
  const int dim = rows.call.dim;
  for (int key = first; key < first + kTile; key++)
    memcpy(copy + (key - first) * dim, piece.keys[key < piece.count ? key : piece.count - 1], dim * sizeof(uint16_t));
  return copy;
}

// Scores [keys][V * LANES] of queries [dim / 2][V * LANES] in pairs, for whole tiles of keys.
template <int V>
INLINE void TileDots(const Rows<uint16_t> &rows, const uint32_t *query, bool aligned, uint16_t *copy, float *scores) {
  constexpr int kWidth = V * LANES, kStride = kWidth * 4;
  const int dim = rows.call.dim;
  for (int first = 0; first < rows.piece->count; first += kTile) {
    const uint16_t *keys = KeyTile(rows, first, aligned, copy);
    float *to = scores + first * kWidth;
    rows.FetchKeys(first, first + kTile);
    Barrier();
    _tile_zero(0);
    if (V > 1) {
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int d = 0; d < dim; d += 32) {
      const uint32_t *pairs = query + d / 2 * kWidth;
      _tile_loadd(4, keys + d, dim * 2);
      _tile_loadd(5, pairs, kStride);
      _tile_dpbf16ps(0, 4, 5);
      if (V > 1) {
        _tile_loadd(6, pairs + LANES, kStride);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(5, pairs + 2 * LANES, kStride);
        _tile_dpbf16ps(2, 4, 5);
        _tile_loadd(6, pairs + 3 * LANES, kStride);
        _tile_dpbf16ps(3, 4, 6);
      }
    }
    _tile_stored(0, to, kStride);
    if (V > 1) {
      _tile_stored(1, to + LANES, kStride);
      _tile_stored(2, to + 2 * LANES, kStride);
      _tile_stored(3, to + 3 * LANES, kStride);
    }
    Barrier();
    for (int at = 0; at < kTile * kWidth; at += LANES) Store(to + at, Load(to + at) * rows.call.scale);
  }
}

// Weights [keys][V * LANES] as tiles of 16 rows and 32 keys: [keys / 32][V][16][32].
template <int V>
INLINE void TileWeights(const float *weights, int keys, uint16_t *tiles) {
  constexpr int kWidth = V * LANES;
  for (int first = 0; first < keys; first += kPairKeys)
    for (int v = 0; v < V; v++, tiles += kTile * kPairKeys) {
      __m512i pairs[kTile];
      for (int pair = 0; pair < kTile; pair++) {
        const float *from = weights + (first + 2 * pair) * kWidth + v * LANES;
        __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)Load(from)));
        __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)Load(from + kWidth)));
        pairs[pair] = _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
      }
      Transpose(pairs);
      for (int row = 0; row < kTile; row++) _mm512_storeu_si512(tiles + row * kPairKeys, pairs[row]);
    }
}

// Values of pairs of keys, [keys / 2][value dim] in pairs, of dimensions in the order of AddPairs.
INLINE void TileValues(const Rows<uint16_t> &rows, int keys, uint32_t *pairs) {
  const int dim = rows.call.value_dim;
  for (int key = 0; key < keys; key += 2) {
    const uint16_t *first = rows.piece->values[key], *second = rows.piece->values[key + 1];
    rows.FetchValues(key, key + 2);
    for (int at = 0; at < dim; at += 32, pairs += 32) {
      __m512i a = _mm512_loadu_si512(first + at), b = _mm512_loadu_si512(second + at);
      _mm512_storeu_si512(pairs, _mm512_unpacklo_epi16(a, b));
      _mm512_storeu_si512(pairs + LANES, _mm512_unpackhi_epi16(a, b));
    }
  }
}

// Adds the values by the weights to sums [V * LANES][value dim].
template <int V>
INLINE void AddTiles(const uint16_t *weights, const uint32_t *values, int keys, int dim, float *sums) {
  const int stride = dim * 4;
  Barrier();
  for (int at = 0; at < dim; at += LANES) {
    float *to = sums + at;
    _tile_loadd(0, to, stride);
    if (V > 1) {
      _tile_loadd(1, to + kTile * dim, stride);
      _tile_loadd(2, to + 2 * kTile * dim, stride);
      _tile_loadd(3, to + 3 * kTile * dim, stride);
    }
    for (int first = 0; first < keys; first += kPairKeys) {
      const uint16_t *own = weights + first / kPairKeys * V * kTile * kPairKeys;
      _tile_loadd(4, values + first / 2 * dim + at, stride);
      _tile_loadd(5, own, 64);
      _tile_dpbf16ps(0, 5, 4);
      if (V > 1) {
        _tile_loadd(6, own + kTile * kPairKeys, 64);
        _tile_dpbf16ps(1, 6, 4);
        _tile_loadd(5, own + 2 * kTile * kPairKeys, 64);
        _tile_dpbf16ps(2, 5, 4);
        _tile_loadd(6, own + 3 * kTile * kPairKeys, 64);
        _tile_dpbf16ps(3, 6, 4);
      }
    }
    _tile_stored(0, to, stride);
    if (V > 1) {
      _tile_stored(1, to + kTile * dim, stride);
      _tile_stored(2, to + 2 * kTile * dim, stride);
      _tile_stored(3, to + 3 * kTile * dim, stride);
    }
  }
  Barrier();
}

// Multiplies the sums [V * LANES][value dim] of every row by its number.
template <int V>
INLINE void Shrink(const Vec *shrinks, int dim, float *sums) {
  for (int row = 0; row < V * LANES; row++, sums += dim) {
    float own = shrinks[row / LANES][row % LANES];
    if (own == 1.0f) continue;
    for (int at = 0; at < dim; at += LANES) Store(sums + at, Load(sums + at) * own);
  }
}

// V vectors of rows.
template <typename T, int V>
void AttendMany(Rows<T> &rows) {
  constexpr int kWidth = V * LANES;
  const AttentionCall &call = rows.call;
  const int dim = call.dim, value_dim = call.value_dim;
  float *query = rows.task.scratch, *scores = query + dim / 2 * kWidth, *sums = scores + kKeys * kWidth;
  auto *tiles = reinterpret_cast<T *>(sums + value_dim * kWidth);
  auto *pairs = reinterpret_cast<uint32_t *>(tiles + kKeys * kWidth);
  T *copy = reinterpret_cast<T *>(pairs + kKeys / 2 * value_dim), *zeros = copy + kTile * dim;
  memset(query, 0, static_cast<size_t>(dim) / 2 * kWidth * sizeof(float));
  memset(sums, 0, static_cast<size_t>(value_dim) * kWidth * sizeof(float));
  memset(zeros, 0, value_dim * sizeof(T));
  for (int row = 0; row < rows.count; row++) {
    const T *from = rows.Query(row);
    for (int d = 0; d < dim; d += 2) memcpy(query + d / 2 * kWidth + row, from + d, 2 * sizeof(T));
  }
  Ints low[V], high[V];
  Vec most[V], total[V], shrinks[V];
  SetOut<T, V>(rows, low, high, most, total);
  int32_t begin, end;
  rows.Range(&begin, &end);
  for (int v = 0; v < V; v++) {
    low[v] = low[v] < begin ? SplatInt(begin) : low[v];
    high[v] = high[v] > end ? SplatInt(end) : high[v];
  }
  // From the first key of a tile on, so that its rows lie side by side; those before `begin` do not count.
  const bool aligned = call.block_size % kTile == 0;
  const int32_t start = aligned ? begin / kTile * kTile : begin;
  const TileConfig config;
  Barrier();
  _tile_loadconfig(&config);
  rows.Begin(start, end);
  for (int32_t at = start; at < end; at += kKeys) {
    rows.Advance(at, end);
    Piece<T> &piece = *rows.piece;
    const int count = piece.count, padded = (count + kPairKeys - 1) / kPairKeys * kPairKeys;
    const bool inside = at >= begin && padded == count;
    TileDots<V>(rows, reinterpret_cast<uint32_t *>(query), aligned, copy, scores);
    rows.AddBiases(at, at + count, kWidth, scores);
    if (!inside) {
      // What is outside may be anything, and zero times that is not zero.
      for (int key = 0; key < padded; key++)
        if (at + key < begin || key >= count) piece.values[key] = zeros;
    }
    bool whole = inside && rows.count == kWidth && rows.Whole(at, at + count);
    Weigh<V>(scores, at, padded, whole, call.softcap, low, high, most, total, shrinks);
    Shrink<V>(shrinks, value_dim, sums);
    TileWeights<V>(scores, padded, tiles);
    TileValues(rows, padded, pairs);
    rows.FetchKeys(padded, kKeys), rows.FetchValues(padded, kKeys);
    AddTiles<V>(tiles, pairs, padded, value_dim, sums);
  }
  _tile_release();
  for (int row = 0; row < rows.count; row++) {
    float *own = sums + row * value_dim;
    for (int at = 0; at < value_dim; at += 32) Unmix(own + at);
    rows.Write(row, most[row / LANES][row % LANES], total[row / LANES][row % LANES], own, 1);
  }
}
