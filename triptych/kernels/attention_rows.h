// Attention of one task, by a running softmax over pieces of kKeys keys.
//
// No include guard: attention.cpp includes this once for each instruction set, after vectors.h. Few rows multiply
// key by key, with a row's dimensions in the lanes; many rows have the rows in the lanes, so that a key is read once
// for all of them and no sum crosses lanes.

constexpr float kNone = -1e30f;  // Below every score: a maximum of no score.

INLINE float ToFloat(float value) { return value; }
INLINE float ToFloat(uint16_t value) {
  uint32_t bits = static_cast<uint32_t>(value) << 16;
  float number;
  memcpy(&number, &bits, sizeof number);
  return number;
}
INLINE void FromFloat(float value, float *to) { *to = value; }
// Rounded to the nearest, ties to even; a NaN stays one.
INLINE void FromFloat(float value, uint16_t *to) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  *to = value != value ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

template <typename T>
struct Rows {
  const AttentionCall &call;
  const AttentionTask &task;
  int count;                              // rows of the task
  int32_t low[kRows], high[kRows];        // bounds of every row
  const T *keys[kKeys], *values[kKeys];   // of the piece

  explicit Rows(const AttentionTask &task) : call(*task.call), task(task), count(static_cast<int>(task.last - task.first)) {
    for (int row = 0; row < count; row++) {
      const int32_t *bound = call.bounds + 2 * Token(row);
      low[row] = bound[0], high[row] = bound[1];
    }
  }
  int64_t Token(int row) const { return call.starts[task.sequence] + (task.first + row) / call.groups; }
  int64_t Head(int row) const { return static_cast<int64_t>(task.kv_head) * call.groups + (task.first + row) % call.groups; }
  const T *Query(int row) const {
    return static_cast<const T *>(call.query) + Head(row) * call.query_head + Token(row) * call.query_token;
  }
  T *Out(int row) const {
    int64_t heads = static_cast<int64_t>(call.kv_heads) * call.groups;
    return static_cast<T *>(call.out) + (Token(row) * heads + Head(row)) * call.value_dim;
  }
  int32_t Lowest() const {
    int32_t lowest = low[0];
    for (int row = 1; row < count; row++) lowest = low[row] < lowest ? low[row] : lowest;
    return lowest;
  }
  int32_t Highest() const {
    int32_t highest = high[0];
    for (int row = 1; row < count; row++) highest = high[row] > highest ? high[row] : highest;
    return highest;
  }
  // Whether every row attends to all keys [first, last).
  bool Whole(int32_t first, int32_t last) const {
    for (int row = 0; row < count; row++)
      if (low[row] > first || high[row] < last) return false;
    return true;
  }
  // Finds the keys and values [first, last).
  void Find(int32_t first, int32_t last) {
    const int64_t *table = call.tables[task.sequence];
    const T *k = static_cast<const T *>(call.keys) + task.kv_head * call.key_head;
    const T *v = static_cast<const T *>(call.values) + task.kv_head * call.value_head;
    for (int32_t at = first; at < last; at++) {
      int64_t slot = table[at / call.block_size] * call.block_size + at % call.block_size;
      keys[at - first] = k + slot * call.dim;
      values[at - first] = v + slot * call.value_dim;
    }
  }
};

// ---- few rows: the dimensions in the lanes

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
  for (int row = 0; row < R; row++) {
    T *out = rows.Out(first + row);
    for (int d = 0; d < value_dim; d++)
      FromFloat(total[row] == 0.0f ? 0.0f : sums[row * value_dim + d] / total[row], out + d);
  }
}

