// Attention of one task, by a running softmax over pieces of kKeys keys.
//
// No include guards here: instruction_sets.h includes this once for each instruction set, after vectors.h.

constexpr float kNone = -1e30f;  // Below every score: a maximum of no score.

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
  // Where this is of [tokens][heads].
  int64_t Place(int row) const { return Token(row) * call.kv_heads * call.groups + Head(row); }
  // Writes a row's result, by the maximum and total of its scores; sums are `step` apart.
  void Write(int row, float most, float total, const float *sums, int step) const {
    if (task.parts > 1) {
      float *to = task.partials + (Place(row) * task.parts + task.part) * (2 + call.value_dim);
      *to++ = most, *to++ = total;
      for (int d = 0; d < call.value_dim; d++) to[d] = sums[d * step];
      return;
    }
    T *to = static_cast<T *>(call.out) + Place(row) * call.value_dim;
    for (int d = 0; d < call.value_dim; d++) FromFloat(total == 0.0f ? 0.0f : sums[d * step] / total, to + d);
  }
  // Leaves of the keys [first, last) those of the task's part.
  void Cut(int32_t *first, int32_t *last) const {
    int64_t begin = *first, count = *last > begin ? *last - begin : 0;
    *first = static_cast<int32_t>(begin + count * task.part / task.parts);
    *last = static_cast<int32_t>(begin + count * (task.part + 1) / task.parts);
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

#include "attention_few.h"
#include "attention_many.h"

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

// Joins the parts of every row of the call.
template <typename T>
void JoinParts(const AttentionCall &call, int parts, const float *partials) {
  const int dim = call.value_dim, size = 2 + dim;
  const int64_t heads = static_cast<int64_t>(call.kv_heads) * call.groups;
  for (int64_t row = call.starts[0] * heads; row < call.starts[call.sequences] * heads; row++) {
    const float *own = partials + row * parts * size;
    T *out = static_cast<T *>(call.out) + row * dim;
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
