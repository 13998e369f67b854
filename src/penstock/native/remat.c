/* The planner's simulation of one training step: the rules are in remat/_simulate.py, which this must equal bit for bit.

   One call plays a whole step with a decision for every storage. Lists of operators and storages come as rows: the ids
   of row i are ids[starts[i]] to ids[starts[i + 1] - 1].

   KEEP and the other decisions, DONE and the other outcomes are numbers of remat/_decision.py: `penstock.native` puts
   them above this source when it is compiled. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    int32_t num_operators, num_storages, num_forward, gap;
    const double *durations_s;
    const int64_t *workspaces, *sizes;
    const int32_t *producers, *last_forward;
    const int32_t *births, *uses; /* slots when forward has run, which no decision changes; -1 for backward's */
    const int32_t *last_needs;    /* the last operator of backward that reads a storage of forward; -1: none */
    const int32_t *input_starts, *input_ids, *output_starts, *output_ids, *need_starts, *need_ids;
    const uint8_t *is_output;
    double step_s, out_bandwidth, back_bandwidth;
    int64_t page_bytes;
} Graph;

typedef struct {
    int64_t peak_bytes;
    double extra_s, stall_s;
    int32_t num_slots;
} Result;

typedef struct {
    const Graph *graph;
    const uint8_t *decisions;
    int32_t *slots, *births, *uses, *next_need, *last_user, *found, *stack, *first_uses;
    uint8_t *is_here, *is_found, *stays; /* stays: it exists all the time, or comes back by itself */
    int64_t *live;
    double *times_s, *left_s;
    int32_t num_slots, capacity;
} Play;

static void hold(Play *play, int32_t first, int32_t last, int64_t size_bytes) {
    play->live[first] += size_bytes;
    play->live[last + 1] -= size_bytes;
}

static void run(Play *play, int32_t operator) {
    const Graph *graph = play->graph;
    int32_t slot = play->num_slots++;
    play->slots[slot] = operator;
    for (int32_t at = graph->input_starts[operator]; at < graph->input_starts[operator + 1]; at++)
        play->uses[graph->input_ids[at]] = slot;
}

/* Forward runs as it is; what does not stay is dropped after its last use there. */
static void forward(Play *play) {
    const Graph *graph = play->graph;
    for (int32_t index = 0; index < graph->num_forward; index++)
        play->slots[index] = index;
    play->num_slots = graph->num_forward;
    memcpy(play->births, graph->births, sizeof *play->births * (size_t)graph->num_storages);
    memcpy(play->uses, graph->uses, sizeof *play->uses * (size_t)graph->num_storages);
    for (int32_t storage = 0; storage < graph->num_storages; storage++) {
        const uint8_t decision = play->decisions[storage];
        play->stays[storage] = graph->is_output[storage] || decision == KEEP || decision == SWAP;
        if (graph->births[storage] < 0)
            continue;
        play->is_here[storage] = play->stays[storage];
        if (!play->stays[storage])
            hold(play, graph->births[storage], graph->last_forward[storage], graph->sizes[storage]);
    }
}

static int ascending(const void *left, const void *right) {
    int32_t one = *(const int32_t *)left, two = *(const int32_t *)right;
    return (one > two) - (one < two);
}

/* Operators to run again before `index`, in order, into `found`. */
static int32_t closure(Play *play, int32_t index) {
    const Graph *graph = play->graph;
    int32_t depth = 0, count = 0;
    for (int32_t at = graph->input_starts[index]; at < graph->input_starts[index + 1]; at++)
        if (!play->is_here[graph->input_ids[at]])
            play->stack[depth++] = graph->producers[graph->input_ids[at]];
    while (depth) {
        int32_t operator = play->stack[--depth];
        if (play->is_found[operator])
            continue;
        play->is_found[operator] = 1;
        play->found[count++] = operator;
        for (int32_t at = graph->input_starts[operator]; at < graph->input_starts[operator + 1]; at++) {
            int32_t producer = graph->producers[graph->input_ids[at]];
            if (!play->is_here[graph->input_ids[at]] && !play->is_found[producer])
                play->stack[depth++] = producer;
        }
    }
    for (int32_t place = 0; place < count; place++)
        play->is_found[play->found[place]] = 0;
    if (count > 1)
        qsort(play->found, (size_t)count, sizeof *play->found, ascending);
    return count;
}

static int32_t advance(Play *play, int32_t storage, int32_t index) {
    const int32_t *needs = play->graph->need_ids + play->graph->need_starts[storage];
    int32_t count = play->graph->need_starts[storage + 1] - play->graph->need_starts[storage];
    while (play->next_need[storage] < count - 1 && needs[play->next_need[storage]] < index)
        play->next_need[storage]++;
    return needs[play->next_need[storage]];
}

/* Within how many operators it has to be needed again to stay. */
static int32_t gap(const Play *play, int32_t storage) {
    return play->decisions[storage] == RECOMPUTE_PER_USE ? 0 : play->graph->gap;
}

