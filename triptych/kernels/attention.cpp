// Attention over a paged cache of keys and values: decodes and prefill chunks of one layer in one call.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "attention.h"

namespace {

#define ROWS "attention_rows.h"
#include "instruction_sets.h"

struct Variant {
  void (*attend)(const AttentionTask &);
  int rows;
};

Variant Choose(int limit) {
  int set = Widest(limit);
  return {PICK(set, AttendTask), PICK(set, kTaskRows)};
}

// The tasks of a call, which threads take one by one.
struct Tasks {
  const AttentionCall &call;
  Variant variant;
  // Of the first task of every sequence, and behind the last; each is done in so many parts.
  int64_t *firsts;
  int parts;
  float *partials;
  float *scratch;
  size_t scratch_each;
  std::atomic<int64_t> next{0};
  std::atomic<int> threads{0};

  void Work() {
    float *own = scratch + scratch_each * threads.fetch_add(1);
    int64_t total = firsts[call.sequences] * parts;
    for (int64_t taken = next.fetch_add(1); taken < total; taken = next.fetch_add(1)) {
      // The last tasks of a chunk attend to the most keys: they come first.
      int64_t task = (total - 1 - taken) / parts, low = 0, high = call.sequences;
      while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        (firsts[middle] <= task ? low : high) = middle;
      }
      int64_t rows = (call.starts[low + 1] - call.starts[low]) * call.groups;
      int64_t piece = (task - firsts[low]) / call.kv_heads, first = piece * variant.rows;
      int64_t last = first + variant.rows < rows ? first + variant.rows : rows;
      int head = static_cast<int>((task - firsts[low]) % call.kv_heads);
      variant.attend({&call, low, first, last, head, own, static_cast<int>(taken % parts), parts, partials});
    }
  }
};

// Parts that the keys are cut into, so that few tasks are enough for all threads.
int Parts(const AttentionCall &call, int64_t tasks, int threads) {
  int64_t longest = 0;
  for (int64_t token = call.starts[0]; token < call.starts[call.sequences]; token++) {
    int64_t keys = call.bounds[2 * token + 1] - call.bounds[2 * token];
    longest = keys > longest ? keys : longest;
  }
  int64_t parts = longest / kPartKeys;
  if (tasks && parts > threads / tasks) parts = threads / tasks;
  return static_cast<int>(parts < 1 ? 1 : parts > kMaxParts ? kMaxParts : parts);
}

}  // namespace

// Writes `out` of the call. 0; 1: no memory; 2: sizes that are not taken.
EXPORT int triptych_attention(const AttentionCall *call) {
  const AttentionCall &c = *call;
  if (c.sequences < 1 || c.kv_heads < 1 || c.groups < 1 || c.dim < 1 || c.value_dim < 1 || c.block_size < 1 ||
      (c.bytes != 2 && c.bytes != 4) || c.threads < 1 || (c.bias && (c.distances < 1 || c.softcap > 0)))
    return 2;
  Variant variant = Choose(c.instructions);
  int threads = c.parallel ? c.threads : 1;
  // Queries and sums of the rows, scores, and a piece's keys or values as floats.
  size_t wider = c.dim > c.value_dim ? c.dim : c.value_dim;
  size_t each = (wider * (2 * kRows + kKeys) + kRows * kKeys + 63) / 16 * 16;
  auto *firsts = static_cast<int64_t *>(malloc((c.sequences + 1) * sizeof(int64_t)));
  if (!firsts) return 1;
  firsts[0] = 0;
  for (int s = 0; s < c.sequences; s++) {
    int64_t rows = (c.starts[s + 1] - c.starts[s]) * c.groups;
    firsts[s + 1] = firsts[s] + (rows + variant.rows - 1) / variant.rows * c.kv_heads;
  }
  int parts = Parts(c, firsts[c.sequences], threads);
  size_t results = parts < 2 ? 0 : static_cast<size_t>(c.starts[c.sequences]) * c.kv_heads * c.groups * parts;
  auto *scratch = static_cast<float *>(malloc((each * threads + results * (2 + c.value_dim)) * sizeof(float)));
  if (!scratch) {
    free(firsts);
    return 1;
  }
  float *partials = scratch + each * threads;
  Tasks tasks = {c, variant, firsts, parts, partials, scratch, each};
  auto work = [](void *data) { static_cast<Tasks *>(data)->Work(); };
  if (threads > 1 && firsts[c.sequences] * parts > 1)
    c.parallel(work, &tasks, threads, 0);
  else
    work(&tasks);
  if (parts > 1) c.bytes == 2 ? plain::JoinParts<uint16_t>(c, parts, partials) : plain::JoinParts<float>(c, parts, partials);
  free(firsts), free(scratch);
  return 0;
}
