/* The requests of a conversation, one JSON body a line of a file, each with its whole history. */
#ifndef BODIES_H
#define BODIES_H

#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "marks.h"

struct body {
    const char *bytes;
    size_t length, number_at; /* where the conversation's number is to be written */
};

struct bodies {
    struct body *turns;
    size_t count;
};

static inline void bodies_fail(const char *path, const char *why) {
    fprintf(stderr, "load: %s: %s\n", path, why);
    exit(2);
}

static inline struct bodies bodies_read(const char *path) {
    struct bodies bodies = {0};
    FILE *file = fopen(path, "rb");
    if (file == NULL) bodies_fail(path, "cannot be read");
    char *line = NULL;
    size_t room = 0;
    ssize_t length;
    while ((length = getline(&line, &room, file)) > 1) {
        size_t used = (size_t)length - (line[length - 1] == '\n');
        const char *mark = memmem(line, used, CONVERSATION, strlen(CONVERSATION));
        if (mark == NULL) bodies_fail(path, "a body without its conversation's mark");
        bodies.turns = realloc(bodies.turns, (bodies.count + 1) * sizeof *bodies.turns);
        bodies.turns[bodies.count++] = (struct body){line, used, (size_t)(mark - line) + strlen(CONVERSATION)};
        line = NULL, room = 0; /* the line stays */
    }
    fclose(file);
    if (bodies.count == 0) bodies_fail(path, "no body");
    return bodies;
}

#endif