static int is_held(Play *play, int32_t storage, int32_t index) {
    const Graph *graph = play->graph;
    if (graph->last_needs[storage] < index)
        return 0;
    if (play->decisions[storage] == RECOMPUTE)
        return 1;
    return advance(play, storage, index) - index <= gap(play, storage);
}

static void drop(Play *play, int32_t index, int32_t slot) {
    const Graph *graph = play->graph;
    for (int32_t at = graph->input_starts[index]; at < graph->input_starts[index + 1]; at++) {
        int32_t storage = graph->input_ids[at];
        if (graph->producers[storage] >= graph->num_forward || play->stays[storage])
            continue;
        if (graph->last_needs[storage] > index) {
            if (play->decisions[storage] == RECOMPUTE)
                continue;
            if (advance(play, storage, index + 1) - index <= gap(play, storage))
                continue;
        }
        if (play->is_here[storage]) {
            hold(play, play->births[storage], slot, graph->sizes[storage]);
            play->is_here[storage] = 0;
        }
    }
}

static int backward(Play *play, int32_t index) {
    const Graph *graph = play->graph;
    int32_t first = play->num_slots, count = closure(play, index);
    if (first + count > play->capacity)
        return ENDLESS;
    memset(play->live + first + 1, 0, sizeof *play->live * (size_t)(count + 1));
    for (int32_t place = 0; place <= count; place++) {
        int32_t operator = place < count ? play->found[place] : index;
        for (int32_t at = graph->input_starts[operator]; at < graph->input_starts[operator + 1]; at++)
            play->last_user[graph->input_ids[at]] = first + place;
    }
    for (int32_t place = 0; place < count; place++) {
        int32_t operator = play->found[place], slot = play->num_slots;
        run(play, operator);
        for (int32_t at = graph->output_starts[operator]; at < graph->output_starts[operator + 1]; at++) {
            int32_t storage = graph->output_ids[at];
            if (play->is_here[storage] && play->stays[storage]) {
                hold(play, slot, slot, graph->sizes[storage]); /* goes at once */
            } else if (play->is_here[storage]) { /* takes the place of the one before */
                int32_t birth = play->births[storage], last = play->uses[storage];
                hold(play, birth, last > birth ? last : birth, graph->sizes[storage]);
                play->births[storage] = slot;
            } else if (is_held(play, storage, index)) {
                play->births[storage] = slot;
                play->is_here[storage] = 1;
            } else {
                int32_t end = play->last_user[storage];
                hold(play, slot, end >= first ? end : slot, graph->sizes[storage]);
            }
        }
    }
    run(play, index);
    int32_t slot = play->num_slots - 1;
    for (int32_t at = graph->output_starts[index]; at < graph->output_starts[index + 1]; at++) {
        int32_t storage = graph->output_ids[at];
        play->births[storage] = play->uses[storage] = slot;
        play->is_here[storage] = 1;
    }
    drop(play, index, slot);
    return DONE;
}

