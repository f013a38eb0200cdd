/* Attention of some rows over many keys, with its log-sum-exp, on a CPU.

   Made for ELEMENT, DIM (head dim), VALUE_DIM, multiples of 16, and PACKED, by `kernel.py`. A task is a
   tile of one item's rows, one kv head, and one share of the item's chunks, so that keys and values
   come from memory once for all rows of a tile. Shares are merged by log-sum-exp behind a barrier. */

#include "vectors.h"
#include "rows.h"
#include "few.h"
#include "many.h"

/* From this many rows on, laying keys out in pairs is paid back. */
#define PAIRS_FROM 12

/* Columns of `items` and `segments`, as `kernel.py` writes them; strides count elements. */
enum { SEGMENT, SEGMENTS, CHUNKS, FIRST, TOKENS, CAUSAL, CHUNK_ROWS, PART_ROWS, ITEM_FIELDS };
enum {
    KEY, VALUE, KEYS, KEY_HEAD, KEY_TOKEN, VALUE_HEAD, VALUE_TOKEN,
    KEY_PEAK, VALUE_PEAK, /* (kv heads, DIM or VALUE_DIM) floats; 0 where nothing is PACKED */
    SEGMENT_FIELDS
};

/* Whether many rows are served well, too. */
const int rag_windows_many = MANY;

typedef struct {
    rows_state rows;
    union {
        few_work few;
        many_work many;
    };
} state;

static void read_chunk(state *at, int rows, const chunk *of) {
#if MANY
    if (rows >= PAIRS_FROM) {
        many_read(&at->rows, &at->many, rows, of);
        return;
    }
#endif
    few_read(&at->rows, &at->few, rows, of);
}

static void take_query(state *at, int row, int rows, const element *query) {
#if MANY
    if (rows >= PAIRS_FROM) {
        many_query(&at->many, row, query);
        return;
    }
#endif
    (void)rows;
    few_query(&at->few, row, query);
}

static int64_t chunks_of(const int64_t *segment) { return (segment[KEYS] + CHUNK - 1) / CHUNK; }

/* Where the log-sum-exp of each chunk goes: `row` is that of the item's first chunk and the tile's
   first row, counted over tokens and the heads of one kv head, `step` leads to the next chunk. */
typedef struct {
    float *lse; /* NULL if nobody asks */
    int64_t row, step, heads, head, groups;
} chunk_lse;

static void note_chunk(const state *at, int rows, int64_t number, const chunk_lse *of) {
    for (int r = 0; r < rows; r++) {
        int64_t row = of->row + r;
        float *to = of->lse + number * of->step;
        to[row / of->groups * of->heads + of->head * of->groups + row % of->groups] =
            at->rows.newest[r] == 0.0f ? -INFINITY : at->rows.most[r] + logf(at->rows.newest[r]);
    }
}

/* Where the keys (KEY) or values (VALUE) of a kv head begin. */
INLINE const stored *first_of(const int64_t *segment, int which, int64_t head) {
    return (const stored *)segment[which] + head * segment[which == KEY ? KEY_HEAD : VALUE_HEAD];
}

/* The peaks of a kv head's keys become part of the queries, where few rows read them. */
static void take_peaks(state *at, int rows, const float *of_keys) {
#if PACKED
#if MANY
    if (rows >= PAIRS_FROM) return;
#endif
    few_scale(&at->few, rows, of_keys);
#else
    (void)at, (void)rows, (void)of_keys;
#endif
}

