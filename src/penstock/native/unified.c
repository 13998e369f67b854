/* Rows of feature tables and neighbours of nodes, for penstock.unified.
 *
 * Rows are copied, or widened to float, from memory by all cores and from files by many threads at once: the whole batch
 * of rows is one call, since an SSD is only as fast as the number of its open requests. Neighbours are drawn by
 * counter-based random numbers, so the draws of a node depend on nothing but the seed and the node.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { AHEAD = 16, MOST_BYTES_AHEAD = 512, STACK_BYTES = 256 * 1024, PAGE_BYTES = 4096 };
enum { COPY, FROM_HALF, FROM_BFLOAT, FROM_INT8 };

typedef struct {
    char *rows;           /* where results go */
    int64_t stride_bytes; /* from row to row */
    int64_t row_bytes;    /* of a stored row */
    int64_t width;        /* numbers in a row */
    const float *scale;   /* [width] for FROM_INT8 */
    int64_t kind;
} Result;

static float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static float from_half(uint16_t half) {
    const uint32_t rest = half & 0x7fffu, sign = (uint32_t)(half & 0x8000u) << 16;
    const float scaled = from_bits(rest << 13) * 0x1p112f; /* exact, subnormal numbers too */
    uint32_t bits;
    memcpy(&bits, &scaled, sizeof bits);
    return from_bits((rest >= 0x7c00u ? (rest << 13) | 0x7f800000u : bits) | sign);
}

static void put(const Result *to, int64_t position, const char *row) {
    char *const place = to->rows + position * to->stride_bytes;
    float *const numbers = (float *)place;
    if (to->kind == COPY) {
        memcpy(place, row, (size_t)to->row_bytes);
    } else if (to->kind == FROM_INT8) {
        for (int64_t at = 0; at < to->width; at++)
            numbers[at] = (float)((const signed char *)row)[at] * to->scale[at];
    } else {
        for (int64_t at = 0; at < to->width; at++) {
            uint16_t stored; /* rows of a file need not be aligned */
            memcpy(&stored, row + 2 * at, sizeof stored);
            numbers[at] = to->kind == FROM_HALF ? from_half(stored) : from_bits((uint32_t)stored << 16);
        }
    }
}

typedef struct {
    const char *rows;
    int64_t num_rows, wrap, stride_bytes;
    const int64_t *index, *positions;
    int64_t size;
} Asked;

/* -1: not there. */
static int64_t row_of(const Asked *asked, int64_t at) {
    const int64_t row = asked->index[at] + (asked->index[at] < 0 ? asked->wrap : 0);
    return row >= 0 && row < asked->num_rows ? row : -1;
}

/* Always inlined, so that a constant number of bytes makes a constant copy. */
static inline __attribute__((always_inline)) int64_t gather(const Asked *asked, const Result *to, int64_t copied,
                                                            int64_t num_threads) {
    int64_t bad = INT64_MAX;
#pragma omp parallel for schedule(static) num_threads((int)num_threads) reduction(min : bad) if (num_threads > 1)
    for (int64_t at = 0; at < asked->size; at++) {
        if (at + AHEAD < asked->size) {
            const int64_t next = row_of(asked, at + AHEAD);
            for (int64_t byte = 0; next >= 0 && byte < (copied ? copied : to->row_bytes) && byte < MOST_BYTES_AHEAD;
                 byte += 64)
                __builtin_prefetch(asked->rows + next * asked->stride_bytes + byte);
        }
        const int64_t row = row_of(asked, at), position = asked->positions ? asked->positions[at] : at;
        if (row < 0)
            bad = at < bad ? at : bad;
        else if (copied)
            memcpy(to->rows + position * to->stride_bytes, asked->rows + row * asked->stride_bytes, (size_t)copied);
        else
            put(to, position, asked->rows + row * asked->stride_bytes);
    }
    return bad == INT64_MAX ? -1 : bad;
}

/* Row index[at] of the table to positions[at] of the result (NULL: to at); `wrap` is added to negative ones. Returns the
 * first position whose index is out of range, -1 where there is none; nothing is read for such ones. */
int64_t penstock_gather(const char *table, int64_t num_rows, int64_t wrap, int64_t stride_bytes, const int64_t *index,
                        const int64_t *positions, int64_t size, const Result *to, int64_t num_threads) {
    const Asked asked = {table, num_rows, wrap, stride_bytes, index, positions, size};
    switch (to->kind == COPY ? to->row_bytes : 0) {
    case 64:
        return gather(&asked, to, 64, num_threads);
    case 128:
        return gather(&asked, to, 128, num_threads);
    case 256:
        return gather(&asked, to, 256, num_threads);
    default:
        return gather(&asked, to, 0, num_threads);
    }
}

/* Sorts rows of an index by tier. places[row]: below num_device in the first tier, else non-negative in the second (its
 * slot is places[row] - num_device), negative in the third (its slot is the row). slots and positions, [size], hold the
 * three tiers one after the other; counts[3]. Returns as penstock_gather does. */
