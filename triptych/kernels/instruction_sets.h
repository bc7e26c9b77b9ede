// Compiles the file ROWS once for each instruction set, in a namespace of its own, after vectors.h.
//
// No include guard: a .cpp defines ROWS and includes this inside its own namespace.

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

// The widest instruction set of this CPU up to `limit`: 0 none, 1 AVX2, 2 AVX-512, 3 with bfloat16.
int Widest(int limit) {
  bool wide = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (limit >= 3 && wide && __builtin_cpu_supports("avx512bf16")) return 3;
  if (limit >= 2 && wide) return 2;
  return limit >= 1 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

// `name` of the widest set.
#define PICK(set, name) ((set) == 3 ? avx512_bf16::name : (set) == 2 ? avx512::name : (set) == 1 ? avx2::name : plain::name)
#else
int Widest(int) { return 0; }
#define PICK(set, name) ((void)(set), plain::name)
#endif
