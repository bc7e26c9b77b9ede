// Compiles the file ROWS once for each instruction set, in a namespace of its own, after vectors.h.
//
// No include guard: a .cpp defines ROWS and includes this inside its own namespace.

#if defined(WITH_TILES) && defined(__GNUC__) && __GNUC__ < 11
#undef WITH_TILES  // GCC has had AMX since its version 11
#endif

namespace plain {
#define LANES 4
#include "vectors.h"
#include ROWS
#undef LANES
}  // namespace plain

#ifdef X86_VARIANTS
#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace avx2 {
#define LANES 8
#include "vectors.h"
#include ROWS
#undef LANES
}  // namespace avx2
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq")
namespace avx512 {
#define LANES 16
#include "vectors.h"
#include ROWS
#undef LANES
}  // namespace avx512
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")
namespace avx512_bf16 {
#define LANES 16
#define BF16_DOTS
#include "vectors.h"
#include ROWS
#undef BF16_DOTS
#undef LANES
}  // namespace avx512_bf16
#pragma GCC pop_options
#ifdef WITH_TILES
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-bf16")
namespace amx {
#define LANES 16
#define BF16_DOTS
#define AMX_TILES
#include "vectors.h"
#include ROWS
#undef AMX_TILES
#undef BF16_DOTS
#undef LANES
}  // namespace amx
#pragma GCC pop_options

// Whether this CPU has AMX for bfloat16, and the system lets this process use it: it keeps 8 KiB for each thread then.
bool HasTiles() {
#ifdef __linux__
  constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM of arch_prctl
  static const bool has = __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
                          syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  return has;
#else
  return false;
#endif
}
#endif

// The widest instruction set of this CPU up to `limit`: 0 none, 1 AVX2, 2 AVX-512, 3 with bfloat16, 4 with AMX.
int Widest(int limit) {
  bool wide = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (limit >= 3 && wide && __builtin_cpu_supports("avx512bf16")) {
#ifdef WITH_TILES
    if (limit >= 4 && HasTiles()) return 4;
#endif
    return 3;
  }
  if (limit >= 2 && wide) return 2;
  return limit >= 1 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

// `name` of the widest set.
#ifdef WITH_TILES
#define PICK(set, name) ((set) == 4 ? amx::name : PICK_VECTORS(set, name))
#else
#define PICK(set, name) PICK_VECTORS(set, name)
#endif
#define PICK_VECTORS(set, name) ((set) == 3 ? avx512_bf16::name : (set) == 2 ? avx512::name : (set) == 1 ? avx2::name : plain::name)
#else
int Widest(int) { return 0; }
#define PICK(set, name) ((void)(set), plain::name)
#endif
