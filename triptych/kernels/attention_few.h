// Attention of few rows: key by key, with the dimensions of a row in the lanes.

#ifndef BF16_DOTS
// Scores [R][kKeys] of R rows, whose queries are `query` [R][dim].
template <typename T, int R>
INLINE void Dots(const float *query, int dim, const T *const *keys, int count, float *scores) {
  for (int key = 0; key < count; key++) {
    Vec sums[R] = {};
    int at = 0;
    for (; at + LANES <= dim; at += LANES) {
      Vec part = Load(keys[key] + at);
      for (int row = 0; row < R; row++) sums[row] = Fma(part, Load(query + row * dim + at), sums[row]);
    }
    for (int row = 0; row < R; row++) {
      float sum = Sum(sums[row]);
      for (int rest = at; rest < dim; rest++) sum += ToFloat(keys[key][rest]) * query[row * dim + rest];
      scores[row * kKeys + key] = sum;
    }
  }
}
#else
// Scores [R][kKeys] of R rows, whose queries are `query` [R][dim] in bfloat16, multiplied in pairs.
template <int R>
INLINE void PairDots(const uint16_t *query, int dim, const uint16_t *const *keys, int count, float *scores) {
  for (int key = 0; key < count; key++) {
    __m512 sums[R] = {};
    for (int at = 0; at < dim; at += 32) {
      __m512bh part = (__m512bh)_mm512_loadu_si512(keys[key] + at);
      for (int row = 0; row < R; row++)
        sums[row] = _mm512_dpbf16_ps(sums[row], part, (__m512bh)_mm512_loadu_si512(query + row * dim + at));
    }
    for (int row = 0; row < R; row++) scores[row * kKeys + key] = _mm512_reduce_add_ps(sums[row]);
  }
}
#endif

// Adds the values by R rows' `weights` [R][kKeys] to `sums` [R][value dim], V vectors at a time from `at`.
template <typename T, int R, int V>
INLINE void AddValues(const float *weights, const T *const *values, int count, int dim, int at, float *sums) {
  Vec parts[R][V];
  for (int row = 0; row < R; row++)
    for (int v = 0; v < V; v++) parts[row][v] = Load(sums + row * dim + at + v * LANES);
  for (int key = 0; key < count; key++)
    for (int v = 0; v < V; v++) {
      Vec value = Load(values[key] + at + v * LANES);
      for (int row = 0; row < R; row++)
        parts[row][v] = Fma(value, Splat(weights[row * kKeys + key]), parts[row][v]);
    }
  for (int row = 0; row < R; row++)
    for (int v = 0; v < V; v++) Store(sums + row * dim + at + v * LANES, parts[row][v]);
}

template <typename T, int R>
INLINE void AddAllValues(const float *weights, const T *const *values, int count, int dim, float *sums) {
  int at = 0;
  for (; at + 4 * LANES <= dim; at += 4 * LANES) AddValues<T, R, 4>(weights, values, count, dim, at, sums);
  for (; at + LANES <= dim; at += LANES) AddValues<T, R, 1>(weights, values, count, dim, at, sums);
  for (; at < dim; at++)
    for (int row = 0; row < R; row++)
      for (int key = 0; key < count; key++)
        sums[row * dim + at] += weights[row * kKeys + key] * ToFloat(values[key][at]);
}

// R rows from row `first` of the task on.
template <typename T, int R>
void AttendFew(Rows<T> &rows, int first) {
  const AttentionCall &call = rows.call;
  const int dim = call.dim, value_dim = call.value_dim;
  float *query = rows.task.scratch, *scores = query + R * dim, *sums = scores + R * kKeys;
  [[maybe_unused]] uint16_t *raw = reinterpret_cast<uint16_t *>(sums + R * value_dim);
  float most[R], total[R];
  int32_t begin = rows.high[first], end = 0;
  for (int row = 0; row < R; row++) {
    const T *from = rows.Query(first + row);
#ifdef BF16_DOTS
    memcpy(raw + row * dim, from, dim * sizeof(T));
#else
    for (int d = 0; d < dim; d++) query[row * dim + d] = ToFloat(from[d]);
#endif
    most[row] = kNone, total[row] = 0;
    if (rows.low[first + row] < begin) begin = rows.low[first + row];
    if (rows.high[first + row] > end) end = rows.high[first + row];
  }
  rows.Cut(&begin, &end);
  memset(sums, 0, static_cast<size_t>(R) * value_dim * sizeof(float));
  for (int32_t at = begin; at < end; at += kKeys) {
    int count = end - at < kKeys ? end - at : kKeys;
    rows.Find(at, at + count);
#ifdef BF16_DOTS
    PairDots<R>(raw, dim, rows.keys, count, scores);
#else
    Dots<T, R>(query, dim, rows.keys, count, scores);
#endif
    for (int row = 0; row < R; row++) {
      float *own = scores + row * kKeys;
      int low = rows.low[first + row] - at, high = rows.high[first + row] - at;
      Vec highest = Splat(most[row]);
      for (int key = count; key < kKeys; key++) own[key] = kNone;
      for (int key = 0; key < kKeys; key += LANES) {
        Vec score = Load(own + key) * call.scale;
        if (call.softcap > 0) score = Tanh(score / call.softcap) * call.softcap;
        Store(own + key, score);
      }
      if (call.bias) rows.AddBias(first + row, at, at + count, 1, own);
      for (int key = 0; key < kKeys; key++)
        if (key < low || key >= high) own[key] = -INFINITY;
      for (int key = 0; key < kKeys; key += LANES) highest = Max(highest, Load(own + key));
      float now = most[row];
      for (int lane = 0; lane < LANES; lane++) now = highest[lane] > now ? highest[lane] : now;
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
        for (int d = 0; d < value_dim; d++) sums[row * value_dim + d] *= shrink;
    }
    AddAllValues<T, R>(scores, rows.values, count, value_dim, sums);
  }
  for (int row = 0; row < R; row++) rows.Write(first + row, most[row], total[row], sums + row * value_dim, 1);
}
