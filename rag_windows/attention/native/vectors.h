/* Sixteen floats at a time, in the compiler's own vectors, and the element that keys are made of. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16

#ifdef DIM
_Static_assert(DIM > 0 && DIM % LANES == 0, "the head dim is a multiple of 16");
_Static_assert(VALUE_DIM > 0 && VALUE_DIM % LANES == 0, "the value dim is a multiple of 16");
#endif

typedef float floats __attribute__((vector_size(64)));
typedef int32_t ints __attribute__((vector_size(64)));
typedef uint32_t words __attribute__((vector_size(64)));

#define INLINE static inline __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 16")

/* ELEMENT: 0 float, 1 bfloat16, 2 _Float16. */
#if ELEMENT == 0
typedef float element;
#elif ELEMENT == 1
typedef uint16_t element;
typedef uint16_t halves __attribute__((vector_size(32)));
#else
#ifdef __F16C__
#include <immintrin.h>
#endif
typedef _Float16 element;
typedef _Float16 halves __attribute__((vector_size(32)));
#endif

INLINE floats load(const float *from) {
    floats made;
    memcpy(&made, from, sizeof made);
    return made;
}

INLINE void store(float *to, floats what) { memcpy(to, &what, sizeof what); }

INLINE floats widened(const element *from) {
#if ELEMENT == 0
    return load(from);
#else
    halves half;
    memcpy(&half, from, sizeof half);
#if ELEMENT == 1
    return (floats)(__builtin_convertvector(half, words) << 16);
#elif defined(__AVX512F__)
    /* GCC converts one number at a time if it is not told how. */
    return (floats)_mm512_cvtph_ps((__m256i)half);
#elif defined(__F16C__)
    __m128i four[2];
    __m256 made[2];
    memcpy(four, &half, sizeof four);
    for (int i = 0; i < 2; i++) made[i] = _mm256_cvtph_ps(four[i]);
    floats both;
    memcpy(&both, made, sizeof both);
    return both;
#else
    return __builtin_convertvector(half, floats);
#endif
#endif
}

INLINE element narrowed(float number) {
#if ELEMENT == 1
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    if (number != number) return 0x7fc0;
    return (element)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
#else
    return (element)number;
#endif
}

INLINE float number(element from) {
#if ELEMENT == 1
    uint32_t bits = (uint32_t)from << 16;
    float made;
    memcpy(&made, &bits, sizeof made);
    return made;
#else
    return (float)from;
#endif
}

INLINE float sum(floats of) {
    typedef float eight __attribute__((vector_size(32)));
    typedef float four __attribute__((vector_size(16)));
    eight low, high;
    memcpy(&low, &of, sizeof low);
    memcpy(&high, (char *)&of + sizeof low, sizeof high);
    low += high;
    four first, second;
    memcpy(&first, &low, sizeof first);
    memcpy(&second, (char *)&low + sizeof first, sizeof second);
    first += second;
    return (first[0] + first[2]) + (first[1] + first[3]);
}

INLINE floats larger(floats one, floats other) {
    ints which = one > other;
    return (floats)(((ints)one & which) | ((ints)other & ~which));
}

/* e^x to a few units in the last place; 0 below -87, NaN for NaN; x may not exceed 88. */
INLINE floats exponential(floats x) {
    const floats lowest = (floats){} - 87.0f;
    ints gone = x < lowest, none = x != x;
    x = (floats)(((ints)x & ~gone) | ((ints)lowest & gone));
    /* Adding 1.5 * 2^23 leaves the nearest integer in the low bits. */
    const floats shift = (floats){} + 12582912.0f;
    floats whole = x * 1.44269504f + shift;
    words power = (words)whole << 23;
    whole -= shift;
    floats rest = x - whole * 0.693359375f;
    rest += whole * 2.12194440e-4f;
    /* Taylor's series; on [-ln2/2, ln2/2] what it leaves out is below 2e-7. */
    floats series = rest * 1.38888889e-3f + 8.33333333e-3f;
    series = series * rest + 4.16666667e-2f;
    series = series * rest + 1.66666667e-1f;
    series = series * rest + 0.5f;
    floats made = series * rest * rest + rest + 1.0f;
    return (floats)(((ints)((words)made + power) & ~gone) | none);
}

/* cap * tanh(x / cap), as Gemma 2 caps its logits. */
INLINE floats capped(floats x, float cap) {
    floats twice = x * (2.0f / cap);
    const floats most = (floats){} + 30.0f;
    ints far = twice > most;
    twice = (floats)(((ints)twice & ~far) | ((ints)most & far));
    return cap - 2.0f * cap / (exponential(twice) + 1.0f);
}