/* The chunks `begin` to `end` of some segments, counted through all of them. */
static void read_chunks(
    state *at, int rows, const int64_t (*segments)[SEGMENT_FIELDS], int64_t head,
    int64_t begin, int64_t end, setting by, const chunk_lse *of_chunks
) {
    const int64_t most = at->rows.seen[rows - 1];
    for (int64_t first = 0, before = 0; first < end && before < most; segments++) {
        const int64_t *in = *segments;
        int64_t chunks = chunks_of(in);
        int64_t from = begin > first ? begin - first : 0;
        int64_t to = end - first < chunks ? end - first : chunks;
        const float *of_keys = (const float *)in[KEY_PEAK] + head * DIM;
        const float *of_values = (const float *)in[VALUE_PEAK] + head * VALUE_DIM;
        if (from < to) take_peaks(at, rows, of_keys);
        for (int64_t c = from; c < to && before + c * CHUNK < most; c++) {
            int64_t key = c * CHUNK, keys = in[KEYS] - key < CHUNK ? in[KEYS] - key : CHUNK;
            const stored *keys_at = first_of(in, KEY, head) + key * in[KEY_TOKEN];
            const stored *values_at = first_of(in, VALUE, head) + key * in[VALUE_TOKEN];
            const stored *next_key = NULL, *next_value = NULL;
            if (c + 1 < to) {
                next_key = keys_at + CHUNK * in[KEY_TOKEN];
                next_value = values_at + CHUNK * in[VALUE_TOKEN];
            } else if (first + chunks < end) {
                next_key = first_of(segments[1], KEY, head);
                next_value = first_of(segments[1], VALUE, head);
            }
            chunk of = {
                keys_at, values_at, next_key, next_value, of_keys, of_values,
                in[KEY_TOKEN], in[VALUE_TOKEN], keys, before + key, by,
            };
            for (int r = 0; r < rows; r++) at->rows.newest[r] = 0.0f;
            read_chunk(at, rows, &of);
            if (of_chunks->lse) note_chunk(at, rows, first + c, of_chunks);
        }
        first += chunks;
        before += in[KEYS];
    }
}

/* Shares of one row, each its output, peak and total, become its output and lse. */
static void finish(const float *shares, int64_t splits, float *output, float *lse) {
    const int64_t size = VALUE_DIM + 2;
    float most = -INFINITY, total = 0.0f, mixed[VALUE_DIM] = {0};
    for (int64_t s = 0; s < splits; s++) most = fmaxf(most, shares[s * size + VALUE_DIM]);
    for (int64_t s = 0; s < splits; s++) {
        const float *share = shares + s * size;
        if (share[VALUE_DIM + 1] == 0.0f) continue;
        float weight = expf(share[VALUE_DIM] - most);
        total += weight * share[VALUE_DIM + 1];
        for (int d = 0; d < VALUE_DIM; d++) mixed[d] += weight * share[d];
    }
    const float weight = total == 0.0f ? 0.0f : 1.0f / total;
    for (int d = 0; d < VALUE_DIM; d++) output[d] = mixed[d] * weight;
    *lse = most + logf(total);
}

/* The log-sum-exps of an item's chunks, (chunks, numbers) each, become those of its segments. */
static void join_chunks(
    const float *chunks, float *parts, const int64_t (*segments)[SEGMENT_FIELDS], int64_t n_segments,
    int64_t numbers
) {
    for (int64_t s = 0; s < n_segments; s++, parts += numbers) {
        const int64_t n = chunks_of(segments[s]);
        for (int64_t i = 0; i < numbers; i++) {
            float most = -INFINITY, total = 0.0f;
            for (int64_t c = 0; c < n; c++) most = fmaxf(most, chunks[c * numbers + i]);
            for (int64_t c = 0; c < n && most != -INFINITY; c++)
                total += expf(chunks[c * numbers + i] - most);
            parts[i] = most + logf(total);
        }
        chunks += n * numbers;
    }
}

static int64_t tiles_of(const int64_t *item, int64_t groups) {
    return (item[TOKENS] * groups + TILE - 1) / TILE;
}

