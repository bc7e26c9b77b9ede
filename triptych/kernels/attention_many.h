// Attention of many rows, which are in the lanes: a key is read once for all of them, and no sum crosses lanes.

// Sums of products that are kept in registers at a time, for V vectors of rows.
constexpr int kStep = LANES == 16 ? 4 : 2;

#ifndef BF16_DOTS
// Numbers of the piece's keys or values as floats [count][dim], which `found` points to.
INLINE void AsFloats(const float *const *from, int count, int, float *, const float **found) {
  for (int key = 0; key < count; key++) found[key] = from[key];
}
INLINE void AsFloats(const uint16_t *const *from, int count, int dim, float *to, const float **found) {
  for (int key = 0; key < count; key++, to += dim) {
    int at = 0;
    for (; at + LANES <= dim; at += LANES) Store(to + at, Load(from[key] + at));
    for (; at < dim; at++) to[at] = ToFloat(from[key][at]);
    found[key] = to;
  }
}

// Scores [padded][V * LANES] of queries [dim][V * LANES].
template <int V, typename T>
INLINE void ManyDots(const Rows<T> &rows, const float *query, int dim, const float *const *keys, int padded, float scale,
                     float *scores) {
  constexpr int kWidth = V * LANES;
  for (int key = 0; key < padded; key += kStep) {
    Vec parts[kStep][V] = {};
    rows.FetchKeys(key, key + kStep), rows.FetchValues(key, key + kStep);
    for (int d = 0; d < dim; d++)
      for (int k = 0; k < kStep; k++) {
        Vec number = Splat(keys[key + k][d]);
        for (int v = 0; v < V; v++) parts[k][v] = Fma(number, Load(query + d * kWidth + v * LANES), parts[k][v]);
      }
    for (int k = 0; k < kStep; k++)
      for (int v = 0; v < V; v++) Store(scores + (key + k) * kWidth + v * LANES, parts[k][v] * scale);
  }
}

// Adds values [count][dim] by weights [count][V * LANES] to sums [dim][V * LANES].
template <int V, int S>
INLINE void AddManyAt(const float *weights, const float *const *values, int count, int d, float *sums) {
  constexpr int kWidth = V * LANES;
  Vec parts[S][V];
  for (int k = 0; k < S; k++)
    for (int v = 0; v < V; v++) parts[k][v] = Load(sums + (d + k) * kWidth + v * LANES);
  for (int key = 0; key < count; key++)
    for (int k = 0; k < S; k++) {
      Vec number = Splat(values[key][d + k]);
      for (int v = 0; v < V; v++) parts[k][v] = Fma(number, Load(weights + key * kWidth + v * LANES), parts[k][v]);
    }
  for (int k = 0; k < S; k++)
    for (int v = 0; v < V; v++) Store(sums + (d + k) * kWidth + v * LANES, parts[k][v]);
}
template <int V>
INLINE void AddMany(const float *weights, const float *const *values, int count, int dim, float *sums) {
  int d = 0;
  for (; d + kStep <= dim; d += kStep) AddManyAt<V, kStep>(weights, values, count, d, sums);
  for (; d < dim; d++) AddManyAt<V, 1>(weights, values, count, d, sums);
}
#else
// The same of bfloat16 in pairs, for an even number of dimensions: a pair is 32 bits.
INLINE __m512bh Pairs(const uint32_t *pairs) { return (__m512bh)_mm512_loadu_si512(pairs); }
INLINE __m512bh SplatPair(const void *pair) {
  int32_t bits;
  memcpy(&bits, pair, sizeof bits);
  return (__m512bh)_mm512_set1_epi32(bits);
}

