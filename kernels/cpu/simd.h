// Eight float lanes for one instruction set. Included by the isa_*.c files only, which set the
// compiler's target and ISA_AVX2. Everything is GNU vector arithmetic except where an instruction matters,
// so the portable build runs the same code, lane by lane.
#ifndef ARTESIAN_SIMD_H
#define ARTESIAN_SIMD_H

#include <stdint.h>
#include <string.h>
#ifdef ISA_AVX2
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float f32x8 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));
typedef uint16_t u16x8 __attribute__((vector_size(16)));
typedef float f32x4 __attribute__((vector_size(16)));
typedef double f64x4 __attribute__((vector_size(32)));
typedef int64_t i64x4 __attribute__((vector_size(32)));

INLINE f32x8 load8(const float *p) {
    f32x8 v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void store8(float *p, f32x8 v) { memcpy(p, &v, sizeof v); }

INLINE f32x8 set8(float x) { return (f32x8){x, x, x, x, x, x, x, x}; }

INLINE f64x4 set4d(double x) { return (f64x4){x, x, x, x}; }

INLINE f32x8 select8(i32x8 mask, f32x8 yes, f32x8 no) {
    return (f32x8)((mask & (i32x8)yes) | (~mask & (i32x8)no));
}

#ifdef ISA_AVX2
INLINE f32x8 fma8(f32x8 a, f32x8 b, f32x8 c) { return (f32x8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
INLINE f64x4 fma4d(f64x4 a, f64x4 b, f64x4 c) { return (f64x4)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c); }
INLINE f32x8 max8(f32x8 a, f32x8 b) { return (f32x8)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE f32x8 min8(f32x8 a, f32x8 b) { return (f32x8)_mm256_min_ps((__m256)a, (__m256)b); }
INLINE int any8(i32x8 mask) { return _mm256_movemask_ps((__m256)mask) != 0; }
INLINE int any4d(i64x4 mask) { return _mm256_movemask_pd((__m256d)mask) != 0; }
INLINE f32x8 load_half8(const uint16_t *p) { return (f32x8)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INLINE void store_half8(uint16_t *p, f32x8 v) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
}
#else
INLINE f32x8 fma8(f32x8 a, f32x8 b, f32x8 c) { return a * b + c; }
INLINE f64x4 fma4d(f64x4 a, f64x4 b, f64x4 c) { return a * b + c; }
// As the x86 instructions: the second operand where either is NaN.
INLINE f32x8 max8(f32x8 a, f32x8 b) { return select8(a > b, a, b); }
INLINE f32x8 min8(f32x8 a, f32x8 b) { return select8(a < b, a, b); }
INLINE int any8(i32x8 mask) {
    int32_t some = 0;
    for (int i = 0; i < 8; i++) some |= mask[i];
    return some != 0;
}
INLINE int any4d(i64x4 mask) { return (mask[0] | mask[1] | mask[2] | mask[3]) != 0; }
INLINE float half_to_float(uint16_t h) {
    uint32_t exponent = (h >> 10) & 31, mantissa = h & 1023, sign = (uint32_t)(h & 0x8000) << 16;
    float value;
    if (exponent == 0) {
        value = (float)mantissa * 0x1p-24f;
        return sign ? -value : value;
    }
    uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13;
    memcpy(&value, &bits, sizeof value);
    return value;
}
INLINE uint16_t float_to_half(float x) {  // round to nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (magnitude < 0x38800000) {  // subnormal: the float adder rounds at 2^-24
        float tiny;
        memcpy(&tiny, &magnitude, sizeof tiny);
        tiny += 0.5f;
        memcpy(&magnitude, &tiny, sizeof magnitude);
        return (uint16_t)(sign | (magnitude - 0x3f000000));
    }
    magnitude += 0xfff + (magnitude >> 13 & 1);
    return (uint16_t)(sign | ((magnitude >> 13) - (112 << 10)));
}
INLINE f32x8 load_half8(const uint16_t *p) {
    f32x8 v;
    for (int i = 0; i < 8; i++) v[i] = half_to_float(p[i]);
    return v;
}
INLINE void store_half8(uint16_t *p, f32x8 v) {
    for (int i = 0; i < 8; i++) p[i] = float_to_half(v[i]);
}
#endif

INLINE f32x8 load_bfloat8(const uint16_t *p) {
    u16x8 raw;
    memcpy(&raw, p, sizeof raw);
    return (f32x8)(__builtin_convertvector(raw, u32x8) << 16);
}

// Sum and maximum of the lanes, always in the same order.
INLINE float sum8(f32x8 v) {
    float a = v[0] + v[4], b = v[1] + v[5], c = v[2] + v[6], d = v[3] + v[7];
    return (a + c) + (b + d);
}

INLINE float top8(f32x8 v) {
    float best = v[0];
    for (int i = 1; i < 8; i++) best = v[i] > best ? v[i] : best;
    return best;
}

// exp(x): n = round(x / ln 2), r = x - n ln 2, 2^n * p(r). ln 2 is split so that n * hi is exact; p is the
// degree-6 Taylor polynomial, |r| <= 0.347, relative error below 2e-7. Clamped to +-87; NaN stays NaN.
INLINE f32x8 exp8(f32x8 x) {
    x = min8(set8(88.0f), max8(set8(-87.0f), x));
    f32x8 n = (x * set8(1.44269504f) + set8(12582912.0f)) - set8(12582912.0f);  // 1.5 * 2^23 rounds
    f32x8 r = fma8(n, set8(-0.693359375f), x);
    r = fma8(n, set8(2.12194440e-4f), r);
    f32x8 p = set8(1.0f / 720);
    p = fma8(p, r, set8(1.0f / 120));
    p = fma8(p, r, set8(1.0f / 24));
    p = fma8(p, r, set8(1.0f / 6));
    p = fma8(p, r, set8(0.5f));
    p = fma8(p, r, set8(1.0f));
    p = fma8(p, r, set8(1.0f));
    i32x8 power = (__builtin_convertvector(n, i32x8) + 127) << 23;
    return p * (f32x8)power;
}

// tanh(x): near 0 the Taylor series to x^11 (the quotient would cancel), else 1 - 2 / (1 + e^2x).
INLINE f32x8 tanh8(f32x8 x) {
    f32x8 y = x * x;
    f32x8 p = set8(-1382.0f / 155925);
    p = fma8(p, y, set8(62.0f / 2835));
    p = fma8(p, y, set8(-17.0f / 315));
    p = fma8(p, y, set8(2.0f / 15));
    p = fma8(p, y, set8(-1.0f / 3));
    p = fma8(p * y, x, x);
    f32x8 q = set8(1.0f) - set8(2.0f) / (set8(1.0f) + exp8(x + x));
    return select8(y < set8(0.1225f), p, q);
}

#endif
