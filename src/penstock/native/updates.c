/* One pass over an optimizer's update in host memory: weight, states and the weight's casts are read and written once.
 *
 * Gradients come in single or half precision, and may be several, to be summed in their order. All of a block's stages
 * run while it is in the first cache, so that only the memory's rate counts. Threads are the caller's to number: the
 * environment of a launcher often allows PyTorch's own operators one.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 2048 /* elements: the block's numbers take 8 KiB of the first cache for each tensor */

/* In the order of `UPDATES` and `PRECISIONS` in _updates.py. */
enum { ADAM, SGD, ADAGRAD };
enum { FLOAT32, BFLOAT16, FLOAT16 };

typedef struct {
    int64_t kind, num_elements, num_threads;
    float *weight, *states[3]; /* Adam: both moments and the largest second one; SGD: momentum; Adagrad: the sum */
    int64_t num_gradients;
    const void *gradients[4];
    int64_t gradient_precision;
    int64_t num_casts;
    void *casts[4];
    int64_t cast_precisions[4];
    double scale; /* of the gradient, before anything else */
    int64_t is_negated, is_decoupled, is_nesterov;
    double weight_decay, step_size; /* Adam: the rate over the first moment's bias */
    double rate, first_decay, second_decay, root_of_bias, epsilon, momentum, dampening;
} Update;

static float of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static float of_bfloat16(uint16_t half) { return of_bits((uint32_t)half << 16); }

/* The exponent moves to its place, and a product makes up for the bias, also of numbers below the smallest normal one. */
static float of_float16(uint16_t half) {
    const uint32_t rest = (uint32_t)(half & 0x7fff) << 13, sign = (uint32_t)(half & 0x8000) << 16;
    const uint32_t finite = bits_of(of_bits(rest) * 0x1p112f), other = rest | 0x7f800000;
    return of_bits(sign | (rest >= 0x0f800000 ? other : finite));
}

