/* What PyTorch's allocator for the CPU takes and gives back, for penstock.probe.
 *
 * PyTorch reports that to one place only, the profiler of a thread, and a profiler cannot begin or end without touching
 * what runs: a region that began under one and ends under the next writes to memory of the first. So the two functions
 * through which libc10 gets its memory are replaced in its own table of imports (as memray does for all of malloc).
 * Nothing is shared with a profiler, recordings of all threads may overlap in any way, blocks from before are seen when
 * they go, and no header of a version of PyTorch is needed.
 *
 * While nothing is recorded it costs a call and a comparison. A recording has what its own thread takes, and what any
 * thread gives back, since autograd and queues free in other threads what this one has made.
 *
 * In the same place a few large blocks may be kept for whoever takes the next of their size. Malloc maps and unmaps each
 * one, and whoever touches it first pays a page fault for every 4 KiB.
 */

#define _GNU_SOURCE
#include <elf.h>
#include <link.h>
#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
enum { BY_CALL = R_X86_64_JUMP_SLOT, BY_ADDRESS = R_X86_64_GLOB_DAT };
#elif defined(__aarch64__)
enum { BY_CALL = R_AARCH64_JUMP_SLOT, BY_ADDRESS = R_AARCH64_GLOB_DAT };
#else
enum { BY_CALL = -1, BY_ADDRESS = -1 };
#endif

enum { FIRST_EVENTS = 1024, LEAST_KEPT_BYTES = 1 << 20, MOST_KEPT = 64 };

typedef struct {
    int64_t time_ns; /* of the real-time clock */
    uint64_t address;
    int64_t size_bytes; /* -1: it was given back */
} Event;

typedef struct Recording {
    struct Recording *next;
    Event *events;
    int64_t num_events, most_events;
    pthread_t thread;
    int has_lost; /* whether there was no memory for some of its events */
} Recording;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards the list and all events */
static Recording *recordings;
static atomic_int num_recordings;
static int (*own_take)(void **, size_t, size_t) = posix_memalign;
static void (*own_give)(void *) = free;

static void note(void *memory, int64_t size_bytes) {
    struct timespec now;
    pthread_mutex_lock(&lock);
    clock_gettime(CLOCK_REALTIME, &now); /* under the lock, so that times are in order */
    for (Recording *each = recordings; each; each = each->next) {
        if (size_bytes >= 0 && !pthread_equal(each->thread, pthread_self())) continue;
        if (each->num_events == each->most_events) {
            Event *more = realloc(each->events, 2 * (size_t)each->most_events * sizeof(Event));
            if (!more) {
                each->has_lost = 1;
                continue;
            }
            each->events = more;
            each->most_events *= 2;
        }
        each->events[each->num_events++] =
            (Event){now.tv_sec * INT64_C(1000000000) + now.tv_nsec, (uint64_t)(uintptr_t)memory, size_bytes};
    }
    pthread_mutex_unlock(&lock);
}

typedef struct {
    void *memory;
    size_t size_bytes;
} Kept;

static pthread_mutex_t keeping = PTHREAD_MUTEX_INITIALIZER; /* guards the three below */
static Kept kept[MOST_KEPT]; /* the latest comes last */
static int num_kept;
static size_t kept_bytes;
static _Atomic size_t most_kept_bytes;

static void *remove_kept(int place) {
    void *memory = kept[place].memory;
    kept_bytes -= kept[place].size_bytes;
    memmove(kept + place, kept + place + 1, (size_t)(--num_kept - place) * sizeof(Kept));
    return memory;
}

/* Free the oldest blocks until there is a place for another one, and `most_bytes` are left; keep `memory`, if given. */
static void change_kept(void *memory, size_t size_bytes, size_t most_bytes) {
    void *old[MOST_KEPT];
    int num_old = 0;
    while (num_kept && (num_kept == MOST_KEPT || kept_bytes + size_bytes > most_bytes)) old[num_old++] = remove_kept(0);
    if (memory) {
        kept[num_kept++] = (Kept){memory, size_bytes};
        kept_bytes += size_bytes;
    }
    pthread_mutex_unlock(&keeping); /* which the caller has locked */
    while (num_old) own_give(old[--num_old]);
}