/* The first position in times_s[0 .. num_slots] whose time is at least, or above, `moment_s`. */
static int32_t position(const Play *play, double moment_s, int above) {
    int32_t low = 0, high = play->num_slots + 1;
    while (low < high) {
        int32_t middle = low + (high - low) / 2;
        if (play->times_s[middle] < moment_s || (above && play->times_s[middle] == moment_s))
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

typedef struct {
    int64_t key;
    int32_t storage;
} Keyed;

static int by_key(const void *left, const void *right) {
    const Keyed *one = left, *two = right;
    if (one->key != two->key)
        return (one->key > two->key) - (one->key < two->key);
    return (one->storage > two->storage) - (one->storage < two->storage);
}

static int lanes(Play *play, int32_t *gone, int32_t *fetch, double *stall_s) {
    const Graph *graph = play->graph;
    *stall_s = 0.0;
    if (!memchr(play->decisions, SWAP, (size_t)graph->num_storages))
        return DONE;
    Keyed *swapped = malloc(sizeof *swapped * (size_t)(graph->num_storages + 1));
    int32_t count = 0;
    if (!swapped)
        return NO_MEMORY;
    memset(play->first_uses, -1, sizeof *play->first_uses * (size_t)graph->num_storages);
    for (int32_t slot = play->num_slots - 1; slot >= graph->num_forward; slot--) {
        int32_t operator = play->slots[slot];
        for (int32_t at = graph->input_starts[operator]; at < graph->input_starts[operator + 1]; at++)
            play->first_uses[graph->input_ids[at]] = slot;
    }
    for (int32_t storage = 0; storage < graph->num_storages; storage++)
        if (play->decisions[storage] == SWAP && !graph->is_output[storage] && play->first_uses[storage] >= 0)
            swapped[count++] = (Keyed){play->births[storage], storage};
    qsort(swapped, (size_t)count, sizeof *swapped, by_key);
    double free_s = 0.0;
    for (int32_t at = 0; at < count; at++) {
        int32_t storage = swapped[at].storage;
        free_s = fmax(free_s, play->times_s[play->births[storage] + 1]);
        free_s += (double)graph->sizes[storage] / graph->out_bandwidth;
        play->left_s[storage] = free_s;
        swapped[at].key = -(int64_t)play->first_uses[storage];
    }
    qsort(swapped, (size_t)count, sizeof *swapped, by_key);
    double lane_s = INFINITY, earliest_s = play->times_s[graph->num_forward];
    for (int32_t at = 0; at < count; at++) {
        int32_t storage = swapped[at].storage, need = play->first_uses[storage];
        double start_s = fmin(play->times_s[need], lane_s) - (double)graph->sizes[storage] / graph->back_bandwidth;
        int32_t slot = position(play, start_s, 1) - 1;
        if (slot < graph->num_forward)
            slot = graph->num_forward;
        if (slot > need)
            slot = need;
        int32_t leaves = position(play, play->left_s[storage], 0);
        if (leaves < graph->last_forward[storage] + 1)
            leaves = graph->last_forward[storage] + 1;
        if (leaves < slot) {
            gone[storage] = leaves;
            fetch[storage] = slot;
            *stall_s = fmax(*stall_s, earliest_s - start_s);
            lane_s = start_s;
        }
    }
    free(swapped);
    return DONE;
}

static void close_intervals(Play *play, const int32_t *gone, const int32_t *fetch) {
    const Graph *graph = play->graph;
    for (int32_t storage = 0; storage < graph->num_storages; storage++) {
        int64_t size_bytes = graph->sizes[storage];
        if (graph->is_output[storage])
            hold(play, play->births[storage], play->num_slots - 1, size_bytes);
        else if (graph->producers[storage] >= graph->num_forward || play->decisions[storage] == KEEP)
            hold(play, play->births[storage], play->uses[storage], size_bytes);
        else if (play->decisions[storage] == SWAP && gone[storage] >= 0) {
            hold(play, play->births[storage], gone[storage] - 1, size_bytes);
            int64_t page_bytes = graph->page_bytes;
            if (page_bytes)
                hold(play, gone[storage], play->uses[storage], page_bytes + size_bytes % page_bytes);
            hold(play, fetch[storage], play->uses[storage], size_bytes + page_bytes);
        } else if (play->decisions[storage] == SWAP)
            hold(play, play->births[storage], play->uses[storage], size_bytes);
    }
}

/* Plays the step. `slots` and `live` have room for `capacity` + `num_operators` entries, `live` for one more; `gone` and
   `fetch` have one entry a storage, -1 where nothing leaves. Returns DONE, ENDLESS or NO_MEMORY. */
int penstock_simulate(const Graph *graph, const uint8_t *decisions, int32_t capacity, int32_t *slots, int64_t *live,
                      int32_t *gone, int32_t *fetch, Result *result) {
    size_t storages = (size_t)graph->num_storages + 1, operators = (size_t)graph->num_operators + 1;
    size_t most = (size_t)capacity + operators, stack = (size_t)graph->input_starts[graph->num_operators] + 1;
    int32_t *memory = malloc(sizeof *memory * (5 * storages + operators + stack));
    double *doubles = malloc(sizeof *doubles * (most + 1 + storages));
    uint8_t *bytes = calloc(2 * storages + operators, 1);
    int outcome = NO_MEMORY;
    if (memory && doubles && bytes) {
        Play play = {.graph = graph, .decisions = decisions, .slots = slots, .live = live, .capacity = capacity};
        int32_t *next = memory;
        play.births = next, next += storages;
        play.uses = next, next += storages;
        play.next_need = next, next += storages;
        play.last_user = next, next += storages;
        play.first_uses = next, next += storages;
        play.found = next, next += operators;
        play.stack = next;
        play.left_s = doubles;
        play.times_s = doubles + storages;
        play.is_here = bytes;
        play.stays = bytes + storages;
        play.is_found = bytes + 2 * storages;
        memset(memory, -1, sizeof(int32_t) * 5 * storages);
        memset(play.next_need, 0, sizeof(int32_t) * storages);
        memset(live, 0, sizeof(int64_t) * ((size_t)graph->num_forward + 1));
        memset(gone, -1, sizeof(int32_t) * (size_t)graph->num_storages);
        memset(fetch, -1, sizeof(int32_t) * (size_t)graph->num_storages);
        outcome = DONE;
        forward(&play);
        for (int32_t index = graph->num_forward; index < graph->num_operators && outcome == DONE; index++)
            outcome = backward(&play, index);
        if (outcome == DONE) {
            play.times_s[0] = 0.0;
            for (int32_t slot = 0; slot < play.num_slots; slot++)
                play.times_s[slot + 1] = play.times_s[slot] + graph->durations_s[slots[slot]];
            outcome = lanes(&play, gone, fetch, &result->stall_s);
        }
        if (outcome == DONE) {
            close_intervals(&play, gone, fetch);
            int64_t held = 0, peak = 0;
            for (int32_t slot = 0; slot < play.num_slots; slot++) {
                held += live[slot];
                live[slot] = held + graph->workspaces[slots[slot]];
                if (live[slot] > peak)
                    peak = live[slot];
            }
            result->peak_bytes = peak;
            result->extra_s = play.times_s[play.num_slots] - graph->step_s + result->stall_s;
            result->num_slots = play.num_slots;
        }
    }
    free(memory);
    free(doubles);
    free(bytes);
    return outcome;
}
