/* Rows that one process has read from the disk, kept a while for the others of the machine, for penstock.unified.
 *
 * All processes map the same memory: slots for rows, and a word per slot that says what is in it. Who needs a row that
 * nobody has claimed claims a slot for it, reads the row and puts it there; who needs it meanwhile reads its own rows
 * first, and then waits for it. No lock is held while anything is read, and nobody waits for a process that has ended:
 * its claim is taken over, so a process may be killed anywhere.
 *
 * A word is (row, state, turn). The turn changes with every claim, so a word that has not changed while a row was
 * copied says that the copy is whole.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

enum { EMPTY, READING, WRITING, READY };       /* states of a slot */
enum { COPIED, CLAIMED, ALONE, AWAITED };      /* what is done about a row: see penstock_sharing_look */
enum { WAYS = 8 };                             /* slots that a row may be in */
enum { TURN_BITS = 22, STATE_BITS = 2, ROW_SHIFT = TURN_BITS + STATE_BITS };
enum { SHORTEST_WAIT_NS = 20000, LONGEST_WAIT_NS = 1000000, ASK_EVERY = 16 /* looks, whether an owner still lives */ };

#define PARKED_ROW ((INT64_C(1) << 40) - 1) /* the row of a slot that nobody may use any more */
#define TURN_MASK ((UINT64_C(1) << TURN_BITS) - 1)

typedef struct {
    _Atomic uint64_t *words;  /* [slots] */
    _Atomic uint64_t *owners; /* [slots]: turn and process of the claim */
    _Atomic uint64_t *stamps; /* [slots]: when it was claimed, by the clock */
    _Atomic uint64_t *clock;  /* claims so far */
    char *rows;               /* [slots] */
    int64_t num_sets;         /* of WAYS slots */
    int64_t row_bytes;
} Shared;

static inline uint64_t packed(int64_t row, uint64_t state, uint64_t turn) {
    return (uint64_t)row << ROW_SHIFT | state << TURN_BITS | (turn & TURN_MASK);
}

static inline int64_t row_of(uint64_t word) { return (int64_t)(word >> ROW_SHIFT); }
static inline uint64_t state_of(uint64_t word) { return word >> TURN_BITS & 3; }
static inline uint64_t turn_of(uint64_t word) { return word & TURN_MASK; }

static inline int64_t first_slot(const Shared *shared, int64_t row) {
    const uint64_t mixed = (uint64_t)row * UINT64_C(0x9E3779B97F4A7C15);
    return (int64_t)((mixed >> 16) % (uint64_t)shared->num_sets) * WAYS;
}

/* Whether the process that claimed a slot has ended; a claim that was just made says nothing yet. */
static int is_abandoned(const Shared *shared, int64_t slot, uint64_t word) {
    const uint64_t owner = atomic_load(&shared->owners[slot]);
    if (owner >> 32 != turn_of(word)) return 0;
    return kill((pid_t)(owner & UINT32_MAX), 0) < 0 && errno == ESRCH;
}

static int claim(const Shared *shared, int64_t slot, uint64_t expected, int64_t row, uint64_t *word) {
    const uint64_t wanted = packed(row, READING, turn_of(expected) + 1);
    if (!atomic_compare_exchange_strong(&shared->words[slot], &expected, wanted)) return 0;
    atomic_store(&shared->owners[slot], turn_of(wanted) << 32 | (uint32_t)getpid());
    atomic_store(&shared->stamps[slot], atomic_fetch_add(shared->clock, 1));
    *word = wanted;
    return 1;
}

/* Copy a row if it is there, else claim a slot for it if one is free. Returns what is done about it. */
static int look(const Shared *shared, int64_t row, char *out, int64_t *slot, uint64_t *word) {
    const int64_t first = first_slot(shared, row);
    for (int attempt = 0; attempt < 4; attempt++) {
        int64_t oldest = -1;
        uint64_t oldest_word = 0, oldest_stamp = UINT64_MAX;
        int is_changed = 0;
        for (int64_t place = first; place < first + WAYS && !is_changed; place++) {
            const uint64_t seen = atomic_load(&shared->words[place]), state = state_of(seen);
            if (state != EMPTY && row_of(seen) == row) {
                if (state != READY) {
                    *slot = place, *word = seen;
                    return AWAITED;
                }
                memcpy(out, shared->rows + place * shared->row_bytes, (size_t)shared->row_bytes);
                atomic_thread_fence(memory_order_seq_cst);
                if (atomic_load(&shared->words[place]) == seen) return COPIED;
                is_changed = 1;
            }
            const uint64_t stamp = state == EMPTY ? 0 : atomic_load(&shared->stamps[place]);
            if ((state == EMPTY || state == READY) && stamp < oldest_stamp)
                oldest = place, oldest_word = seen, oldest_stamp = stamp;
        }
        if (is_changed) continue;
        for (int64_t place = first; place < first + WAYS && oldest < 0; place++) {
            const uint64_t seen = atomic_load(&shared->words[place]);
            if (is_abandoned(shared, place, seen)) oldest = place, oldest_word = seen;
        }
        if (oldest < 0) return ALONE;
        if (claim(shared, oldest, oldest_word, row, word)) {
            *slot = oldest;
            return CLAIMED;
        }
    }
    return ALONE;
}