// Of queries [dim / 2][V * LANES] in pairs.
template <int V>
INLINE void ManyPairDots(const Rows<uint16_t> &rows, const uint32_t *query, int dim, int padded, float scale,
                         float *scores) {
  constexpr int kWidth = V * LANES;
  const uint16_t *const *keys = rows.piece->keys;
  for (int key = 0; key < padded; key += kStep) {
    __m512 parts[kStep][V] = {};
    rows.FetchKeys(key, key + kStep), rows.FetchValues(key, key + kStep);
    for (int d = 0; d < dim; d += 2)
      for (int k = 0; k < kStep; k++) {
        __m512bh pair = SplatPair(keys[key + k] + d);
        for (int v = 0; v < V; v++)
          parts[k][v] = _mm512_dpbf16_ps(parts[k][v], pair, Pairs(query + d / 2 * kWidth + v * LANES));
      }
    for (int k = 0; k < kStep; k++)
      for (int v = 0; v < V; v++) Store(scores + (key + k) * kWidth + v * LANES, (Vec)parts[k][v] * scale);
  }
}

// The weights and the values of two keys each, in pairs: of weights [count][width], in their place.
INLINE void MakePairs(float *weights, int width, const uint16_t *const *values, int count, int dim, uint32_t *pairs) {
  static const uint16_t kNothing[32] = {};
  for (int key = 0; key < count; key += 2) {
    bool two = key + 1 < count;
    for (int at = 0; at < width; at += LANES) {
      __m512 low = (__m512)Load(weights + key * width + at);
      __m512 high = two ? (__m512)Load(weights + (key + 1) * width + at) : _mm512_setzero_ps();
      __m512i first = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(low));
      __m512i second = _mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(high)), 16);
      _mm512_storeu_si512(weights + key / 2 * width + at, _mm512_or_si512(first, second));
    }
    uint32_t *to = pairs + key / 2 * dim;
    int at = 0;
    for (; at + LANES <= dim; at += LANES) {
      auto *other = reinterpret_cast<const __m256i *>(two ? values[key + 1] + at : kNothing);
      __m512i first = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(values[key] + at)));
      __m512i second = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(other)), 16);
      _mm512_storeu_si512(to + at, _mm512_or_si512(first, second));
    }
    for (; at < dim; at++) to[at] = values[key][at] | (two ? static_cast<uint32_t>(values[key + 1][at]) << 16 : 0);
  }
}

template <int V>
INLINE void AddManyPairs(const uint32_t *weights, const uint32_t *values, int pairs, int dim, float *sums) {
  constexpr int kWidth = V * LANES;
  for (int d = 0; d < dim; d += 2) {
    __m512 parts[2][V];
    for (int k = 0; k < 2; k++)
      for (int v = 0; v < V; v++) parts[k][v] = (__m512)Load(sums + (d + k) * kWidth + v * LANES);
    for (int pair = 0; pair < pairs; pair++)
      for (int k = 0; k < 2; k++) {
        __m512bh number = SplatPair(values + pair * dim + d + k);
        for (int v = 0; v < V; v++)
          parts[k][v] = _mm512_dpbf16_ps(parts[k][v], number, Pairs(weights + pair * kWidth + v * LANES));
      }
    for (int k = 0; k < 2; k++)
      for (int v = 0; v < V; v++) Store(sums + (d + k) * kWidth + v * LANES, (Vec)parts[k][v]);
  }
}
#endif

// The weights of a piece in the place of its scores, and what they change: the maxima and totals so far. The sums so
// far are to be multiplied by `shrinks`.
template <int V>
INLINE void Weigh(float *scores, int32_t at, int count, bool whole, float softcap, const Ints *low, const Ints *high,
                  Vec *most, Vec *total, Vec *shrinks) {
  constexpr int kWidth = V * LANES;
  for (int v = 0; v < V; v++) {
    Vec now = most[v], sum = {};
    for (int key = 0; key < count; key++) {
      Vec score = Load(scores + key * kWidth + v * LANES);
      if (softcap > 0) score = Tanh(score / softcap) * softcap;
      if (!whole) {
        Ints index = SplatInt(at + key);
        score = (index >= low[v]) & (index < high[v]) ? score : Splat(-INFINITY);
      }
      if (softcap > 0 || !whole) Store(scores + key * kWidth + v * LANES, score);
      now = Max(now, score);
    }
    Vec shrink = Exp(most[v] - now);
    for (int key = 0; key < count; key++) {
      Vec score = Load(scores + key * kWidth + v * LANES);
      Vec weight = score <= Splat(kNone) ? Splat(0.0f) : Exp(score - now);
      Store(scores + key * kWidth + v * LANES, weight);
      sum += weight;
    }
    total[v] = total[v] * shrink + sum, most[v] = now, shrinks[v] = shrink;
  }
}

