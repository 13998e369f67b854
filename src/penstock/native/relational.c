/* Products of rows with the matrix of their type, for penstock.relational.
 *
 * Rows lie type by type; where a row comes from is an index list, so that nothing is gathered but a block that stays in
 * cache. The products themselves are the BLAS's that PyTorch brings along, called through a pointer. Blocks are shared
 * out among OpenMP's threads; every result is written by one of them, in a fixed order: equal to the bit from run to run.
 *
 * Products are always called inside of an active parallel region if there are several threads, even for a few rows.
 * Outside of one, MKL takes threads of its own for each small product, 0.1 ms a call.
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

typedef struct {
    const char *matrices; /* [types, heads or 1, inner, outer] */
    int64_t head_stride, stride, transposed;
} Matrices;

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

/* to [rows, heads, columns], of a head = rows [rows, inner] @ some columns of the matrix of a type, from the first on,
 * by a column-major BLAS. */
static void multiply_columns(const Typed *typed, const Matrices *matrices, int64_t type, int64_t head, int64_t count,
                             const char *rows, int64_t stride, char *to, int64_t first, int64_t columns) {
    const int64_t size = typed->element_bytes, inner = typed->inner, outer = typed->outer;
    const char *matrix = matrices->matrices + (type * matrices->stride + head * matrices->head_stride) * size;
    matrix += (matrices->transposed ? first * inner : first) * size;
    const int m = (int)columns, n = (int)count, k = (int)inner, row = (int)stride;
    const int width = (int)(matrices->transposed ? inner : outer), result = (int)(typed->num_heads * columns);
    const float one_f = 1, zero_f = 0;
    const double one_d = 1, zero_d = 0;
    const int is_double = size == 8;
    typed->gemm(matrices->transposed ? "T" : "N", "N", &m, &n, &k, is_double ? (const void *)&one_d : &one_f, matrix,
                &width, rows, &row, is_double ? (const void *)&zero_d : &zero_f, to + head * columns * size, &result);
}

static void multiply(const Typed *typed, const Matrices *matrices, int64_t type, int64_t head, int64_t count,
                     const char *rows, int64_t stride, char *to) {
    multiply_columns(typed, matrices, type, head, count, rows, stride, to, 0, typed->outer);
}

/* C [m, n] += A[rows, m]^T @ B[rows, n] */
static void add_outer(const Typed *typed, int64_t m, int64_t n, int64_t rows, const char *a, int64_t lda, const char *b,
                      int64_t ldb, char *c) {
    const int mi = (int)n, ni = (int)m, ki = (int)rows, la = (int)lda, lb = (int)ldb;
    const float one_f = 1;
    const double one_d = 1;
    const void *one = typed->element_bytes == 8 ? (const void *)&one_d : &one_f;
    typed->gemm("N", "T", &mi, &ni, &ki, one, b, &lb, a, &la, one, c, &mi);
}

