/* Products of some rows with all rows of a matrix, each of which comes from memory once.

   Made for ELEMENT by `linear.py`. Bound by memory: while some rows of the matrix are multiplied, as
   many behind them are fetched. What a row gives depends neither on the rows beside it nor on the
   number of threads. */

#include "vectors.h"

/* 4 rows by 4 rows of the matrix are 16 sums, in registers. */
#define ROWS 4
#define OUTS 4

/* Parts of the work that a thread is given at least: threads do not end at once. */
#define SHARES 4

#define PIECE (2 * LANES)

/* Whether the processor has products of pairs, which make it fast for more rows. */
#ifdef PAIRED
const int rag_windows_paired = 1;
#else
const int rag_windows_paired = 0;
#endif

#ifdef PAIRED
typedef __m512i piece;
#else
typedef struct {
    floats one, other;
} piece;
#endif

/* PIECE numbers, in the same order for rows and matrix. */
INLINE piece taken(const element *from) {
#ifdef PAIRED
    return _mm512_loadu_si512(from);
#elif ELEMENT == 1
    /* Those at even places and those at odd ones, so that none has to move far. */
    words both;
    memcpy(&both, from, sizeof both);
    return (piece){(floats)(both << 16), (floats)(both & 0xffff0000u)};
#else
    return (piece){widened(from), widened(from + LANES)};
#endif
}

/* The last numbers of a row, fewer than PIECE, and zeros behind them. */
INLINE piece taken_last(const element *from, int64_t left) {
    element padded[PIECE] = {0};
    memcpy(padded, from, left * sizeof *from);
    return taken(padded);
}

INLINE floats added(floats sums, piece one, piece other) {
#ifdef PAIRED
    return (floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)one, (__m512bh)other);
#else
    return fused(one.other, other.other, fused(one.one, other.one, sums));
#endif
}

/* `rows` and `outs` are constant where this is inlined. */
INLINE void multiply(
    int rows, int outs, const element *input, const element *weight, int64_t ins,
    const element *bias, element *output, int64_t output_row
) {
    floats sums[ROWS][OUTS];
    piece from[ROWS];
    UNROLLED for (int r = 0; r < rows; r++)
        UNROLLED for (int o = 0; o < outs; o++) sums[r][o] = (floats){};
    int64_t i = 0;
    for (; i + PIECE <= ins; i += PIECE) {
        UNROLLED for (int r = 0; r < rows; r++) from[r] = taken(input + r * ins + i);
        UNROLLED for (int o = 0; o < outs; o++) {
            const element *at = weight + o * ins + i;
            fetch(at + OUTS * ins, PIECE);
            piece with = taken(at);
            UNROLLED for (int r = 0; r < rows; r++) sums[r][o] = added(sums[r][o], from[r], with);
        }
    }
    if (i < ins) {
        UNROLLED for (int r = 0; r < rows; r++) from[r] = taken_last(input + r * ins + i, ins - i);
        UNROLLED for (int o = 0; o < outs; o++) {
            piece with = taken_last(weight + o * ins + i, ins - i);
            UNROLLED for (int r = 0; r < rows; r++) sums[r][o] = added(sums[r][o], from[r], with);
        }
    }
    /* Through memory, or GCC keeps the sums there all the time. */
    float all[ROWS * OUTS][LANES];
    UNROLLED for (int r = 0; r < rows; r++)
        UNROLLED for (int o = 0; o < outs; o++) store(all[r * outs + o], sums[r][o]);
    for (int j = 0; j < rows * outs; j++) {
        int r = j / outs, o = j % outs;
        float made = sum(load(all[j])) + (bias ? number(bias[o]) : 0.0f);
        output[r * output_row + o] = narrowed(made);
    }
}

/* Each of `rows` rows (rows, ins) times `outs` rows of the matrix, ROWS at a time. */
INLINE void multiply_all(
    int64_t rows, int outs, const element *input, const element *weight, int64_t ins,
    const element *bias, element *output, int64_t output_row
) {
    for (; rows > 0; rows -= ROWS, input += ROWS * ins, output += ROWS * output_row)
        switch (rows) {
        case 1: multiply(1, outs, input, weight, ins, bias, output, output_row); break;
        case 2: multiply(2, outs, input, weight, ins, bias, output, output_row); break;
        case 3: multiply(3, outs, input, weight, ins, bias, output, output_row); break;
        default: multiply(ROWS, outs, input, weight, ins, bias, output, output_row);
        }
}

/* input (rows, ins) times weight (outs, ins), plus bias (outs,) where there is one, is output
   (rows, outs); all of them without gaps. */
void rag_windows_linear(
    const element *input, int64_t rows, const element *weight, int64_t outs, int64_t ins,
    const element *bias, element *output, int threads
) {
    const int64_t blocks = (outs + OUTS - 1) / OUTS, shares = (int64_t)threads * SHARES;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t share = 0; share < shares; share++) {
        int64_t end = blocks * (share + 1) / shares * OUTS;
        for (int64_t o = blocks * share / shares * OUTS; o < end; o += OUTS) {
            const element *shift = bias ? bias + o : 0;
            if (o + OUTS <= outs)
                multiply_all(rows, OUTS, input, weight + o * ins, ins, shift, output + o, outs);
            else
                for (int64_t one = o; one < outs; one++)
                    multiply_all(
                        rows, 1, input, weight + one * ins, ins, bias ? bias + one : 0,
                        output + one, outs
                    );
        }
    }
}
