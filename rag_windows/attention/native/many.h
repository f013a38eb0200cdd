/* Many rows in bfloat16: a chunk of keys and values is laid out in pairs once for all rows, and the
   processor's products of pairs (AVX512_BF16) are summed in float. Bound by arithmetic. */

#if ELEMENT == 1 && defined(__AVX512BF16__)
#define MANY 1

/* 6 rows by 4 vectors of keys or values are 24 sums, in registers. */
#define MANY_ROWS 6
#define MANY_VECTORS 4
#define STRETCH (MANY_VECTORS * LANES)

/* A pair is two neighbours of a row: of dimensions for the products of query and key, of keys for
   those of weight and value. */
typedef struct {
    uint32_t query[TILE][DIM / 2];
    uint32_t key[DIM / 2][CHUNK];
    uint32_t value[CHUNK / 2][VALUE_DIM];
    uint32_t weights[MANY_ROWS][CHUNK / 2];
    float scores[MANY_ROWS][CHUNK];
} many_work;

INLINE __m512 added(__m512 sums, __m512i one, __m512i other) {
    return _mm512_dpbf16_ps(sums, (__m512bh)one, (__m512bh)other);
}

/* Products of some rows and STRETCH keys. */
INLINE void many_products(many_work *in, int row, int rows, int64_t key) {
    __m512 sums[MANY_ROWS][MANY_VECTORS];
    UNROLLED for (int r = 0; r < rows; r++)
        UNROLLED for (int v = 0; v < MANY_VECTORS; v++) sums[r][v] = _mm512_setzero_ps();
    for (int d = 0; d < DIM / 2; d++) {
        __m512i keys[MANY_VECTORS];
        UNROLLED for (int v = 0; v < MANY_VECTORS; v++)
            keys[v] = _mm512_loadu_si512(in->key[d] + key + v * LANES);
        UNROLLED for (int r = 0; r < rows; r++) {
            __m512i query = _mm512_set1_epi32((int)in->query[row + r][d]);
            UNROLLED for (int v = 0; v < MANY_VECTORS; v++)
                sums[r][v] = added(sums[r][v], keys[v], query);
        }
    }
    UNROLLED for (int r = 0; r < rows; r++)
        UNROLLED for (int v = 0; v < MANY_VECTORS; v++)
            _mm512_storeu_ps(in->scores[r] + key + v * LANES, sums[r][v]);
}

INLINE void many_mix(
    rows_state *at, many_work *in, int row, int rows, int64_t pairs, int d, int vectors
) {
    __m512 sums[MANY_ROWS][MANY_VECTORS];
    UNROLLED for (int r = 0; r < rows; r++)
        UNROLLED for (int v = 0; v < vectors; v++)
            sums[r][v] = _mm512_loadu_ps(at->output[row + r] + d + v * LANES);
    for (int64_t j = 0; j < pairs; j++) {
        __m512i values[MANY_VECTORS];
        UNROLLED for (int v = 0; v < vectors; v++)
            values[v] = _mm512_loadu_si512(in->value[j] + d + v * LANES);
        UNROLLED for (int r = 0; r < rows; r++) {
            __m512i weight = _mm512_set1_epi32((int)in->weights[r][j]);
            UNROLLED for (int v = 0; v < vectors; v++)
                sums[r][v] = added(sums[r][v], values[v], weight);
        }
    }
    UNROLLED for (int r = 0; r < rows; r++)
        UNROLLED for (int v = 0; v < vectors; v++)
            _mm512_storeu_ps(at->output[row + r] + d + v * LANES, sums[r][v]);
}

/* `rows` is constant where this is inlined. */
INLINE void many_block(rows_state *at, many_work *in, int row, int rows, const chunk *of) {
    const int64_t keys = seen(at, row + rows - 1, of), whole = padded(keys);
    if (keys == 0) return;
    for (int64_t key = 0; key < keys; key += STRETCH) many_products(in, row, rows, key);
    for (int r = 0; r < rows; r++) {
        weigh(at, row + r, in->scores[r], keys, of);
        for (int64_t j = 0; j < whole; j += 2 * LANES) {
            __m512 first = _mm512_loadu_ps(in->scores[r] + j);
            __m512 second = _mm512_loadu_ps(in->scores[r] + j + LANES);
            __m512i both = (__m512i)_mm512_cvtne2ps_pbh(second, first);
            _mm512_storeu_si512(in->weights[r] + j / 2, both);
        }
    }
    int d = 0;
    for (; d + STRETCH <= VALUE_DIM; d += STRETCH)
        many_mix(at, in, row, rows, whole / 2, d, MANY_VECTORS);
    for (; d < VALUE_DIM; d += LANES) many_mix(at, in, row, rows, whole / 2, d, 1);
}

static void many_query(many_work *in, int row, const element *query) {
    memcpy(in->query[row], query, sizeof in->query[row]);
}

