/* Products of rows with the matrix of their type, for penstock.relational.
 *
 * Rows lie type by type; where a row comes from is an index list, so that nothing is gathered but a block that stays in
 * cache. The products themselves are the BLAS's that PyTorch brings along, called through a pointer. Blocks are shared
 * out among OpenMP's threads; every result is written by one of them, in a fixed order: equal to the bit from run to run.
 */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK_ROWS = 256, SPLIT_ROWS = 2048, AHEAD = 8, MOST_BYTES_AHEAD = 512 };

typedef void (*Gemm)(const char *, const char *, const int *, const int *, const int *, const void *, const void *,
                     const int *, const void *, const int *, const void *, void *, const int *);

typedef struct {
    const char *rows;       /* [.., heads or 1, width] */
    const int32_t *index;   /* row of each of ours, or NULL: the same */
    int64_t row_stride;     /* elements from row to row */
    int64_t head_stride;    /* elements from head to head; 0: one for all */
} Rows;

typedef struct {
    int64_t num_types, num_heads, inner, outer, element_bytes;
    const int64_t *segments; /* [num_types + 1] */
    Gemm gemm;
} Typed;

/* Rows that are looked up lie anywhere, and the processor cannot guess which are next. */
static void fetch_ahead(const char *row, int64_t bytes) {
    for (int64_t at = 0; at < bytes && at < MOST_BYTES_AHEAD; at += 64)
        __builtin_prefetch(row + at);
}

static void gather(char *block, const Rows *rows, int64_t head, int64_t start, int64_t count, int64_t width,
                   int64_t element_bytes) {
    for (int64_t at = 0; at < count; at++) {
        const int64_t row = rows->index ? rows->index[start + at] : start + at;
        if (rows->index && at + AHEAD < count)
            fetch_ahead(rows->rows + (rows->index[start + at + AHEAD] * rows->row_stride + head * rows->head_stride) *
                                         element_bytes, width * element_bytes);
        memcpy(block + at * width * element_bytes,
               rows->rows + (row * rows->row_stride + head * rows->head_stride) * element_bytes,
               (size_t)(width * element_bytes));
    }
}

/* C row-major [m, n] = A [m, k] @ op(B) (+ C), by a column-major BLAS. */
static void product(const Typed *typed, int transpose_b, int64_t m, int64_t n, int64_t k, const char *a, int64_t lda,
                    const char *b, int64_t ldb, char *c, int64_t ldc) {
    const int mi = (int)n, ni = (int)m, ki = (int)k, la = (int)ldb, lb = (int)lda, lc = (int)ldc;
    const float one_f = 1, zero_f = 0;
    const double one_d = 1, zero_d = 0;
    const int is_double = typed->element_bytes == 8;
    typed->gemm(transpose_b ? "T" : "N", "N", &mi, &ni, &ki, is_double ? (const void *)&one_d : &one_f, b, &la, a, &lb,
                is_double ? (const void *)&zero_d : &zero_f, c, &lc);
}

/* C [m, n] += A[rows, m]^T @ B[rows, n] */
static void add_outer(const Typed *typed, int64_t m, int64_t n, int64_t rows, const char *a, const char *b, char *c) {
    const int mi = (int)n, ni = (int)m, ki = (int)rows;
    const float one_f = 1;
    const double one_d = 1;
    const void *one = typed->element_bytes == 8 ? (const void *)&one_d : &one_f;
    typed->gemm("N", "T", &mi, &ni, &ki, one, b, &mi, a, &ni, one, c, &mi);
}

static int64_t blocks_before(const Typed *typed, int64_t size, int64_t *first) {
    int64_t total = 0;
    for (int64_t type = 0; type < typed->num_types; type++) {
        first[type] = total;
        total += (typed->segments[type + 1] - typed->segments[type] + size - 1) / size;
    }
    first[typed->num_types] = total;
    return total;
}

