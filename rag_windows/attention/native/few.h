/* Few rows: keys are read as they stand, widened to float. Bound by memory. */

/* 4 rows by 4 vectors of values are 16 sums, in registers. */
#define FEW_ROWS 4
#define FEW_VECTORS 4

typedef struct {
    float query[TILE][DIM];
    float scores[FEW_ROWS][CHUNK];
} few_room;

INLINE void few_products(few_room *in, int row, int rows, int64_t keys, const chunk *of) {
    const element *key = of->key;
    for (int64_t j = 0; j < keys; j++, key += of->key_step) {
        floats sums[FEW_ROWS];
        UNROLLED for (int r = 0; r < rows; r++) sums[r] = (floats){};
        UNROLLED for (int d = 0; d < DIM; d += LANES) {
            floats wide = widened(key + d);
            UNROLLED for (int r = 0; r < rows; r++) sums[r] += wide * load(in->query[row + r] + d);
        }
        UNROLLED for (int r = 0; r < rows; r++) in->scores[r][j] = sum(sums[r]);
    }
}

INLINE void few_mix(
    rows_state *at, few_room *in, int row, int rows, int64_t keys, const chunk *of, int d, int vectors
) {
    const element *value = of->value + d;
    floats sums[FEW_ROWS][FEW_VECTORS];
    UNROLLED for (int r = 0; r < rows; r++)
        UNROLLED for (int v = 0; v < vectors; v++)
            sums[r][v] = load(at->output[row + r] + d + v * LANES);
    for (int64_t j = 0; j < keys; j++, value += of->value_step)
        UNROLLED for (int v = 0; v < vectors; v++) {
            floats wide = widened(value + v * LANES);
            UNROLLED for (int r = 0; r < rows; r++) sums[r][v] += wide * in->scores[r][j];
        }
    UNROLLED for (int r = 0; r < rows; r++)
        UNROLLED for (int v = 0; v < vectors; v++)
            store(at->output[row + r] + d + v * LANES, sums[r][v]);
}

/* `rows` is constant where this is inlined. */
INLINE void few_block(rows_state *at, few_room *in, int row, int rows, const chunk *of) {
    const int64_t keys = seen(at, row + rows - 1, of);
    if (keys == 0) return;
    few_products(in, row, rows, keys, of);
    for (int r = 0; r < rows; r++) weigh(at, row + r, in->scores[r], keys, of);
    int d = 0;
    for (; d + FEW_VECTORS * LANES <= VALUE_DIM; d += FEW_VECTORS * LANES)
        few_mix(at, in, row, rows, keys, of, d, FEW_VECTORS);
    for (; d < VALUE_DIM; d += LANES) few_mix(at, in, row, rows, keys, of, d, 1);
}

static void few_query(few_room *in, int row, const element *query) {
    for (int d = 0; d < DIM; d += LANES) store(in->query[row] + d, widened(query + d));
}

static void few_read(rows_state *at, few_room *in, int rows, const chunk *of) {
    int row = 0;
    for (; row + FEW_ROWS <= rows; row += FEW_ROWS) few_block(at, in, row, FEW_ROWS, of);
    for (; row + 2 <= rows; row += 2) few_block(at, in, row, 2, of);
    if (row < rows) few_block(at, in, row, 1, of);
}
