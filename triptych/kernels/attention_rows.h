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

#ifdef BF16_DOTS
// The same from the queries' own bfloat16, [R][dim], in pairs.
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
  uint16_t *raw = reinterpret_cast<uint16_t *>(sums + R * value_dim);
  float most[R], total[R];
  int32_t begin = rows.high[first], end = 0;
  for (int row = 0; row < R; row++) {
    const T *from = rows.Query(first + row);
    for (int d = 0; d < dim; d++) query[row * dim + d] = ToFloat(from[d]);
    if (sizeof(T) == 2) memcpy(raw + row * dim, from, dim * sizeof(T));
    most[row] = kNone, total[row] = 0;
    if (rows.low[first + row] < begin) begin = rows.low[first + row];
    if (rows.high[first + row] > end) end = rows.high[first + row];
  }
  memset(sums, 0, static_cast<size_t>(R) * value_dim * sizeof(float));
  for (int32_t at = begin; at < end; at += kKeys) {
    int count = end - at < kKeys ? end - at : kKeys;
    rows.Find(at, at + count);
#ifdef BF16_DOTS
    if (sizeof(T) == 2 && dim % 32 == 0)
      PairDots<R>(raw, dim, reinterpret_cast<const uint16_t *const *>(rows.keys), count, scores);
    else
#endif
      Dots<T, R>(query, dim, rows.keys, count, scores);
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

// V vectors of rows. Two or four keys at a time: as many sums as there are registers for.
template <typename T, int V>
void AttendMany(Rows<T> &rows) {
  constexpr int kWidth = V * LANES, kStep = LANES == 16 ? 4 : 2;
  const AttentionCall &call = rows.call;
  const int dim = call.dim, value_dim = call.value_dim;
  float *query = rows.task.scratch, *scores = query + dim * kWidth, *sums = scores + kKeys * kWidth;
  float *key_floats = sums + value_dim * kWidth, *value_floats = key_floats + kKeys * dim;
  const float *keys[kKeys], *values[kKeys];
  memset(query, 0, static_cast<size_t>(dim) * kWidth * sizeof(float));
  memset(sums, 0, static_cast<size_t>(value_dim) * kWidth * sizeof(float));
  for (int row = 0; row < rows.count; row++) {
    const T *from = rows.Query(row);
    for (int d = 0; d < dim; d++) query[d * kWidth + row] = ToFloat(from[d]);
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
    int count = end - at < kKeys ? end - at : kKeys;
    rows.Find(at, at + count);
    AsFloats(rows.keys, count, dim, key_floats, keys);
    AsFloats(rows.values, count, value_dim, value_floats, values);
    int padded = (count + kStep - 1) / kStep * kStep;
    for (int key = count; key < padded; key++) keys[key] = keys[count - 1];
    for (int key = 0; key < padded; key += kStep) {
      Vec parts[kStep][V] = {};
      for (int d = 0; d < dim; d++) {
        Vec part[V];
        for (int v = 0; v < V; v++) part[v] = Load(query + d * kWidth + v * LANES);
        for (int k = 0; k < kStep; k++) {
          Vec number = Splat(keys[key + k][d]);
          for (int v = 0; v < V; v++) parts[k][v] = Fma(number, part[v], parts[k][v]);
        }
      }
      for (int k = 0; k < kStep; k++)
        for (int v = 0; v < V; v++) Store(scores + (key + k) * kWidth + v * LANES, parts[k][v] * call.scale);
    }
    bool whole = rows.count == kWidth && rows.Whole(at, at + count);
    for (int v = 0; v < V; v++) {
      Vec now = most[v], sum = {};
      for (int key = 0; key < count; key++) {
        Vec score = Load(scores + key * kWidth + v * LANES);
        if (call.softcap > 0) score = Tanh(score / call.softcap) * call.softcap;
        if (!whole) {
          Ints index = SplatInt(at + key);
          score = (index >= low[v]) & (index < high[v]) ? score : Splat(-INFINITY);
        }
        if (call.softcap > 0 || !whole) Store(scores + key * kWidth + v * LANES, score);
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
    int d = 0;
    for (; d + kStep <= value_dim; d += kStep) {
      Vec parts[kStep][V];
      for (int k = 0; k < kStep; k++)
        for (int v = 0; v < V; v++) parts[k][v] = Load(sums + (d + k) * kWidth + v * LANES);
      for (int key = 0; key < count; key++) {
        Vec weight[V];
        for (int v = 0; v < V; v++) weight[v] = Load(scores + key * kWidth + v * LANES);
        for (int k = 0; k < kStep; k++) {
          Vec number = Splat(values[key][d + k]);
          for (int v = 0; v < V; v++) parts[k][v] = Fma(number, weight[v], parts[k][v]);
        }
      }
      for (int k = 0; k < kStep; k++)
        for (int v = 0; v < V; v++) Store(sums + (d + k) * kWidth + v * LANES, parts[k][v]);
    }
    for (; d < value_dim; d++)
      for (int v = 0; v < V; v++) {
        Vec part = Load(sums + d * kWidth + v * LANES);
        for (int key = 0; key < count; key++)
          part = Fma(Splat(values[key][d]), Load(scores + key * kWidth + v * LANES), part);
        Store(sums + d * kWidth + v * LANES, part);
      }
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
    if (rows.count <= LANES) return AttendMany<T, 1>(rows);
    if (rows.count <= 2 * LANES) return AttendMany<T, 2>(rows);
    return AttendMany<T, 4>(rows);
  }
  int first = 0;
  for (; first + 4 <= rows.count; first += 4) AttendFew<T, 4>(rows, first);
  for (; first + 2 <= rows.count; first += 2) AttendFew<T, 2>(rows, first);
  for (; first < rows.count; first++) AttendFew<T, 1>(rows, first);
}

void AttendTask(const AttentionTask &task) {
  task.call->bytes == 2 ? AttendRows<uint16_t>(task) : AttendRows<float>(task);
}
// Rows of a task at most.
constexpr int kTaskRows = 4 * LANES;
