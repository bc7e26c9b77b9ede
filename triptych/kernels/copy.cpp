// Copies of floating-point numbers that say whether all of them are finite.
//
// A number is infinite or NaN where all bits of its exponent are set, which `mask` has.
#include <string.h>

#include "export.h"

namespace {

template <typename T>
bool CopyFinite(const uint8_t *from, uint8_t *to, size_t bytes, uint32_t mask) {
  T exponent = static_cast<T>(mask), bad = 0;
  for (size_t i = 0; i < bytes; i += sizeof(T)) {
    T number;
    memcpy(&number, from + i, sizeof number);
    memcpy(to + i, &number, sizeof number);
    bad |= static_cast<T>((number & exponent) == exponent);
  }
  return !bad;
}

#ifdef X86_VARIANTS
// Past the CPU's caches: what is larger than they are would push out all else, and every line would be read first.
// `to` is aligned. SSE2 is in every x86-64 CPU, and wider vectors are no faster here.
template <typename T>
bool StreamFinite(const uint8_t *from, uint8_t *to, size_t bytes, uint32_t mask) {
  constexpr size_t kVector = sizeof(__m128i), kLine = 4 * kVector;
  __m128i exponent = sizeof(T) == 2 ? _mm_set1_epi16(static_cast<short>(mask)) : _mm_set1_epi32(mask);
  __m128i bad = _mm_setzero_si128();
  size_t done = 0;
  for (; done + kLine <= bytes; done += kLine)
    for (size_t at = done; at < done + kLine; at += kVector) {
      __m128i numbers = _mm_loadu_si128(reinterpret_cast<const __m128i *>(from + at));
      __m128i bits = _mm_and_si128(numbers, exponent);
      bad = _mm_or_si128(bad, sizeof(T) == 2 ? _mm_cmpeq_epi16(bits, exponent) : _mm_cmpeq_epi32(bits, exponent));
      _mm_stream_si128(reinterpret_cast<__m128i *>(to + at), numbers);
    }
  _mm_sfence();
  bool rest = CopyFinite<T>(from + done, to + done, bytes - done, mask);
  return rest && _mm_movemask_epi8(bad) == 0;
}
#endif

template <typename T>
bool Run(const uint8_t *from, uint8_t *to, size_t bytes, uint32_t mask, [[maybe_unused]] bool stream) {
#ifdef X86_VARIANTS
  if (stream && reinterpret_cast<uintptr_t>(to) % sizeof(__m128i) == 0) return StreamFinite<T>(from, to, bytes, mask);
#endif
  return CopyFinite<T>(from, to, bytes, mask);
}

}  // namespace

// Copies `bytes` bytes of numbers of `size` bytes. 0: all are finite; 1: one is not; 2: a size that is not taken.
EXPORT int triptych_copy_finite(const uint8_t *from, uint8_t *to, size_t bytes, int size, uint32_t mask, int stream) {
  if ((size != 2 && size != 4) || bytes % size) return 2;
  bool finite = size == 2 ? Run<uint16_t>(from, to, bytes, mask, stream) : Run<uint32_t>(from, to, bytes, mask, stream);
  return finite ? 0 : 1;
}
