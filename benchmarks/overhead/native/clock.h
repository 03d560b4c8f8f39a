/* Time, in nanoseconds, from a clock that is never set. */
#ifndef CLOCK_H
#define CLOCK_H

#include <stdint.h>
#include <sys/prctl.h>
#include <time.h>

#define US 1000ull
#define MS 1000000ull
#define SECOND 1000000000ull

static inline uint64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * SECOND + (uint64_t)time.tv_nsec;
}

/* A thread may otherwise be woken 50 us later than it asked, so that wakings can be shared. */
static inline void be_punctual(void) { prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0); }

#endif