/* Keep a block, in place of the oldest ones; return whether it is kept. */
static int keep(void *memory) {
    const size_t size_bytes = atomic_load_explicit(&most_kept_bytes, memory_order_relaxed) ? malloc_usable_size(memory) : 0;
    if (size_bytes < LEAST_KEPT_BYTES) return 0;
    pthread_mutex_lock(&keeping);
    const size_t most_bytes = atomic_load(&most_kept_bytes);
    const int is_kept = size_bytes <= most_bytes;
    change_kept(is_kept ? memory : NULL, is_kept ? size_bytes : 0, most_bytes);
    return is_kept;
}

/* Return a block that was kept, of the size asked for or an eighth more; NULL if there is none. */
static void *take_kept(size_t alignment, size_t size_bytes) {
    void *memory = NULL;
    if (size_bytes < LEAST_KEPT_BYTES || !atomic_load_explicit(&most_kept_bytes, memory_order_relaxed)) return NULL;
    pthread_mutex_lock(&keeping);
    for (int i = num_kept - 1; i >= 0 && !memory; i--)
        if (kept[i].size_bytes >= size_bytes && kept[i].size_bytes - size_bytes <= size_bytes / 8 &&
            (uintptr_t)kept[i].memory % alignment == 0)
            memory = remove_kept(i);
    pthread_mutex_unlock(&keeping);
    return memory;
}

static int take(void **memory, size_t alignment, size_t size_bytes) {
    void *known = take_kept(alignment, size_bytes);
    if (known) *memory = known;
    const int error = known ? 0 : own_take(memory, alignment, size_bytes);
    if (!error && atomic_load_explicit(&num_recordings, memory_order_relaxed)) note(*memory, (int64_t)size_bytes);
    return error;
}

static void give(void *memory) {
    /* before it is free, since another thread may get it at once */
    if (memory && atomic_load_explicit(&num_recordings, memory_order_relaxed)) note(memory, -1);
    if (!memory || !keep(memory)) own_give(memory);
}

/* Keep up to so many bytes of large blocks that are given back. Returns the most before. */
int64_t penstock_memory_keep(int64_t size_bytes) {
    pthread_mutex_lock(&keeping);
    const int64_t before = (int64_t)atomic_exchange(&most_kept_bytes, (size_t)size_bytes);
    change_kept(NULL, 0, (size_t)size_bytes);
    return before;
}

/* Give back what is kept now. */
void penstock_memory_drop(void) {
    pthread_mutex_lock(&keeping);
    change_kept(NULL, 0, 0);
}

/* Where libc10 keeps the addresses of the functions that it imports. */
typedef struct {
    const char *end_of_name;
    int has_take, has_give;
} Search;

static int is_inside(const struct dl_phdr_info *library, uintptr_t address) {
    for (int i = 0; i < library->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &library->dlpi_phdr[i];
        const uintptr_t start = library->dlpi_addr + part->p_vaddr;
        if (part->p_type == PT_LOAD && address >= start && address < start + part->p_memsz) return 1;
    }
    return 0;
}

static int is_protected(const struct dl_phdr_info *library, uintptr_t address) {
    for (int i = 0; i < library->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &library->dlpi_phdr[i];
        const uintptr_t start = library->dlpi_addr + part->p_vaddr;
        if (part->p_type == PT_GNU_RELRO && address >= start && address < start + part->p_memsz) return 1;
    }
    return 0;
}

/* Put `function` into a slot; keep what was there in `own`, unless that is the stub of a function not yet looked up. */
static int put(const struct dl_phdr_info *library, uintptr_t slot, void *function, void **own) {
    const uintptr_t page_bytes = (uintptr_t)sysconf(_SC_PAGESIZE), page = slot & ~(page_bytes - 1);
    void **place = (void **)slot;
    if (*place != function) {
        if (!is_inside(library, (uintptr_t)*place)) *own = *place;
        if (mprotect((void *)page, page_bytes, PROT_READ | PROT_WRITE)) return 0;
        __atomic_store_n(place, function, __ATOMIC_SEQ_CST);
        if (is_protected(library, slot)) mprotect((void *)page, page_bytes, PROT_READ);
    }
    return 1;
}

static void replace_in(
    const struct dl_phdr_info *library, const ElfW(Rela) *entry, size_t num_entries, const ElfW(Sym) *symbols,
    const char *names, Search *search
) {
    for (size_t i = 0; i < num_entries; i++, entry++) {
        const int type = (int)ELF64_R_TYPE(entry->r_info);
        if (type != BY_CALL && type != BY_ADDRESS) continue;
        const char *name = names + symbols[ELF64_R_SYM(entry->r_info)].st_name;
        const uintptr_t slot = library->dlpi_addr + entry->r_offset;
        if (!strcmp(name, "posix_memalign"))
            search->has_take |= put(library, slot, (void *)take, (void **)&own_take);
        else if (!strcmp(name, "free"))
            search->has_give |= put(library, slot, (void *)give, (void **)&own_give);
    }
}

