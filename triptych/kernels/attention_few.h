// Attention of few rows: key by key, with the dimensions of a row in the lanes.

// Keys whose sums are added up together.
constexpr int kTogether = 4;

#ifndef BF16_DOTS
// Queries of R rows, [R][dim] in floats.
template <typename T, int R>
INLINE void PackQueries(const Rows<T> &rows, float *query) {
  for (int row = 0; row < R; row++) {
    const T *from = rows.Query(row);
    for (int d = 0; d < rows.call.dim; d++) query[row * rows.call.dim + d] = ToFloat(from[d]);
  }
}

// Sums of the products of R rows with kTogether keys.
template <typename T, int R>
INLINE void KeyDots(const float *query, int dim, const T *const *keys, float *scores) {
  Vec sums[R][kTogether] = {};
  int at = 0;
  for (; at + LANES <= dim; at += LANES)
    for (int key = 0; key < kTogether; key++) {
      Vec part = Load(keys[key] + at);
      for (int row = 0; row < R; row++) sums[row][key] = Fma(part, Load(query + row * dim + at), sums[row][key]);
    }
  for (int row = 0; row < R; row++) {
    Sum4(sums[row], scores + row * kKeys);
    for (int key = 0; key < kTogether; key++)
      for (int rest = at; rest < dim; rest++) scores[row * kKeys + key] += ToFloat(keys[key][rest]) * query[row * dim + rest];
  }
}

// Adds the values by R rows' `weights` [R][kKeys] to `sums` [R][value dim], V vectors at a time from `at`.
template <typename T, int R, int V>
INLINE void AddValues(const Rows<T> &rows, const float *weights, int at, float *sums) {
  const int dim = rows.call.value_dim;
  Vec parts[R][V];
  for (int row = 0; row < R; row++)
    for (int v = 0; v < V; v++) parts[row][v] = Load(sums + row * dim + at + v * LANES);
  for (int key = 0; key < rows.piece->count; key++) {
    if (at == 0) rows.FetchValues(key, key + 1);
    for (int v = 0; v < V; v++) {
      Vec value = Load(rows.piece->values[key] + at + v * LANES);
      for (int row = 0; row < R; row++)
        parts[row][v] = Fma(value, Splat(weights[row * kKeys + key]), parts[row][v]);
    }
  }
  for (int row = 0; row < R; row++)
    for (int v = 0; v < V; v++) Store(sums + row * dim + at + v * LANES, parts[row][v]);
}

template <typename T, int R>
INLINE void AddAllValues(const Rows<T> &rows, const float *weights, float *sums) {
  const int dim = rows.call.value_dim;
  int at = 0;
  for (; at + 4 * LANES <= dim; at += 4 * LANES) AddValues<T, R, 4>(rows, weights, at, sums);
  for (; at + LANES <= dim; at += LANES) AddValues<T, R, 1>(rows, weights, at, sums);
  for (; at < dim; at++)
    for (int row = 0; row < R; row++)
      for (int key = 0; key < rows.piece->count; key++)
        sums[row * dim + at] += weights[row * kKeys + key] * ToFloat(rows.piece->values[key][at]);
}

// Sums as they are written.
template <typename T, int R>
INLINE void InOrder(const Rows<T> &, float *) {}

template <typename T>
INLINE int SumsWidth(const Rows<T> &rows) { return rows.call.value_dim; }
#else
// The same of bfloat16, multiplied in pairs: queries of R rows, [R][dim].
template <typename T, int R>
INLINE void PackQueries(const Rows<T> &rows, float *query) {
  for (int row = 0; row < R; row++)
    memcpy(reinterpret_cast<T *>(query) + row * rows.call.dim, rows.Query(row), rows.call.dim * sizeof(T));
}

template <typename T, int R>
INLINE void KeyDots(const float *query, int dim, const T *const *keys, float *scores) {
  __m512 sums[R][kTogether] = {};
  const T *own = reinterpret_cast<const T *>(query);
  // Key by key, in the order of the memory.
  for (int key = 0; key < kTogether; key++)
    for (int at = 0; at < dim; at += 32) {
      __m512bh part = (__m512bh)_mm512_loadu_si512(keys[key] + at);
      for (int row = 0; row < R; row++)
        sums[row][key] = _mm512_dpbf16_ps(sums[row][key], part, (__m512bh)_mm512_loadu_si512(own + row * dim + at));
    }
  for (int row = 0; row < R; row++) Sum4(reinterpret_cast<Vec *>(sums[row]), scores + row * kKeys);
}

// Adds the values [at, at + 32 * V) of pairs of keys by R rows' `weights` [R][kKeys], in bfloat16, to `sums`
// [R][width]. Of 32 dimensions those whose products the low halves of an unpacking have come first.
template <typename T, int R, int V>
INLINE void AddPairs(const Rows<T> &rows, const T *weights, int at, __mmask32 valid, float *sums, int width) {
  __m512 parts[R][2 * V];
  for (int row = 0; row < R; row++)
    for (int v = 0; v < 2 * V; v++) parts[row][v] = (__m512)Load(sums + row * width + at + v * LANES);
  for (int key = 0; key < rows.piece->count; key += 2) {
    if (at == 0) rows.FetchValues(key, key + 2);
    for (int v = 0; v < V; v++) {
      __m512i first = _mm512_maskz_loadu_epi16(valid, rows.piece->values[key] + at + 32 * v);
      __m512i second = _mm512_maskz_loadu_epi16(valid, rows.piece->values[key + 1] + at + 32 * v);
      __m512bh low = (__m512bh)_mm512_unpacklo_epi16(first, second), high = (__m512bh)_mm512_unpackhi_epi16(first, second);
      for (int row = 0; row < R; row++) {
        int32_t pair;
        memcpy(&pair, weights + row * kKeys + key, sizeof pair);
        __m512bh weight = (__m512bh)_mm512_set1_epi32(pair);
        parts[row][2 * v] = _mm512_dpbf16_ps(parts[row][2 * v], low, weight);
        parts[row][2 * v + 1] = _mm512_dpbf16_ps(parts[row][2 * v + 1], high, weight);
      }
    }
  }
  for (int row = 0; row < R; row++)
    for (int v = 0; v < 2 * V; v++) Store(sums + row * width + at + v * LANES, (Vec)parts[row][v]);
}

