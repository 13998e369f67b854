/* Products of nodes' rows with the narrow matrices of types, as scores of attention are: node by node.
 *
 * Such matrices lie in cache together, for all types. A node's row is then read once for all of its pairs, where an order
 * by types would read it from memory for each. Rows of pairs are a few numbers.
 */

#include <stdint.h>
#include <stdlib.h>

typedef struct {
    int64_t num_types, width, narrow; /* matrices are [width, narrow] */
    int64_t element_bytes, num_threads, num_parts;
    const int64_t *borders;   /* [num_parts + 1]: the first node of each part */
    const int64_t *starts;    /* [nodes + 1]: the first pair of each node, in order of nodes */
    const int32_t *positions; /* the row of each pair, or NULL: the same */
    const int32_t *types;     /* the type of each pair */
} Narrow;

#define NARROW(real)                                                                                         \
    /* turned [types, narrow, width] from matrices [types, width, narrow], or the other way round */         \
    static void real##_turn(const Narrow *of, const real *from, real *to, int back) {                        \
        const int64_t rows = back ? of->narrow : of->width, columns = back ? of->width : of->narrow;         \
        for (int64_t type = 0; type < of->num_types; type++, from += rows * columns, to += rows * columns)   \
            for (int64_t row = 0; row < rows; row++)                                                         \
                for (int64_t column = 0; column < columns; column++)                                         \
                    to[column * rows + row] = from[row * columns + column];                                  \
    }                                                                                                        \
    static void real##_scores(const Narrow *of, int64_t part, const real *turned, const real *rows,          \
                              real *results) {                                                               \
        const int64_t width = of->width, narrow = of->narrow;                                                \
        for (int64_t node = of->borders[part]; node < of->borders[part + 1]; node++)                         \
            for (int64_t at = of->starts[node]; at < of->starts[node + 1]; at++)                             \
                for (int64_t number = 0; number < narrow; number++) {                                        \
                    const real *const row = rows + node * width;                                             \
                    const real *const matrix = turned + (of->types[at] * narrow + number) * width;           \
                    real total = 0;                                                                          \
                    _Pragma("omp simd reduction(+ : total)")                                                 \
                    for (int64_t column = 0; column < width; column++)                                       \
                        total += row[column] * matrix[column];                                               \
                    results[(of->positions ? of->positions[at] : at) * narrow + number] = total;             \
                }                                                                                            \
    }                                                                                                        \
    static void real##_add_rows(const Narrow *of, int64_t part, const real *turned, const real *pairs,       \
                                real *results, int64_t adds) {                                               \
        const int64_t width = of->width, narrow = of->narrow;                                                \
        for (int64_t node = of->borders[part]; node < of->borders[part + 1]; node++) {                       \
            real *const restrict row = results + node * width;                                               \
            if (!adds)                                                                                       \
                memset(row, 0, (size_t)width * sizeof *row);                                                 \
            for (int64_t at = of->starts[node]; at < of->starts[node + 1]; at++)                             \
                for (int64_t number = 0; number < narrow; number++) {                                        \
                    const real factor = pairs[(of->positions ? of->positions[at] : at) * narrow + number];   \
                    const real *const restrict matrix = turned + (of->types[at] * narrow + number) * width;  \
                    _Pragma("omp simd")                                                                      \
                    for (int64_t column = 0; column < width; column++)                                       \
                        row[column] += factor * matrix[column];                                              \
                }                                                                                            \
        }                                                                                                    \
    }                                                                                                        \
    static void real##_add_matrices(const Narrow *of, int64_t part, const real *rows, const real *pairs,     \
                                    real *turned) {                                                          \
        const int64_t width = of->width, narrow = of->narrow;                                                \
        for (int64_t node = of->borders[part]; node < of->borders[part + 1]; node++)                         \
            for (int64_t at = of->starts[node]; at < of->starts[node + 1]; at++)                             \
                for (int64_t number = 0; number < narrow; number++) {                                        \
                    const real *const restrict row = rows + node * width;                                    \
                    const real factor = pairs[(of->positions ? of->positions[at] : at) * narrow + number];   \
                    real *const restrict matrix = turned + (of->types[at] * narrow + number) * width;        \
                    _Pragma("omp simd")                                                                      \
                    for (int64_t column = 0; column < width; column++)                                       \
                        matrix[column] += factor * row[column];                                              \
                }                                                                                            \
    }
NARROW(float)
NARROW(double)
#define OF_ITS_TYPE(of, name, ...) ((of)->element_bytes == 8 ? double_##name(of, __VA_ARGS__) : float_##name(of, __VA_ARGS__))

/* Sets `all` to the matrices as [types, narrow, width]: where they are if they lie so, else a copy in `copied`, which the
 * caller frees. Returns whether there was memory. */
static int turn_all(const Narrow *of, const void *matrices, int64_t lie_so, const void **all, void **copied) {
    *copied = NULL;
    *all = matrices;
    if (lie_so || of->narrow == 1)
        return 1;
    *all = *copied = malloc((size_t)(of->num_types * of->width * of->narrow * of->element_bytes + 1));
    if (*copied)
        OF_ITS_TYPE(of, turn, matrices, *copied, 0);
    return *copied != NULL;
}

/* results [pairs, narrow] = rows [nodes, width] @ matrices [types, width, narrow] (lie_so: [types, narrow, width]) */
int penstock_narrow_scores(const Narrow *of, const void *matrices, int64_t lie_so, const void *rows, void *results) {
    void *copied;
    const void *all;
    if (!turn_all(of, matrices, lie_so, &all, &copied))
        return 1;
#pragma omp parallel for schedule(dynamic, 1) num_threads((int)of->num_threads) if (of->num_threads > 1)
    for (int64_t part = 0; part < of->num_parts; part++)
        OF_ITS_TYPE(of, scores, part, all, rows, results);
    free(copied);
    return 0;
}

/* results [nodes, width] = the sum of pairs [pairs, narrow] @ matrices^T; adds: to what is there */
int penstock_narrow_sums(const Narrow *of, const void *matrices, int64_t lie_so, const void *pairs, void *results,
                         int64_t adds) {
    void *copied;
    const void *all;
    if (!turn_all(of, matrices, lie_so, &all, &copied))
        return 1;
#pragma omp parallel for schedule(dynamic, 1) num_threads((int)of->num_threads) if (of->num_threads > 1)
    for (int64_t part = 0; part < of->num_parts; part++)
        OF_ITS_TYPE(of, add_rows, part, all, pairs, results, adds);
    free(copied);
    return 0;
}

/* results [types, width, narrow] (lie_so: [types, narrow, width]) = per type the sum of rows outer pairs */
int penstock_narrow_outers(const Narrow *of, const void *rows, const void *pairs, void *results, int64_t lie_so) {
    const int64_t size = of->num_types * of->width * of->narrow, bytes = size * of->element_bytes;
    char *const parts = calloc((size_t)(of->num_parts * bytes + 1), 1);
    if (!parts)
        return 1;
#pragma omp parallel for schedule(dynamic, 1) num_threads((int)of->num_threads) if (of->num_threads > 1)
    for (int64_t part = 0; part < of->num_parts; part++)
        OF_ITS_TYPE(of, add_matrices, part, rows, pairs, (void *)(parts + part * bytes));
    for (int64_t part = 1; part < of->num_parts; part++)
        add(parts, parts + part * bytes, bytes, of->element_bytes);
    if (lie_so || of->narrow == 1)
        memcpy(results, parts, (size_t)bytes);
    else
        OF_ITS_TYPE(of, turn, (void *)parts, results, 1);
    free(parts);
    return 0;
}
