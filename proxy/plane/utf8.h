/* Whether bytes are UTF-8, as Python and RFC 3629 have it: neither overlong forms nor surrogates, and nothing above
   U+10FFFF. */
#ifndef PPD_UTF8_H
#define PPD_UTF8_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* From a character's first byte on. */
static inline int utf8_is_valid_from(const unsigned char *data, ptrdiff_t at, ptrdiff_t size)
{
    while (at < size) {
        unsigned char first = data[at], second;
        ptrdiff_t more;
        uint64_t eight;
        if (first < 0x80) {
            at++;
            while (at + 8 <= size && (memcpy(&eight, data + at, 8), !(eight & 0x8080808080808080ull)))
                at += 8;
            continue;
        }
        more = first >= 0xF0 ? 3 : first >= 0xE0 ? 2 : 1;
        if (first < 0xC2 || first > 0xF4 || at + more >= size)
            return 0;
        second = data[at + 1];
        if ((first == 0xE0 && second < 0xA0) || (first == 0xED && second >= 0xA0))
            return 0;
        if ((first == 0xF0 && second < 0x90) || (first == 0xF4 && second >= 0x90))
            return 0;
        for (at++; more; more--, at++)
            if ((data[at] & 0xC0) != 0x80)
                return 0;
    }
    return 1;
}

#ifdef __x86_64__
#include <tmmintrin.h>

/* What two bytes in a row can be wrong in. Each has a bit in three tables: of the first byte's upper and lower half, and
   of the second byte's upper half. Where all three have it, it is so. The method is Keiser's and Lemire's (2020). */
enum {
    UTF8_SHORT = 1,       /* a first byte of several is followed by none of its own */
    UTF8_LONG = 2,        /* ASCII is followed by a further byte */
    UTF8_OVERLONG_3 = 4,
    UTF8_LARGE = 8,       /* above U+10FFFF */
    UTF8_SURROGATE = 16,
    UTF8_OVERLONG_2 = 32,
    UTF8_OVERLONG_4 = 64, /* or above U+13FFFF */
    UTF8_FURTHER = 128,   /* two further bytes in a row, which are right where a character has three bytes or four */
    UTF8_ANY_LOW = UTF8_SHORT | UTF8_LONG | UTF8_FURTHER,
    UTF8_LOW_LARGE = UTF8_ANY_LOW | UTF8_LARGE | UTF8_OVERLONG_4,
    UTF8_ANY_FURTHER = UTF8_LONG | UTF8_OVERLONG_2 | UTF8_FURTHER
};

static const unsigned char UTF8_FIRST_HIGH[16] = {
    UTF8_LONG, UTF8_LONG, UTF8_LONG, UTF8_LONG, UTF8_LONG, UTF8_LONG, UTF8_LONG, UTF8_LONG,
    UTF8_FURTHER, UTF8_FURTHER, UTF8_FURTHER, UTF8_FURTHER,
    UTF8_SHORT | UTF8_OVERLONG_2,
    UTF8_SHORT,
    UTF8_SHORT | UTF8_OVERLONG_3 | UTF8_SURROGATE,
    UTF8_SHORT | UTF8_LARGE | UTF8_OVERLONG_4};
static const unsigned char UTF8_FIRST_LOW[16] = {
    UTF8_ANY_LOW | UTF8_OVERLONG_2 | UTF8_OVERLONG_3 | UTF8_OVERLONG_4,
    UTF8_ANY_LOW | UTF8_OVERLONG_2,
    UTF8_ANY_LOW, UTF8_ANY_LOW,
    UTF8_ANY_LOW | UTF8_LARGE,
    UTF8_LOW_LARGE, UTF8_LOW_LARGE, UTF8_LOW_LARGE, UTF8_LOW_LARGE, UTF8_LOW_LARGE, UTF8_LOW_LARGE, UTF8_LOW_LARGE,
    UTF8_LOW_LARGE,
    UTF8_LOW_LARGE | UTF8_SURROGATE,
    UTF8_LOW_LARGE, UTF8_LOW_LARGE};
