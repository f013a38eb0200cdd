/* What a task knows of its rows: the online softmax (Milakov and Gimelshein, arXiv:1805.02867). */

/* Keys that are read at a time: scores of a few rows and the keys stay in a core's cache. */
#define CHUNK 256

/* Rows of one task; all it holds stays below a megabyte, which is on the thread's stack. */
#if DIM > 128 || VALUE_DIM > 128
#define TILE 64
#else
#define TILE 128
#endif

typedef struct {
    float scale, cap, temperature; /* cap 0 for none; the last one multiplies */
} setting;

typedef struct {
    const stored *key, *value;
    const stored *next_key, *next_value; /* of the chunk that is read behind this one, or NULL */
    const float *key_peak, *value_peak;  /* of their channels, where they are PACKED */
    int64_t key_step, value_step; /* in elements */
    int64_t keys, before;         /* 1 to CHUNK keys, and the item's in front of them */
    setting by;
} chunk;

typedef struct {
    float output[TILE][VALUE_DIM];
    float most[TILE];
    float total[TILE];
    float newest[TILE]; /* what the last chunk added to `total` */
    int64_t seen[TILE]; /* keys of the item, from its first; never fewer than the row before */
} rows_state;

/* Keys of a chunk that a row sees. */
INLINE int64_t seen(const rows_state *at, int row, const chunk *of) {
    int64_t left = at->seen[row] - of->before;
    return left < 0 ? 0 : left < of->keys ? left : of->keys;
}

/* Keys for which there are weights: whole vectors of pairs. */
INLINE int64_t padded(int64_t keys) { return (keys + 2 * LANES - 1) / (2 * LANES) * (2 * LANES); }

/* Products of one row and `of_all` keys become weights; the row's total grows by them, and what it
   has shrinks to its new peak. `scores` holds CHUNK numbers; what the row does not see weighs 0. */
INLINE void weigh(rows_state *at, int row, float *scores, int64_t of_all, const chunk *of) {
    const setting by = of->by;
    const int64_t keys = seen(at, row, of), whole = padded(of_all);
    float factor = by.scale * by.temperature;
    if (by.cap != 0.0f || factor <= 0.0f) {
        const float plain = by.cap == 0.0f ? factor : by.scale;
        for (int64_t j = 0; j < keys; j += LANES) {
            floats some = load(scores + j) * plain;
            if (by.cap != 0.0f) some = capped(some, by.cap) * by.temperature;
            store(scores + j, some);
        }
        factor = 1.0f;
    }
    for (int64_t j = keys; j < whole; j++) scores[j] = -INFINITY;
    floats peaks = (floats){} - INFINITY;
    for (int64_t j = 0; j < whole; j += LANES) peaks = larger(load(scores + j), peaks);
    peaks *= factor;
    float most = at->most[row], total = at->total[row];
    for (int i = 0; i < LANES; i++) most = peaks[i] > most ? peaks[i] : most;
    float rescale = total == 0.0f ? 0.0f : expf(at->most[row] - most);
    /* Products of -inf weigh nothing, also where there are no others. */
    const float peak = most == -INFINITY ? 0.0f : most;
    floats totals = {};
    for (int64_t j = 0; j < whole; j += LANES) {
        floats some = exponential(load(scores + j) * factor - peak);
        store(scores + j, some);
        totals += some;
    }
    at->most[row] = most;
    at->newest[row] = sum(totals);
    at->total[row] = total * rescale + at->newest[row];
    if (rescale == 1.0f) return;
    for (int d = 0; d < VALUE_DIM; d += LANES)
        store(at->output[row] + d, load(at->output[row] + d) * rescale);
}
