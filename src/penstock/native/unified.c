/* Rows of feature tables, for penstock.unified.
 *
 * Rows are copied, or widened to float, from memory by all cores. Those of a file are one call for a whole batch: what
 * the page cache holds is copied from a map of the file; the rest is read past it with many requests at once, since an
 * SSD is only as fast as the number of its open requests.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#if defined __has_include
#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif
#endif

enum { AHEAD = 32 /* rows that come into the cache at once */, MOST_BYTES_AHEAD = 512, STACK_BYTES = 256 * 1024, PAGE_BYTES = 4096 };
enum { GROUP = 32 /* pages asked about at once */, CACHED_FOR_MS = 1000, ABSENT_FOR_MS = 8000 };
enum { MANY_ABSENT = 1024, ASK_EVERY = 16 };
enum { RING_DEPTHS = 4 };
enum { SERIAL_BYTES = 256 * 1024 /* below it, to wake other threads takes longer than to copy */ };
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

static inline void ahead(const char *row, int64_t bytes) {
    for (int64_t byte = 0; byte < bytes && byte < MOST_BYTES_AHEAD; byte += 64)
        __builtin_prefetch(row + byte);
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

/* Where a row begins, NULL if it is not there; it starts to come into the cache. */
static inline __attribute__((always_inline)) const char *find_row(const Asked *asked, int64_t at, int64_t bytes) {
    const int64_t row = row_of(asked, at);
    if (row < 0)
        return NULL;
    ahead(asked->rows + row * asked->stride_bytes, bytes);
    return asked->rows + row * asked->stride_bytes;
}

/* Returns whether the row is there. */
static inline __attribute__((always_inline)) int put_row(const Asked *asked, const Result *to, int64_t copied, int64_t at,
                                                         const char *row) {
    const int64_t position = asked->positions ? asked->positions[at] : at;
    if (row && copied)
        memcpy(to->rows + position * to->stride_bytes, row, (size_t)copied);
    else if (row)
        put(to, position, row);
    return row != NULL;
}

/* Rows [begin, end), one after the other, and each while the next ones come into the cache. Always inlined, so that a
 * constant number of bytes makes a constant copy. Returns the first that is not there. */
static inline __attribute__((always_inline)) int64_t gather_part(const Asked *asked, const Result *to, int64_t copied,
                                                                 int64_t begin, int64_t end) {
    const Asked mine = *asked;
    const Result result = *to;
    const char *coming[AHEAD];
    const int64_t bytes = copied ? copied : to->row_bytes, last = end - AHEAD;
    int64_t bad = INT64_MAX, at = begin;
    for (int64_t first = begin; first < end && first < begin + AHEAD; first++)
        coming[(first - begin) % AHEAD] = find_row(&mine, first, bytes);
    for (; at < last; at++) {
        const char *const row = coming[(at - begin) % AHEAD];
        coming[(at - begin) % AHEAD] = find_row(&mine, at + AHEAD, bytes);
        if (!put_row(&mine, &result, copied, at, row))
            bad = at < bad ? at : bad;
    }
    for (; at < end; at++)
        if (!put_row(&mine, &result, copied, at, coming[(at - begin) % AHEAD]))
            bad = at < bad ? at : bad;
    return bad;
}

static inline __attribute__((always_inline)) int64_t gather(const Asked *asked, const Result *to, int64_t copied,
                                                            int64_t num_threads) {
    int64_t bad = INT64_MAX;
#pragma omp parallel for schedule(static) num_threads((int)num_threads) reduction(min : bad) if (num_threads > 1)
    for (int64_t part = 0; part < num_threads; part++) {
        const int64_t first = gather_part(asked, to, copied, asked->size * part / num_threads,
                                          asked->size * (part + 1) / num_threads);
        bad = first < bad ? first : bad;
    }
    return bad == INT64_MAX ? -1 : bad;
}

/* Row index[at] of the table to positions[at] of the result (NULL: to at); `wrap` is added to negative ones. Returns the
 * first position whose index is out of range, -1 where there is none; nothing is read for such ones. */
int64_t penstock_gather(const char *table, int64_t num_rows, int64_t wrap, int64_t stride_bytes, const int64_t *index,
                        const int64_t *positions, int64_t size, const Result *to, int64_t num_threads) {
    const Asked asked = {table ? table : "" /* rows without numbers */, num_rows, wrap, stride_bytes, index, positions, size};
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
    int64_t by_ring;      /* whether io_uring may be used */
} Files;

/* What the page cache holds of the files, as far as is known. Many threads may read and write that; what one of them
 * has not seen yet is asked again. */
typedef struct {
    const char *const *maps; /* of each file, from its byte 0 */
    const int64_t *sizes;    /* of each map */
    int64_t page_bytes;
    int64_t num_groups;  /* of the longest file */
    uint64_t *groups;    /* [num_files * num_groups]: when a group was asked about, above which of its pages are there */
    int64_t *num_absent; /* groups in a row of which no page was there */
    int64_t num_threads;
} Cache;

typedef struct {
    int64_t num_cached, num_faults, num_requests, bytes, nanoseconds, error, file, offset, size;
} Report;

typedef struct {
    int64_t key, position; /* key: the row's number, and then what rows are sorted by */
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

static uint32_t now_ms(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &time);
    return (uint32_t)(time.tv_sec * 1000 + time.tv_nsec / 1000000) | 1; /* 0: never */
}

/* Which pages of a group are in the page cache, a bit each. Where little of a file is, this seldom asks. */
static uint32_t pages_of(const Cache *cache, int64_t file, int64_t group, uint32_t now) {
    uint64_t *const place = cache->groups + file * cache->num_groups + group;
    const uint64_t known = __atomic_load_n(place, __ATOMIC_RELAXED);
    const uint32_t asked = (uint32_t)(known >> 32), pages = (uint32_t)known;
    if (asked && now - asked < (uint32_t)(pages ? CACHED_FOR_MS : ABSENT_FOR_MS))
        return pages;
    const int64_t absent = __atomic_fetch_add(cache->num_absent, 1, __ATOMIC_RELAXED);
    if (absent >= MANY_ABSENT && absent % ASK_EVERY)
        return 0;
    const int64_t first = group * GROUP * cache->page_bytes, left = cache->sizes[file] - first;
    const int64_t length = left < GROUP * cache->page_bytes ? left : GROUP * cache->page_bytes;
    unsigned char is_there[GROUP] = {0};
    uint32_t there = 0;
    if (!mincore((void *)(cache->maps[file] + first), (size_t)length, is_there))
        for (int page = 0; page < GROUP; page++)
            there |= (uint32_t)(is_there[page] & 1) << page;
    __atomic_store_n(place, (uint64_t)now << 32 | there, __ATOMIC_RELAXED);
    if (there)
        __atomic_store_n(cache->num_absent, 0, __ATOMIC_RELAXED);
    return there;
}

static int is_cached(const Files *files, const Cache *cache, int64_t row, int64_t row_bytes, uint32_t now) {
    const int64_t begin = offset_of(files, row), last = (begin + row_bytes - 1) / cache->page_bytes;
    for (int64_t page = begin / cache->page_bytes; page <= last; page++)
        if (!(pages_of(cache, file_of(files, row), page / GROUP, now) >> page % GROUP & 1))
            return 0;
    return 1;
}

/* Whether no file was cut: a map of one has zeros in its last page, and none behind that. */
static int are_whole(const Files *files, const Cache *cache) {
    for (int64_t file = 0; file < files->num_files; file++) {
        struct stat state;
        if (fstat(files->descriptors[file], &state) || state.st_size < cache->sizes[file])
            return 0;
    }
    return 1;
}

/* Moves rows that are in the page cache from wanted[size] to cached; returns how many stay. */
static int64_t sort_out(const Files *files, const Cache *cache, Wanted *wanted, int64_t size, Wanted *cached,
                        int64_t row_bytes) {
    const uint32_t now = now_ms();
    int64_t stay = 0;
    for (int64_t at = 0; at < size; at++) {
        if (is_cached(files, cache, wanted[at].key, row_bytes, now))
            cached[at - stay] = wanted[at];
        else
            wanted[stay++] = wanted[at];
    }
    return stay;
}

static const char *mapped(const Files *files, const Cache *cache, int64_t row) {
    return cache->maps[file_of(files, row)] + offset_of(files, row);
}

static int64_t num_faults(void) {
    struct rusage usage;
    return getrusage(RUSAGE_THREAD, &usage) ? 0 : usage.ru_majflt;
}

/* Where a thread that copies from a map goes on if the map turns out to have no such page. NULL while it does not. */
static _Thread_local sigjmp_buf *volatile landing __attribute__((tls_model("initial-exec"))); /* read in a handler */
static _Thread_local int is_passing __attribute__((tls_model("initial-exec")));
static struct sigaction before;
static pthread_mutex_t landings = PTHREAD_MUTEX_INITIALIZER;

/* The signal of a page that a map does not have: a file was cut, or its disk has failed. Others' are passed on. */
static void land(int number, siginfo_t *info, void *context) {
    const int is_fault = info->si_code > 0; /* and not sent by somebody */
    if (is_fault && landing)
        siglongjmp(*landing, 1);
    if (!(before.sa_flags & SA_SIGINFO) && before.sa_handler == SIG_IGN && !is_fault)
        return;
    const int has_handler = before.sa_flags & SA_SIGINFO || (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN);
    if (!has_handler || is_passing) { /* as if nobody had asked for it; a fault comes again by itself */
        signal(number, SIG_DFL);
        if (!is_fault)
            raise(number);
        return;
    }
    is_passing = 1;
    if (before.sa_flags & SA_SIGINFO)
        before.sa_sigaction(number, info, context);
    else
        before.sa_handler(number);
    is_passing = 0;
}

/* Others may have taken the signal since the last batch. */
static void make_landings(void) {
    struct sigaction action = {.sa_sigaction = land, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER}, now;
    sigemptyset(&action.sa_mask);
    pthread_mutex_lock(&landings);
    if (!sigaction(SIGBUS, NULL, &now) && !(now.sa_flags & SA_SIGINFO && now.sa_sigaction == land)) {
        before = now;
        sigaction(SIGBUS, &action, NULL);
    }
    pthread_mutex_unlock(&landings);
}

typedef struct {
    const Files *files;
    const Cache *cache;
    const Wanted *cached;
    int64_t begin, end, size;
    const Result *to;
} Copying;

__attribute__((noinline)) static void copy_part(const Copying *part) {
    for (int64_t at = part->begin; at < part->end; at++) {
        if (at + AHEAD < part->size)
            ahead(mapped(part->files, part->cache, part->cached[at + AHEAD].key), part->to->row_bytes);
        put(part->to, part->cached[at].position, mapped(part->files, part->cache, part->cached[at].key));
    }
}

/* Returns whether the maps had all these rows. */
static int could_copy(const Copying *part) {
    sigjmp_buf here;
    if (sigsetjmp(here, 1)) {
        landing = NULL;
        return 0;
    }
    landing = &here;
    copy_part(part);
    landing = NULL;
    return 1;
}

/* Pages may leave between asking and reading. They are then read from the disk, one by one; if that happens, nothing of
 * what was known is believed. Returns how many were read so by this thread; -1 if a file was cut meanwhile, so that what
 * was copied may be wrong. */
static int64_t copy_cached(const Files *files, const Cache *cache, const Wanted *cached, int64_t size, const Result *to) {
    const int64_t begin = num_faults(), num_threads = size * to->row_bytes < SERIAL_BYTES ? 1 : cache->num_threads;
    int are_there = 1;
    make_landings();
#pragma omp parallel for schedule(static) num_threads((int)num_threads) if (num_threads > 1) reduction(& : are_there)
    for (int64_t part = 0; part < num_threads; part++) {
        const int64_t from = size * part / num_threads, end = size * (part + 1) / num_threads;
        are_there &= could_copy(&(Copying){files, cache, cached, from, end, size, to});
    }
    if (!are_there || !are_whole(files, cache))
        return -1;
    const int64_t faults = num_faults() - begin;
    if (faults)
        for (int64_t at = 0; at < files->num_files * cache->num_groups; at++)
            __atomic_store_n(cache->groups + at, 0, __ATOMIC_RELAXED);
    return faults;
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

/* The next span of a file in turn; NULL where all were taken, or a read failed. */
static const Span *take(Batch *batch, int64_t *file) {
    const int64_t num_files = batch->files->num_files;
    while (!__atomic_load_n(&batch->report->error, __ATOMIC_RELAXED)) {
        const int64_t turn = __atomic_fetch_add(&batch->next, 1, __ATOMIC_RELAXED);
        if (turn >= batch->turns)
            break;
        const int64_t at = batch->starts[turn % num_files] + turn / num_files;
        *file = turn % num_files;
        if (at < batch->starts[*file + 1])
            return batch->spans + at;
    }
    return NULL;
}

static void put_span(const Batch *batch, int64_t file, const Span *span, const char *buffer) {
    for (int64_t at = span->first; at < span->end; at++) {
        const int64_t row = batch->wanted[at].key % batch->longest * batch->files->num_files + file;
        put(batch->to, batch->wanted[at].position, buffer + (offset_of(batch->files, row) - span->offset));
    }
}

static void *work(void *given) {
    Batch *const batch = given;
    void *buffer = NULL;
    if (posix_memalign(&buffer, PAGE_BYTES, (size_t)batch->buffer_bytes)) {
        fail(batch, ENOMEM, 0, NULL);
        return NULL;
    }
    const Span *span;
    for (int64_t file; (span = take(batch, &file));) {
        const int64_t error = read_span(batch->files->descriptors[file], span, buffer);
        if (error)
            fail(batch, error, file, span);
        else
            put_span(batch, file, span, buffer);
    }
    free(buffer);
    return NULL;
}

#ifdef IORING_OFF_SQES
#ifndef IORING_SETUP_SINGLE_ISSUER
#define IORING_SETUP_SINGLE_ISSUER (1U << 12)
#define IORING_SETUP_DEFER_TASKRUN (1U << 13)
#endif

/* Many requests of one thread at once, with fewer system calls than requests. */
typedef struct {
    int descriptor;
    uint32_t mask, answer_mask, *tail, *answer_head, *answer_tail;
    struct io_uring_sqe *requests;
    struct io_uring_cqe *answers;
    char *rings;
    size_t rings_bytes, requests_bytes;
} Ring;

static void close_ring(Ring *ring) {
    if (ring->requests != MAP_FAILED)
        munmap(ring->requests, ring->requests_bytes);
    if (ring->rings != MAP_FAILED)
        munmap(ring->rings, ring->rings_bytes);
    close(ring->descriptor);
}

/* Whether the kernel lets us: many containers do not. */
static int open_ring(Ring *ring, int64_t depth) {
    struct io_uring_params told = {.flags = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN};
    int descriptor = (int)syscall(SYS_io_uring_setup, (unsigned)depth, &told);
    if (descriptor < 0) { /* a kernel before 6.1 */
        told = (struct io_uring_params){0};
        descriptor = (int)syscall(SYS_io_uring_setup, (unsigned)depth, &told);
    }
    if (descriptor < 0)
        return 0;
    const size_t asked = told.sq_off.array + told.sq_entries * sizeof(uint32_t);
    const size_t answered = told.cq_off.cqes + told.cq_entries * sizeof(struct io_uring_cqe);
    *ring = (Ring){.descriptor = descriptor, .rings = MAP_FAILED, .requests = MAP_FAILED,
                   .rings_bytes = asked > answered ? asked : answered,
                   .requests_bytes = told.sq_entries * sizeof(struct io_uring_sqe)};
    if (told.features & IORING_FEAT_SINGLE_MMAP && told.features & IORING_FEAT_RW_CUR_POS) { /* 5.6 */
        const int flags = MAP_SHARED | MAP_POPULATE, rights = PROT_READ | PROT_WRITE;
        ring->rings = mmap(NULL, ring->rings_bytes, rights, flags, descriptor, IORING_OFF_SQ_RING);
        ring->requests = mmap(NULL, ring->requests_bytes, rights, flags, descriptor, IORING_OFF_SQES);
    }
    if (ring->rings == MAP_FAILED || ring->requests == MAP_FAILED) {
        close_ring(ring);
        return 0;
    }
    ring->tail = (uint32_t *)(ring->rings + told.sq_off.tail);
    ring->answer_head = (uint32_t *)(ring->rings + told.cq_off.head);
    ring->answer_tail = (uint32_t *)(ring->rings + told.cq_off.tail);
    ring->mask = *(uint32_t *)(ring->rings + told.sq_off.ring_mask);
    ring->answer_mask = *(uint32_t *)(ring->rings + told.cq_off.ring_mask);
    ring->answers = (struct io_uring_cqe *)(ring->rings + told.cq_off.cqes);
    for (uint32_t at = 0; at < told.sq_entries; at++)
        ((uint32_t *)(ring->rings + told.sq_off.array))[at] = at;
    return 1;
}

typedef struct {
    const Span *span;
    int64_t file;
} Open;

/* Reads what is left of the batch with `depth` requests at once. Returns 0 where nothing was done, since it cannot. */
static int read_by_ring(Batch *batch, int64_t depth) {
    Ring ring;
    if (!open_ring(&ring, depth))
        return 0;
    void *buffers = NULL;
    Open *const open = malloc((size_t)depth * sizeof *open);
    int64_t *const idle = malloc((size_t)depth * sizeof *idle), stride = batch->buffer_bytes;
    int64_t num_idle = open && idle && !posix_memalign(&buffers, PAGE_BYTES, (size_t)(depth * stride)) ? depth : 0;
    const int works = num_idle > 0;
    for (int64_t at = 0; at < num_idle; at++)
        idle[at] = at;
    for (uint32_t queued = 0; works;) {
        for (int64_t file; num_idle;) {
            const Span *const span = take(batch, &file);
            if (!span)
                break;
            const int64_t slot = idle[--num_idle];
            open[slot] = (Open){span, file};
            ring.requests[*ring.tail & ring.mask] = (struct io_uring_sqe){
                .opcode = IORING_OP_READ, .fd = batch->files->descriptors[file], .off = (uint64_t)span->offset,
                .addr = (uintptr_t)buffers + (uint64_t)(slot * stride), .len = (uint32_t)span->length,
                .user_data = (uint64_t)slot};
            __atomic_store_n(ring.tail, *ring.tail + 1, __ATOMIC_RELEASE);
            queued++;
        }
        if (num_idle == depth)
            break;
        const int64_t num_open = depth - num_idle, several = depth / 8 + 1;
        const int64_t enough = num_open < several ? num_open : several;
        const long sent =
            syscall(SYS_io_uring_enter, ring.descriptor, queued, (int)enough, IORING_ENTER_GETEVENTS, NULL, 0);
        if (sent < 0 && errno != EINTR && errno != EAGAIN && errno != EBUSY) {
            fail(batch, errno, 0, NULL);
            buffers = NULL; /* not freed: the kernel may still write to them */
            break;
        }
        queued -= sent > 0 ? (uint32_t)sent : 0;
        uint32_t head = *ring.answer_head;
        for (; head != __atomic_load_n(ring.answer_tail, __ATOMIC_ACQUIRE); head++) {
            const struct io_uring_cqe *const answer = ring.answers + (head & ring.answer_mask);
            const int64_t slot = (int64_t)answer->user_data, file = open[slot].file;
            const Span *const span = open[slot].span;
            char *const buffer = (char *)buffers + slot * stride;
            /* what failed or came in part is asked again, so that an error is of one kind */
            const int64_t error =
                answer->res >= span->needed ? 0 : read_span(batch->files->descriptors[file], span, buffer);
            if (error)
                fail(batch, error, file, span);
            else
                put_span(batch, file, span, buffer);
            idle[num_idle++] = slot;
        }
        __atomic_store_n(ring.answer_head, head, __ATOMIC_RELEASE);
    }
    free(buffers);
    free(open);
    free(idle);
    close_ring(&ring);
    return works;
}
#else
static int read_by_ring(Batch *batch, int64_t depth) {
    (void)batch, (void)depth;
    return 0;
}
#endif

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
    const int64_t depth = num_spans < batch->files->depth ? num_spans : batch->files->depth, num_threads = depth;
    int64_t started = 0;
    if (batch->files->by_ring && depth > 1) { /* more requests, where they are short: one thread answers all of them */
        const int64_t room = batch->files->depth * (batch->files->most_bytes + 2 * PAGE_BYTES) / batch->buffer_bytes;
        const int64_t most = room < RING_DEPTHS * depth ? room : RING_DEPTHS * depth;
        if (read_by_ring(batch, most < depth ? depth : most < num_spans ? most : num_spans))
            return;
    }
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

/* Rows of the files to positions of the result. Rows are in range; the same one may be asked for several times. cache
 * may be NULL: then all are read from the disk. */
void penstock_read_rows(const Files *files, const Cache *cache, int64_t num_rows, const int64_t *rows,
                        const int64_t *positions, int64_t size, const Result *to, Report *report) {
    memset(report, 0, sizeof *report);
    const int64_t longest = num_rows / files->num_files + 1;
    Wanted *wanted = malloc((size_t)size * 2 * sizeof *wanted);
    Span *spans = malloc((size_t)size * sizeof *spans);
    int64_t *starts = malloc((size_t)(files->num_files + 1) * sizeof *starts);
    if (wanted && spans && starts) {
        for (int64_t at = 0; at < size; at++)
            wanted[at] = (Wanted){rows[at], positions ? positions[at] : at};
        if (cache && are_whole(files, cache)) {
            const int64_t left = sort_out(files, cache, wanted, size, wanted + size, to->row_bytes);
            const int64_t faults = copy_cached(files, cache, wanted + size, size - left, to);
            if (faults < 0) { /* all are read from the files, which says what is missing */
                memcpy(wanted + left, wanted + size, (size_t)(size - left) * sizeof *wanted);
            } else {
                report->num_cached = size - left;
                report->num_faults = faults;
                size = left;
            }
        }
        for (int64_t at = 0; at < size; at++)
            wanted[at].key = file_of(files, wanted[at].key) * longest + wanted[at].key / files->num_files;
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
        if (count) {
            struct timespec start, end;
            clock_gettime(CLOCK_MONOTONIC, &start);
            run(&batch, count);
            clock_gettime(CLOCK_MONOTONIC, &end);
            report->nanoseconds = (end.tv_sec - start.tv_sec) * 1000000000 + end.tv_nsec - start.tv_nsec;
        }
    } else {
        report->error = ENOMEM;
    }
    free(wanted);
    free(spans);
    free(starts);
}
