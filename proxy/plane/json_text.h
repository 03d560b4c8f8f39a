/* JSON by its bytes: where strings and values end, and what a string says. Nothing here allocates or recurses. */

#ifndef PPD_JSON_TEXT_H
#define PPD_JSON_TEXT_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "utf8.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

enum { JSON_BEYOND_ASCII = 1 }; /* kinds of bytes in a string */

typedef const unsigned char *json_t;

static inline ptrdiff_t json_space_end(json_t data, ptrdiff_t at, ptrdiff_t size)
{
    while (at < size && (data[at] == ' ' || data[at] == '\n' || data[at] == '\r' || data[at] == '\t'))
        at++;
    return at;
}

#ifdef __SSE2__
/* The quotation marks, backslashes and control characters among these bytes. */
static inline __m128i json_marks(__m128i some)
{
    __m128i quote = _mm_cmpeq_epi8(some, _mm_set1_epi8('"')), escape = _mm_cmpeq_epi8(some, _mm_set1_epi8('\\'));
    __m128i control = _mm_cmpeq_epi8(_mm_min_epu8(some, _mm_set1_epi8(0x1f)), some);
    return _mm_or_si128(_mm_or_si128(quote, escape), control);
}

/* The highest bit of each of 64 bytes. */
static inline uint64_t json_bits(__m128i a, __m128i b, __m128i c, __m128i d)
{
    uint64_t low = (uint64_t)_mm_movemask_epi8(a) | (uint64_t)_mm_movemask_epi8(b) << 16;
    return low | (uint64_t)_mm_movemask_epi8(c) << 32 | (uint64_t)_mm_movemask_epi8(d) << 48;
}

/* Goes on in a string, by `width` bytes or to what ends it there: 1 behind its end, -1 where it cannot go on, else 0.
   marks, high: have a bit for each byte, of those above and of bytes beyond ASCII. */
static inline __attribute__((always_inline)) int json_string_step(json_t data, ptrdiff_t *at, int width, uint64_t marks, uint64_t high, int *kinds,
                                   ptrdiff_t *escapes)
{
    json_t start = data + *at;
    *at += width;
    while (marks) {
        int place = __builtin_ctzll(marks);
        if (start[place] == '"') {
            if (high & ((1ull << place) - 1))
                *kinds |= JSON_BEYOND_ASCII;
            *at += place + 1 - width;
            return 1;
        }
        if (start[place] != '\\')
            return -1;
        ++*escapes;
        marks &= ~(3ull << place); /* whatever follows does not end the string */
        if (place == width - 1)
            ++*at;
    }
    if (high)
        *kinds |= JSON_BEYOND_ASCII;
    return 0;
}

/* As `json_string_step`, by 64 bytes. In most of them there is nothing to look at. */
static inline int json_string_stride(json_t data, ptrdiff_t *at, int *kinds, ptrdiff_t *escapes)
{
    const __m128i *from = (const __m128i *)(data + *at);
    __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
    __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
    __m128i in_a = json_marks(a), in_b = json_marks(b), in_c = json_marks(c), in_d = json_marks(d);
    __m128i in_any = _mm_or_si128(_mm_or_si128(in_a, in_b), _mm_or_si128(in_c, in_d));
    uint64_t marks = 0, high = (uint64_t)_mm_movemask_epi8(_mm_or_si128(_mm_or_si128(a, b), _mm_or_si128(c, d)));
    if (_mm_movemask_epi8(in_any)) {
        marks = json_bits(in_a, in_b, in_c, in_d);
        high = json_bits(a, b, c, d);
    }
    return json_string_step(data, at, 64, marks, high, kinds, escapes);
}
#endif

/* Behind the quotation mark that ends the string at `at`; -1 where none does, or a control character is inside.
   Counts its escapes, whatever they are. */
static inline ptrdiff_t json_string_end(json_t data, ptrdiff_t at, ptrdiff_t size, int *kinds, ptrdiff_t *escapes)
{
#ifdef __SSE2__
    ptrdiff_t start = at;
    int said = 0;
    while (at + 16 <= size) {
        __m128i some = _mm_loadu_si128((const __m128i *)(data + at));
        unsigned marks = (unsigned)_mm_movemask_epi8(json_marks(some)), high = (unsigned)_mm_movemask_epi8(some);
        said = json_string_step(data, &at, 16, marks, high, kinds, escapes);
        while (!said && at - start >= 64 && at + 64 <= size) /* many strings are shorter */
            said = json_string_stride(data, &at, kinds, escapes);
        if (said)
            return said > 0 ? at : -1;
    }
#endif
    while (at < size) {
        unsigned char code = data[at++];
        if (code == '"')
            return at;
        if (code < 0x20)
            return -1;
        if (code == '\\') {
            ++*escapes;
            at++;
        } else if (code >= 0x80) {
            *kinds |= JSON_BEYOND_ASCII;
        }
    }
    return -1;
}

