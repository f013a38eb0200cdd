/* Some floats at a time, in the compiler's own vectors, and the element that keys are made of. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) || defined(__AVX2__) || defined(__FMA__) || defined(__F16C__)
#include <immintrin.h>
#endif

/* As many as a register holds: GCC keeps longer vectors in memory. */
#ifdef __AVX512F__
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

#ifdef DIM
_Static_assert(DIM > 0 && DIM % 16 == 0, "the head dim is a multiple of 16");
_Static_assert(VALUE_DIM > 0 && VALUE_DIM % 16 == 0, "the value dim is a multiple of 16");
#endif

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));

#define INLINE static inline __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 16")

/* ELEMENT: 0 float, 1 bfloat16, 2 _Float16. */
#if ELEMENT == 0
typedef float element;
#elif ELEMENT == 1
typedef uint16_t element;
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
#else
#if defined(__x86_64__) && !defined(__F16C__)
#error "this processor has no instruction that widens halves"
#endif
typedef _Float16 element;
typedef _Float16 halves __attribute__((vector_size(2 * LANES)));
#endif

/* What keys and values are stored in. PACKED: 8 bits a number, a 127th of its channel's peak. */
#ifndef PACKED
#define PACKED 0
#endif
#if PACKED
typedef int8_t stored;
typedef int8_t bytes __attribute__((vector_size(LANES)));
#define OF_PEAK (1.0f / 127.0f)
#else
typedef element stored;
#endif

INLINE floats load(const float *from) {
    floats made;
    memcpy(&made, from, sizeof made);
    return made;
}

/* Has memory bring so many numbers; harmless where there are none. */
INLINE void fetch(const stored *from, int numbers) {
    for (int i = 0; i < numbers * (int)sizeof *from; i += 64)
        __builtin_prefetch((const char *)((uintptr_t)from + i), 0, 2);
}

/* one * other + sums, rounded once where the processor can: GCC fuses them where it likes. */
INLINE floats fused(floats one, floats other, floats sums) {
#if defined(__AVX512F__)
    return (floats)_mm512_fmadd_ps((__m512)one, (__m512)other, (__m512)sums);
#elif defined(__FMA__)
    return (floats)_mm256_fmadd_ps((__m256)one, (__m256)other, (__m256)sums);
#else
    return one * other + sums;
#endif
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
    /* Without the intrinsic, GCC converts one number at a time. */
    return (floats)_mm512_cvtph_ps((__m256i)half);
#elif defined(__F16C__)
    return (floats)_mm256_cvtph_ps((__m128i)half);
#else
    return __builtin_convertvector(half, floats);
#endif
#endif
}

/* As many stored numbers. */
INLINE floats taken_from(const stored *from) {
#if PACKED
    bytes some;
    memcpy(&some, from, sizeof some);
#if defined(__AVX512F__)
    return (floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)some));
#elif defined(__AVX2__)
    return (floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)from)));
#else
    return __builtin_convertvector(some, floats);
#endif
#else
    return widened(from);
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
    typedef float four __attribute__((vector_size(16)));
    four parts[LANES / 4];
    memcpy(parts, &of, sizeof parts);
    UNROLLED for (int many = LANES / 8; many > 0; many /= 2)
        UNROLLED for (int i = 0; i < many; i++) parts[i] += parts[i + many];
    return (parts[0][0] + parts[0][2]) + (parts[0][1] + parts[0][3]);
}

/* Lane i is the sum of the i-th vector. */
INLINE floats sums(const floats of[LANES]) {
#ifdef __AVX512F__
    __m512 half[8], fourth[4], eighth[2];
    UNROLLED for (int i = 0; i < 8; i++) {
        __m512 one = (__m512)of[i / 2 + i % 2 * 8], other = (__m512)of[i / 2 + i % 2 * 8 + 4];
        half[i] = _mm512_add_ps(
            _mm512_shuffle_f32x4(one, other, 0x44), _mm512_shuffle_f32x4(one, other, 0xee)
        );
    }
    UNROLLED for (int i = 0; i < 4; i++)
        fourth[i] = _mm512_add_ps(
            _mm512_shuffle_f32x4(half[2 * i], half[2 * i + 1], 0x88),
            _mm512_shuffle_f32x4(half[2 * i], half[2 * i + 1], 0xdd)
        );
    UNROLLED for (int i = 0; i < 2; i++)
        eighth[i] = _mm512_add_ps(
            _mm512_shuffle_ps(fourth[2 * i], fourth[2 * i + 1], 0x44),
            _mm512_shuffle_ps(fourth[2 * i], fourth[2 * i + 1], 0xee)
        );
    return (floats)_mm512_add_ps(
        _mm512_shuffle_ps(eighth[0], eighth[1], 0x88), _mm512_shuffle_ps(eighth[0], eighth[1], 0xdd)
    );
#else
    floats made;
    for (int i = 0; i < LANES; i++) made[i] = sum(of[i]);
    return made;
#endif
}

#if ELEMENT == 1 && defined(__AVX512BF16__)
#define PAIRED

/* Sums, and products of 2 * LANES numbers, two of them in each lane. */
INLINE floats paired(floats sums, const element *one, const element *other) {
    __m512i first = _mm512_loadu_si512(one), second = _mm512_loadu_si512(other);
    return (floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)first, (__m512bh)second);
}
#endif

INLINE floats larger(floats one, floats other) {
#ifdef __AVX512F__
    return (floats)_mm512_max_ps((__m512)one, (__m512)other);
#else
    ints which = one > other;
    return (floats)(((ints)one & which) | ((ints)other & ~which));
#endif
}

/* Taylor's series of e^x; on [-ln2/2, ln2/2] what it leaves out is below 2e-7. */
INLINE floats series(floats x) {
    floats made = x * 1.38888889e-3f + 8.33333333e-3f;
    made = made * x + 4.16666667e-2f;
    made = made * x + 1.66666667e-1f;
    made = made * x + 0.5f;
    return made * x * x + x + 1.0f;
}

/* e^x to a few units in the last place; 0 below -104, NaN for NaN; x may not exceed 88. */
INLINE floats exponential(floats x) {
#ifdef __AVX512F__
    x = (floats)_mm512_max_ps(_mm512_set1_ps(-110.0f), (__m512)x);
    floats whole = (floats)_mm512_roundscale_ps((__m512)(x * 1.44269504f), 0);
    floats rest = x - whole * 0.693359375f;
    rest += whole * 2.12194440e-4f;
    return (floats)_mm512_scalef_ps((__m512)series(rest), (__m512)whole);
#else
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
    return (floats)(((ints)((words)series(rest) + power) & ~gone) | none);
#endif
}

/* cap * tanh(x / cap), as Gemma 2 caps its logits. */
INLINE floats capped(floats x, float cap) {
    floats twice = x * (2.0f / cap);
    const floats most = (floats){} + 30.0f;
    ints far = twice > most;
    twice = (floats)(((ints)twice & ~far) | ((ints)most & far));
    return cap - 2.0f * cap / (exponential(twice) + 1.0f);
}