static int look_at(struct dl_phdr_info *library, size_t size, void *data) {
    (void)size;
    Search *search = data;
    const size_t length = strlen(library->dlpi_name), tail = strlen(search->end_of_name);
    if (length < tail || strcmp(library->dlpi_name + length - tail, search->end_of_name)) return 0;
    const ElfW(Dyn) *entry = NULL;
    for (int i = 0; i < library->dlpi_phnum; i++)
        if (library->dlpi_phdr[i].p_type == PT_DYNAMIC)
            entry = (const ElfW(Dyn) *)(library->dlpi_addr + library->dlpi_phdr[i].p_vaddr);
    uintptr_t by_call = 0, by_address = 0, symbols = 0, names = 0;
    size_t by_call_bytes = 0, by_address_bytes = 0;
    for (; entry && entry->d_tag != DT_NULL; entry++) {
        uintptr_t value = entry->d_un.d_ptr;
        if (value < library->dlpi_addr) value += library->dlpi_addr; /* C libraries other than glibc leave it relative */
        if (entry->d_tag == DT_JMPREL) by_call = value;
        if (entry->d_tag == DT_RELA) by_address = value;
        if (entry->d_tag == DT_SYMTAB) symbols = value;
        if (entry->d_tag == DT_STRTAB) names = value;
        if (entry->d_tag == DT_PLTRELSZ) by_call_bytes = entry->d_un.d_val;
        if (entry->d_tag == DT_RELASZ) by_address_bytes = entry->d_un.d_val;
    }
    if (!symbols || !names) return 1;
    replace_in(
        library, (const ElfW(Rela) *)by_call, by_call ? by_call_bytes / sizeof(ElfW(Rela)) : 0,
        (const ElfW(Sym) *)symbols, (const char *)names, search
    );
    replace_in(
        library, (const ElfW(Rela) *)by_address, by_address ? by_address_bytes / sizeof(ElfW(Rela)) : 0,
        (const ElfW(Sym) *)symbols, (const char *)names, search
    );
    return 1;
}

static void before_fork(void) {
    pthread_mutex_lock(&lock);
    pthread_mutex_lock(&keeping);
}
static void after_fork(void) {
    pthread_mutex_unlock(&keeping);
    pthread_mutex_unlock(&lock);
}

static pthread_once_t once = PTHREAD_ONCE_INIT;
static int is_watching;

static void watch(void) {
    Search search = {"/libc10.so", 0, 0};
    if (BY_CALL < 0) return;
    dl_iterate_phdr(look_at, &search);
    is_watching = search.has_take && search.has_give && !pthread_atfork(before_fork, after_fork, after_fork);
}

/* Replace the two functions in the imports of libc10. Returns whether both were there. Further calls change nothing.
 *
 * To be called after the library has used both, so that no thread is about to look them up and to write them.
 */
int64_t penstock_memory_watch(void) {
    pthread_once(&once, watch);
    return is_watching;
}

/* Begin to record what this thread takes and all threads give back. Returns NULL if there is no memory for it. */
Recording *penstock_memory_begin(void) {
    Recording *recording = calloc(1, sizeof(Recording));
    Event *events = malloc(FIRST_EVENTS * sizeof(Event));
    if (!recording || !events) {
        free(recording);
        free(events);
        return NULL;
    }
    *recording = (Recording){.events = events, .most_events = FIRST_EVENTS, .thread = pthread_self()};
    pthread_mutex_lock(&lock);
    recording->next = recordings;
    recordings = recording;
    atomic_fetch_add(&num_recordings, 1);
    pthread_mutex_unlock(&lock);
    return recording;
}

/* End a recording, in any thread. Returns the number of its events, or -1 if some were lost, and where they are. */
int64_t penstock_memory_end(Recording *recording, const Event **events) {
    pthread_mutex_lock(&lock);
    Recording **place = &recordings;
    while (*place && *place != recording) place = &(*place)->next;
    if (*place) {
        *place = recording->next;
        atomic_fetch_sub(&num_recordings, 1);
    }
    pthread_mutex_unlock(&lock);
    *events = recording->events;
    return recording->has_lost ? -1 : recording->num_events;
}

/* Free a recording that has ended. */
void penstock_memory_free(Recording *recording) {
    free(recording->events);
    free(recording);
}
