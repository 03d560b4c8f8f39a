/* What is due when: a heap, its earliest entry first. An entry stays until it is taken; owners mark what is void. */
#ifndef TIMERS_H
#define TIMERS_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

struct timer {
    uint64_t due_ns;
    void *owner;
};

struct timers {
    struct timer *heap;
    size_t length, room;
};

static inline void timers_add(struct timers *timers, uint64_t due_ns, void *owner) {
    if (timers->length == timers->room) {
        timers->room = timers->room ? 2 * timers->room : 1024;
        timers->heap = realloc(timers->heap, timers->room * sizeof *timers->heap);
        if (timers->heap == NULL) {
            fputs("out of memory\n", stderr);
            exit(1);
        }
    }
    size_t at = timers->length++;
    for (size_t parent; at > 0 && timers->heap[parent = (at - 1) / 2].due_ns > due_ns; at = parent)
        timers->heap[at] = timers->heap[parent];
    timers->heap[at] = (struct timer){due_ns, owner};
}

static inline void *timers_take(struct timers *timers) {
    void *owner = timers->heap[0].owner;
    struct timer last = timers->heap[--timers->length];
    size_t at = 0;
    for (size_t child; (child = 2 * at + 1) < timers->length; at = child) {
        if (child + 1 < timers->length && timers->heap[child + 1].due_ns < timers->heap[child].due_ns) child++;
        if (timers->heap[child].due_ns >= last.due_ns) break;
        timers->heap[at] = timers->heap[child];
    }
    timers->heap[at] = last;
    return owner;
}

#endif
