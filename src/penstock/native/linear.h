/* The backward of linear maps whose rows lie type by type: each block of rows is read once for all of its gradients. */

/* A map [inner] to `num_parts` tables [outer]; weights are [types, num_parts, outer, inner]. */
typedef struct {
    Typed typed;
    int64_t num_parts;
    const char *const *gradients; /* of each part, [rows, outer] */
    const char *x, *weights;
    char *of_x;
} Maps;

/* sums [columns] += the sum of rows [count, columns], by way of a sum of its own, which is shorter than all rows */
static void add_rows(const char *rows, int64_t count, int64_t columns, int64_t size, char *own, char *sums) {
    memset(own, 0, (size_t)(columns * size));
    for (int64_t row = 0; row < count; row++)
        add(own, rows + row * columns * size, columns * size, size);
    add(sums, own, columns * size, size);
}

/* What rows from start on give: their of_x, and what they add to the weights' and the bias' gradients. These lie one
 * after the other, before memory for the bias of a part. */
static void differentiate(const Maps *maps, int64_t type, int64_t start, int64_t count, char *of_weights) {
    const int64_t size = maps->typed.element_bytes, inner = maps->typed.inner, outer = maps->typed.outer;
    char *const of_bias = of_weights + maps->num_parts * outer * inner * size;
    for (int64_t part = 0; part < maps->num_parts; part++) {
        const char *const gradient = maps->gradients[part] + start * outer * size;
        const Product product = {
            .inner = outer, .element_bytes = size, .left = gradient, .left_row = outer * size, .left_inner = size,
            .right = maps->weights + (type * maps->num_parts + part) * outer * inner * size, .right_inner = inner * size,
            .results = maps->of_x + start * inner * size, .result_row = inner * size, .adds = part > 0};
        multiply(&product, count, inner);
        add_outer(&maps->typed, outer, inner, count, gradient, outer, maps->x + start * inner * size, inner,
                  of_weights + part * outer * inner * size);
        add_rows(gradient, count, outer, size, of_bias + maps->num_parts * outer * size, of_bias + part * outer * size);
    }
}

/* of_x [rows, inner], of_weights as the weights and of_bias [types, num_parts, outer]. A type with many rows is several
 * splits. What each adds to weights and bias are sums of its own, which are added in order. */
int penstock_differentiate_maps(const Maps *maps, char *of_weights, char *of_bias, int64_t num_threads) {
    const int64_t num_types = maps->typed.num_types, size = maps->typed.element_bytes;
    const int64_t bias_bytes = maps->num_parts * maps->typed.outer * size, weight_bytes = bias_bytes * maps->typed.inner;
    const int64_t split_bytes = weight_bytes + bias_bytes + maps->typed.outer * size;
    int64_t *first = malloc((size_t)(num_types + 1) * sizeof *first);
    if (!first)
        return 1;
    /* sums of splits take at most a fourth of x's memory */
    const int64_t least = 4 * maps->num_parts * maps->typed.outer, split_rows = least > SPLIT_ROWS ? least : SPLIT_ROWS;
    const int64_t num_splits = blocks_before(&maps->typed, split_rows, first);
    char *const sums = calloc((size_t)(num_splits * split_bytes + 1), 1);
    const int failed = !sums;
#pragma omp parallel for num_threads((int)num_threads) schedule(dynamic, 1) if (num_threads > 1)
    for (int64_t at = 0; at < (failed ? 0 : num_splits); at++) {
        const int64_t type = type_of(first, num_types, at);
        const int64_t begin = maps->typed.segments[type] + (at - first[type]) * split_rows;
        const int64_t end = at + 1 == first[type + 1] ? maps->typed.segments[type + 1] : begin + split_rows;
        for (int64_t start = begin; start < end; start += BLOCK_ROWS)
            differentiate(maps, type, start, end - start < BLOCK_ROWS ? end - start : BLOCK_ROWS, sums + at * split_bytes);
    }
    for (int64_t type = 0; type < num_types && !failed; type++) {
        memset(of_weights + type * weight_bytes, 0, (size_t)weight_bytes);
        memset(of_bias + type * bias_bytes, 0, (size_t)bias_bytes);
        for (int64_t at = first[type]; at < first[type + 1]; at++) {
            const char *const of_split = sums + at * split_bytes;
            add(of_weights + type * weight_bytes, of_split, weight_bytes, size);
            add(of_bias + type * bias_bytes, of_split + weight_bytes, bias_bytes, size);
        }
    }
    free(sums);
    free(first);
    return failed;
}
