// Heads of queries, keys and values: normalised and rotated in place, and written into the cache.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <atomic>
#include <initializer_list>

#include "heads.h"

namespace {

#define ROWS "heads_rows.h"
#include "instruction_sets.h"

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
  if (call->angle_bytes != 4 && call->angle_bytes != call->bytes) return 2;
  int set = Widest(call->instructions);
  InPieces(*call, PICK(set, RotateTokens));
  return 0;
}

// Writes keys and values into the cache. 0; 2: a slot that it does not have, and then nothing is written.
EXPORT int triptych_write_cache(const WriteCall *call) {
  for (int64_t token = 0; token < call->tokens; token++)
    if (call->at[token] < 0 || call->at[token] >= call->slots) return 2;
  InPieces(*call, WriteTokens);
  return 0;
}
