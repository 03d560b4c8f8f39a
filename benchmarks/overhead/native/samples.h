/* Durations and their quantiles, and how often which status came. */
#ifndef SAMPLES_H
#define SAMPLES_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

struct samples {
    uint64_t *ns;
    size_t count, room;
};

static inline void samples_add(struct samples *samples, uint64_t ns) {
    if (samples->count == samples->room) {
        samples->room = samples->room ? 2 * samples->room : 65536;
        samples->ns = realloc(samples->ns, samples->room * sizeof *samples->ns);
        if (samples->ns == NULL) {
            fputs("out of memory\n", stderr);
            exit(1);
        }
    }
    samples->ns[samples->count++] = ns;
}

static inline int samples_compare(const void *one, const void *other) {
    uint64_t a = *(const uint64_t *)one, b = *(const uint64_t *)other;
    return (a > b) - (a < b);
}

/* In microseconds, by nearest rank; of sorted samples. */
static inline double samples_quantile(const struct samples *samples, double share) {
    size_t rank = (size_t)(share * (double)samples->count);
    if (rank >= samples->count) rank = samples->count - 1;
    return (double)samples->ns[rank] / 1e3;
}

/* As a JSON object, null where there are none. */
static inline void samples_print(struct samples *samples, const char *name) {
    if (samples->count == 0) {
        printf("\"%s\":null,", name);
        return;
    }
    qsort(samples->ns, samples->count, sizeof *samples->ns, samples_compare);
    printf("\"%s\":{\"count\":%zu,\"p50_us\":%.1f,\"p90_us\":%.1f,\"p99_us\":%.1f,\"max_us\":%.1f},", name,
           samples->count, samples_quantile(samples, 0.5), samples_quantile(samples, 0.9),
           samples_quantile(samples, 0.99), samples_quantile(samples, 1.0));
}

#define STATUSES 1000 /* 0: none that HTTP knows */

struct statuses {
    long counts[STATUSES];
};

static inline void statuses_add(struct statuses *statuses, int status) {
    statuses->counts[status > 0 && status < STATUSES ? status : 0]++;
}

/* As a JSON object of those that came. */
static inline void statuses_print(const struct statuses *statuses) {
    bool is_first = true;
    printf("\"statuses\":{");
    for (int status = 0; status < STATUSES; status++) {
        if (statuses->counts[status] == 0) continue;
        printf("%s\"%d\":%ld", is_first ? "" : ",", status, statuses->counts[status]);
        is_first = false;
    }
    printf("},");
}

#endif