int64_t penstock_split(const int32_t *places, int64_t num_rows, int64_t num_device, const int64_t *index, int64_t size,
                       int64_t *slots, int64_t *positions, int64_t *counts, int32_t *found) {
    counts[0] = counts[1] = counts[2] = 0;
    for (int64_t at = 0; at < size; at++) {
        if (at + AHEAD < size) {
            const int64_t next = index[at + AHEAD] + (index[at + AHEAD] < 0 ? num_rows : 0);
            if (next >= 0 && next < num_rows)
                __builtin_prefetch(places + next);
        }
        const int64_t row = index[at] + (index[at] < 0 ? num_rows : 0);
        if (row < 0 || row >= num_rows)
            return at;
        found[at] = places[row];
        counts[found[at] < 0 ? 2 : found[at] >= num_device]++;
    }
    int64_t next[3] = {0, counts[0], counts[0] + counts[1]};
    for (int64_t at = 0; at < size; at++) {
        const int tier = found[at] < 0 ? 2 : found[at] >= num_device;
        const int64_t row = index[at] + (index[at] < 0 ? num_rows : 0), to = next[tier]++;
        slots[to] = tier == 2 ? row : found[at] - (tier ? num_device : 0);
        positions[to] = at;
    }
    return -1;
}

typedef struct {
    const int32_t *descriptors; /* row r is row r / num_files of file r % num_files */
    int64_t num_files;
    int64_t first_byte;   /* of row 0, in every file */
    int64_t stride_bytes; /* from row to row in a file */
    int64_t align_bytes;  /* of offsets and lengths of requests; 1: none */
    int64_t gap_bytes;    /* rows that are no farther apart are read in one request */
    int64_t most_bytes;   /* of a request that reads several rows */
    int64_t depth;        /* requests at once */
} Files;

typedef struct {
    int64_t num_requests, bytes, error, file, offset, size;
} Report;

typedef struct {
    int64_t key, position;
} Wanted;

typedef struct {
    int64_t offset, length, needed, first, end; /* wanted rows [first, end); `needed` bytes must come */
} Span;

typedef struct {
    const Files *files;
    const Result *to;
    const Wanted *wanted;
    const Span *spans;
    const int64_t *starts; /* spans of each file */
    int64_t longest, next, turns, buffer_bytes;
    Report *report;
    pthread_mutex_t lock;
} Batch;

static int64_t file_of(const Files *files, int64_t row) { return row % files->num_files; }

static int64_t offset_of(const Files *files, int64_t row) {
    return files->first_byte + row / files->num_files * files->stride_bytes;
}

/* By ascending key, bytes of it at a time. `other` has room for as many. Returns the one that is sorted. */
static Wanted *sorted(Wanted *wanted, Wanted *other, int64_t size, int64_t largest) {
    for (int shift = 0; shift < 63 && largest >> shift; shift += 11) {
        int64_t counts[2049] = {0};
        for (int64_t at = 0; at < size; at++)
            counts[(wanted[at].key >> shift & 2047) + 1]++;
        for (int at = 0; at < 2048; at++)
            counts[at + 1] += counts[at];
        for (int64_t at = 0; at < size; at++)
            other[counts[wanted[at].key >> shift & 2047]++] = wanted[at];
        Wanted *const swap = wanted;
        wanted = other;
        other = swap;
    }
    return wanted;
}

static void fail(Batch *batch, int64_t error, int64_t file, const Span *span) {
    pthread_mutex_lock(&batch->lock);
    if (!batch->report->error) {
        batch->report->error = error;
        batch->report->file = file;
        batch->report->offset = span ? span->offset : 0;
        batch->report->size = span ? span->needed : 0;
    }
    pthread_mutex_unlock(&batch->lock);
}

/* 0, an errno, or -1 where the file ends too soon. */
static int64_t read_span(int descriptor, const Span *span, char *buffer) {
    int64_t had = 0;
    while (had < span->needed) {
        const ssize_t count = pread(descriptor, buffer + had, (size_t)(span->length - had), span->offset + had);
        if (count < 0 && errno != EINTR)
            return errno;
        if (count == 0)
            return -1;
        had += count > 0 ? count : 0;
    }
    return 0;
}

static void *work(void *given) {
    Batch *const batch = given;
    const Files *const files = batch->files;
    void *buffer = NULL;
    if (posix_memalign(&buffer, PAGE_BYTES, (size_t)batch->buffer_bytes)) {
        fail(batch, ENOMEM, 0, NULL);
        return NULL;
    }
    for (;;) {
        const int64_t turn = __atomic_fetch_add(&batch->next, 1, __ATOMIC_RELAXED);
        if (turn >= batch->turns || __atomic_load_n(&batch->report->error, __ATOMIC_RELAXED))
            break;
        const int64_t file = turn % files->num_files, at = batch->starts[file] + turn / files->num_files;
        if (at >= batch->starts[file + 1])
            continue;
        const Span *const span = batch->spans + at;
        const int64_t error = read_span(files->descriptors[file], span, buffer);
        if (error) {
            fail(batch, error, file, span);
            break;
        }
        for (int64_t one = span->first; one < span->end; one++) {
            const int64_t row = batch->wanted[one].key % batch->longest * files->num_files + file;
            put(batch->to, batch->wanted[one].position, (char *)buffer + (offset_of(files, row) - span->offset));
        }
    }
    free(buffer);
    return NULL;
}

