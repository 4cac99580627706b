/* Copies of rows of bytes for native.py, which alone calls this and has checked all bounds.
 *
 * Plain C without Python, called through ctypes: the interpreter's lock is free meanwhile. Usable
 * from any thread.
 *
 * Streaming stores write whole lines past the caches. An ordinary store into memory that no cache
 * has reads its line first, so that a copy moves three bytes for two; memcpy streams, too, but only
 * where one copy is about as large as the cache, which a row never is.
 *
 * Four rows are copied together, LAP bytes of each in turn: so the processor reads ahead in four
 * places, and waits at once for the first lines of four rows, which it cannot foresee.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Changes with the signatures below; native.py refuses a library that was built for another. */
#define VERSION 1

/* How to copy. */
#define PLAIN 0
#define STREAM 1
#define STREAM_FOUR 2

/* Pieces whose addresses are computed at a time. */
#define BLOCK 512

/* How many rows from the first on follow each other on both sides. */
static size_t run_of(char *const *to, const char *const *from, size_t count, size_t bytes)
{
    size_t run = 1;
    while (run < count && to[run] == to[0] + run * bytes && from[run] == from[0] + run * bytes)
        run++;
    return run;
}

static void rows_plain(char *const *to, const char *const *from, size_t count, size_t bytes)
{
    for (size_t row = 0, run; row < count; row += run) {
        run = run_of(to + row, from + row, count - row, bytes);
        memcpy(to[row], from[row], run * bytes);
    }
}

#if defined(__GNUC__) && defined(__x86_64__) && !defined(ONLY_PLAIN)
#include <immintrin.h>

#define LINE 64
#define LAP 256
#define SHORTEST_QUARTER 8192
#define SSE2 /* is part of x86-64 */
#define AVX2 __attribute__((target("avx2")))
#ifndef HAS_AVX2
#define HAS_AVX2 __builtin_cpu_supports("avx2")
#endif

static inline void line_sse2(char *to, const char *from)
{
    const __m128i *in = (const __m128i *)from;
    __m128i a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1);
    __m128i c = _mm_loadu_si128(in + 2), d = _mm_loadu_si128(in + 3);
    __m128i *out = (__m128i *)to;
    _mm_stream_si128(out, a);
    _mm_stream_si128(out + 1, b);
    _mm_stream_si128(out + 2, c);
    _mm_stream_si128(out + 3, d);
}

AVX2 static inline void line_avx2(char *to, const char *from)
{
    const __m256i *in = (const __m256i *)from;
    __m256i a = _mm256_loadu_si256(in), b = _mm256_loadu_si256(in + 1);
    __m256i *out = (__m256i *)to;
    _mm256_stream_si256(out, a);
    _mm256_stream_si256(out + 1, b);
}

static inline int are_lines(char *const *to)
{
    uintptr_t bits = (uintptr_t)to[0] | (uintptr_t)to[1] | (uintptr_t)to[2] | (uintptr_t)to[3];
    return bits % LINE == 0;
}

