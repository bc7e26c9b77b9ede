// Heads of queries, keys and values: normalised and rotated in place, and written into the cache.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <atomic>
#include <initializer_list>

#include "heads.h"

namespace {

namespace plain {
#define LANES 4
#include "vectors.h"
#include "heads_rows.h"
#undef LANES
}  // namespace plain

#ifdef X86_VARIANTS
#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace avx2 {
#define LANES 8
#include "vectors.h"
#include "heads_rows.h"
#undef LANES
}  // namespace avx2
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq")
namespace avx512 {
#define LANES 16
#include "vectors.h"
#include "heads_rows.h"
#undef LANES
}  // namespace avx512
#pragma GCC pop_options
#endif

using Rotate = void (*)(const RotaryCall &, int64_t, int64_t);

Rotate Choose([[maybe_unused]] int limit) {
#ifdef X86_VARIANTS
  bool wide = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (limit >= 2 && wide) return avx512::RotateTokens;
  if (limit >= 1 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return avx2::RotateTokens;
#endif
  return plain::RotateTokens;
}

void WriteTokens(const WriteCall &call, int64_t first, int64_t last) {
  for (const CachedRows *rows : {&call.keys, &call.values})
    for (int head = 0; head < call.heads; head++)
      for (int64_t token = first; token < last; token++)
        memcpy(rows->to + head * rows->to_head + call.at[token] * rows->bytes,
               rows->from + token * rows->from_token + head * rows->from_head, rows->bytes);
}

// Runs `work` over pieces of the tokens, which threads take one by one.
template <typename Call, typename Work>
void InPieces(const Call &call, Work work) {
  struct Pieces {
    const Call &call;
    Work work;
    std::atomic<int64_t> next{0};
  } pieces = {call, work};
  auto run = [](void *data) {
    Pieces &p = *static_cast<Pieces *>(data);
    for (int64_t first = p.next.fetch_add(kPieceTokens); first < p.call.tokens; first = p.next.fetch_add(kPieceTokens))
      p.work(p.call, first, first + kPieceTokens < p.call.tokens ? first + kPieceTokens : p.call.tokens);
  };
  if (call.parallel && call.threads > 1 && call.tokens > kPieceTokens)
    call.parallel(run, &pieces, call.threads, 0);
  else
    run(&pieces);
}

}  // namespace

// Rotates the call's heads. 0; 2: sizes that are not taken.
EXPORT int triptych_rotate(const RotaryCall *call) {
  if (call->dim < 2 || call->dim % 2 || (call->bytes != 2 && call->bytes != 4)) return 2;
  InPieces(*call, Choose(call->instructions));
  return 0;
}

// Writes keys and values into the cache. 0; 2: a slot that it does not have, and then nothing is written.
EXPORT int triptych_write_cache(const WriteCall *call) {
  for (int64_t token = 0; token < call->tokens; token++)
    if (call->at[token] < 0 || call->at[token] >= call->slots) return 2;
  InPieces(*call, WriteTokens);
  return 0;
}
