// The kernels for x86-64 with AVX2, FMA and F16C. Only code behind `kernels_avx2` may use them: the library
// itself is built for the compiler's default CPU.
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#define ISA_AVX2
#define ISA_NAME "avx2"
#include "isa.inc.c"

const struct kernels kernels_avx2 = KERNELS;

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