static int64_t type_of(const int64_t *first, int64_t num_types, int64_t block) {
    int64_t low = 0, high = num_types - 1; /* the last type with first[type] <= block */
    while (low < high) {
        const int64_t middle = (low + high + 1) / 2;
        if (first[middle] <= block)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* results [rows, heads, outer] = left [rows, heads, inner] @ matrices [types, heads, inner, outer] (or transposed).
 * places: where each of our rows is in results, or NULL: the same. */
int penstock_typed_matmul(const Typed *typed, const Rows *left, const char *matrices, int64_t matrix_head_stride,
                          int64_t matrix_stride, int transposed, const int32_t *places, char *results,
                          int64_t num_threads) {
    int64_t *first = malloc((size_t)(typed->num_types + 1) * sizeof *first);
    if (!first)
        return 1;
    const int64_t num_blocks = blocks_before(typed, BLOCK_ROWS, first), size = typed->element_bytes;
    const int64_t row_bytes = typed->num_heads * typed->outer * size;
    int failed = 0;
#pragma omp parallel num_threads((int)num_threads) if (num_blocks > 1)
    {
        char *block = malloc((size_t)(BLOCK_ROWS * typed->inner * size));
        char *made = places ? malloc((size_t)(BLOCK_ROWS * row_bytes)) : NULL;
        const int lacks = !block || (places && !made);
        if (lacks) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic, 4)
        for (int64_t at = 0; at < num_blocks; at++) {
            if (lacks)
                continue;
            const int64_t type = type_of(first, typed->num_types, at);
            const int64_t start = typed->segments[type] + (at - first[type]) * BLOCK_ROWS;
            const int64_t left_over = typed->segments[type + 1] - start;
            const int64_t count = left_over < BLOCK_ROWS ? left_over : BLOCK_ROWS;
            char *const to = places ? made : results + start * row_bytes;
            for (int64_t head = 0; head < typed->num_heads; head++) {
                const char *matrix = matrices + (type * matrix_stride + head * matrix_head_stride) * size;
                const char *rows = block;
                int64_t stride = typed->inner;
                if (left->index) {
                    if (head == 0 || left->head_stride)
                        gather(block, left, head, start, count, typed->inner, size);
                } else {
                    rows = left->rows + (start * left->row_stride + head * left->head_stride) * size;
                    stride = left->row_stride;
                }
                product(typed, transposed, count, typed->outer, typed->inner, rows, stride, matrix,
                        transposed ? typed->inner : typed->outer, to + head * typed->outer * size,
                        typed->num_heads * typed->outer);
            }
            for (int64_t row = 0; places && row < count; row++)
                memcpy(results + places[start + row] * row_bytes, made + row * row_bytes, (size_t)row_bytes);
        }
        free(block);
        free(made);
    }
    free(first);
    return failed;
}

static int64_t first_at_least(const int32_t *owners, int64_t low, int64_t high, int64_t owner) {
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (owners[middle] < owner)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static void add_rows(const Typed *typed, const char *block, const int32_t *owners, int64_t count, char *results) {
    const int64_t width = typed->num_heads * typed->outer;
    for (int64_t at = 0; at < count; at++) {
        if (at + AHEAD < count)
            fetch_ahead(results + owners[at + AHEAD] * width * typed->element_bytes, width * typed->element_bytes);
        if (typed->element_bytes == 8) {
            double *to = (double *)results + owners[at] * width;
            const double *from = (const double *)block + at * width;
            for (int64_t j = 0; j < width; j++)
                to[j] += from[j];
        } else {
            float *to = (float *)results + owners[at] * width;
            const float *from = (const float *)block + at * width;
            for (int64_t j = 0; j < width; j++)
                to[j] += from[j];
        }
    }
}

/* Writes the rows from begin to end one after the other. */
typedef int (*Producer)(const void *context, int64_t begin, int64_t end, void *rows);

/* results [owners, heads, outer] += the products of each one's rows, in order of type. Inside of a type owners ascend.
 * Thread t takes the owners from borders[t] to borders[t + 1], so no result is written by two. */
int penstock_blocked_sum(const Typed *typed, const Rows *left, Producer producer, const void *context,
                         const char *matrices, int64_t matrix_head_stride, int64_t matrix_stride, int transposed,
                         const int32_t *owners, const int64_t *borders, char *results, int64_t num_threads) {
    const int64_t size = typed->element_bytes, heads = typed->num_heads, inner = typed->inner, outer = typed->outer;
    int failed = 0;
#pragma omp parallel for num_threads((int)num_threads) schedule(static, 1) if (num_threads > 1)
    for (int64_t thread = 0; thread < num_threads; thread++) {
        char *block = malloc((size_t)(BLOCK_ROWS * inner * heads * size));
        char *made = malloc((size_t)(BLOCK_ROWS * outer * heads * size));
        for (int64_t type = 0; block && made && type < typed->num_types; type++) {
            const int64_t *segment = typed->segments + type;
            int64_t start = first_at_least(owners, segment[0], segment[1], borders[thread]);
            const int64_t end = first_at_least(owners, start, segment[1], borders[thread + 1]);
            for (; start < end; start += BLOCK_ROWS) {
                const int64_t count = end - start < BLOCK_ROWS ? end - start : BLOCK_ROWS;
                if (producer)
                    producer(context, start, start + count, block);
                for (int64_t head = 0; head < heads; head++) {
                    const char *matrix = matrices + (type * matrix_stride + head * matrix_head_stride) * size;
                    const char *rows = block;
                    int64_t stride = inner;
                    if (producer) {
                        rows = block + head * left->head_stride * size;
                        stride = left->row_stride;
                    } else if (left->index) {
                        if (head == 0 || left->head_stride)
                            gather(block, left, head, start, count, inner, size);
                    } else {
                        rows = left->rows + (start * left->row_stride + head * left->head_stride) * size;
                        stride = left->row_stride;
                    }
                    product(typed, transposed, count, outer, inner, rows, stride, matrix, transposed ? inner : outer,
                            made + head * outer * size, heads * outer);
                }
                add_rows(typed, made, owners + start, count, results);
            }
        }
        if (!block || !made) {
#pragma omp atomic write
            failed = 1;
        }
        free(block);
        free(made);
    }
    return failed;
}

/* results [types, heads, inner, outer] = per type the sum over its rows of left outer right */
int penstock_typed_outer(const Typed *typed, const Rows *left, const Rows *right, char *results, int64_t num_threads) {
    const int64_t size = typed->element_bytes, heads = typed->num_heads, matrix = typed->inner * typed->outer;
    int64_t *first = malloc((size_t)(typed->num_types + 1) * sizeof *first);
    if (!first)
        return 1;
    const int64_t num_splits = blocks_before(typed, SPLIT_ROWS, first);
    char *parts = calloc((size_t)(num_splits ? num_splits : 1), (size_t)(heads * matrix * size));
    if (!parts) {
        free(first);
        return 1;
    }
    int failed = 0;
#pragma omp parallel num_threads((int)num_threads) if (num_splits > 1)
    {
        char *a = malloc((size_t)(BLOCK_ROWS * typed->inner * size)), *b = malloc((size_t)(BLOCK_ROWS * typed->outer * size));
        if (!a || !b) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t at = 0; at < num_splits; at++) {
            if (!a || !b)
                continue;
            const int64_t type = type_of(first, typed->num_types, at);
            int64_t start = typed->segments[type] + (at - first[type]) * SPLIT_ROWS;
            const int64_t limit = start + SPLIT_ROWS, border = typed->segments[type + 1];
            const int64_t end = limit < border ? limit : border;
            for (; start < end; start += BLOCK_ROWS) {
                const int64_t count = end - start < BLOCK_ROWS ? end - start : BLOCK_ROWS;
                for (int64_t head = 0; head < heads; head++) {
                    if (head == 0 || left->head_stride)
                        gather(a, left, head, start, count, typed->inner, size);
                    if (head == 0 || right->head_stride)
                        gather(b, right, head, start, count, typed->outer, size);
                    add_outer(typed, typed->inner, typed->outer, count, a, b, parts + (at * heads + head) * matrix * size);
                }
            }
        }
        free(a);
        free(b);
    }
    for (int64_t type = 0; type < typed->num_types; type++) {
        const int64_t begin = first[type], count = first[type + 1] - begin;
        char *result = results + type * heads * matrix * size;
        if (!count) {
            memset(result, 0, (size_t)(heads * matrix * size));
            continue;
        }
        memcpy(result, parts + begin * heads * matrix * size, (size_t)(heads * matrix * size));
        for (int64_t split = 1; split < count; split++) {
            const char *part = parts + (begin + split) * heads * matrix * size;
            for (int64_t at = 0; at < heads * matrix; at++) {
                if (size == 8)
                    ((double *)result)[at] += ((const double *)part)[at];
                else
                    ((float *)result)[at] += ((const float *)part)[at];
            }
        }
    }
    free(parts);
    free(first);
    return failed;
}

/* Counting sort: positions[rank] = place of an element, in order of key, equal keys in order of place.
 * starts [num_keys + 1] gets where each key's begin. */
int penstock_counting_sort(const int64_t *keys, int64_t size, int64_t num_keys, int32_t *positions, int64_t *starts) {
    int64_t *next = calloc((size_t)(num_keys + 1), sizeof *next);
    if (!next)
        return 1;
    for (int64_t at = 0; at < size; at++)
        next[keys[at] + 1]++;
    for (int64_t key = 0; key < num_keys; key++)
        next[key + 1] += next[key];
    memcpy(starts, next, (size_t)(num_keys + 1) * sizeof *next);
    for (int64_t at = 0; at < size; at++)
        positions[next[keys[at]]++] = (int32_t)at;
    free(next);
    return 0;
}

/* Pairs of a node and a type that occur among edges, in order of type, then node, and each edge's pair: two counting
 * sorts. Returns how many there are, -1 without memory. All arrays have room for size numbers. */
int64_t penstock_pairs(const int64_t *nodes, const int64_t *types, int64_t size, int64_t num_nodes, int64_t num_types,
                       int64_t *pair_nodes, int64_t *pair_types, int64_t *edge_pairs) {
    const int64_t largest = num_nodes > num_types ? num_nodes : num_types;
    int64_t *starts = malloc((size_t)(largest + 1) * sizeof *starts);
    int64_t *sorted = malloc((size_t)(size ? size : 1) * sizeof *sorted);
    int32_t *by_node = malloc((size_t)(size ? size : 1) * sizeof *by_node);
    int32_t *by_type = malloc((size_t)(size ? size : 1) * sizeof *by_type);
    int64_t count = -1;
    if (starts && sorted && by_node && by_type && !penstock_counting_sort(nodes, size, num_nodes, by_node, starts)) {
        for (int64_t at = 0; at < size; at++)
            sorted[at] = types[by_node[at]];
        if (!penstock_counting_sort(sorted, size, num_types, by_type, starts)) {
            count = 0;
            for (int64_t at = 0; at < size; at++) {
                const int64_t edge = by_node[by_type[at]];
                if (!count || pair_nodes[count - 1] != nodes[edge] || pair_types[count - 1] != types[edge]) {
                    pair_nodes[count] = nodes[edge];
                    pair_types[count] = types[edge];
                    count++;
                }
                edge_pairs[edge] = count - 1;
            }
        }
    }
    free(starts);
    free(sorted);
    free(by_node);
    free(by_type);
    return count;
}