/* Items (items, ITEM_FIELDS) and settings (items): item i asks for the tokens order[FIRST] .. of
   the query (tokens, heads, DIM) over SEGMENTS of the segments (segments, SEGMENT_FIELDS), which
   have CHUNKS chunks; where CAUSAL is set, the j-th of its tokens sees only the first j + 1 keys.
   Results (their number, heads, VALUE_DIM) and lse (their number, heads) stand in the order of
   `order`. `work` holds results * heads * splits * (VALUE_DIM + 2) floats. Unless they are
   NULL, `of_chunks` and `of_parts`, which hold -inf, take the log-sum-exps of an item's chunks and
   segments by themselves, (chunks or segments, TOKENS, heads), from the rows CHUNK_ROWS and
   PART_ROWS of so many heads on. */
void rag_windows_attend(
    const int64_t (*items)[ITEM_FIELDS], const setting *settings, int64_t n_items,
    const int64_t (*segments)[SEGMENT_FIELDS], const int64_t *order, int64_t results,
    const element *query, int64_t query_token, int64_t query_head, int64_t kv_heads, int64_t groups,
    float *output, float *lse, float *work, int64_t splits, float *of_chunks, float *of_parts,
    int threads
) {
    const int64_t heads = kv_heads * groups, size = VALUE_DIM + 2;
    int64_t tiles = 0;
    for (int64_t i = 0; i < n_items; i++) tiles += tiles_of(items[i], groups);
#pragma omp parallel num_threads(threads)
    {
        state at __attribute__((aligned(64)));
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < tiles * kv_heads * splits; task++) {
            int64_t split = task % splits, head = task / splits % kv_heads;
            int64_t tile = task / splits / kv_heads, i = 0;
            for (; tile >= tiles_of(items[i], groups); i++) tile -= tiles_of(items[i], groups);
            const int64_t *item = items[i];
            int64_t left = item[TOKENS] * groups - tile * TILE;
            int rows = left < TILE ? (int)left : TILE;
            int64_t share = (item[CHUNKS] + splits - 1) / splits;
            int64_t begin = split * share, end = begin + share;
            if (end > item[CHUNKS]) end = item[CHUNKS];
            memset(at.rows.output, 0, sizeof at.rows.output[0] * rows);
            for (int r = 0; r < rows; r++) {
                int64_t row = tile * TILE + r, token = order[item[FIRST] + row / groups];
                int64_t whose = head * groups + row % groups;
                take_query(&at, r, rows, query + token * query_token + whose * query_head);
                at.rows.most[r] = -INFINITY;
                at.rows.total[r] = 0.0f;
                at.rows.seen[r] = item[CAUSAL] ? row / groups + 1 : INT64_MAX;
            }
            const chunk_lse noted = {
                of_chunks ? of_chunks + item[CHUNK_ROWS] * heads : NULL,
                tile * TILE, item[TOKENS] * heads, heads, head, groups,
            };
            if (begin < end)
                read_chunks(
                    &at, rows, segments + item[SEGMENT], head, begin, end, settings[i], &noted
                );
            for (int r = 0; r < rows; r++) {
                int64_t row = tile * TILE + r, result = item[FIRST] + row / groups;
                int64_t whose = head * groups + row % groups;
                float *to = work + ((result * heads + whose) * splits + split) * size;
                memcpy(to, at.rows.output[r], sizeof at.rows.output[r]);
                to[VALUE_DIM] = at.rows.most[r];
                to[VALUE_DIM + 1] = at.rows.total[r];
            }
        }
#pragma omp for schedule(static)
        for (int64_t row = 0; row < results * heads; row++)
            finish(work + row * splits * size, splits, output + row * VALUE_DIM, lse + row);
        if (of_parts) {
#pragma omp for schedule(static)
            for (int64_t i = 0; i < n_items; i++)
                join_chunks(
                    of_chunks + items[i][CHUNK_ROWS] * heads, of_parts + items[i][PART_ROWS] * heads,
                    segments + items[i][SEGMENT], items[i][SEGMENTS], items[i][TOKENS] * heads
                );
        }
    }
}