// ---- many rows: the rows in the lanes

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
template <int V>
INLINE void ManyDots(const float *query, int dim, const float *const *keys, int padded, float scale, float *scores) {
  constexpr int kWidth = V * LANES;
  for (int key = 0; key < padded; key += kStep) {
    Vec parts[kStep][V] = {};
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
INLINE void ManyPairDots(const uint32_t *query, int dim, const uint16_t *const *keys, int padded, float scale,
                         float *scores) {
  constexpr int kWidth = V * LANES;
  for (int key = 0; key < padded; key += kStep) {
    __m512 parts[kStep][V] = {};
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

// The weights of a piece in the place of its scores, and what they change: the maxima, totals and sums so far.
template <int V>
INLINE void Weigh(float *scores, int32_t at, int count, bool whole, float softcap, const Ints *low, const Ints *high,
                  int value_dim, Vec *most, Vec *total, float *sums) {
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
    total[v] = total[v] * shrink + sum, most[v] = now;
    for (int d = 0; d < value_dim; d++) {
      float *part = sums + d * kWidth + v * LANES;
      Store(part, Load(part) * shrink);
    }
  }
}

// V vectors of rows.
template <typename T, int V>
void AttendMany(Rows<T> &rows) {
  constexpr int kWidth = V * LANES;
  const AttentionCall &call = rows.call;
  const int dim = call.dim, value_dim = call.value_dim;
  float *query = rows.task.scratch, *scores = query + dim * kWidth, *sums = scores + kKeys * kWidth;
  float *piece = sums + value_dim * kWidth;  // its keys or values as floats, or its values in pairs
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
  for (int row = 0; row < kWidth; row++) {
    bool real = row < rows.count;
    low[row / LANES][row % LANES] = real ? rows.low[row] : 0;
    high[row / LANES][row % LANES] = real ? rows.high[row] : 0;
  }
  Vec most[V], total[V];
  for (int v = 0; v < V; v++) most[v] = Splat(kNone), total[v] = Vec{};
  int32_t end = rows.Highest();
  for (int32_t at = rows.Lowest(); at < end; at += kKeys) {
    int count = end - at < kKeys ? end - at : kKeys, padded = (count + kStep - 1) / kStep * kStep;
    rows.Find(at, at + count);
    for (int key = count; key < padded; key++) rows.keys[key] = rows.keys[count - 1];
    bool whole = rows.count == kWidth && rows.Whole(at, at + count);
#ifdef BF16_DOTS
    ManyPairDots<V>(reinterpret_cast<uint32_t *>(query), dim, rows.keys, padded, call.scale, scores);
    Weigh<V>(scores, at, count, whole, call.softcap, low, high, value_dim, most, total, sums);
    auto *pairs = reinterpret_cast<uint32_t *>(piece);
    MakePairs(scores, kWidth, rows.values, count, value_dim, pairs);
    AddManyPairs<V>(reinterpret_cast<uint32_t *>(scores), pairs, (count + 1) / 2, value_dim, sums);
#else
    const float *found[kKeys];
    AsFloats(rows.keys, padded, dim, piece, found);
    ManyDots<V>(query, dim, found, padded, call.scale, scores);
    Weigh<V>(scores, at, count, whole, call.softcap, low, high, value_dim, most, total, sums);
    AsFloats(rows.values, count, value_dim, piece, found);
    AddMany<V>(scores, found, count, value_dim, sums);
#endif
  }
  for (int row = 0; row < rows.count; row++) {
    T *out = rows.Out(row);
    float sum = total[row / LANES][row % LANES];
    for (int d = 0; d < value_dim; d++) FromFloat(sum == 0.0f ? 0.0f : sums[d * kWidth + row] / sum, out + d);
  }
}

// Rows up to which the dimensions are in the lanes.
constexpr int kFew = 4;

template <typename T>
void AttendRows(const AttentionTask &task) {
  Rows<T> rows(task);
  if (rows.count > kFew) {
    return rows.count <= LANES ? AttendMany<T, 1>(rows) : AttendMany<T, 4>(rows);
  }
  int first = 0;
  for (; first + 4 <= rows.count; first += 4) AttendFew<T, 4>(rows, first);
  for (; first + 2 <= rows.count; first += 2) AttendFew<T, 2>(rows, first);
  for (; first < rows.count; first++) AttendFew<T, 1>(rows, first);
}

void AttendTask(const AttentionTask &task) {
#ifdef BF16_DOTS
  const AttentionCall &call = *task.call;
  bool paired = call.bytes == 2 && call.dim % 32 == 0 && call.value_dim % 2 == 0;
  paired ? AttendRows<uint16_t>(task) : avx512::AttendTask(task);
#else
  task.call->bytes == 2 ? AttendRows<uint16_t>(task) : AttendRows<float>(task);
#endif
}
// Rows of a task at most.
constexpr int kTaskRows = 4 * LANES;
