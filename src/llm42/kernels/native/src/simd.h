// One vector type of fp32 lanes, for AVX-512, AVX2 or whatever the compiler makes of 16-byte vectors (SSE2, NEON).
//
// Invariant: every operation is lane-wise or reduces lanes in one written-down order, and fused multiply-adds are
// spelled out (the library is built with -ffp-contract=off), so that two loops over the same numbers give the same bits.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace llm42 {

#define INLINE inline __attribute__((always_inline))

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

template <class To, class From>
INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

INLINE float widen(float x) { return x; }
INLINE float widen(BFloat16 x) { return bit_cast<float>(uint32_t{x.bits} << 16); }
INLINE float widen(Float16 x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, magnitude = x.bits & 0x7fff;
  if (magnitude >= 0x7c00) return bit_cast<float>(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  // A half's bits, shifted into a float's fields, are the value times 2^-112: exact for subnormal halves too.
  return bit_cast<float>(sign | bit_cast<uint32_t>(bit_cast<float>(magnitude << 13) * 0x1p112f));
}

// To nearest, ties to even; NaN stays NaN.
INLINE void narrow(float x, float* to) { *to = x; }
INLINE void narrow(float x, BFloat16* to) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  to->bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
INLINE void narrow(float x, Float16* to) {
  const uint32_t bits = bit_cast<uint32_t>(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  uint32_t half;
  if (magnitude > 0x7f800000) {
    half = 0x7e00;
  } else if (magnitude >= 0x477ff000) {
    half = 0x7c00;
  } else if (magnitude < 0x38800000) {
    // Subnormal: adding 0.5 puts the half's unit at the float's last bit, and the addition rounds.
    half = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - bit_cast<uint32_t>(0.5f);
  } else {
    half = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
  }
  to->bits = uint16_t(sign | half);
}

#if defined(__AVX512F__)

constexpr int kLanes = 16;
using Vec = __m512;
using Word = __m512i;  // one 32-bit word per lane
INLINE Vec set1(float x) { return _mm512_set1_ps(x); }
INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
INLINE void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
INLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
INLINE Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
INLINE Vec round(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE Vec load(const Float16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
INLINE void store(Float16* p, Vec x) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
INLINE Vec load(const BFloat16* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
INLINE void store(BFloat16* p, Vec x) {
  const __m512i bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i half = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  half = _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), half, _mm512_set1_epi32(0x7fc0));
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(half));
}
INLINE Word load_words(const uint32_t* p) { return _mm512_loadu_si512(p); }
INLINE Vec low_half(Word x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }
INLINE Vec high_half(Word x) { return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(int(0xffff0000)))); }
INLINE Vec scale2(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }
INLINE float max_lanes(Vec x) { return _mm512_reduce_max_ps(x); }
INLINE void transpose(Vec (&x)[kLanes]) {
  Vec y[kLanes];
  for (int i = 0; i < kLanes; i += 2) {  // pairs of rows, then fours
    y[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
  }
  for (int i = 0; i < kLanes; i += 4)
    for (int j = 0; j < 2; ++j) {
      const __m512d a = _mm512_castps_pd(y[i + j]), b = _mm512_castps_pd(y[i + j + 2]);
      x[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
      x[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    }
  for (int i = 0; i < 4; ++i) {  // then the 128-bit parts
    const Vec a = _mm512_shuffle_f32x4(x[i], x[i + 4], 0x88), b = _mm512_shuffle_f32x4(x[i], x[i + 4], 0xdd);
    const Vec c = _mm512_shuffle_f32x4(x[i + 8], x[i + 12], 0x88), d = _mm512_shuffle_f32x4(x[i + 8], x[i + 12], 0xdd);
    y[i] = _mm512_shuffle_f32x4(a, c, 0x88);
    y[i + 4] = _mm512_shuffle_f32x4(b, d, 0x88);
    y[i + 8] = _mm512_shuffle_f32x4(a, c, 0xdd);
    y[i + 12] = _mm512_shuffle_f32x4(b, d, 0xdd);
  }
  for (int i = 0; i < kLanes; ++i) x[i] = y[i];
}
#if defined(__AVX512BF16__)
INLINE Word set1(uint32_t x) { return _mm512_set1_epi32(int(x)); }
// c + a * b for the two brain floats in each 32-bit word, the high one first. Subnormal numbers count as zero.
INLINE Vec add_products(Word a, Word b, Vec c) { return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b); }
#endif

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

constexpr int kLanes = 8;
using Vec = __m256;
using Word = __m256i;
INLINE Vec set1(float x) { return _mm256_set1_ps(x); }
INLINE Vec load(const float* p) { return _mm256_loadu_ps(p); }
INLINE void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
INLINE Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
INLINE Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
INLINE Vec round(Vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE Vec load(const Float16* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
INLINE void store(Float16* p, Vec x) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
INLINE Vec load(const BFloat16* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
INLINE void store(BFloat16* p, Vec x) {
  const __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i half = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  half = _mm256_blendv_epi8(half, _mm256_set1_epi32(0x7fc0), _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(half, half), 0x08);
  _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(packed));
}
INLINE Word load_words(const uint32_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
INLINE Vec low_half(Word x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
INLINE Vec high_half(Word x) { return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(int(0xffff0000)))); }
INLINE float max_lanes(Vec x) {
  const __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 quarter = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(quarter, _mm_movehdup_ps(quarter)));
}
INLINE void transpose(Vec (&x)[kLanes]) {
  Vec y[kLanes];
  for (int i = 0; i < kLanes; i += 2) {  // pairs of rows, then fours
    y[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
    y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
  }
  for (int i = 0; i < kLanes; i += 4)
    for (int j = 0; j < 2; ++j) {
      const __m256d a = _mm256_castps_pd(y[i + j]), b = _mm256_castps_pd(y[i + j + 2]);
      x[i + 2 * j] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, b));
      x[i + 2 * j + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, b));
    }
  for (int i = 0; i < 4; ++i) {  // then the 128-bit parts
    y[i] = _mm256_permute2f128_ps(x[i], x[i + 4], 0x20);
    y[i + 4] = _mm256_permute2f128_ps(x[i], x[i + 4], 0x31);
  }
  for (int i = 0; i < kLanes; ++i) x[i] = y[i];
}
INLINE Vec scale2(Vec x, Vec n) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(x, _mm256_castsi256_ps(exponent));
}

