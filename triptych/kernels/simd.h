// 32-bit sums of 8-bit levels, in vectors as wide as the surrounding `#pragma GCC target` allows.
//
// No include guard: a file includes this once for each instruction set, in namespaces of their own, with LANES as
// many as a vector has. g++ reads a file whole before its pragmas, so __AVX2__ does not say which one it is.
#if LANES == 16

typedef __m512i Sums;

INLINE Sums Splat(int32_t value) { return _mm512_set1_epi32(value); }
INLINE Sums Add(Sums sums, const uint8_t *levels, Sums weight) {
  __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(levels)));
  return _mm512_add_epi32(sums, _mm512_mullo_epi32(wide, weight));
}
// One pixel of each of four rows.
INLINE Sums AddPixels(Sums sums, const uint8_t *const *rows, size_t at, Sums weight) {
  __m128i pixels = _mm_set_epi32(Word(rows[3] + at), Word(rows[2] + at), Word(rows[1] + at), Word(rows[0] + at));
  return _mm512_add_epi32(sums, _mm512_mullo_epi32(_mm512_cvtepu8_epi32(pixels), weight));
}
INLINE void StoreLevels(Sums sums, uint8_t *levels) {
  Sums shifted = _mm512_max_epi32(_mm512_srai_epi32(sums, kBits), _mm512_setzero_si512());
  _mm_storeu_si128(reinterpret_cast<__m128i *>(levels), _mm512_cvtusepi32_epi8(shifted));
}

#elif LANES == 8

typedef __m256i Sums;

INLINE Sums Splat(int32_t value) { return _mm256_set1_epi32(value); }
INLINE Sums Add(Sums sums, const uint8_t *levels, Sums weight) {
  __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(levels)));
  return _mm256_add_epi32(sums, _mm256_mullo_epi32(wide, weight));
}
// One pixel of each of two rows.
INLINE Sums AddPixels(Sums sums, const uint8_t *const *rows, size_t at, Sums weight) {
  __m128i pixels = _mm_set_epi32(0, 0, Word(rows[1] + at), Word(rows[0] + at));
  return _mm256_add_epi32(sums, _mm256_mullo_epi32(_mm256_cvtepu8_epi32(pixels), weight));
}
INLINE void StoreLevels(Sums sums, uint8_t *levels) {
  Sums shifted = _mm256_srai_epi32(sums, kBits);
  __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(shifted), _mm256_extracti128_si256(shifted, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i *>(levels), _mm_packus_epi16(words, words));
}

#else

struct Sums {
  int32_t lane[LANES];
};

INLINE Sums Splat(int32_t value) {
  Sums sums;
  for (int i = 0; i < LANES; i++) sums.lane[i] = value;
  return sums;
}
INLINE Sums Add(Sums sums, const uint8_t *levels, const Sums &weight) {
  for (int i = 0; i < LANES; i++) sums.lane[i] += levels[i] * weight.lane[i];
  return sums;
}
INLINE Sums AddPixels(Sums sums, const uint8_t *const *rows, size_t at, const Sums &weight) {
  for (int i = 0; i < LANES; i++) sums.lane[i] += rows[i / 4][at + i % 4] * weight.lane[i];
  return sums;
}
INLINE void StoreLevels(const Sums &sums, uint8_t *levels) {
  for (int i = 0; i < LANES; i++) levels[i] = Clip(sums.lane[i]);
}

#endif

// Packed pixels to three planes.
INLINE void Split(const uint8_t *row, int width, uint8_t *const *planes) {
  int x = 0;
#if LANES > 4
  const __m128i *picks = reinterpret_cast<const __m128i *>(&kPicks);
  for (; x + 16 <= width; x += 16) {
    const __m128i *from = reinterpret_cast<const __m128i *>(row + static_cast<size_t>(x) * kChannels);
    __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1), c = _mm_loadu_si128(from + 2);
    for (int channel = 0; channel < kChannels; channel++) {
      const __m128i *pick = picks + kChannels * channel;
      __m128i plane = _mm_or_si128(_mm_or_si128(_mm_shuffle_epi8(a, pick[0]), _mm_shuffle_epi8(b, pick[1])),
                                   _mm_shuffle_epi8(c, pick[2]));
      _mm_storeu_si128(reinterpret_cast<__m128i *>(planes[channel] + x), plane);
    }
  }
#endif
  for (; x < width; x++)
    for (int channel = 0; channel < kChannels; channel++) planes[channel][x] = row[kChannels * x + channel];
}
