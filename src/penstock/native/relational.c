/* Products of rows with the matrix of their type, for penstock.relational.
 *
 * Rows lie type by type; where a row comes from is an index list, so that nothing is gathered but a block that stays in
 * cache. Blocks are shared out among OpenMP's threads; every result is written by one of them, in a fixed order: equal to
 * the bit from run to run.
 */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "products.h"

enum { BLOCK_ROWS = 256, SPLIT_ROWS = 2048, INNER_ROWS = 64, AHEAD = 32, LINES = 8, MOST_BYTES_AHEAD = 512 };

typedef struct {
    const char *rows;       /* [.., heads or 1, width] */
    const int32_t *index;   /* row of each of ours, or NULL: the same */
    int64_t row_stride;     /* elements from row to row */
    int64_t head_stride;    /* elements from head to head; 0: one for all */
} Rows;

typedef struct {
    int64_t num_types, num_heads, inner, outer, element_bytes;
    const int64_t *segments; /* [num_types + 1] */
} Typed;

typedef struct {
    const char *matrices; /* [types, heads or 1, inner, outer] */
    int64_t head_stride, stride, transposed;
    const char *bias;     /* [types, heads, outer], added to products, or NULL */
    int64_t bias_stride;  /* elements from type to type */
} Matrices;

/* Rows that are looked up lie anywhere, and the processor cannot guess which are next. */
static void fetch_ahead(const char *row, int64_t bytes) {
    for (int64_t at = 0; at < bytes && at < MOST_BYTES_AHEAD; at += 64)
        __builtin_prefetch(row + at);
}

static void gather(char *block, const Rows *rows, int64_t head, int64_t start, int64_t count, int64_t width,
                   int64_t element_bytes) {
    for (int64_t at = rows->index ? -AHEAD : 0; at < count; at++) {
        if (rows->index && at + AHEAD < count)
            fetch_ahead(rows->rows + (rows->index[start + at + AHEAD] * rows->row_stride + head * rows->head_stride) *
                                         element_bytes, width * element_bytes);
        if (at < 0)
            continue;
        const int64_t row = rows->index ? rows->index[start + at] : start + at;
        memcpy(block + at * width * element_bytes,
               rows->rows + (row * rows->row_stride + head * rows->head_stride) * element_bytes,
               (size_t)(width * element_bytes));
    }
}

/* Where the matrix of a type and head is, as [inner, outer]. A transposed one is copied into turned. */
static const char *matrix_of(const Typed *typed, const Matrices *matrices, int64_t type, int64_t head, char *turned) {
    const int64_t size = typed->element_bytes, inner = typed->inner, outer = typed->outer;
    const char *const matrix = matrices->matrices + (type * matrices->stride + head * matrices->head_stride) * size;
    if (!matrices->transposed)
        return matrix;
    for (int64_t first = 0; first < inner; first += LINES) /* a few lines of the cache at a time */
        for (int64_t column = 0; column < outer; column++)
            for (int64_t row = first; row < first + LINES && row < inner; row++)
                if (size == 8)
                    ((double *)turned)[row * outer + column] = ((const double *)matrix)[column * inner + row];
                else
                    ((float *)turned)[row * outer + column] = ((const float *)matrix)[column * inner + row];
    return turned;
}

/* The matrices of one type, which many blocks of rows in turn are multiplied with. */
typedef struct {
    int64_t type;       /* -1: none yet */
    const char **heads; /* [num_heads] */
    char *turned;       /* copies of those that are transposed */
    const char *bias;   /* [num_heads, outer], or NULL */
} Current;

static int begin(Current *current, const Typed *typed) {
    const int64_t matrix_bytes = typed->inner * typed->outer * typed->element_bytes;
    current->type = -1;
    current->heads = malloc((size_t)typed->num_heads * sizeof *current->heads);
    current->turned = malloc((size_t)(typed->num_heads * matrix_bytes));
    return current->heads && current->turned;
}

static void end(Current *current) {
    free(current->heads);
    free(current->turned);
}

static void turn_to(Current *current, const Typed *typed, const Matrices *matrices, int64_t type) {
    if (current->type == type)
        return;
    current->type = type;
    current->bias = matrices->bias ? matrices->bias + type * matrices->bias_stride * typed->element_bytes : NULL;
    for (int64_t head = 0; head < typed->num_heads; head++) {
        char *const turned = current->turned + head * typed->inner * typed->outer * typed->element_bytes;
        current->heads[head] = matrix_of(typed, matrices, type, head, turned);
    }
}