/* Both round to the nearest, to even halfway. */
static uint16_t to_bfloat16(float value) {
    const uint32_t bits = bits_of(value), rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

static uint16_t to_float16(float value) {
    const uint32_t bits = bits_of(value), size = bits & 0x7fffffff, sign = (bits >> 16) & 0x8000;
    const uint32_t normal = (size - 0x38000000 + 0xfff + ((size >> 13) & 1)) >> 13;
    const uint32_t small = bits_of(of_bits(size) + 0.5f) - bits_of(0.5f); /* the sum rounds to multiples of 2**-24 */
    const uint32_t large = size > 0x7f800000 ? 0x7e00 : 0x7c00;
    return (uint16_t)(sign | (size >= 0x477ff000 ? large : size < 0x38800000 ? small : normal));
}

static void add_gradient(const Update *of, int64_t number, int64_t start, int64_t size, float *restrict sum) {
    const void *const from = of->gradients[number];
#define ADD(type, widened)                                                                          \
    {                                                                                               \
        const type *const restrict values = (const type *)from + start;                             \
        if (number)                                                                                 \
            for (int64_t i = 0; i < size; i++) sum[i] += widened(values[i]);                        \
        else                                                                                        \
            for (int64_t i = 0; i < size; i++) sum[i] = widened(values[i]);                         \
    }
    if (of->gradient_precision == BFLOAT16)
        ADD(uint16_t, of_bfloat16)
    else if (of->gradient_precision == FLOAT16)
        ADD(uint16_t, of_float16)
    else
        ADD(float, )
}

static void write_casts(const Update *of, int64_t start, int64_t size, const float *restrict weight) {
    for (int64_t number = 0; number < of->num_casts; number++) {
        uint16_t *const restrict cast = (uint16_t *)of->casts[number] + start;
        if (of->cast_precisions[number] == BFLOAT16)
            for (int64_t i = 0; i < size; i++) cast[i] = to_bfloat16(weight[i]);
        else
            for (int64_t i = 0; i < size; i++) cast[i] = to_float16(weight[i]);
    }
}

static void update_adam(const Update *of, int64_t start, int64_t size, float *restrict weight, float *restrict gradient) {
    float *const restrict first = of->states[0] + start, *const restrict second = of->states[1] + start;
    const float first_decay = (float)of->first_decay, second_decay = (float)of->second_decay;
    const float kept = (float)(1 - of->first_decay), squared = (float)(1 - of->second_decay);
    const float root = (float)of->root_of_bias, epsilon = (float)of->epsilon, step_size = (float)of->step_size;
    for (int64_t i = 0; i < size; i++) {
        first[i] = first_decay * first[i] + kept * gradient[i];
        second[i] = second_decay * second[i] + squared * gradient[i] * gradient[i];
    }
    if (of->states[2]) {
        float *const restrict largest = of->states[2] + start;
        for (int64_t i = 0; i < size; i++) {
            largest[i] = largest[i] > second[i] ? largest[i] : second[i];
            weight[i] -= step_size * first[i] / (sqrtf(largest[i]) / root + epsilon);
        }
    } else
        for (int64_t i = 0; i < size; i++) weight[i] -= step_size * first[i] / (sqrtf(second[i]) / root + epsilon);
}

static void update_sgd(const Update *of, int64_t start, int64_t size, float *restrict weight, float *restrict gradient) {
    const float rate = (float)of->rate, momentum = (float)of->momentum, kept = (float)(1 - of->dampening);
    if (of->states[0]) {
        float *const restrict speed = of->states[0] + start;
        for (int64_t i = 0; i < size; i++) speed[i] = momentum * speed[i] + kept * gradient[i];
        for (int64_t i = 0; i < size; i++) gradient[i] = of->is_nesterov ? gradient[i] + momentum * speed[i] : speed[i];
    }
    for (int64_t i = 0; i < size; i++) weight[i] -= rate * gradient[i];
}

static void update_adagrad(const Update *of, int64_t start, int64_t size, float *restrict weight, float *restrict gradient) {
    float *const restrict sum = of->states[0] + start;
    const float rate = (float)of->rate, epsilon = (float)of->epsilon;
    for (int64_t i = 0; i < size; i++) {
        sum[i] += gradient[i] * gradient[i];
        weight[i] -= rate * gradient[i] / (sqrtf(sum[i]) + epsilon);
    }
}

static void update_block(const Update *of, int64_t start, int64_t size) {
    float gradient[BLOCK], *const restrict weight = of->weight + start;
    const float decay = (float)of->weight_decay, scale = (float)of->scale;
    for (int64_t number = 0; number < of->num_gradients; number++) add_gradient(of, number, start, size, gradient);
    if (scale != 1)
        for (int64_t i = 0; i < size; i++) gradient[i] *= scale;
    if (of->is_negated)
        for (int64_t i = 0; i < size; i++) gradient[i] = -gradient[i];
    if (of->weight_decay != 0) {
        const float shrunk = (float)(1 - of->rate * of->weight_decay);
        if (of->is_decoupled)
            for (int64_t i = 0; i < size; i++) weight[i] *= shrunk;
        else
            for (int64_t i = 0; i < size; i++) gradient[i] += decay * weight[i];
    }
    if (of->kind == ADAM)
        update_adam(of, start, size, weight, gradient);
    else if (of->kind == SGD)
        update_sgd(of, start, size, weight, gradient);
    else
        update_adagrad(of, start, size, weight, gradient);
    write_casts(of, start, size, weight);
}

void penstock_update(const Update *of) {
    const int64_t num_blocks = (of->num_elements + BLOCK - 1) / BLOCK;
#pragma omp parallel for schedule(static) num_threads((int)of->num_threads) if (of->num_threads > 1)
    for (int64_t block = 0; block < num_blocks; block++) {
        const int64_t start = block * BLOCK, left = of->num_elements - start;
        update_block(of, start, left < BLOCK ? left : BLOCK);
    }
}