/* Columns of sixteen vectors become vectors. */
INLINE void transpose(__m512i of[LANES]) {
    __m512i t[LANES];
    UNROLLED for (int i = 0; i < LANES; i += 2) {
        t[i] = _mm512_unpacklo_epi32(of[i], of[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(of[i], of[i + 1]);
    }
    UNROLLED for (int i = 0; i < LANES; i += 4)
        UNROLLED for (int c = 0; c < 2; c++) {
            of[i + 2 * c] = _mm512_unpacklo_epi64(t[i + c], t[i + c + 2]);
            of[i + 2 * c + 1] = _mm512_unpackhi_epi64(t[i + c], t[i + c + 2]);
        }
    /* Now of[4 * i + c] has, four numbers each, the columns c, c + 4, c + 8, c + 12. */
    UNROLLED for (int c = 0; c < 4; c++) {
        __m512i even = _mm512_shuffle_i32x4(of[c], of[c + 4], 0x88);
        __m512i even_too = _mm512_shuffle_i32x4(of[c + 8], of[c + 12], 0x88);
        __m512i odd = _mm512_shuffle_i32x4(of[c], of[c + 4], 0xdd);
        __m512i odd_too = _mm512_shuffle_i32x4(of[c + 8], of[c + 12], 0xdd);
        t[c] = _mm512_shuffle_i32x4(even, even_too, 0x88);
        t[c + 4] = _mm512_shuffle_i32x4(odd, odd_too, 0x88);
        t[c + 8] = _mm512_shuffle_i32x4(even, even_too, 0xdd);
        t[c + 12] = _mm512_shuffle_i32x4(odd, odd_too, 0xdd);
    }
    UNROLLED for (int i = 0; i < LANES; i++) of[i] = t[i];
}

#if PACKED
/* LANES numbers of 8 bits as they are read, rounded to bfloat16. */
INLINE __m256i unpacked(const stored *from, const float *peak) {
    return (__m256i)_mm512_cvtneps_pbh((__m512)(taken_from(from) * (load(peak) * OF_PEAK)));
}
#endif

/* Up to LANES pairs of a key, zeros behind them. */
INLINE __m512i pairs_of(const chunk *of, int64_t key, int d, int pairs) {
    const stored *from = of->key + key * of->key_step + 2 * d;
#if PACKED
    __m256i low = unpacked(from, of->key_peak + 2 * d);
    __m256i high = pairs == LANES ? unpacked(from + LANES, of->key_peak + 2 * d + LANES)
                                  : _mm256_setzero_si256();
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
#else
    return _mm512_maskz_loadu_epi32((__mmask16)((1u << pairs) - 1), from);
#endif
}

/* LANES numbers of a value. */
INLINE __m256i value_of(const chunk *of, int64_t key, int d) {
    const stored *from = of->value + key * of->value_step + d;
#if PACKED
    return unpacked(from, of->value_peak + d);
#else
    return _mm256_loadu_si256((const void *)from);
#endif
}

/* Keys and values of a chunk in pairs; zeros behind the last one, whose weight is 0. */
static void many_pack(many_work *in, const chunk *of) {
    for (int64_t j = 0; j < CHUNK && j < (of->keys + STRETCH - 1) / STRETCH * STRETCH; j += LANES)
        for (int d = 0; d < DIM / 2; d += LANES) {
            const int pairs = DIM / 2 - d < LANES ? DIM / 2 - d : LANES;
            __m512i block[LANES];
            UNROLLED for (int k = 0; k < LANES; k++)
                block[k] =
                    j + k < of->keys ? pairs_of(of, j + k, d, pairs) : _mm512_setzero_si512();
            transpose(block);
            for (int i = 0; i < pairs; i++) _mm512_storeu_si512(in->key[d + i] + j, block[i]);
        }
    const __m256i nothing = _mm256_setzero_si256();
    for (int64_t j = 0; j < padded(of->keys); j += 2)
        for (int d = 0; d < VALUE_DIM; d += LANES) {
            __m256i low = j < of->keys ? value_of(of, j, d) : nothing;
            __m256i high = j + 1 < of->keys ? value_of(of, j + 1, d) : nothing;
            __m512i shifted = _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16);
            _mm512_storeu_si512(
                in->value[j / 2] + d, _mm512_or_si512(_mm512_cvtepu16_epi32(low), shifted)
            );
        }
}

static void many_read(rows_state *at, many_work *in, int rows, const chunk *of) {
    many_pack(in, of);
    int row = 0;
    for (; row + MANY_ROWS <= rows; row += MANY_ROWS) many_block(at, in, row, MANY_ROWS, of);
    /* Each size is compiled by itself, which is what compiling takes its time for. */
    for (; row + 2 <= rows; row += 2) many_block(at, in, row, 2, of);
    if (row < rows) many_block(at, in, row, 1, of);
}

#else
#define MANY 0
typedef char many_work;
#endif
