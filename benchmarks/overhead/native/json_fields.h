/* One field of a JSON object. Long strings are leapt over, so that a prompt of 600 KB costs next to nothing. */
#ifndef JSON_FIELDS_H
#define JSON_FIELDS_H

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

struct text {
    const char *start, *end;
};

static inline const char *json_skip_string(const char *at, const char *end) {
    for (at++; at < end; at++) {
        const char *quote = memchr(at, '"', (size_t)(end - at));
        if (quote == NULL) return end;
        const char *slash = quote;
        while (slash > at && slash[-1] == '\\') slash--;
        at = quote;
        if ((quote - slash) % 2 == 0) return quote + 1;
    }
    return end;
}

static inline const char *json_skip_space(const char *at, const char *end) {
    while (at < end && (*at == ' ' || *at == '\n' || *at == '\r' || *at == '\t')) at++;
    return at;
}

/* The end of the value that begins at `at`. */
static inline const char *json_skip_value(const char *at, const char *end) {
    int depth = 0;
    while (at < end) {
        if (*at == '"') {
            at = json_skip_string(at, end);
        } else if (*at == '{' || *at == '[') {
            depth++, at++;
        } else if (*at == '}' || *at == ']') {
            if (depth == 0) return at;
            depth--, at++;
        } else if (*at == ',' && depth == 0) {
            return at;
        } else {
            at++;
            continue;
        }
        if (depth == 0) return at;
    }
    return end;
}

/* The value of the object's own field of that name, with a null `start` where there is none. */
static inline struct text json_field(struct text object, const char *name) {
    const char *at = json_skip_space(object.start, object.end), *end = object.end;
    if (at == end || *at != '{') return (struct text){0};
    for (at = json_skip_space(at + 1, end); at < end && *at == '"'; at = json_skip_space(at + 1, end)) {
        const char *key = at + 1, *key_end = json_skip_string(at, end);
        at = json_skip_space(key_end, end);
        if (at == end || *at != ':') break;
        const char *value = json_skip_space(at + 1, end);
        at = json_skip_value(value, end);
        if ((size_t)(key_end - 1 - key) == strlen(name) && memcmp(key, name, strlen(name)) == 0)
            return (struct text){value, at};
        at = json_skip_space(at, end);
        if (at == end || *at != ',') break;
    }
    return (struct text){0};
}

static inline bool json_is_true(struct text object, const char *name) {
    struct text value = json_field(object, name);
    return value.start != NULL && value.end - value.start >= 4 && memcmp(value.start, "true", 4) == 0;
}

/* Of a field that is missing or null: `otherwise`. */
static inline long json_number(struct text object, const char *name, long otherwise) {
    struct text value = json_field(object, name);
    if (value.start == NULL || value.end == value.start || *value.start == 'n') return otherwise;
    return strtol(value.start, NULL, 10);
}

#endif