/* rows_sse2 and rows_avx2, each with its own kind of line. */
#define ROWS(KIND, TARGET)                                                                         \
    TARGET static inline void one_##KIND(char *to, const char *from, size_t bytes)                 \
    {                                                                                              \
        size_t at = -(uintptr_t)to % LINE; /* to the first whole line */                           \
        if (at + LINE > bytes)                                                                     \
            at = bytes;                                                                            \
        memcpy(to, from, at);                                                                      \
        for (; at + LINE <= bytes; at += LINE)                                                     \
            line_##KIND(to + at, from + at);                                                       \
        memcpy(to + at, from + at, bytes - at);                                                    \
    }                                                                                              \
                                                                                                   \
    /* Four rows of which each is written from the beginning of a line on. */                      \
    TARGET static inline void four_##KIND(char *const *to, const char *const *from, size_t bytes)  \
    {                                                                                              \
        size_t at = 0;                                                                             \
        for (; at + LAP <= bytes; at += LAP)                                                       \
            for (int row = 0; row < 4; row++)                                                      \
                for (int line = 0; line < LAP; line += LINE)                                       \
                    line_##KIND(to[row] + at + line, from[row] + at + line);                       \
        for (int row = 0; row < 4; row++)                                                          \
            one_##KIND(to[row] + at, from[row] + at, bytes - at);                                  \
    }                                                                                              \
                                                                                                   \
    /* A run: as four rows, too, where it is long. */                                              \
    TARGET static inline void run_##KIND(char *to, const char *from, size_t bytes)                 \
    {                                                                                              \
        size_t at = -(uintptr_t)to % LINE;                                                         \
        size_t quarter = bytes / 4 / LAP * LAP;                                                    \
        if (quarter < SHORTEST_QUARTER) {                                                          \
            one_##KIND(to, from, bytes);                                                           \
            return;                                                                                \
        }                                                                                          \
        quarter -= at ? LAP : 0;                                                                   \
        memcpy(to, from, at);                                                                      \
        char *tos[4];                                                                              \
        const char *froms[4];                                                                      \
        for (int row = 0; row < 4; row++, at += quarter) {                                         \
            tos[row] = to + at;                                                                    \
            froms[row] = from + at;                                                                \
        }                                                                                          \
        four_##KIND(tos, froms, quarter);                                                          \
        one_##KIND(to + at, from + at, bytes - at);                                                \
    }                                                                                              \
                                                                                                   \
    TARGET static void rows_##KIND(char *const *to, const char *const *from, size_t count,         \
                                   size_t bytes, int how)                                          \
    {                                                                                              \
        for (size_t row = 0, run; row < count; row += run) {                                       \
            run = run_of(to + row, from + row, count - row, bytes);                                \
            if (how == STREAM_FOUR && run == 1 && row + 4 <= count && are_lines(to + row)) {       \
                four_##KIND(to + row, from + row, bytes);                                          \
                run = 4;                                                                           \
            } else {                                                                               \
                run_##KIND(to[row], from[row], run * bytes);                                       \
            }                                                                                      \
        }                                                                                          \
    }

ROWS(sse2, SSE2)
ROWS(avx2, AVX2)

static void rows_streamed(char *const *to, const char *const *from, size_t count, size_t bytes,
                          int how)
{
    if (HAS_AVX2)
        rows_avx2(to, from, count, bytes, how);
    else
        rows_sse2(to, from, count, bytes, how);
}

#define FENCE() _mm_sfence() /* other threads see streamed bytes after it */
#else
#define rows_streamed(to, from, count, bytes, how) rows_plain(to, from, count, bytes)
#define FENCE() ((void)0)
#endif

static void rows(char *const *to, const char *const *from, size_t count, size_t bytes, int how)
{
    if (how == PLAIN)
        rows_plain(to, from, count, bytes);
    else
        rows_streamed(to, from, count, bytes, how);
}

int kvkeep_rows_version(void)
{
    return VERSION;
}

/* Copies `count` rows of `pieces` pieces of `bytes` bytes. Piece p of row r lies at
 * to[r] + p * to_step, and is copied from from[r] + p * from_step. Nothing overlaps. */
void kvkeep_copy_rows(char *const *to, const char *const *from, size_t count, size_t bytes,
                      size_t pieces, size_t to_step, size_t from_step, int how)
{
    if (pieces == 1) {
        rows(to, from, count, bytes, how);
    } else {
        char *some_to[BLOCK];
        const char *some_from[BLOCK];
        size_t known = 0;
        for (size_t row = 0; row < count; row++)
            for (size_t piece = 0; piece < pieces; piece++) {
                some_to[known] = to[row] + piece * to_step;
                some_from[known] = from[row] + piece * from_step;
                if (++known == BLOCK) {
                    rows(some_to, some_from, known, bytes, how);
                    known = 0;
                }
            }
        rows(some_to, some_from, known, bytes, how);
    }
    FENCE();
}