/* Rows from start of a head: where they lie if that is one after the other, or gathered into block. */
static const char *rows_of(const Rows *rows, int64_t head, int64_t start, int64_t count, int64_t width,
                           int64_t element_bytes, char *block, int64_t *stride) {
    if (!rows->index) {
        *stride = rows->row_stride;
        return rows->rows + (start * rows->row_stride + head * rows->head_stride) * element_bytes;
    }
    if (head == 0 || rows->head_stride)
        gather(block, rows, head, start, count, width, element_bytes);
    *stride = width;
    return block;
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
int penstock_typed_matmul(const Typed *typed, const Rows *left, const Matrices *matrices, const int32_t *places,
                          char *results, int64_t num_threads) {
    int64_t *first = malloc((size_t)(typed->num_types + 1) * sizeof *first);
    if (!first)
        return 1;
    const int64_t num_blocks = blocks_before(typed, BLOCK_ROWS, first), size = typed->element_bytes;
    const int64_t row_bytes = typed->num_heads * typed->outer * size;
    int failed = 0;
#pragma omp parallel num_threads((int)num_threads) if (num_threads > 1)
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
                int64_t stride;
                const char *rows = rows_of(left, head, start, count, typed->inner, size, block, &stride);
                multiply(typed, matrices, type, head, count, rows, stride, to);
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

/* to += from */
static void add(char *to, const char *from, int64_t bytes, int64_t element_bytes) {
    const int64_t count = bytes / element_bytes;
    for (int64_t at = 0; at < count; at++) {
        if (element_bytes == 8)
            ((double *)to)[at] += ((const double *)from)[at];
        else
            ((float *)to)[at] += ((const float *)from)[at];
    }
}

static void add_rows(const Typed *typed, const char *block, const int32_t *owners, int64_t count, char *results) {
    const int64_t row_bytes = typed->num_heads * typed->outer * typed->element_bytes;
    for (int64_t at = 0; at < count; at++) {
        if (at + AHEAD < count)
            fetch_ahead(results + owners[at + AHEAD] * row_bytes, row_bytes);
        add(results + owners[at] * row_bytes, block + at * row_bytes, row_bytes, typed->element_bytes);
    }
}

/* Computes the rows from begin to end of each table, one after the other. */
typedef int (*Producer)(const void *context, int64_t begin, int64_t end, void *const *tables);

typedef struct {
    int64_t row_bytes;
    char *rows; /* all rows, or NULL: they are dropped after each block */
} Table;

typedef struct {
    Rows rows;
    int64_t table; /* number of the table that they are computed in, -1: rows that exist */
} Operand;

/* results [owners, heads, outer] += left @ right */
typedef struct {
    Typed typed;
    Operand left;
    Matrices right;
    char *results;
} Sum;

/* results [types, heads, inner, outer] = per type the sum of left outer right */
typedef struct {
    Typed typed;
    Operand left, right;
    char *results;
    char *parts; /* the same for each thread but the first */
} OuterSum;

typedef struct {
    int64_t num_types, element_bytes, num_threads, num_tables, num_sums, num_outers;
    const int64_t *segments, *borders;
    const int32_t *owners;
    Producer producer;
    const void *context;
    const Table *tables;
    const Sum *sums;
    const OuterSum *outers;
} Pass;

typedef struct {
    void **tables;   /* rows of the current block */
    char *a, *b, *made;
} Buffers;

static int64_t at_least(int64_t size, int64_t other) { return size > other ? size : other; }

static void drop(const Pass *pass, Buffers *buffers) {
    for (int64_t table = 0; buffers->tables && table < pass->num_tables; table++)
        if (!pass->tables[table].rows)
            free(buffers->tables[table]);
    free(buffers->tables);
    free(buffers->a);
    free(buffers->b);
    free(buffers->made);
}

static int allocate(const Pass *pass, Buffers *buffers) {
    int64_t a = 1, b = 1, made = 1;
    for (const Sum *sum = pass->sums; sum < pass->sums + pass->num_sums; sum++) {
        a = at_least(a, sum->typed.inner);
        made = at_least(made, sum->typed.outer * sum->typed.num_heads);
    }
    for (const OuterSum *outer = pass->outers; outer < pass->outers + pass->num_outers; outer++) {
        a = at_least(a, outer->typed.inner);
        b = at_least(b, outer->typed.outer);
    }
    const int64_t bytes = BLOCK_ROWS * pass->element_bytes;
    buffers->tables = calloc((size_t)(pass->num_tables + 1), sizeof *buffers->tables);
    buffers->a = malloc((size_t)(a * bytes));
    buffers->b = malloc((size_t)(b * bytes));
    buffers->made = malloc((size_t)(made * bytes));
    if (!buffers->tables || !buffers->a || !buffers->b || !buffers->made)
        return 0;
    for (int64_t table = 0; table < pass->num_tables; table++)
        if (!pass->tables[table].rows && !(buffers->tables[table] = malloc((size_t)(BLOCK_ROWS * pass->tables[table].row_bytes))))
            return 0;
    return 1;
}

static const char *operand_rows(const Operand *operand, const Buffers *buffers, int64_t head, int64_t start,
                                int64_t count, int64_t width, int64_t size, char *block, int64_t *stride) {
    if (operand->table < 0)
        return rows_of(&operand->rows, head, start, count, width, size, block, stride);
    *stride = operand->rows.row_stride;
    return (const char *)buffers->tables[operand->table] + head * operand->rows.head_stride * size;
}

static void add_products(const Pass *pass, const Sum *sum, const Buffers *buffers, int64_t type, int64_t start,
                         int64_t count) {
    const Typed *typed = &sum->typed;
    for (int64_t head = 0; head < typed->num_heads; head++) {
        int64_t stride;
        const char *rows = operand_rows(&sum->left, buffers, head, start, count, typed->inner, pass->element_bytes,
                                        buffers->a, &stride);
        multiply(typed, &sum->right, type, head, count, rows, stride, buffers->made);
    }
    add_rows(typed, buffers->made, pass->owners + start, count, sum->results);
}

static void add_outers(const Pass *pass, const OuterSum *outer, const Buffers *buffers, char *to, int64_t start,
                       int64_t count) {
    const Typed *typed = &outer->typed;
    const int64_t size = pass->element_bytes;
    for (int64_t head = 0; head < typed->num_heads; head++) {
        int64_t strides[2];
        const char *left =
            operand_rows(&outer->left, buffers, head, start, count, typed->inner, size, buffers->a, &strides[0]);
        const char *right =
            operand_rows(&outer->right, buffers, head, start, count, typed->outer, size, buffers->b, &strides[1]);
        add_outer(typed, typed->inner, typed->outer, count, left, strides[0], right, strides[1],
                  to + head * typed->inner * typed->outer * size);
    }
}

static int64_t matrix_bytes(const OuterSum *outer) {
    return outer->typed.num_heads * outer->typed.inner * outer->typed.outer * outer->typed.element_bytes;
}

/* Where a thread adds up the matrix of a type. */
static char *part_of(const Pass *pass, const OuterSum *outer, int64_t thread, int64_t type) {
    char *const all = thread ? outer->parts + (thread - 1) * pass->num_types * matrix_bytes(outer) : outer->results;
    return all + type * matrix_bytes(outer);
}

static void pass_rows(const Pass *pass, Buffers *buffers, int64_t thread, int64_t type, int64_t start, int64_t end) {
    for (; start < end; start += BLOCK_ROWS) {
        const int64_t count = end - start < BLOCK_ROWS ? end - start : BLOCK_ROWS;
        for (int64_t table = 0; table < pass->num_tables; table++)
            if (pass->tables[table].rows)
                buffers->tables[table] = pass->tables[table].rows + start * pass->tables[table].row_bytes;
        if (pass->producer)
            pass->producer(pass->context, start, start + count, buffers->tables);
        for (const Sum *sum = pass->sums; sum < pass->sums + pass->num_sums; sum++)
            add_products(pass, sum, buffers, type, start, count);
        for (const OuterSum *outer = pass->outers; outer < pass->outers + pass->num_outers; outer++)
            add_outers(pass, outer, buffers, part_of(pass, outer, thread, type), start, count);
    }
}

/* The sums of products and of outer products of the rows of pairs, in order of type. Inside of a type owners ascend.
 * Thread t takes the owners from borders[t] to borders[t + 1], so no result is written by two. */
int penstock_blocked_pass(const Pass *pass) {
    const int64_t num_threads = pass->num_threads;
    char *const has_part = calloc((size_t)(num_threads * pass->num_types + 1), 1);
    int failed = !has_part;
#pragma omp parallel for num_threads((int)num_threads) schedule(static, 1) if (num_threads > 1)
    for (int64_t thread = 0; thread < num_threads; thread++) {
        Buffers buffers = {0};
        const int lacks = !has_part || !allocate(pass, &buffers);
        for (int64_t type = 0; !lacks && type < pass->num_types; type++) {
            const int64_t *segment = pass->segments + type;
            const int64_t start = first_at_least(pass->owners, segment[0], segment[1], pass->borders[thread]);
            const int64_t end = first_at_least(pass->owners, start, segment[1], pass->borders[thread + 1]);
            has_part[thread * pass->num_types + type] = end > start;
            for (int64_t at = 0; at < pass->num_outers && (end > start || !thread); at++)
                memset(part_of(pass, &pass->outers[at], thread, type), 0, (size_t)matrix_bytes(&pass->outers[at]));
            pass_rows(pass, &buffers, thread, type, start, end);
        }
        if (lacks) {
#pragma omp atomic write
            failed = 1;
        }
        drop(pass, &buffers);
    }
    const int64_t num_parts = failed || num_threads == 1 ? 0 : pass->num_types * pass->num_outers;
#pragma omp parallel for num_threads((int)num_threads) schedule(static) if (num_parts > 64)
    for (int64_t at = 0; at < num_parts; at++) {
        const int64_t type = at % pass->num_types;
        const OuterSum *outer = &pass->outers[at / pass->num_types];
        for (int64_t thread = 1; thread < num_threads; thread++)
            if (has_part[thread * pass->num_types + type])
                add(part_of(pass, outer, 0, type), part_of(pass, outer, thread, type), matrix_bytes(outer),
                    pass->element_bytes);
    }
    free(has_part);
    return failed;
}

/* Adds the rows from begin to end, [rows, heads, columns], to results, columns from the first on. */
typedef int (*Consumer)(const void *context, int64_t begin, int64_t end, const void *rows, int64_t first);

/* The products of left and matrices, given to the consumer a block at a time. Each thread takes some columns. */
int penstock_scattered_product(const Typed *typed, const Rows *left, const Matrices *matrices, Consumer consumer,
                               const void *context, int64_t num_parts, int64_t num_threads) {
    const int64_t size = typed->element_bytes, columns = typed->outer / num_parts;
    int failed = 0;
#pragma omp parallel for num_threads((int)num_threads) schedule(static, 1) if (num_threads > 1)
    for (int64_t part = 0; part < num_parts; part++) {
        char *block = malloc((size_t)(BLOCK_ROWS * typed->inner * size));
        char *made = malloc((size_t)(BLOCK_ROWS * typed->num_heads * columns * size));
        for (int64_t type = 0; block && made && type < typed->num_types; type++) {
            for (int64_t start = typed->segments[type]; start < typed->segments[type + 1]; start += BLOCK_ROWS) {
                const int64_t left_over = typed->segments[type + 1] - start;
                const int64_t count = left_over < BLOCK_ROWS ? left_over : BLOCK_ROWS;
                for (int64_t head = 0; head < typed->num_heads; head++) {
                    int64_t stride;
                    const char *rows = rows_of(left, head, start, count, typed->inner, size, block, &stride);
                    multiply_columns(typed, matrices, type, head, count, rows, stride, made, part * columns, columns);
                }
                consumer(context, start, start + count, made, part * columns);
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
#pragma omp parallel num_threads((int)num_threads) if (num_threads > 1)
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
                    int64_t strides[2];
                    const char *from = rows_of(left, head, start, count, typed->inner, size, a, &strides[0]);
                    const char *to = rows_of(right, head, start, count, typed->outer, size, b, &strides[1]);
                    add_outer(typed, typed->inner, typed->outer, count, from, strides[0], to, strides[1],
                              parts + (at * heads + head) * matrix * size);
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
        for (int64_t split = 1; split < count; split++)
            add(result, parts + (begin + split) * heads * matrix * size, heads * matrix * size, size);
    }
    free(parts);
    free(first);
    return failed;
}
