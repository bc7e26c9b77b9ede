// Attention over a paged cache of keys and values: decodes and prefill chunks of one layer in one call.
#include <math.h>
#include <stdlib.h>
#include <string.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "attention.h"

namespace {

#define ROWS "attention_rows.h"
#define FETCH 2  // into the second cache: a piece ahead and the one that is computed would not fit in the first
#define WITH_TILES
#include "instruction_sets.h"

struct Variant {
  void (*attend)(const AttentionTask &);
  int rows;
};

Variant Choose(int limit) {
  int set = Widest(limit);
  return {PICK(set, AttendTask), PICK(set, kTaskRows)};
}

// The tasks of one sequence.
struct Share {
  // The first task, and the first of its numbers in `partials`.
  int64_t first, partials;
  int parts;
};

// Tasks [next, end) of one thread.
struct Run {
  int64_t next = 0, end = 0;
};

// The tasks of a call, which threads take in runs.
struct Tasks {
  const AttentionCall &call;
  Variant variant;
  // Of every sequence, and one behind the last.
  Share *shares;
  float *partials;
  float *scratch;
  size_t scratch_each;
  // Tasks that a thread takes at once.
  int64_t run;
  std::atomic<int64_t> next{0};
  std::atomic<int> threads{0};

  int64_t Total() const { return shares[call.sequences].first; }
  // Takes a task; false: there is none left.
  bool Take(float *own, Run *taken_run, AttentionTask *task) {
    if (taken_run->next == taken_run->end) {
      int64_t first = next.fetch_add(run);
      if (first >= Total()) return false;
      *taken_run = {first, first + run < Total() ? first + run : Total()};
    }
    // The last tasks of a chunk attend to the most keys: they come first.
    int64_t taken = Total() - 1 - taken_run->next++, low = 0, high = call.sequences;
    while (high - low > 1) {
      int64_t middle = (low + high) / 2;
      (shares[middle].first <= taken ? low : high) = middle;
    }
    const Share &share = shares[low];
    int64_t at = taken - share.first, rows = (call.starts[low + 1] - call.starts[low]) * call.groups;
    // But a block's heads, which lie one behind the other, in their order: what the processor fetches of its own beyond
    // the end of one is the next one then. The other way round a thread reads a third less.
    int part = share.parts - 1 - static_cast<int>(at % share.parts);
    int head = call.kv_heads - 1 - static_cast<int>(at / share.parts % call.kv_heads);
    int64_t first = at / share.parts / call.kv_heads * variant.rows;
    int64_t last = first + variant.rows < rows ? first + variant.rows : rows;
    *task = {&call, low, first, last, head, part, share.parts, partials + share.partials, own, nullptr};
    return true;
  }
  void Work() {
    float *own = scratch + scratch_each * threads.fetch_add(1);
    Run taken;
    AttentionTask tasks[2];
    int now = 0;
    for (bool more = Take(own, &taken, tasks); more; now = 1 - now) {
      more = Take(own, &taken, tasks + 1 - now);
      tasks[now].next = more ? tasks + 1 - now : nullptr;
      variant.attend(tasks[now]);
    }
  }
};

// The most keys that a token of sequence `s` attends to.
int64_t Longest(const AttentionCall &call, int64_t s) {
  int64_t longest = 0;
  for (int64_t token = call.starts[s]; token < call.starts[s + 1]; token++) {
    int64_t keys = call.bounds[2 * token + 1] - call.bounds[2 * token];
    longest = keys > longest ? keys : longest;
  }
  return longest;
}

// Fills the shares in, and returns how many numbers there are in `partials`. The keys of a sequence are cut into parts
// where one task would be more than a thread's part of the work.
int64_t Divide(const AttentionCall &call, int task_rows, int threads, Share *shares) {
  auto tasks = [&](int64_t s) {
    return ((call.starts[s + 1] - call.starts[s]) * call.groups + task_rows - 1) / task_rows * call.kv_heads;
  };
  int64_t work = 0, numbers = 0, first = 0;
  for (int64_t s = 0; s < call.sequences; s++) work += tasks(s) * Longest(call, s);
  int64_t each = work / threads, piece = each / 2 > kPartKeys ? each / 2 : kPartKeys;
  for (int64_t s = 0; s < call.sequences; s++) {
    int64_t longest = Longest(call, s), parts = longest > each ? longest / piece : 1;
    parts = parts < 1 ? 1 : parts > kMaxParts ? kMaxParts : parts;
    shares[s] = {first, numbers, static_cast<int>(parts)};
    first += tasks(s) * parts;
    if (parts > 1) numbers += (call.starts[s + 1] - call.starts[s]) * call.kv_heads * call.groups * parts * (2 + call.value_dim);
  }
  shares[call.sequences] = {first, numbers, 1};
  return numbers;
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
  constexpr size_t kLine = 64 / sizeof(float);
  size_t each = (ScratchFloats(c) + kLine - 1) / kLine * kLine;
  auto *shares = static_cast<Share *>(malloc((c.sequences + 1) * sizeof(Share)));
  if (!shares) return 1;
  int64_t numbers = Divide(c, variant.rows, threads, shares);
  auto *memory = static_cast<float *>(malloc((each * threads + numbers + kLine) * sizeof(float)));
  if (!memory) {
    free(shares);
    return 1;
  }
  // From the beginning of a cache line on.
  float *scratch = memory + (kLine - reinterpret_cast<uintptr_t>(memory) / sizeof(float) % kLine) % kLine;
  float *partials = scratch + each * threads;
  // As many as a block has heads, but some for each thread.
  int64_t run = shares[c.sequences].first / (8 * threads);
  run = run < 1 ? 1 : run > c.kv_heads ? c.kv_heads : run;
  Tasks tasks = {c, variant, shares, partials, scratch, each, run};
  auto work = [](void *data) { static_cast<Tasks *>(data)->Work(); };
  if (threads > 1 && tasks.Total() > 1)
    c.parallel(work, &tasks, threads, 0);
  else
    work(&tasks);
  for (int64_t s = 0; s < c.sequences; s++) {
    if (shares[s].parts < 2) continue;
    float *own = partials + shares[s].partials;
    c.bytes == 2 ? plain::JoinParts<uint16_t>(c, s, shares[s].parts, own) : plain::JoinParts<float>(c, s, shares[s].parts, own);
  }
  free(shares), free(memory);
  return 0;
}