/* The next quotation mark or bracket; `size` if there is none. */
static inline ptrdiff_t json_bracket(json_t data, ptrdiff_t at, ptrdiff_t size)
{
#ifdef __SSE2__
    /* With this bit both kinds of brackets are alike, and nothing else becomes one. */
    const __m128i quote = _mm_set1_epi8('"'), bit = _mm_set1_epi8(0x20);
    const __m128i opens = _mm_set1_epi8('{'), closes = _mm_set1_epi8('}');
    while (at + 16 <= size) {
        __m128i some = _mm_loadu_si128((const __m128i *)(data + at)), alike = _mm_or_si128(some, bit);
        __m128i found = _mm_or_si128(_mm_cmpeq_epi8(alike, opens), _mm_cmpeq_epi8(alike, closes));
        unsigned marks = (unsigned)_mm_movemask_epi8(_mm_or_si128(found, _mm_cmpeq_epi8(some, quote)));
        if (marks)
            return at + __builtin_ctz(marks);
        at += 16;
    }
#endif
    while (at < size && data[at] != '"' && (data[at] | 0x20) != '{' && (data[at] | 0x20) != '}')
        at++;
    return at;
}

/* Where the value at `at` ends; -1 where it does not, or there is none. Of what is valid JSON this is exact; what is
   not may pass. */
static inline ptrdiff_t json_value_end(json_t data, ptrdiff_t at, ptrdiff_t size)
{
    ptrdiff_t start = at, depth = 0, escapes = 0;
    int kinds = 0;
    do {
        if (depth)
            at = json_bracket(data, at, size);
        if (at >= size)
            return -1;
        if (data[at] == '"') {
            at = json_string_end(data, at + 1, size, &kinds, &escapes);
            if (at < 0)
                return -1;
        } else if ((data[at] | 0x20) == '{') {
            depth++, at++;
        } else if ((data[at] | 0x20) == '}') {
            if (!depth)
                return -1;
            depth--, at++;
        } else { /* a number or a name, which only what follows a value ends */
            while (at < size && !memchr(",]} \n\r\t", data[at], 7))
                at++;
            return at > start ? at : -1;
        }
    } while (depth);
    return at;
}

static inline int json_hex(json_t four)
{
    int value = 0, place;
    for (place = 0; place < 4; place++) {
        unsigned char code = four[place], low = code | 0x20;
        if (code >= '0' && code <= '9')
            value = value << 4 | (code - '0');
        else if (low >= 'a' && low <= 'f')
            value = value << 4 | (low - 'a' + 10);
        else
            return -1;
    }
    return value;
}

static inline unsigned char *json_put(unsigned char *to, uint32_t code)
{
    if (code < 0x80) {
        *to++ = (unsigned char)code;
    } else if (code < 0x800) {
        *to++ = (unsigned char)(0xC0 | code >> 6);
        *to++ = (unsigned char)(0x80 | (code & 0x3F));
    } else if (code < 0x10000) {
        *to++ = (unsigned char)(0xE0 | code >> 12);
        *to++ = (unsigned char)(0x80 | (code >> 6 & 0x3F));
        *to++ = (unsigned char)(0x80 | (code & 0x3F));
    } else {
        *to++ = (unsigned char)(0xF0 | code >> 18);
        *to++ = (unsigned char)(0x80 | (code >> 12 & 0x3F));
        *to++ = (unsigned char)(0x80 | (code >> 6 & 0x3F));
        *to++ = (unsigned char)(0x80 | (code & 0x3F));
    }
    return to;
}

/* What a string says, in UTF-8, which is never longer than how it is written. Returns its bytes; -1 for an escape that
   is none, and for half of a surrogate pair. to: has room for `size` bytes, all of which may be written. */
static inline ptrdiff_t json_unescaped(json_t data, ptrdiff_t size, unsigned char *to)
{
    unsigned char *start = to;
    ptrdiff_t at = 0;
    for (;;) {
        int code, low;
#ifdef __SSE2__
        while (at + 16 <= size) {
            __m128i some = _mm_loadu_si128((const __m128i *)(data + at));
            unsigned marks = (unsigned)_mm_movemask_epi8(_mm_cmpeq_epi8(some, _mm_set1_epi8('\\')));
            int plain = marks ? __builtin_ctz(marks) : 16;
            _mm_storeu_si128((__m128i *)to, some);
            to += plain;
            at += plain;
            if (marks)
                break;
        }
#endif
        while (at < size && data[at] != '\\')
            *to++ = data[at++];
        if (at == size)
            return to - start;
        at++;
        if (at >= size)
            return -1;
        switch (data[at++]) {
        case '"': *to++ = '"'; break;
        case '\\': *to++ = '\\'; break;
        case '/': *to++ = '/'; break;
        case 'b': *to++ = '\b'; break;
        case 'f': *to++ = '\f'; break;
        case 'n': *to++ = '\n'; break;
        case 'r': *to++ = '\r'; break;
        case 't': *to++ = '\t'; break;
        case 'u':
            if (at + 4 > size || (code = json_hex(data + at)) < 0)
                return -1;
            at += 4;
            if (code >= 0xD800 && code < 0xE000) {
                if (code >= 0xDC00 || at + 6 > size || data[at] != '\\' || data[at + 1] != 'u')
                    return -1;
                low = json_hex(data + at + 2);
                if (low < 0xDC00 || low >= 0xE000)
                    return -1;
                at += 6;
                code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
            }
            to = json_put(to, (uint32_t)code);
            break;
        default: return -1;
        }
    }
}

#endif