/* results [rows, heads, columns] of a head = rows [rows, inner] @ some columns of its matrix, from the first on. */
static void multiply_rows(const Typed *typed, const Current *current, int64_t head, const char *rows, int64_t stride,
                          int64_t count, int64_t first, int64_t columns, char *results, const int32_t *places,
                          int64_t adds) {
    const int64_t size = typed->element_bytes;
    const Product product = {
        .inner = typed->inner, .element_bytes = size, .left = rows, .left_row = stride * size, .left_inner = size,
        .right = current->heads[head] + first * size, .right_inner = typed->outer * size,
        .results = results + head * columns * size, .result_row = typed->num_heads * columns * size, .places = places,
        .adds = adds, .bias = current->bias ? current->bias + (head * typed->outer + first) * size : NULL};
    multiply(&product, count, columns);
}

/* C [m, n] += A[rows, m]^T @ B[rows, n] */
static void add_outer(const Typed *typed, int64_t m, int64_t n, int64_t rows, const char *a, int64_t lda, const char *b,
                      int64_t ldb, char *c) {
    const int64_t size = typed->element_bytes;
    for (int64_t start = 0; start < rows; start += INNER_ROWS) { /* rows of both that stay in the first cache */
        const Product product = {
            .inner = rows - start < INNER_ROWS ? rows - start : INNER_ROWS, .element_bytes = size,
            .left = a + start * lda * size, .left_row = size, .left_inner = lda * size,
            .right = b + start * ldb * size, .right_inner = ldb * size,
            .results = c, .result_row = n * size, .adds = 1};
        multiply(&product, m, n);
    }
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
 * places: where each of our rows is in results, or NULL: the same. adds: whether to what is there. */
int penstock_typed_matmul(const Typed *typed, const Rows *left, const Matrices *matrices, const int32_t *places,
                          char *results, int64_t adds, int64_t num_threads) {
    int64_t *first = malloc((size_t)(typed->num_types + 1) * sizeof *first);
    if (!first)
        return 1;
    const int64_t num_blocks = blocks_before(typed, BLOCK_ROWS, first), size = typed->element_bytes;
    const int64_t row_bytes = typed->num_heads * typed->outer * size;
    int failed = 0;
#pragma omp parallel num_threads((int)num_threads) if (num_threads > 1)
    {
        char *block = malloc((size_t)(BLOCK_ROWS * typed->inner * size));
        Current current;
        const int lacks = !begin(&current, typed) || !block;
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
            char *const to = places ? results : results + start * row_bytes;
            turn_to(&current, typed, matrices, type);
            for (int64_t head = 0; head < typed->num_heads; head++) {
                int64_t stride;
                const char *rows = rows_of(left, head, start, count, typed->inner, size, block, &stride);
                multiply_rows(typed, &current, head, rows, stride, count, 0, typed->outer, to,
                              places ? places + start : NULL, adds);
            }
        }
        free(block);
        end(&current);
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

#include "narrow.h"

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
    void **tables;     /* rows of the current block */
    Current *currents; /* [num_sums] */
    char *a, *b;
} Buffers;

static int64_t at_least(int64_t size, int64_t other) { return size > other ? size : other; }

static void drop(const Pass *pass, Buffers *buffers) {
    for (int64_t table = 0; buffers->tables && table < pass->num_tables; table++)
        if (!pass->tables[table].rows)
            free(buffers->tables[table]);
    for (int64_t sum = 0; buffers->currents && sum < pass->num_sums; sum++)
        end(&buffers->currents[sum]);
    free(buffers->tables);
    free(buffers->currents);
    free(buffers->a);
    free(buffers->b);
}

static int allocate(const Pass *pass, Buffers *buffers) {
    int64_t a = 1, b = 1, has_all = 1;
    for (const Sum *sum = pass->sums; sum < pass->sums + pass->num_sums; sum++)
        a = at_least(a, sum->typed.inner);
    for (const OuterSum *outer = pass->outers; outer < pass->outers + pass->num_outers; outer++) {
        a = at_least(a, outer->typed.inner);
        b = at_least(b, outer->typed.outer);
    }
    const int64_t bytes = BLOCK_ROWS * pass->element_bytes;
    buffers->tables = calloc((size_t)(pass->num_tables + 1), sizeof *buffers->tables);
    buffers->a = malloc((size_t)(a * bytes));
    buffers->b = malloc((size_t)(b * bytes));
    buffers->currents = calloc((size_t)(pass->num_sums + 1), sizeof *buffers->currents);
    if (!buffers->tables || !buffers->currents || !buffers->a || !buffers->b)
        return 0;
    for (int64_t sum = 0; sum < pass->num_sums; sum++)
        has_all &= begin(&buffers->currents[sum], &pass->sums[sum].typed);
    for (int64_t table = 0; table < pass->num_tables; table++)
        if (!pass->tables[table].rows && !(buffers->tables[table] = malloc((size_t)(BLOCK_ROWS * pass->tables[table].row_bytes))))
            return 0;
    return (int)has_all;
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
    Current *const current = &buffers->currents[sum - pass->sums];
    turn_to(current, typed, &sum->right, type);
    for (int64_t head = 0; head < typed->num_heads; head++) {
        int64_t stride;
        const char *rows = operand_rows(&sum->left, buffers, head, start, count, typed->inner, pass->element_bytes,
                                        buffers->a, &stride);
        multiply_rows(typed, current, head, rows, stride, count, 0, typed->outer, sum->results, pass->owners + start, 1);
    }
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
        Current current;
        const int lacks = !begin(&current, typed) || !block || !made;
        for (int64_t type = 0; !lacks && type < typed->num_types; type++) {
            for (int64_t start = typed->segments[type]; start < typed->segments[type + 1]; start += BLOCK_ROWS) {
                const int64_t left_over = typed->segments[type + 1] - start;
                const int64_t count = left_over < BLOCK_ROWS ? left_over : BLOCK_ROWS;
                turn_to(&current, typed, matrices, type);
                for (int64_t head = 0; head < typed->num_heads; head++) {
                    int64_t stride;
                    const char *rows = rows_of(left, head, start, count, typed->inner, size, block, &stride);
                    multiply_rows(typed, &current, head, rows, stride, count, part * columns, columns, made, NULL, 0);
                }
                consumer(context, start, start + count, made, part * columns);
            }
        }
        if (lacks) {
#pragma omp atomic write
            failed = 1;
        }
        free(block);
        free(made);
        end(&current);
    }
    return failed;
}

