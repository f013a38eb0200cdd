/* Few rows: keys are read as they stand. Bound by memory. */

/* 4 rows by 4 vectors of values are 16 sums, in registers. */
#define FEW_ROWS 4
#define FEW_VECTORS 4

/* Keys by rows whose products are summed together: where sixteen vectors fit into registers and
   `sums` is quick. */
#ifdef __AVX512F__
#define FEW_SUMS LANES
#else
#define FEW_SUMS FEW_ROWS
#endif

typedef struct {
    element raw[TILE][DIM];
    float query[TILE][DIM]; /* times the peaks of the keys that are read, where they are PACKED */
    float scores[FEW_ROWS][CHUNK];
} few_work;

/* Products of `rows` rows with `n` keys; both are constant where this is inlined. */
INLINE void few_scores(few_work *in, int row, int rows, int64_t first, int n, const chunk *of) {
    floats all[LANES];
    UNROLLED for (int i = 0; i < rows * n; i++) all[i] = (floats){};
    const stored *key = of->key + first * of->key_step;
    /* Meanwhile memory brings what is read next. */
    if (row == 0 && of->next_key)
        for (int k = 0; k < n; k++) fetch(of->next_key + (first + k) * of->key_step, DIM);
    int d = 0;
#if defined(PAIRED) && !PACKED
    for (; d + 2 * LANES <= DIM; d += 2 * LANES)
        UNROLLED for (int k = 0; k < n; k++)
            UNROLLED for (int r = 0; r < rows; r++)
                all[r * n + k] =
                    paired(all[r * n + k], key + k * of->key_step + d, in->raw[row + r] + d);
#endif
    for (; d < DIM; d += LANES)
        UNROLLED for (int k = 0; k < n; k++) {
            floats wide = taken_from(key + k * of->key_step + d);
            UNROLLED for (int r = 0; r < rows; r++)
                all[r * n + k] += wide * load(in->query[row + r] + d);
        }
    if (rows * n == LANES) {
        floats made = sums(all);
        UNROLLED for (int r = 0; r < rows; r++)
            memcpy(in->scores[r] + first, (const float *)&made + r * n, n * sizeof(float));
    } else
        UNROLLED for (int r = 0; r < rows; r++)
            UNROLLED for (int k = 0; k < n; k++) in->scores[r][first + k] = sum(all[r * n + k]);
}

/* The same for the keys from `first` on that are too few for that. */
static void few_scores_left(
    few_work *in, int row, int rows, int64_t first, int64_t keys, const chunk *of
) {
    for (int64_t j = first; j < keys; j++)
        for (int r = 0; r < rows; r++) {
            floats all = {};
            for (int d = 0; d < DIM; d += LANES)
                all += taken_from(of->key + j * of->key_step + d) * load(in->query[row + r] + d);
            in->scores[r][j] = sum(all);
        }
}

INLINE void few_products(few_work *in, int row, int rows, int64_t keys, const chunk *of) {
    const int n = FEW_SUMS > rows ? FEW_SUMS / rows : 1;
    int64_t j = 0;
    for (; j + n <= keys; j += n) few_scores(in, row, rows, j, n, of);
    few_scores_left(in, row, rows, j, keys, of);
}

INLINE void few_mix(
    rows_state *at, few_work *in, int row, int rows, int64_t keys, const chunk *of, int d, int vectors
) {
    const stored *value = of->value + d;
    floats sums[FEW_ROWS][FEW_VECTORS];
    UNROLLED for (int r = 0; r < rows; r++)
        UNROLLED for (int v = 0; v < vectors; v++)
#if PACKED
            sums[r][v] = (floats){};
#else
            sums[r][v] = load(at->output[row + r] + d + v * LANES);
#endif
    for (int64_t j = 0; j < keys; j++, value += of->value_step) {
        if (row == 0 && d == 0 && of->next_value)
            fetch(of->next_value + j * of->value_step, VALUE_DIM);
        UNROLLED for (int v = 0; v < vectors; v++) {
            floats wide = taken_from(value + v * LANES);
            UNROLLED for (int r = 0; r < rows; r++) sums[r][v] += wide * in->scores[r][j];
        }
    }
    UNROLLED for (int r = 0; r < rows; r++)
        UNROLLED for (int v = 0; v < vectors; v++) {
            float *to = at->output[row + r] + d + v * LANES;
#if PACKED
            sums[r][v] = load(to) + sums[r][v] * load(of->value_peak + d + v * LANES) * OF_PEAK;
#endif
            store(to, sums[r][v]);
        }
}

/* `rows` is constant where this is inlined. */
INLINE void few_block(rows_state *at, few_work *in, int row, int rows, const chunk *of) {
    const int64_t keys = seen(at, row + rows - 1, of);
    if (keys == 0) return;
    few_products(in, row, rows, keys, of);
    for (int r = 0; r < rows; r++) weigh(at, row + r, in->scores[r], keys, of);
    int d = 0;
    for (; d + FEW_VECTORS * LANES <= VALUE_DIM; d += FEW_VECTORS * LANES)
        few_mix(at, in, row, rows, keys, of, d, FEW_VECTORS);
    for (; d < VALUE_DIM; d += LANES) few_mix(at, in, row, rows, keys, of, d, 1);
}

static void few_query(few_work *in, int row, const element *query) {
    memcpy(in->raw[row], query, sizeof in->raw[row]);
    for (int d = 0; d < DIM; d += LANES) store(in->query[row] + d, widened(query + d));
}

#if PACKED
/* The queries times the peaks of keys that are read next. */
static void few_scale(few_work *in, int rows, const float *peak) {
    for (int r = 0; r < rows; r++)
        for (int d = 0; d < DIM; d += LANES)
            store(in->query[r] + d, widened(in->raw[r] + d) * load(peak + d) * OF_PEAK);
}
#endif

static void few_read(rows_state *at, few_work *in, int rows, const chunk *of) {
    int row = 0;
    for (; row + FEW_ROWS <= rows; row += FEW_ROWS) few_block(at, in, row, FEW_ROWS, of);
    for (; row + 2 <= rows; row += 2) few_block(at, in, row, 2, of);
    if (row < rows) few_block(at, in, row, 1, of);
}
