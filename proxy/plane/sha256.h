/* SHA-256 (FIPS 180-4) by the instructions that x86 CPUs have for it. Elsewhere `sha256_is_there` says no. */
#ifndef PPD_SHA256_H
#define PPD_SHA256_H

#include <stdint.h>
#include <string.h>

typedef struct {
    uint32_t state[8];
    uint64_t size;          /* bytes hashed */
    unsigned char open[64]; /* the block that is not full yet */
} sha256_t;

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

static const uint32_t SHA256_K[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static int sha256_is_there(void) {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b >> 29 & 1) && __builtin_cpu_supports("sse4.1");
}

/* The instructions want the eight words as ABEF and CDGH. */
__attribute__((target("sha,sse4.1"))) static void sha256_blocks(uint32_t *state, const unsigned char *at, size_t count) {
    const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0bULL, 0x0405060700010203ULL);
    __m128i low = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)state), 0xb1);
    __m128i high = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)(state + 4)), 0x1b);
    __m128i abef = _mm_alignr_epi8(low, high, 8), cdgh = _mm_blend_epi16(high, low, 0xf0);
    for (; count; count--, at += 64) {
        const __m128i abef_before = abef, cdgh_before = cdgh;
        __m128i w[4];
        for (int i = 0; i < 4; i++) w[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(at + 16 * i)), swap);
        for (int round = 0; round < 16; round++) { /* four rounds each, with four words of the schedule */
            const __m128i words = w[round & 3];
            const __m128i sum = _mm_add_epi32(words, _mm_loadu_si128((const __m128i *)(SHA256_K + 4 * round)));
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0e));
            if (round < 12) { /* w[t] from w[t-16], w[t-15], w[t-7] and w[t-2] */
                const __m128i next = w[(round + 1) & 3], third = w[(round + 2) & 3], last = w[(round + 3) & 3];
                const __m128i partial = _mm_add_epi32(_mm_sha256msg1_epu32(words, next), _mm_alignr_epi8(last, third, 4));
                w[round & 3] = _mm_sha256msg2_epu32(partial, last);
            }
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }
    low = _mm_shuffle_epi32(abef, 0x1b);
    high = _mm_shuffle_epi32(cdgh, 0xb1);
    _mm_storeu_si128((__m128i *)state, _mm_blend_epi16(low, high, 0xf0));
    _mm_storeu_si128((__m128i *)(state + 4), _mm_alignr_epi8(high, low, 8));
}
#else
static int sha256_is_there(void) { return 0; }
static void sha256_blocks(uint32_t *state, const unsigned char *at, size_t count) { (void)state, (void)at, (void)count; }
#endif

static void sha256_start(sha256_t *hash) {
    static const uint32_t first[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    memcpy(hash->state, first, sizeof first);
    hash->size = 0;
}

static void sha256_add(sha256_t *hash, const void *data, size_t size) {
    const unsigned char *at = data;
    size_t open = hash->size & 63;
    hash->size += size;
    if (open) {
        size_t taken = size < 64 - open ? size : 64 - open;
        memcpy(hash->open + open, at, taken);
        if (open + taken < 64) return;
        sha256_blocks(hash->state, hash->open, 1);
        at += taken;
        size -= taken;
    }
    if (size >= 64) sha256_blocks(hash->state, at, size / 64);
    memcpy(hash->open, at + (size & ~(size_t)63), size & 63);
}

/* The first eight bytes of the digest, as a little-endian number. */
static uint64_t sha256_end(sha256_t *hash) {
    static const unsigned char padding[64] = {0x80};
    unsigned char bits[8];
    uint64_t size = hash->size * 8;
    for (int i = 0; i < 8; i++) bits[i] = (unsigned char)(size >> (56 - 8 * i));
    sha256_add(hash, padding, 1 + ((119 - (hash->size & 63)) & 63));
    sha256_add(hash, bits, 8);
    return (uint64_t)__builtin_bswap32(hash->state[1]) << 32 | __builtin_bswap32(hash->state[0]);
}

#endif
