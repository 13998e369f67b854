/* What a disk gives: blocks at given offsets by so many threads, into one buffer each, and nothing else done with them. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

typedef struct {
    int descriptor;
    const int64_t *offsets;
    int64_t count, size, next, failed;
} Work;

static void *run(void *given) {
    Work *const work = given;
    void *buffer = NULL;
    if (posix_memalign(&buffer, 4096, (size_t)work->size)) {
        __atomic_store_n(&work->failed, 1, __ATOMIC_RELAXED);
        return NULL;
    }
    for (;;) {
        const int64_t at = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED);
        if (at >= work->count)
            break;
        if (pread(work->descriptor, buffer, (size_t)work->size, work->offsets[at]) != work->size)
            __atomic_store_n(&work->failed, 1, __ATOMIC_RELAXED);
    }
    free(buffer);
    return NULL;
}

/* 0, or 1 where a read failed. The file is opened past the page cache. */
int64_t probe(const char *path, const int64_t *offsets, int64_t count, int64_t size, int64_t depth) {
    Work work = {open(path, O_RDONLY | O_DIRECT), offsets, count, size, 0, 0};
    pthread_t threads[256];
    int64_t started = 0;
    if (work.descriptor < 0)
        return 1;
    while (started < depth && started < 256 && !pthread_create(threads + started, NULL, run, &work))
        started++;
    for (int64_t at = 0; at < started; at++)
        pthread_join(threads[at], NULL);
    close(work.descriptor);
    return work.failed || !started;
}
