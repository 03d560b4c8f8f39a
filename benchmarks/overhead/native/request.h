/* Reads one HTTP/1.1 request from the bytes that came so far. */
#ifndef REQUEST_H
#define REQUEST_H

#define _GNU_SOURCE
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "buffer.h"
#include "json_fields.h"

struct request {
    size_t head_length, body_length; /* 0: the head is not complete */
    bool is_chunked, wants_continue;
};

/* The length of a chunked body as it lies in `bytes`, 0 where it is not complete; its data are moved to the front. */
static inline size_t unchunk(char *bytes, size_t length, size_t *data_length) {
    size_t at = 0;
    for (int moving = 0; moving < 2; moving++) { /* nothing is moved before all is there */
        size_t data = 0;
        for (at = 0;;) {
            char *line_end = memmem(bytes + at, length - at, "\r\n", 2);
            if (line_end == NULL) return 0;
            size_t size = strtoul(bytes + at, NULL, 16);
            size_t start = (size_t)(line_end - bytes) + 2;
            if (start + size + 2 > length) return 0;
            if (moving && size) memmove(bytes + data, bytes + start, size);
            data += size;
            at = start + size + 2;
            if (size == 0) break;
        }
        *data_length = data;
    }
    return at;
}

/* Whether the head is complete; it is read once, and may then be searched as a string. */
static inline bool request_read_head(struct request *request, struct buffer *in) {
    if (request->head_length) return true;
    char *end = memmem(in->bytes, in->length, "\r\n\r\n", 4);
    if (end == NULL) return false;
    end[2] = '\0';
    const char *length = strcasestr(in->bytes, "\ncontent-length:");
    request->head_length = (size_t)(end - in->bytes) + 4;
    request->body_length = length ? strtoul(length + strlen("\ncontent-length:"), NULL, 10) : 0;
    request->is_chunked = strcasestr(in->bytes, "\ntransfer-encoding: chunked") != NULL;
    request->wants_continue = strcasestr(in->bytes, "\nexpect: 100-continue") != NULL;
    return true;
}

/* The whole request's length, 0 while some of it is still to come. */
static inline size_t request_read_body(const struct request *request, struct buffer *in, struct text *body) {
    char *start = in->bytes + request->head_length;
    size_t there = in->length - request->head_length, data = request->body_length;
    size_t used = request->is_chunked ? unchunk(start, there, &data) : data;
    if ((request->is_chunked && used == 0) || there < used) return 0;
    *body = (struct text){start, start + data};
    return request->head_length + used;
}

#endif
