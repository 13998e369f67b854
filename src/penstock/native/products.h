/* Products of small matrices, a tile at a time whose sums stay in registers.
 *
 * A BLAS first copies its operands into an order of its own, which takes long beside products this small, and on AMD
 * processors with AVX-512 MKL reaches half of the rate that is possible (docs/design/relational.md has figures).
 * The sum over the inner dimension is in order, so that a row's result does not depend on the rows beside it.
 */

#include <stddef.h>
#include <stdint.h>

#ifdef __clang__
#pragma STDC FP_CONTRACT ON
#else
#pragma GCC push_options
#pragma GCC optimize("fp-contract=fast") /* a product and its sum in one instruction, as in any BLAS */
#endif

/* results [rows, columns] = left [rows, inner] @ right [inner, columns], all in steps of bytes. Columns of right and of
 * results lie one after the other. */
typedef struct {
    int64_t inner, element_bytes;
    const char *left;
    int64_t left_row, left_inner;
    const char *right;
    int64_t right_inner;
    char *results;
    const int32_t *places; /* where a row is in results, or NULL: the same */
    int64_t result_row;
    int64_t adds;          /* whether results are added to what is there */
    const char *bias;      /* a row that is added to each result, or NULL */
} Product;

#if defined(__AVX512F__)
enum { VECTOR_BYTES = 64 };
#elif defined(__AVX__)
enum { VECTOR_BYTES = 32 };
#else
enum { VECTOR_BYTES = 16 };
#endif
enum { NUM_WIDTHS = 5, NUM_HEIGHTS = 3 };
static const int64_t WIDTH_BYTES[] = {2 * VECTOR_BYTES, VECTOR_BYTES, 32, 16, 0}; /* 0: a single number */
static const int64_t HEIGHTS[] = {8, 4, 2};

/* Computes a tile of a product, whose corner is at left and right; to has its rows, and onto what is added, or NULL. */
typedef void (*Tile)(const Product *product, const char *left, const char *right, const char *onto, char *const *to);

#define TILE(name, real, vector, height, width)                                                              \
    static void name(const Product *product, const char *left, const char *right, const char *onto,          \
                     char *const *to) {                                                                      \
        vector sums[height][width];                                                                          \
        for (int row = 0; row < height; row++)                                                               \
            for (int at = 0; at < width; at++)                                                               \
                sums[row][at] = (vector){0};                                                                 \
        for (int64_t inner = 0; inner < product->inner; inner++) {                                           \
            const vector *const numbers = (const vector *)(right + inner * product->right_inner);            \
            for (int row = 0; row < height; row++) {                                                         \
                const real factor = *(const real *)(left + row * product->left_row + inner * product->left_inner);\
                for (int at = 0; at < width; at++)                                                           \
                    sums[row][at] += factor * numbers[at];                                                   \
            }                                                                                                \
        }                                                                                                    \
        for (int row = 0; row < height; row++)                                                               \
            for (int at = 0; at < width; at++) {                                                             \
                vector *const result = (vector *)to[row] + at;                                               \
                if (product->adds)                                                                           \
                    *result += sums[row][at];                                                                \
                else if (onto)                                                                               \
                    *result = ((const vector *)onto)[at] + sums[row][at];                                    \
                else                                                                                         \
                    *result = sums[row][at];                                                                 \
            }                                                                                                \
    }
#define TILES(name, real, vector, width)                                                                     \
    TILE(name##_8, real, vector, 8, width)                                                                   \
    TILE(name##_4, real, vector, 4, width)                                                                   \
    TILE(name##_2, real, vector, 2, width)
#define VECTOR(name, real, bytes)                                                                            \
    typedef real name __attribute__((vector_size(bytes), aligned(sizeof(real)), may_alias))
#define ALL_TILES(real)                                                                                      \
    VECTOR(real##_vector, real, VECTOR_BYTES);                                                               \
    VECTOR(real##_32, real, 32);                                                                             \
    VECTOR(real##_16, real, 16);                                                                             \
    typedef real real##_one __attribute__((may_alias));                                                      \
    TILES(real##_pair, real, real##_vector, 2)                                                               \
    TILES(real##_whole, real, real##_vector, 1)                                                              \
    TILES(real##_half, real, real##_32, 1)                                                                   \
    TILES(real##_quarter, real, real##_16, 1)                                                                \
    TILES(real##_single, real, real##_one, 1)                                                                \
    static const Tile real##_tiles[NUM_WIDTHS][NUM_HEIGHTS] = {                                              \
        {real##_pair_8, real##_pair_4, real##_pair_2},                                                       \
        {real##_whole_8, real##_whole_4, real##_whole_2},                                                    \
        {real##_half_8, real##_half_4, real##_half_2},                                                       \
        {real##_quarter_8, real##_quarter_4, real##_quarter_2},                                              \
        {real##_single_8, real##_single_4, real##_single_2}};
ALL_TILES(float)
ALL_TILES(double)

static void find_results(const Product *product, int64_t row, int64_t height, int64_t column_bytes,
                         int64_t width_bytes, char **to) {
    for (int64_t at = 0; at < height; at++) {
        const int64_t place = product->places ? product->places[row + at] : row + at;
        to[at] = product->results + place * product->result_row + column_bytes;
        for (int64_t byte = 0; product->places && byte < width_bytes; byte += 64)
            __builtin_prefetch(to[at] + byte, 1);
    }
}

static void multiply_panel(const Product *product, const Tile *tiles, int64_t num_rows, int64_t column_bytes,
                           int64_t width_bytes) {
    const char *const right = product->right + column_bytes;
    const char *const onto = product->bias ? product->bias + column_bytes : NULL;
    char *to[8];
    int64_t row = 0;
    for (int64_t height = 0; height < NUM_HEIGHTS; height++) {
        for (; row + HEIGHTS[height] <= num_rows; row += HEIGHTS[height]) {
            find_results(product, row, HEIGHTS[height], column_bytes, width_bytes, to);
            tiles[height](product, product->left + row * product->left_row, right, onto, to);
        }
    }
    if (row < num_rows) { /* once more beside itself: of a row alone GCC may round product and sum apart */
        double spare[2 * VECTOR_BYTES / sizeof(double)] = {0};
        Product twice = *product;
        twice.left_row = 0;
        find_results(product, row, 1, column_bytes, width_bytes, to);
        to[1] = (char *)spare;
        tiles[NUM_HEIGHTS - 1](&twice, product->left + row * product->left_row, right, onto, to);
    }
}

static void multiply(const Product *product, int64_t num_rows, int64_t num_columns) {
    const int64_t size = product->element_bytes, row_bytes = num_columns * size;
    const Tile(*tiles)[NUM_HEIGHTS] = size == 8 ? double_tiles : float_tiles;
    int64_t column = 0;
    for (int64_t width = 0; width < NUM_WIDTHS; width++) {
        const int64_t width_bytes = WIDTH_BYTES[width] ? WIDTH_BYTES[width] : size;
        for (; column + width_bytes <= row_bytes; column += width_bytes)
            multiply_panel(product, tiles[width], num_rows, column, width_bytes);
    }
}

#ifndef __clang__
#pragma GCC pop_options
#endif