/* Adds the outer products of rows from start to end to sums [heads, inner, outer]. */
static void add_outers_of(const Typed *typed, const Rows *left, const Rows *right, int64_t start, int64_t end,
                          char *blocks[2], char *sums) {
    const int64_t size = typed->element_bytes;
    for (; start < end; start += BLOCK_ROWS) {
        const int64_t count = end - start < BLOCK_ROWS ? end - start : BLOCK_ROWS;
        for (int64_t head = 0; head < typed->num_heads; head++) {
            int64_t strides[2];
            const char *from = rows_of(left, head, start, count, typed->inner, size, blocks[0], &strides[0]);
            const char *to = rows_of(right, head, start, count, typed->outer, size, blocks[1], &strides[1]);
            add_outer(typed, typed->inner, typed->outer, count, from, strides[0], to, strides[1],
                      sums + head * typed->inner * typed->outer * size);
        }
    }
}

#include "linear.h"

/* results [types, heads, inner, outer] = per type the sum over its rows of left outer right. A type with many rows is
 * several splits; all but its first are summed in parts, which are added in order. */
int penstock_typed_outer(const Typed *typed, const Rows *left, const Rows *right, char *results, int64_t num_threads) {
    const int64_t size = typed->element_bytes, bytes = typed->num_heads * typed->inner * typed->outer * size;
    int64_t *first = malloc((size_t)(typed->num_types + 1) * sizeof *first);
    if (!first)
        return 1;
    int64_t num_splits = 0;
    for (int64_t type = 0; type < typed->num_types; type++) {
        first[type] = num_splits;
        num_splits += at_least(1, (typed->segments[type + 1] - typed->segments[type] + SPLIT_ROWS - 1) / SPLIT_ROWS);
    }
    first[typed->num_types] = num_splits;
    char *parts = malloc((size_t)at_least(1, (num_splits - typed->num_types) * bytes));
    int failed = !parts;
#pragma omp parallel num_threads((int)num_threads) if (num_threads > 1)
    {
        char *blocks[] = {malloc((size_t)(BLOCK_ROWS * typed->inner * size)),
                          malloc((size_t)(BLOCK_ROWS * typed->outer * size))};
        const int lacks = !parts || !blocks[0] || !blocks[1];
        if (lacks) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t at = 0; at < num_splits; at++) {
            if (lacks)
                continue;
            const int64_t type = type_of(first, typed->num_types, at);
            const int64_t start = typed->segments[type] + (at - first[type]) * SPLIT_ROWS;
            const int64_t left_over = typed->segments[type + 1] - start;
            char *const to = at == first[type] ? results + type * bytes : parts + (at - type - 1) * bytes;
            memset(to, 0, (size_t)bytes);
            add_outers_of(typed, left, right, start, start + (left_over < SPLIT_ROWS ? left_over : SPLIT_ROWS), blocks, to);
        }
        free(blocks[0]);
        free(blocks[1]);
    }
    for (int64_t type = 0; type < typed->num_types && !failed; type++)
        for (int64_t at = first[type] + 1; at < first[type + 1]; at++)
            add(results + type * bytes, parts + (at - type - 1) * bytes, bytes, size);
    free(parts);
    free(first);
    return failed;
}