#else

constexpr int kLanes = 4;
typedef float Vec __attribute__((vector_size(16)));
typedef uint32_t Word __attribute__((vector_size(16)));
INLINE Vec set1(float x) { return Vec{x, x, x, x}; }
INLINE Vec load(const float* p) {
  Vec x;
  std::memcpy(&x, p, sizeof(x));
  return x;
}
INLINE void store(float* p, Vec x) { std::memcpy(p, &x, sizeof(x)); }
INLINE Vec fma(Vec a, Vec b, Vec c) {
#if defined(__ARM_NEON)
  return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}
INLINE Vec select(Word mask, Vec a, Vec b) { return (Vec)(((Word)a & mask) | ((Word)b & ~mask)); }
INLINE Vec max(Vec a, Vec b) { return select((Word)(a > b), a, b); }
INLINE Vec min(Vec a, Vec b) { return select((Word)(a < b), a, b); }
INLINE Vec round(Vec x) {  // to nearest even, for |x| < 2^22: what exp needs
  const Vec magic = set1(12582912.0f);
  return (x + magic) - magic;
}
template <class T>
INLINE Vec load(const T* p) { return Vec{widen(p[0]), widen(p[1]), widen(p[2]), widen(p[3])}; }
template <class T>
INLINE void store(T* p, Vec x) {
  for (int i = 0; i < kLanes; ++i) narrow(x[i], p + i);
}
INLINE Word load_words(const uint32_t* p) {
  Word x;
  std::memcpy(&x, p, sizeof(x));
  return x;
}
INLINE Vec low_half(Word x) { return (Vec)(x << 16); }
INLINE Vec high_half(Word x) { return (Vec)(x & 0xffff0000u); }
INLINE float max_lanes(Vec x) {
  const float a = x[1] > x[0] ? x[1] : x[0], b = x[3] > x[2] ? x[3] : x[2];
  return b > a ? b : a;
}
INLINE void transpose(Vec (&x)[kLanes]) {
  const Vec a = x[0], b = x[1], c = x[2], d = x[3];
  for (int i = 0; i < kLanes; ++i) x[i] = Vec{a[i], b[i], c[i], d[i]};
}
INLINE Vec scale2(Vec x, Vec n) {
  typedef int32_t Int __attribute__((vector_size(16)));
  return x * (Vec)((__builtin_convertvector(n, Int) + 127) << 23);
}

