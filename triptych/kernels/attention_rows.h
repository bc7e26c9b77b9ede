// Attention of one task, by a running softmax over pieces of kKeys keys.
//
// No include guards here: instruction_sets.h includes this once for each instruction set, after vectors.h.

constexpr float kNone = -1e30f;  // Below every score: a maximum of no score.

// Where the keys and values of a piece are.
template <typename T>
struct Piece {
  const T *keys[kKeys], *values[kKeys];
  int count = 0;

  // Those with index [first, last) in a sequence.
  void Find(const AttentionCall &call, int64_t sequence, int kv_head, int32_t first, int32_t last) {
    const int64_t *table = call.tables[sequence];
    const T *k = static_cast<const T *>(call.keys) + kv_head * call.key_head;
    const T *v = static_cast<const T *>(call.values) + kv_head * call.value_head;
    count = 0;
    int32_t block = first / call.block_size, at = first - block * call.block_size;
    for (int32_t left = last - first; left > 0; block++, at = 0) {
      const T *key = k + table[block] * call.key_block + at * static_cast<int64_t>(call.dim);
      const T *value = v + table[block] * call.value_block + at * static_cast<int64_t>(call.value_dim);
      for (; at < call.block_size && left > 0; at++, left--, key += call.dim, value += call.value_dim)
        keys[count] = key, values[count++] = value;
    }
  }
};

template <typename T>
struct Rows {
  const AttentionCall &call;
  const AttentionTask &task;
  int count;                        // rows of the task
  int32_t low[kRows], high[kRows];  // bounds of every row
  Piece<T> pieces[2];
  Piece<T> *piece = pieces, *ahead = pieces + 1;  // the one that is computed, and the one that is fetched

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
  // The maximum and total of a row's scores before its keys: those of its sink, which the first part counts.
  float Sink(int row, float *total) const {
    *total = call.sinks && !task.part ? 1.0f : 0.0f;
    if (*total == 0.0f) return kNone;
    float sink = call.sinks[Head(row)];
    return sink < kNone ? kNone : sink;
  }
  // Writes a row's result, by the maximum and total of its scores; sums are `step` apart.
  void Write(int row, float most, float total, const float *sums, int step) const {
    const int64_t heads = static_cast<int64_t>(call.kv_heads) * call.groups;
    if (task.parts > 1) {
      int64_t place = (Token(row) - call.starts[task.sequence]) * heads + Head(row);
      float *to = task.partials + (place * task.parts + task.part) * (2 + call.value_dim);
      *to++ = most, *to++ = total;
      for (int d = 0; d < call.value_dim; d++) to[d] = sums[d * step];
      return;
    }
    T *to = static_cast<T *>(call.out) + (Token(row) * heads + Head(row)) * call.value_dim;
    for (int d = 0; d < call.value_dim; d++) FromFloat(total == 0.0f ? 0.0f : sums[d * step] / total, to + d);
  }
  // The task's part of the keys that any of its rows attends to.
  void Range(int32_t *first, int32_t *last) const {
    int64_t begin = low[0], end = high[0];
    for (int row = 1; row < count; row++) {
      begin = low[row] < begin ? low[row] : begin;
      end = high[row] > end ? high[row] : end;
    }
    int64_t keys = end > begin ? end - begin : 0;
    *first = static_cast<int32_t>(begin + keys * task.part / task.parts);
    *last = static_cast<int32_t>(begin + keys * (task.part + 1) / task.parts);
  }
  // Whether every row attends to all keys [first, last).
  bool Whole(int32_t first, int32_t last) const {
    for (int row = 0; row < count; row++)
      if (low[row] > first || high[row] < last) return false;
    return true;
  }
  // Adds the bias of keys [first, last) to a row's scores, which are `step` apart.
  void AddBias(int row, int32_t first, int32_t last, int step, float *scores) const {
    int32_t own = high[row] - 1, beyond = call.distances - 1;
    const float *bias = call.bias + Head(row) * call.bias_head + own * call.bias_token;
    if (last > own + 1) last = own + 1;
    for (int32_t at = first; at < last; at++, scores += step) {
      int32_t distance = own - at < beyond ? own - at : beyond;
      *scores += bias[call.bias_token ? at : distance];
    }
  }
  // Of all rows, whose scores are [keys][width].
  void AddBiases(int32_t first, int32_t last, int width, float *scores) const {
    for (int row = 0; call.bias && row < count; row++) AddBias(row, first, last, width, scores + row);
  }
  // Finds the first piece of keys [first, last).
  void Begin(int32_t first, int32_t last) {
    ahead->Find(call, task.sequence, task.kv_head, first, last - first < kKeys ? last : first + kKeys);
  }
  // Goes on to the piece that begins at `at` of keys that end at `last`, and finds what is to be fetched meanwhile.
  void Advance(int32_t at, int32_t last) {
    Piece<T> *done = piece;
    piece = ahead, ahead = done;
    if (at + kKeys < last)
      ahead->Find(call, task.sequence, task.kv_head, at + kKeys, last - at < 2 * kKeys ? last : at + 2 * kKeys);
    else
      FindNext();
  }
  // Finds where the thread's next task begins.
  void FindNext() {
    ahead->count = 0;
    if (!task.next) return;
    const AttentionTask &next = *task.next;
    const int32_t *bound = call.bounds + 2 * (call.starts[next.sequence] + next.first / call.groups);
    int64_t keys = bound[1] > bound[0] ? bound[1] - bound[0] : 0;
    int32_t first = static_cast<int32_t>(bound[0] + keys * next.part / next.parts);
    ahead->Find(call, next.sequence, next.kv_head, first, bound[1] - first < kKeys ? bound[1] : first + kKeys);
  }
  // Fetch the keys or the values [first, last) of the piece ahead, as far as there are any. Inline: GCC takes a call
  // of what only fetches for one without effect, and leaves it out.
  ALWAYS_INLINE void FetchKeys(int first, int last) const { Fetch(ahead->keys, first, last, call.dim); }
  ALWAYS_INLINE void FetchValues(int first, int last) const { Fetch(ahead->values, first, last, call.value_dim); }
  ALWAYS_INLINE void Fetch(const T *const *rows, int first, int last, int dim) const {
    const int bytes = dim * static_cast<int>(sizeof(T));
    for (last = last < ahead->count ? last : ahead->count; first < last; first++) {
      const char *from = reinterpret_cast<const char *>(rows[first]);
      int at = 0;
      for (; at + 256 <= bytes; at += 256)
        for (int line = 0; line < 256; line += 64) __builtin_prefetch(from + at + line, 0, FETCH);
      for (; at < bytes; at += 64) __builtin_prefetch(from + at, 0, FETCH);
    }
  }
};

