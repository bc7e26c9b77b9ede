// What the kernels share: how functions are exported, and whether there are x86's instruction sets.
#pragma once
#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#define X86_VARIANTS 1
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))
#define ALWAYS_INLINE inline __attribute__((always_inline))
#define INLINE static ALWAYS_INLINE
