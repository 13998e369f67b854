/* Indexes of graphs for penstock.relational: rows in order of what they belong to, pairs of a node and an edge type, and
 * the end at which each edge is multiplied. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

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

enum { NUM_BORDERS = 64 };

/* Numbers of edges from which a pair may count as one of many edges: 1 to 8, then half as many again. */
static void set_borders(int64_t *borders) {
    for (int64_t at = 0; at < NUM_BORDERS; at++)
        borders[at] = at < 8 ? at + 1 : borders[at - 1] + (borders[at - 1] + 1) / 2;
}

static uint8_t size_of(const int64_t *borders, int64_t num_edges) {
    uint8_t size = 0;
    while (size + 1 < NUM_BORDERS && borders[size + 1] <= num_edges)
        size++;
    return size;
}

/* An end of the edges: their pairs, of which those with many edges are multiplied. */
typedef struct {
    const int64_t *pairs, *types; /* of edges; of pairs */
    int64_t num_pairs;
    int64_t *degrees;   /* edges of each pair */
    uint8_t *sizes;     /* the same as the number of a border */
    uint8_t *least;     /* the least size at the other end of a pair's edges */
    int64_t *large;     /* [types, NUM_BORDERS]: pairs by size */
    int64_t *rest;      /* the same by least */
} End;

static int prepare(End *end, const int64_t *pairs, const int64_t *types, int64_t num_pairs, int64_t num_types) {
    *end = (End){.pairs = pairs, .types = types, .num_pairs = num_pairs};
    end->degrees = calloc((size_t)(num_pairs + 1), sizeof *end->degrees);
    end->sizes = malloc((size_t)(num_pairs + 1));
    end->least = malloc((size_t)(num_pairs + 1));
    end->large = calloc((size_t)(num_types * NUM_BORDERS + 1), sizeof *end->large);
    end->rest = calloc((size_t)(num_types * NUM_BORDERS + 1), sizeof *end->rest);
    return end->degrees && end->sizes && end->least && end->large && end->rest;
}

static void release(End *end) {
    free(end->degrees);
    free(end->sizes);
    free(end->least);
    free(end->large);
    free(end->rest);
}

static void count_sizes(End *end, int64_t num_edges, const int64_t *borders) {
    for (int64_t edge = 0; edge < num_edges; edge++)
        end->degrees[end->pairs[edge]]++;
    memset(end->least, NUM_BORDERS - 1, (size_t)end->num_pairs);
    for (int64_t pair = 0; pair < end->num_pairs; pair++) {
        end->sizes[pair] = size_of(borders, end->degrees[pair]);
        end->large[end->types[pair] * NUM_BORDERS + end->sizes[pair]]++;
    }
}

/* The border from which pairs of an end are multiplied, for the fewest rows of a type; NUM_BORDERS: none is. */
static int64_t best_border(const End *end, const End *other, int64_t type, int64_t *fewest) {
    const int64_t *large = end->large + type * NUM_BORDERS, *rest = other->rest + type * NUM_BORDERS;
    int64_t rows = 0, best = 0;
    for (int64_t size = 0; size < NUM_BORDERS; size++)
        rows += large[size];
    *fewest = rows;
    for (int64_t border = 1; border <= NUM_BORDERS; border++) {
        rows += rest[border - 1] - large[border - 1];
        if (rows < *fewest) {
            *fewest = rows;
            best = border;
        }
    }
    return best;
}

/* Chooses for each edge whether it is multiplied at its target, so that few pairs are. Returns how many, -1 without
 * memory. A pair at one end is multiplied if it has many edges, and at the other unless all of its edges are of such
 * pairs; which end, and how many are many, is chosen for each type. */
int64_t penstock_cover(const int64_t *sources, const int64_t *targets, const int64_t *source_types,
                       const int64_t *target_types, uint8_t *at_target, int64_t num_edges, int64_t num_sources,
                       int64_t num_targets, int64_t num_types) {
    int64_t borders[NUM_BORDERS], total = -1;
    set_borders(borders);
    End ends[2];
    int64_t *const chosen = malloc((size_t)(num_types + 1) * sizeof *chosen);
    uint8_t *const end_of = malloc((size_t)(num_types + 1));
    const int is_first_ready = prepare(&ends[0], sources, source_types, num_sources, num_types);
    const int is_second_ready = prepare(&ends[1], targets, target_types, num_targets, num_types);
    if (is_first_ready && is_second_ready && chosen && end_of) {
        for (int end = 0; end < 2; end++)
            count_sizes(&ends[end], num_edges, borders);
        for (int64_t edge = 0; edge < num_edges; edge++) {
            const uint8_t at_source = ends[0].sizes[sources[edge]], at_end = ends[1].sizes[targets[edge]];
            uint8_t *const of_source = &ends[0].least[sources[edge]], *const of_target = &ends[1].least[targets[edge]];
            if (at_end < *of_source)
                *of_source = at_end;
            if (at_source < *of_target)
                *of_target = at_source;
        }
        for (int end = 0; end < 2; end++)
            for (int64_t pair = 0; pair < ends[end].num_pairs; pair++)
                ends[end].rest[ends[end].types[pair] * NUM_BORDERS + ends[end].least[pair]]++;
        total = 0;
        for (int64_t type = 0; type < num_types; type++) {
            int64_t rows[2];
            const int64_t best[2] = {best_border(&ends[0], &ends[1], type, &rows[0]),
                                     best_border(&ends[1], &ends[0], type, &rows[1])};
            end_of[type] = rows[1] < rows[0];
            chosen[type] = best[end_of[type]];
            total += rows[end_of[type]];
        }
        for (int64_t edge = 0; edge < num_edges; edge++) {
            const int64_t type = source_types[sources[edge]];
            const End *const end = &ends[end_of[type]];
            const int is_large = end->sizes[end->pairs[edge]] >= chosen[type];
            at_target[edge] = (uint8_t)(end_of[type] ? is_large : !is_large);
        }
    }
    for (int end = 0; end < 2; end++)
        release(&ends[end]);
    free(chosen);
    free(end_of);
    return total;
}
