/* Reads one HTTP/1.1 answer as it comes, in pieces, and judges it: whole, ours, for this very conversation. */
#ifndef ANSWER_H
#define ANSWER_H

#define _GNU_SOURCE
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "marks.h"

#define LINE_SIZE 4096

enum part { HEAD, BODY, BODY_TO_END, CHUNK_SIZE, CHUNK, CHUNK_END, TRAILER, WHOLE };

struct answer {
    enum part part;
    int status;
    bool closes, is_stream, is_done, is_foreign; /* foreign: a piece without the mark of its conversation */
    long words, chunks;
    size_t left;           /* of the body, or of the chunk */
    size_t line_length;    /* of the head, of an SSE event's line, or of a whole JSON body */
    char line[LINE_SIZE];  /* what does not fit is cut off, and the answer is then wrong */
    char mark[sizeof ANSWER_ID + DIGITS];
};

/* `number`: DIGITS digits. */
static inline void answer_begin(struct answer *answer, const char *number) {
    answer->part = HEAD;
    answer->status = 0;
    answer->closes = answer->is_stream = answer->is_done = answer->is_foreign = false;
    answer->words = answer->chunks = 0;
    answer->left = answer->line_length = 0;
    memcpy(answer->mark, ANSWER_ID, strlen(ANSWER_ID));
    memcpy(answer->mark + strlen(ANSWER_ID), number, DIGITS);
    answer->mark[sizeof answer->mark - 1] = '\0';
}

static inline bool answer_is_right(const struct answer *answer, long words) {
    bool is_complete = answer->part == WHOLE && (answer->is_done || !answer->is_stream);
    return answer->status == 200 && is_complete && !answer->is_foreign && answer->words == words;
}

static inline void answer_keep(struct answer *answer, const char *bytes, size_t length) {
    size_t room = LINE_SIZE - 1 - answer->line_length;
    size_t kept = length < room ? length : room;
    memcpy(answer->line + answer->line_length, bytes, kept);
    answer->line_length += kept;
}

/* An event of a stream, or a whole body. */
static inline void answer_judge(struct answer *answer, const char *text, size_t length) {
    if (memmem(text, length, "[DONE]", 6) != NULL) {
        answer->is_done = true;
        return;
    }
    if (memmem(text, length, answer->mark, strlen(answer->mark)) == NULL) answer->is_foreign = true;
    const char *at = text, *end = text + length;
    const char *content = memmem(text, length, "\"content\"", strlen("\"content\""));
    if (content == NULL) return;
    at = content;
    while ((at = memmem(at, (size_t)(end - at), WORD, strlen(WORD))) != NULL) {
        at += strlen(WORD);
        answer->words++;
    }
    answer->chunks++;
}

/* Empty lines and comments say nothing. */
static inline void answer_judge_line(struct answer *answer, const char *line, size_t length) {
    if (length > strlen("data:") && memcmp(line, "data:", strlen("data:")) == 0) answer_judge(answer, line, length);
}

static inline void answer_take_body(struct answer *answer, const char *bytes, size_t length) {
    while (answer->is_stream && length) {
        const char *newline = memchr(bytes, '\n', length);
        if (newline == NULL) break;
        size_t used = (size_t)(newline - bytes) + 1;
        if (answer->line_length) { /* its beginning came before */
            answer_keep(answer, bytes, used);
            answer_judge_line(answer, answer->line, answer->line_length);
            answer->line_length = 0;
        } else {
            answer_judge_line(answer, bytes, used);
        }
        bytes += used, length -= used;
    }
    answer_keep(answer, bytes, length);
}

static inline void answer_end(struct answer *answer) {
    if (!answer->is_stream) answer_judge(answer, answer->line, answer->line_length);
    answer->part = WHOLE;
}

/* Takes of the head what belongs to it. */
static inline size_t answer_read_head(struct answer *answer, const char *bytes, size_t length) {
    size_t before = answer->line_length;
    answer_keep(answer, bytes, length);
    answer->line[answer->line_length] = '\0';
    char *end = strstr(answer->line, "\r\n\r\n");
    if (end == NULL) return length;
    size_t used = (size_t)(end - answer->line) + 4 - before;
    end[2] = '\0';
    answer->status = answer->line_length > 12 ? atoi(answer->line + 9) : 0;
    const char *size = strcasestr(answer->line, "\ncontent-length:");
    answer->closes = strcasestr(answer->line, "\nconnection: close") != NULL;
    answer->is_stream = strcasestr(answer->line, "text/event-stream") != NULL;
    bool is_chunked = strcasestr(answer->line, "\ntransfer-encoding: chunked") != NULL;
    answer->left = size ? strtoul(size + strlen("\ncontent-length:"), NULL, 10) : 0;
    answer->line_length = 0;
    if (answer->status == 100) return used; /* the head proper is still to come */
    answer->part = is_chunked ? CHUNK_SIZE : size ? BODY : BODY_TO_END;
    if (answer->part == BODY && answer->left == 0) answer_end(answer);
    return used;
}

/* Takes what there is of the body, or of the chunk, that is due. */
static inline size_t answer_read_data(struct answer *answer, const char *bytes, size_t length) {
    size_t used = length < answer->left ? length : answer->left;
    answer_take_body(answer, bytes, used);
    answer->left -= used;
    if (answer->left == 0 && answer->part == BODY) answer_end(answer);
    if (answer->left == 0 && answer->part == CHUNK) answer->part = CHUNK_END, answer->left = 2;
    return used;
}

/* Between chunks, byte by byte; `left` collects a size, or counts a line's bytes. */
static inline void answer_read_frame(struct answer *answer, char byte) {
    if (answer->part == CHUNK_END) {
        if (--answer->left == 0) answer->part = CHUNK_SIZE;
    } else if (answer->part == CHUNK_SIZE) {
        int digit = byte >= '0' && byte <= '9' ? byte - '0' : (byte | 32) >= 'a' ? (byte | 32) - 'a' + 10 : -1;
        if (byte == '\n') answer->part = answer->left ? CHUNK : TRAILER;
        else if (digit >= 0 && digit < 16) answer->left = 16 * answer->left + (size_t)digit;
    } else if (byte == '\n') {
        if (answer->left == 0) answer_end(answer);
        answer->left = 0;
    } else if (byte != '\r') {
        answer->left++;
    }
}

/* Reads until the answer is whole, or nothing is left; how much it took. */
static inline size_t answer_read(struct answer *answer, const char *bytes, size_t length) {
    size_t used = 0;
    while (used < length && answer->part != WHOLE) {
        const char *at = bytes + used;
        size_t left = length - used;
        switch (answer->part) {
        case HEAD:
            used += answer_read_head(answer, at, left);
            break;
        case BODY:
        case CHUNK:
            used += answer_read_data(answer, at, left);
            break;
        case BODY_TO_END:
            answer_take_body(answer, at, left);
            used = length;
            break;
        default:
            answer_read_frame(answer, *at);
            used++;
        }
    }
    return used;
}

#endif