// The bounds of all rows, of which there are V vectors, and their maxima and totals before the first key.
template <typename T, int V>
INLINE void SetOut(const Rows<T> &rows, Ints *low, Ints *high, Vec *most, Vec *total) {
  for (int row = 0; row < V * LANES; row++) {
    bool real = row < rows.count;
    float none = 0;
    low[row / LANES][row % LANES] = real ? rows.low[row] : 0;
    high[row / LANES][row % LANES] = real ? rows.high[row] : 0;
    most[row / LANES][row % LANES] = real ? rows.Sink(row, &none) : kNone;
    total[row / LANES][row % LANES] = none;
  }
}

#ifdef AMX_TILES
#include "attention_tiles.h"
#else
// V vectors of rows.
template <typename T, int V>
void AttendMany(Rows<T> &rows) {
  constexpr int kWidth = V * LANES;
  const AttentionCall &call = rows.call;
  const int dim = call.dim, value_dim = call.value_dim;
  float *query = rows.task.scratch, *scores = query + dim * kWidth, *sums = scores + kKeys * kWidth;
  float *numbers = sums + value_dim * kWidth;  // the piece's keys or values as floats, or its values in pairs
  memset(query, 0, static_cast<size_t>(dim) * kWidth * sizeof(float));
  memset(sums, 0, static_cast<size_t>(value_dim) * kWidth * sizeof(float));
  for (int row = 0; row < rows.count; row++) {
    const T *from = rows.Query(row);
#ifdef BF16_DOTS
    for (int d = 0; d < dim; d += 2) memcpy(query + d / 2 * kWidth + row, from + d, 2 * sizeof(T));
#else
    for (int d = 0; d < dim; d++) query[d * kWidth + row] = ToFloat(from[d]);
#endif
  }
  Ints low[V], high[V];
  Vec most[V], total[V], shrinks[V];
  SetOut<T, V>(rows, low, high, most, total);
  int32_t begin, end;
  rows.Range(&begin, &end);
  rows.Begin(begin, end);
  for (int32_t at = begin; at < end; at += kKeys) {
    rows.Advance(at, end);
    Piece<T> &piece = *rows.piece;
    const int count = piece.count, padded = (count + kStep - 1) / kStep * kStep;
    for (int key = count; key < padded; key++) piece.keys[key] = piece.keys[count - 1];
    bool whole = rows.count == kWidth && rows.Whole(at, at + count);
#ifdef BF16_DOTS
    ManyPairDots<V>(rows, reinterpret_cast<uint32_t *>(query), dim, padded, call.scale, scores);
#else
    const float *found[kKeys];
    AsFloats(piece.keys, padded, dim, numbers, found);
    ManyDots<V>(rows, query, dim, found, padded, call.scale, scores);
#endif
    rows.FetchKeys(padded, kKeys), rows.FetchValues(padded, kKeys);
    rows.AddBiases(at, at + count, kWidth, scores);
    Weigh<V>(scores, at, count, whole, call.softcap, low, high, most, total, shrinks);
    for (int d = 0; d < value_dim; d++)
      for (int v = 0; v < V; v++) {
        float *part = sums + d * kWidth + v * LANES;
        Store(part, Load(part) * shrinks[v]);
      }
#ifdef BF16_DOTS
    auto *pairs = reinterpret_cast<uint32_t *>(numbers);
    MakePairs(scores, kWidth, piece.values, count, value_dim, pairs);
    AddManyPairs<V>(reinterpret_cast<uint32_t *>(scores), pairs, (count + 1) / 2, value_dim, sums);
#else
    AsFloats(piece.values, count, value_dim, numbers, found);
    AddMany<V>(scores, found, count, value_dim, sums);
#endif
  }
  for (int row = 0; row < rows.count; row++) {
    int v = row / LANES, lane = row % LANES;
    rows.Write(row, most[v][lane], total[v][lane], sums + row, kWidth);
  }
}
#endif
