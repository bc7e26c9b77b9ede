// Vectors of LANES floats, as wide as the surrounding `#pragma GCC target` allows.
//
// No include guard: a file includes this once for each instruction set, in namespaces of their own.
typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));

INLINE Vec Splat(float value) { return Vec{} + value; }
INLINE Ints SplatInt(int32_t value) { return Ints{} + value; }
INLINE Vec Load(const float *from) {
  Vec vector;
  memcpy(&vector, from, sizeof vector);
  return vector;
}
INLINE void Store(float *to, Vec vector) { memcpy(to, &vector, sizeof vector); }
// A NaN in `a` stays.
INLINE Vec Max(Vec a, Vec b) { return a < b ? b : a; }

#if LANES == 16
INLINE Vec Fma(Vec a, Vec b, Vec c) { return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
INLINE float Sum(Vec vector) { return _mm512_reduce_add_ps((__m512)vector); }
INLINE float Highest(Vec vector) { return _mm512_reduce_max_ps((__m512)vector); }
INLINE Vec Load(const uint16_t *from) {
  __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from));
  return (Vec)_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
// The sums of four vectors.
INLINE void Sum4(const Vec *vectors, float *sums) {
  const __m512 *v = reinterpret_cast<const __m512 *>(vectors);
  __m512 first = _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
  __m512 second = _mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
  __m512 four = _mm512_add_ps(_mm512_shuffle_ps(first, second, 0x44), _mm512_shuffle_ps(first, second, 0xee));
  __m256 half = _mm256_add_ps(_mm512_castps512_ps256(four), _mm512_extractf32x8_ps(four, 1));
  _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}
#elif LANES == 8
INLINE Vec Fma(Vec a, Vec b, Vec c) { return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
INLINE float Sum(Vec vector) {
  __m128 four = _mm_add_ps(_mm256_castps256_ps128((__m256)vector), _mm256_extractf128_ps((__m256)vector, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
INLINE float Highest(Vec vector) {
  float highest = vector[0];
  for (int i = 1; i < LANES; i++) highest = vector[i] > highest ? vector[i] : highest;
  return highest;
}
INLINE void Sum4(const Vec *vectors, float *sums) {
  const __m256 *v = reinterpret_cast<const __m256 *>(vectors);
  __m256 four = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
  _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(four), _mm256_extractf128_ps(four, 1)));
}
INLINE Vec Load(const uint16_t *from) {
  __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i *>(from));
  return (Vec)_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
#else
INLINE Vec Fma(Vec a, Vec b, Vec c) { return a * b + c; }
INLINE float Sum(Vec vector) {
  float sum = 0;
  for (int i = 0; i < LANES; i++) sum += vector[i];
  return sum;
}
INLINE float Highest(Vec vector) {
  float highest = vector[0];
  for (int i = 1; i < LANES; i++) highest = vector[i] > highest ? vector[i] : highest;
  return highest;
}
INLINE void Sum4(const Vec *vectors, float *sums) {
  for (int i = 0; i < 4; i++) sums[i] = Sum(vectors[i]);
}
INLINE Vec Load(const uint16_t *from) {
  Ints bits;
  for (int i = 0; i < LANES; i++) bits[i] = static_cast<int32_t>(static_cast<uint32_t>(from[i]) << 16);
  return (Vec)bits;
}
#endif

// One number, of float32 or bfloat16, and back.
INLINE float ToFloat(float value) { return value; }
INLINE float ToFloat(uint16_t value) {
  uint32_t bits = static_cast<uint32_t>(value) << 16;
  float number;
  memcpy(&number, &bits, sizeof number);
  return number;
}
INLINE void FromFloat(float value, float *to) { *to = value; }
// Rounded to the nearest, ties to even; a NaN stays one.
INLINE void FromFloat(float value, uint16_t *to) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  *to = value != value ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
// Alike, a vector's numbers.
INLINE void Store(uint16_t *to, Vec vector) {
  typedef uint32_t Bits __attribute__((vector_size(LANES * 4)));
  typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));
  Bits bits = (Bits)vector, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  Halves halves = __builtin_convertvector(vector == vector ? rounded : Bits{} + 0x7fc0, Halves);
  memcpy(to, &halves, sizeof halves);
}

// e to the power of x <= 80, within 2 units in the last place; below -87 as at -87. A NaN stays.
INLINE Vec Exp(Vec x) {
  const Vec shift = Splat(12582912.0f);  // 1.5 * 2^23: a sum with it rounds to an integer, in its low bits
  x = Max(x, Splat(-87.0f));
  Vec shifted = Fma(x, Splat(1.44269504088896341f), shift);
  Vec whole = shifted - shift;
  Vec rest = Fma(whole, Splat(-0.693359375f), x);
  rest = Fma(whole, Splat(2.12194440e-4f), rest);
  Vec sum = Splat(1.9875691500e-4f);
  sum = Fma(sum, rest, Splat(1.3981999507e-3f));
  sum = Fma(sum, rest, Splat(8.3334519073e-3f));
  sum = Fma(sum, rest, Splat(4.1665795894e-2f));
  sum = Fma(sum, rest, Splat(1.6666665459e-1f));
  sum = Fma(sum, rest, Splat(5.0000001201e-1f));
  sum = Fma(sum, rest * rest, rest + 1.0f);
  return (Vec)((Ints)sum + ((Ints)shifted << 23));
}

// The hyperbolic tangent.
INLINE Vec Tanh(Vec x) {
  Vec twice = x + x;
  twice = twice > Splat(80.0f) ? Splat(80.0f) : twice;
  return Splat(1.0f) - Splat(2.0f) / (Exp(twice) + 1.0f);
}