#include "attention_few.h"
#include "attention_many.h"

// Rows up to which the dimensions are in the lanes.
constexpr int kFew = 4;

template <typename T>
void AttendRows(const AttentionTask &task) {
  Rows<T> rows(task);
  if (rows.count > kFew)
    rows.count <= LANES ? AttendMany<T, 1>(rows) : AttendMany<T, 4>(rows);
  else if (rows.count > 2)
    rows.count == 4 ? AttendFew<T, 4>(rows) : AttendFew<T, 3>(rows);
  else
    rows.count == 2 ? AttendFew<T, 2>(rows) : AttendFew<T, 1>(rows);
}

void AttendTask(const AttentionTask &task) {
  [[maybe_unused]] const AttentionCall &call = *task.call;
#ifdef AMX_TILES
  bool tiled = call.bytes == 2 && call.dim % 32 == 0 && call.value_dim % 32 == 0;
  tiled ? AttendRows<uint16_t>(task) : avx512_bf16::AttendTask(task);
#elif defined(BF16_DOTS)
  bool paired = call.bytes == 2 && call.dim % 32 == 0 && call.value_dim % 2 == 0;
  paired ? AttendRows<uint16_t>(task) : avx512::AttendTask(task);
#else
  call.bytes == 2 ? AttendRows<uint16_t>(task) : AttendRows<float>(task);
#endif
}
// Rows of a task at most.
constexpr int kTaskRows = 4 * LANES;

// Joins the parts of every row of a sequence.
template <typename T>
void JoinParts(const AttentionCall &call, int64_t sequence, int parts, const float *partials) {
  const int dim = call.value_dim, size = 2 + dim;
  const int64_t heads = static_cast<int64_t>(call.kv_heads) * call.groups, first = call.starts[sequence] * heads;
  for (int64_t row = 0; row < call.starts[sequence + 1] * heads - first; row++) {
    const float *own = partials + row * parts * size;
    T *out = static_cast<T *>(call.out) + (first + row) * dim;
    float most = kNone, total = 0;
    for (int part = 0; part < parts; part++) most = own[part * size] > most ? own[part * size] : most;
    float shares[kMaxParts];
    for (int part = 0; part < parts; part++) {
      shares[part] = expf(own[part * size] - most);
      total += shares[part] * own[part * size + 1];
    }
    for (int d = 0; d < dim; d++) {
      float sum = 0;
      for (int part = 0; part < parts; part++) sum += shares[part] * own[part * size + 2 + d];
      FromFloat(total == 0.0f ? 0.0f : sum / total, out + d);
    }
  }
}
