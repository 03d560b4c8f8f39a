/* Bytes that grow at one end and are taken from the other. */
#ifndef BUFFER_H
#define BUFFER_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct buffer {
    char *bytes;
    size_t length, room;
};

/* Makes room for so many more bytes, and says where they go. */
static inline char *buffer_space(struct buffer *buffer, size_t more) {
    if (buffer->length + more > buffer->room) {
        buffer->room = 2 * (buffer->length + more);
        buffer->bytes = realloc(buffer->bytes, buffer->room);
        if (buffer->bytes == NULL) {
            fputs("out of memory\n", stderr);
            exit(1);
        }
    }
    return buffer->bytes + buffer->length;
}

static inline void buffer_add(struct buffer *buffer, const char *bytes, size_t length) {
    memcpy(buffer_space(buffer, length), bytes, length);
    buffer->length += length;
}

static inline void buffer_take(struct buffer *buffer, size_t length) {
    buffer->length -= length;
    memmove(buffer->bytes, buffer->bytes + length, buffer->length);
}

static inline void buffer_free(struct buffer *buffer) {
    free(buffer->bytes);
    *buffer = (struct buffer){0};
}

#endif
