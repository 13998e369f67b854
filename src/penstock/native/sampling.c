/* Neighbours of nodes, for penstock.unified. They are drawn by counter-based random numbers, so the draws of a node depend
 * on nothing but the seed and the node.
 */

#define _GNU_SOURCE
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

enum { AHEAD = 16 };

/* The finalizer that Triton's kernel has, too. */
static uint32_t hashed(uint32_t value) {
    value = (value ^ (value >> 16)) * 0x7FEB352Du;
    value = (value ^ (value >> 15)) * 0x846CA68Bu;
    return value ^ (value >> 16);
}

static uint32_t key_of(uint64_t seed, uint64_t node) {
    const uint32_t mixed = hashed(hashed((uint32_t)seed ^ 0x9E3779B9u) ^ (uint32_t)(seed >> 32));
    return hashed(hashed(mixed ^ (uint32_t)node) ^ (uint32_t)(node >> 32));
}

/* Uniform in [0, bound) but for bound / 2^32. */
static int64_t drawn(uint32_t key, uint32_t number, int64_t bound) {
    return (int64_t)(((uint64_t)hashed(key + number * 0x9E3779B9u) * (uint64_t)bound) >> 32);
}

/* offsets[size + 1]: where the neighbours drawn for each node begin. fanout < 0: all. Returns how many there are; -1 if
 * starts, which may come from a file, leave the num_edges edges. */
int64_t penstock_sample_offsets(const int64_t *starts, int64_t num_edges, const int64_t *nodes, int64_t size,
                                int64_t fanout, int64_t replace, int64_t *offsets) {
    offsets[0] = 0;
    for (int64_t at = 0; at < size; at++) {
        if (at + AHEAD < size)
            __builtin_prefetch(starts + nodes[at + AHEAD]);
        const int64_t first = starts[nodes[at]], degree = starts[nodes[at] + 1] - first;
        if (first < 0 || degree < 0 || degree > num_edges - first)
            return -1;
        const int64_t most = fanout < 0 || (!replace && degree < fanout) ? degree : fanout;
        offsets[at + 1] = offsets[at] + (degree ? most : 0);
    }
    return offsets[size];
}

/* Ask the system to read the pages of a mapped file in which array[places[..]] lie, all at once; a page after the other,
 * as they are touched, takes as many times as long as a disk serves requests at once. Pages that are in memory are asked
 * about, not asked for, if is_told. Returns how many were asked for. */
int64_t penstock_read_ahead(const char *array, int64_t item_bytes, const int64_t *places, int64_t size,
                            int64_t page_bytes, int64_t is_told) {
    int64_t num_absent = 0;
    uintptr_t last = 0;
    for (int64_t at = 0; at < size; at++) {
        const uintptr_t page = (uintptr_t)(array + places[at] * item_bytes) / (uintptr_t)page_bytes;
        unsigned char is_there = 0;
        if (page == last)
            continue;
        last = page;
        if (is_told && !mincore((void *)(page * (uintptr_t)page_bytes), (size_t)page_bytes, &is_there) && is_there & 1)
            continue;
        madvise((void *)(page * (uintptr_t)page_bytes), (size_t)page_bytes, MADV_WILLNEED);
        num_absent++;
    }
    return num_absent;
}

/* neighbours[..] = index[edges[..]] */
void penstock_neighbours(const char *index, int64_t index_bytes, const int64_t *edges, int64_t size, int64_t *neighbours,
                         int64_t num_threads) {
#pragma omp parallel for schedule(static) num_threads((int)num_threads) if (num_threads > 1)
    for (int64_t at = 0; at < size; at++)
        neighbours[at] =
            index_bytes == 4 ? ((const int32_t *)index)[edges[at]] : ((const int64_t *)index)[edges[at]];
}

/* Floyd's method without replacement: each subset is equally likely. edges: places in the index; neighbours: what is
 * there, unless NULL. */
void penstock_sample(const int64_t *starts, const char *index, int64_t index_bytes, const int64_t *nodes, int64_t size,
                     int64_t replace, int64_t seed, const int64_t *offsets, int64_t *neighbours, int64_t *edges,
                     int64_t num_threads) {
#pragma omp parallel for schedule(dynamic, 256) num_threads((int)num_threads) if (num_threads > 1)
    for (int64_t at = 0; at < size; at++) {
        const int64_t first = starts[nodes[at]], degree = starts[nodes[at] + 1] - first;
        const int64_t begin = offsets[at], count = offsets[at + 1] - begin;
        const uint32_t key = key_of((uint64_t)seed, (uint64_t)nodes[at]);
        for (int64_t one = 0; one < count; one++) {
            int64_t chosen = one;
            if (replace) {
                chosen = drawn(key, (uint32_t)one, degree);
            } else if (count < degree) {
                const int64_t most = degree - count + one;
                chosen = drawn(key, (uint32_t)one, most + 1);
                for (int64_t other = 0; other < one; other++)
                    if (edges[begin + other] == first + chosen) {
                        chosen = most;
                        break;
                    }
            }
            edges[begin + one] = first + chosen;
        }
        for (int64_t one = 0; neighbours && one < count; one++) {
            const int64_t edge = edges[begin + one];
            neighbours[begin + one] = index_bytes == 4 ? ((const int32_t *)index)[edge] : ((const int64_t *)index)[edge];
        }
    }
}

/* Numbers ids in the order in which they are first met. keys (-1: free) and values are a hash table of mask + 1 places,
 * more than will be met; nodes[next..] takes new ones. locals may be NULL. Returns the next number. */
int64_t penstock_relabel(int64_t *keys, int64_t *values, int64_t mask, const int64_t *ids, int64_t size,
                         int64_t *locals, int64_t *nodes, int64_t next) {
    for (int64_t at = 0; at < size; at++) {
        if (at + AHEAD < size)
            __builtin_prefetch(keys + (hashed((uint32_t)ids[at + AHEAD]) & mask));
        int64_t place = hashed((uint32_t)ids[at]) & mask;
        while (keys[place] != ids[at] && keys[place] >= 0)
            place = (place + 1) & mask;
        if (keys[place] < 0) {
            keys[place] = ids[at];
            values[place] = next;
            nodes[next++] = ids[at];
        }
        if (locals)
            locals[at] = values[place];
    }
    return next;
}

/* Edges by target, in their order: starts[num_nodes + 1], sources and, where wanted, positions[size] in the given list.
 * Returns -1, or the first edge with a target out of range. */
int64_t penstock_by_target(const int64_t *sources, const int64_t *targets, int64_t size, int64_t num_nodes,
                           int64_t index_bytes, int64_t *starts, char *index, int64_t *positions) {
    memset(starts, 0, (size_t)(num_nodes + 1) * sizeof *starts);
    for (int64_t at = 0; at < size; at++) {
        if (targets[at] < 0 || targets[at] >= num_nodes)
            return at;
        starts[targets[at] + 1]++;
    }
    for (int64_t node = 0; node < num_nodes; node++)
        starts[node + 1] += starts[node];
    for (int64_t at = 0; at < size; at++) {
        const int64_t place = starts[targets[at]]++;
        if (index_bytes == 4)
            ((int32_t *)index)[place] = (int32_t)sources[at];
        else
            ((int64_t *)index)[place] = sources[at];
        if (positions)
            positions[place] = at;
    }
    memmove(starts + 1, starts, (size_t)num_nodes * sizeof *starts);
    starts[0] = 0;
    return -1;
}