/* Consecutive rows of a file in one request where that is no more work for the disk. Returns how many spans. */
static int64_t find_spans(const Files *files, const Wanted *wanted, int64_t size, int64_t longest, int64_t row_bytes,
                          Span *spans, int64_t *starts) {
    int64_t count = 0, last_file = -1;
    for (int64_t at = 0; at < size; at++) {
        const int64_t file = wanted[at].key / longest, row = wanted[at].key % longest * files->num_files + file;
        const int64_t begin = offset_of(files, row), end = begin + row_bytes, align = files->align_bytes;
        const int64_t low = begin / align * align, high = (end + align - 1) / align * align;
        Span *const span = spans + count - 1;
        if (file == last_file && low <= span->offset + span->length + files->gap_bytes &&
            (high <= span->offset + span->length || high - span->offset <= files->most_bytes)) {
            if (high > span->offset + span->length)
                span->length = high - span->offset;
            span->needed = end - span->offset;
            span->end = at + 1;
            continue;
        }
        while (last_file < file)
            starts[++last_file] = count;
        spans[count++] = (Span){low, high - low, end - low, at, at + 1};
    }
    while (last_file < files->num_files)
        starts[++last_file] = count;
    return count;
}

static void run(Batch *batch, int64_t num_spans) {
    int64_t num_threads = num_spans < batch->files->depth ? num_spans : batch->files->depth, started = 0;
    pthread_t *threads = malloc((size_t)num_threads * sizeof *threads);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    while (threads && started < num_threads - 1 && !pthread_create(threads + started, &attributes, work, batch))
        started++;
    work(batch); /* this thread, too; alone where no other could be made */
    for (int64_t at = 0; at < started; at++)
        pthread_join(threads[at], NULL);
    pthread_attr_destroy(&attributes);
    free(threads);
}

/* Rows of the files to positions of the result. Rows are in range; the same one may be asked for several times. */
void penstock_read_rows(const Files *files, int64_t num_rows, const int64_t *rows, const int64_t *positions,
                        int64_t size, const Result *to, Report *report) {
    memset(report, 0, sizeof *report);
    if (!size)
        return;
    const int64_t longest = num_rows / files->num_files + 1;
    Wanted *wanted = malloc((size_t)size * 2 * sizeof *wanted);
    Span *spans = malloc((size_t)size * sizeof *spans);
    int64_t *starts = malloc((size_t)(files->num_files + 1) * sizeof *starts);
    if (wanted && spans && starts) {
        for (int64_t at = 0; at < size; at++)
            wanted[at] = (Wanted){file_of(files, rows[at]) * longest + rows[at] / files->num_files,
                                  positions ? positions[at] : at};
        Batch batch = {.files = files, .to = to, .spans = spans, .starts = starts, .longest = longest,
                       .report = report, .lock = PTHREAD_MUTEX_INITIALIZER};
        batch.wanted = sorted(wanted, wanted + size, size, files->num_files * longest);
        const int64_t count = find_spans(files, batch.wanted, size, longest, to->row_bytes, spans, starts);
        for (int64_t file = 0; file < files->num_files; file++)
            if ((starts[file + 1] - starts[file]) * files->num_files > batch.turns)
                batch.turns = (starts[file + 1] - starts[file]) * files->num_files;
        for (int64_t at = 0; at < count; at++) {
            report->bytes += spans[at].length;
            if (spans[at].length > batch.buffer_bytes)
                batch.buffer_bytes = spans[at].length;
        }
        report->num_requests = count;
        run(&batch, count);
    } else {
        report->error = ENOMEM;
    }
    free(wanted);
    free(spans);
    free(starts);
}

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

/* offsets[size + 1]: where the neighbours drawn for each node begin. fanout < 0: all. Returns how many there are. */
int64_t penstock_sample_offsets(const int64_t *starts, const int64_t *nodes, int64_t size, int64_t fanout,
                                int64_t replace, int64_t *offsets) {
    offsets[0] = 0;
    for (int64_t at = 0; at < size; at++) {
        if (at + AHEAD < size)
            __builtin_prefetch(starts + nodes[at + AHEAD]);
        const int64_t degree = starts[nodes[at] + 1] - starts[nodes[at]];
        const int64_t most = fanout < 0 || (!replace && degree < fanout) ? degree : fanout;
        offsets[at + 1] = offsets[at] + (degree ? most : 0);
    }
    return offsets[size];
}

/* Floyd's method without replacement: each subset is equally likely. edges: places in the index; neighbours: what is
 * there. */
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
        for (int64_t one = 0; one < count; one++) {
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