template <typename T>
INLINE int SumsWidth(const Rows<T> &rows) { return (rows.call.value_dim + 31) / 32 * 32; }

template <typename T, int R>
INLINE void AddAllValues(const Rows<T> &rows, float *weights, float *sums) {
  const int dim = rows.call.value_dim, width = SumsWidth(rows), count = rows.piece->count;
  T *rounded = reinterpret_cast<T *>(weights);
  for (int row = 0; row < R; row++)
    for (int key = 0; key < kKeys; key += 32) {
      __m512 low = (__m512)Load(weights + row * kKeys + key), high = (__m512)Load(weights + row * kKeys + key + LANES);
      _mm512_storeu_si512(rounded + row * kKeys + key, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
  // The weight of a last one is zero.
  if (count % 2) rows.piece->values[count] = rows.piece->values[count - 1];
  int at = 0;
  // All that a row of values has, where the registers hold its sums.
  if (R <= 2)
    for (; at + 128 <= dim; at += 128) AddPairs<T, R, 4>(rows, rounded, at, ~0u, sums, width);
  for (; at + 64 <= dim; at += 64) AddPairs<T, R, 2>(rows, rounded, at, ~0u, sums, width);
  for (; at < dim; at += 32) AddPairs<T, R, 1>(rows, rounded, at, dim - at < 32 ? (1u << (dim - at)) - 1 : ~0u, sums, width);
}

// Sums of 32 dimensions as AddPairs has them, into the order of the dimensions.
INLINE void Unmix(float *sums) {
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  __m512 low = (__m512)Load(sums), high = (__m512)Load(sums + LANES);
  Store(sums, (Vec)_mm512_permutex2var_ps(low, first, high));
  Store(sums + LANES, (Vec)_mm512_permutex2var_ps(low, second, high));
}

template <typename T, int R>
INLINE void InOrder(const Rows<T> &rows, float *sums) {
  for (int at = 0; at < R * SumsWidth(rows); at += 32) Unmix(sums + at);
}
#endif

// R rows, which are all of the task.
template <typename T, int R>
void AttendFew(Rows<T> &rows) {
  const AttentionCall &call = rows.call;
  const int dim = call.dim, width = SumsWidth(rows);
  float *scores = rows.task.scratch, *sums = scores + R * kKeys, *query = sums + R * width;
  float most[R], total[R];
  int32_t begin, end;
  PackQueries<T, R>(rows, query);
  for (int row = 0; row < R; row++) most[row] = rows.Sink(row, &total[row]);
  memset(sums, 0, static_cast<size_t>(R) * width * sizeof(float));
  rows.Range(&begin, &end);
  rows.Begin(begin, end);
  for (int32_t at = begin; at < end; at += kKeys) {
    rows.Advance(at, end);
    Piece<T> &piece = *rows.piece;
    const int count = piece.count, padded = (count + kTogether - 1) / kTogether * kTogether;
    for (int key = count; key < padded; key++) piece.keys[key] = piece.keys[count - 1];
    for (int key = 0; key < padded; key += kTogether) {
      rows.FetchKeys(key, key + kTogether);
      KeyDots<T, R>(query, dim, piece.keys + key, scores + key);
    }
    for (int row = 0; row < R; row++) {
      float *own = scores + row * kKeys;
      int low = rows.low[row] - at, high = rows.high[row] - at < count ? rows.high[row] - at : count;
      Vec highest = Splat(most[row]);
      for (int key = padded; key < kKeys; key++) own[key] = 0;
      for (int key = 0; key < kKeys; key += LANES) {
        Vec score = Load(own + key) * call.scale;
        if (call.softcap > 0) score = Tanh(score / call.softcap) * call.softcap;
        Store(own + key, score);
      }
      if (call.bias) rows.AddBias(row, at, at + count, 1, own);
      if (low > 0 || high < kKeys)
        for (int key = 0; key < kKeys; key++)
          if (key < low || key >= high) own[key] = -INFINITY;
      for (int key = 0; key < kKeys; key += LANES) highest = Max(highest, Load(own + key));
      float now = Highest(highest);
      Vec sum = {};
      for (int key = 0; key < kKeys; key += LANES) {
        Vec score = Load(own + key);
        Vec weight = score <= Splat(kNone) ? Splat(0.0f) : Exp(score - now);
        Store(own + key, weight);
        sum += weight;
      }
      float shrink = now == most[row] ? 1.0f : expf(most[row] - now);
      total[row] = total[row] * shrink + Sum(sum), most[row] = now;
      if (shrink != 1.0f)
        for (int d = 0; d < width; d++) sums[row * width + d] *= shrink;
    }
    AddAllValues<T, R>(rows, scores, sums);
    rows.FetchKeys(padded, kKeys), rows.FetchValues(count, kKeys);
  }
  InOrder<T, R>(rows, sums);
  for (int row = 0; row < R; row++) rows.Write(row, most[row], total[row], sums + row * width, 1);
}