#endif

INLINE Vec zero() { return set1(0.0f); }

// The first n lanes, zero beyond; and the other way round.
template <class T>
INLINE Vec load_first(const T* p, int n) {
  if (n >= kLanes) return load(p);
  T buffer[kLanes] = {};
  std::memcpy(buffer, p, n * sizeof(T));
  return load(buffer);
}
template <class T>
INLINE void store_first(T* p, Vec x, int n) {
  if (n >= kLanes) return store(p, x);
  T buffer[kLanes];
  store(buffer, x);
  std::memcpy(p, buffer, n * sizeof(T));
}

// Lanes added pairwise at distance kLanes/2, kLanes/4, ..., 1.
INLINE float sum_lanes(Vec x) {
  float lanes[kLanes];
  store(lanes, x);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

// What numbers of a dtype are multiplied as: floats, or pairs of brain floats where the CPU multiplies those as they are.
template <class T>
struct Factors {
  using Type = float;
  static constexpr int64_t kStep = 1;  // numbers in one
};
#if defined(__AVX512BF16__)
template <>
struct Factors<BFloat16> {
  using Type = uint32_t;
  static constexpr int64_t kStep = 2;
};
INLINE Word load(const uint32_t* p) { return load_words(p); }
#endif
template <class T>
using Factor = typename Factors<T>::Type;
INLINE Vec add_products(Vec a, Vec b, Vec c) { return fma(a, b, c); }

// Stores the first n sums of products. AVX512-BF16 counts subnormal ones as zero here too.
template <class T>
INLINE void store_products(T* p, Vec x, int n) { store_first(p, x, n); }
#if defined(__AVX512BF16__)
INLINE void store_products(BFloat16* p, Vec x, int n) {
  _mm256_mask_storeu_epi16(p, __mmask16(n >= kLanes ? 0xffff : (1 << n) - 1), (__m256i)_mm512_cvtneps_pbh(x));
}
#endif

// kLanes factors of a row of `count` numbers, from the i-th factor on, with zeros at the end; as a vector of any bits.
template <class T>
INLINE Vec load_factors(const T* x, int64_t i, int64_t count) {
  constexpr int64_t kStep = Factors<T>::kStep, kWidth = kLanes * kStep;
  const int64_t left = count - i * kStep;
  if constexpr (kStep == 1) {
    return load_first(x + i, int(std::min<int64_t>(kLanes, left)));
  } else {
    if (left >= kWidth) return load(reinterpret_cast<const float*>(x + i * kStep));
    T numbers[kWidth] = {};
    std::memcpy(numbers, x + i * kStep, left * sizeof(T));
    return load(reinterpret_cast<const float*>(numbers));
  }
}

// e^x to about 1 ulp: x = n ln 2 + r, a polynomial in r (Cephes, expf), times 2^n. Below -87 the result is 0.
INLINE Vec exp(Vec x) {
  const Vec clamped = min(max(x, set1(-87.0f)), set1(88.0f));
  const Vec n = round(clamped * set1(1.44269504088896341f));
  Vec r = fma(n, set1(-0.693359375f), clamped);
  r = fma(n, set1(2.12194440e-4f), r);
  Vec p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, r * r, r + set1(1.0f));
  p = scale2(p, n);
#if defined(__AVX512F__)
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, set1(-87.0f), _CMP_GE_OQ), p);
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
  return _mm256_and_ps(p, _mm256_cmp_ps(x, set1(-87.0f), _CMP_GE_OQ));
#else
  return select((Word)(x >= set1(-87.0f)), p, zero());
#endif
}

}  // namespace llm42