/* For each row: copy it to `out` (at `positions`, if given) if it is there, or say what to do about it: CLAIMED, to
 * read it and publish it; ALONE, to read it for oneself, since no slot is free; AWAITED, another reads it. `slots` and
 * `words` name the claims. Returns the number of rows copied. */
int64_t penstock_sharing_look(const Shared *shared, const int64_t *rows, const int64_t *positions, int64_t num_rows,
                              char *out, int8_t *verdicts, int64_t *slots, uint64_t *words) {
    int64_t num_copied = 0;
    for (int64_t number = 0; number < num_rows; number++) {
        char *into = out + (positions ? positions[number] : number) * shared->row_bytes;
        verdicts[number] = (int8_t)look(shared, rows[number], into, &slots[number], &words[number]);
        num_copied += verdicts[number] == COPIED;
    }
    return num_copied;
}

/* Put claimed rows, which are in `out` now, where the others find them; or give the claims up if they were not read. */
void penstock_sharing_publish(const Shared *shared, const int64_t *rows, const int64_t *positions, int64_t num_rows,
                              const char *out, const int8_t *verdicts, const int64_t *slots, const uint64_t *words,
                              int64_t are_read) {
    for (int64_t number = 0; number < num_rows; number++) {
        if (verdicts[number] != CLAIMED) continue;
        const int64_t slot = slots[number];
        const uint64_t turn = turn_of(words[number]);
        uint64_t expected = words[number];
        const uint64_t next = are_read ? packed(rows[number], WRITING, turn) : packed(0, EMPTY, turn);
        /* a claim that was taken over belongs to another, so nothing is written */
        if (!atomic_compare_exchange_strong(&shared->words[slot], &expected, next) || !are_read) continue;
        const char *from = out + (positions ? positions[number] : number) * shared->row_bytes;
        memcpy(shared->rows + slot * shared->row_bytes, from, (size_t)shared->row_bytes);
        atomic_store(&shared->words[slot], packed(rows[number], READY, turn));
    }
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* Wait for rows that others read, until all are there or some must be read here after all: those of a process that has
 * ended, or that takes too long, become CLAIMED or ALONE. Returns the number of rows copied. */
int64_t penstock_sharing_wait(const Shared *shared, const int64_t *rows, const int64_t *positions, int64_t num_rows,
                              char *out, int8_t *verdicts, int64_t *slots, uint64_t *words, int64_t patience_ns) {
    const int64_t start_ns = now_ns();
    int64_t num_copied = 0, wait_ns = SHORTEST_WAIT_NS;
    for (int64_t num_looks = 1;; num_looks++) {
        int64_t num_left = 0, num_to_read = 0;
        const int asks = num_looks % ASK_EVERY == 0;
        const int is_late = now_ns() - start_ns > patience_ns;
        for (int64_t number = 0; number < num_rows; number++) {
            if (verdicts[number] != AWAITED) continue;
            char *into = out + (positions ? positions[number] : number) * shared->row_bytes;
            int verdict = look(shared, rows[number], into, &slots[number], &words[number]);
            if (verdict == AWAITED && (is_late || (asks && is_abandoned(shared, slots[number], words[number])))) {
                const int is_writing = state_of(words[number]) == WRITING;
                uint64_t expected = words[number];
                verdict = ALONE;
                if (is_late && is_writing) /* it may go on to write, so the slot is given to nobody; nobody waits again */
                    atomic_compare_exchange_strong(&shared->words[slots[number]], &expected,
                                                   packed(PARKED_ROW, WRITING, turn_of(expected) + 1));
                else if (claim(shared, slots[number], words[number], rows[number], &words[number]))
                    verdict = CLAIMED;
            }
            verdicts[number] = (int8_t)verdict;
            num_copied += verdict == COPIED;
            num_left += verdict == AWAITED;
            num_to_read += verdict == CLAIMED || verdict == ALONE;
        }
        if (!num_left || num_to_read) return num_copied;
        const struct timespec pause = {0, wait_ns};
        nanosleep(&pause, NULL);
        wait_ns = 2 * wait_ns < LONGEST_WAIT_NS ? 2 * wait_ns : LONGEST_WAIT_NS;
    }
}