static const unsigned char UTF8_SECOND_HIGH[16] = {
    UTF8_SHORT, UTF8_SHORT, UTF8_SHORT, UTF8_SHORT, UTF8_SHORT, UTF8_SHORT, UTF8_SHORT, UTF8_SHORT,
    UTF8_ANY_FURTHER | UTF8_OVERLONG_3 | UTF8_OVERLONG_4,
    UTF8_ANY_FURTHER | UTF8_OVERLONG_3 | UTF8_LARGE,
    UTF8_ANY_FURTHER | UTF8_SURROGATE | UTF8_LARGE,
    UTF8_ANY_FURTHER | UTF8_SURROGATE | UTF8_LARGE,
    UTF8_SHORT, UTF8_SHORT, UTF8_SHORT, UTF8_SHORT};

/* How many bytes are looked at, all of whole blocks of 16: they are valid but for an end in mid-character. -1: they are
   not. */
__attribute__((target("ssse3"))) static ptrdiff_t utf8_blocks(const unsigned char *data, ptrdiff_t size)
{
    const __m128i first_high = _mm_loadu_si128((const __m128i *)UTF8_FIRST_HIGH), low = _mm_set1_epi8(15);
    const __m128i first_low = _mm_loadu_si128((const __m128i *)UTF8_FIRST_LOW);
    const __m128i second_high = _mm_loadu_si128((const __m128i *)UTF8_SECOND_HIGH);
    __m128i before = _mm_setzero_si128(), wrong = before;
    ptrdiff_t at = 0;
    for (; at + 16 <= size; at += 16) {
        __m128i some = _mm_loadu_si128((const __m128i *)(data + at));
        if (_mm_movemask_epi8(_mm_or_si128(some, before))) {
            __m128i last = _mm_alignr_epi8(some, before, 15); /* the byte before each, the one before that, ... */
            __m128i last_2 = _mm_alignr_epi8(some, before, 14), last_3 = _mm_alignr_epi8(some, before, 13);
            __m128i high = _mm_and_si128(_mm_srli_epi16(last, 4), low);
            __m128i next = _mm_and_si128(_mm_srli_epi16(some, 4), low);
            __m128i found = _mm_and_si128(_mm_shuffle_epi8(first_high, high),
                                          _mm_shuffle_epi8(first_low, _mm_and_si128(last, low)));
            __m128i third = _mm_subs_epu8(last_2, _mm_set1_epi8(0xE0 - 0x80)); /* its upper bit: must be a further byte */
            __m128i fourth = _mm_subs_epu8(last_3, _mm_set1_epi8(0xF0 - 0x80));
            __m128i must = _mm_and_si128(_mm_or_si128(third, fourth), _mm_set1_epi8((char)UTF8_FURTHER));
            found = _mm_and_si128(found, _mm_shuffle_epi8(second_high, next));
            wrong = _mm_or_si128(wrong, _mm_xor_si128(found, must));
        }
        before = some;
    }
    return _mm_movemask_epi8(_mm_cmpeq_epi8(wrong, _mm_setzero_si128())) == 0xffff ? at : -1;
}
#endif

static inline int utf8_is_valid(const unsigned char *data, ptrdiff_t size)
{
    ptrdiff_t at = 0;
#ifdef __x86_64__
    if (size >= 64 && __builtin_cpu_supports("ssse3")) {
        int back;
        at = utf8_blocks(data, size);
        if (at < 0)
            return 0;
        for (back = 1; back <= 3; back++) /* to the first byte of a character that goes on in the rest */
            if (data[at - back] >= 0xC0)
                return utf8_is_valid_from(data, at - back, size);
    }
#endif
    return utf8_is_valid_from(data, at, size);
}

#endif
