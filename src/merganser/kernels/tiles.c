/* Runs a recorded rule (`kernels/recording.py`) over the stored bytes of one block, tile by tile.
 *
 * A tile is short enough to stay in the first cache: every step of the rule reads and writes registers of one tile, so
 * that nothing but the inputs and the result ever goes through memory. Each step has the arithmetic of the torch
 * operation it was recorded from, bit by bit; contraction of expressions is switched off, `fma` is written where torch
 * fuses. Loaded with ctypes: no Python API, and the interpreter's lock is free while this runs.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "vectors.h"

/* The last two are for results alone: rounded to the narrow type, and stored in float32. */
enum { FLOAT32, BFLOAT16, FLOAT16, ROUNDED_BFLOAT16, ROUNDED_FLOAT16 };
enum {
    LOAD, LOAD_MINUS, STORE, FILL, ADD, SUB, MUL, DIV, MAX, MIN, COPYSIGN, AXPY, ADDCMUL, LERP, ADDS, MULS, MAXS, MINS,
    ABS, NEG, SIGN, SHRINK, GES, SELECT, BY_ROW, DROP, DROP_BY_RANK, SUM, NONZERO, SCAN, TAKE, DIVERGENCE,
    ADD_MUL, MUL_MAXS, DIV_MAXS, AXPY_SIGN, SIGN_ADDS, SIGN_SHRINK, ADDCMUL_SUB, SUM_MUL, SCAN_ABS
    /* the last ones are two steps at once, each rounded as by itself */
};
enum { CODES = 1 << 15, RUN = 1024 };

/* One step: registers, numbers, a place, tables. Their meaning is beside each case of `step`. */
typedef struct {
    int32_t op, to, a, b, c;
    float x, y;
    int32_t low, high, unused;
    int64_t place;
    const void *table, *more;
} Step;
typedef struct { const void *data; int64_t dtype; } Source;
typedef struct { uint64_t high, low, step_high, step_low; } Seed;
typedef struct {
    const Source *sources;
    const Seed *seeds;
    int64_t offset, size; /* the flat place of the block, and its entries */
    int64_t start; /* of the block in the sources */
    int64_t tile, stride, row; /* entries of a tile; one tile of so many is computed; entries of a row */
    void *out;
    int64_t dtype;
    double *sums;    /* for each sum a value a tile */
    double *rows;    /* for each divergence a value a row */
    int64_t *counts; /* for each scan: above, on the upper end, on the lower end, kept */
    uint32_t *kept;  /* for each scan `room` scores, as bits */
    int64_t room;
} Job;
typedef unsigned __int128 Wide;
typedef struct { Wide state, step; int64_t group; } Stream;
typedef struct {
    float *registers, *factors;
    Stream *streams;
    int16_t *draws;
    uint16_t *codes;
    uint32_t *ranks;
    double *softmaxes;
    int64_t pitch; /* from one register to the next: not a multiple of a page, lest they share cache lines */
    int64_t at, number, taken; /* of the tile: its first entry, its number, and the entries computed before it */
} Scratch;

void divergences(double *to, const float *model, const float *base, double *room, int64_t rows, int64_t n);

INLINE uint32_t bits(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
INLINE float number(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }
INLINE float sign(float x) { return (float)((0 < x) - (x < 0)); }

/* Widening (of a difference at once) and rounding; both say whether something is not finite: torch sees to that. */

INLINE int load(float *to, const Source *source, const float *minus, int64_t at, int64_t n) {
    const void *from = source->data;
    const int64_t dtype = source->dtype;
    int32_t largest = 0;
    if (dtype == BFLOAT16) {
        const uint16_t *x = (const uint16_t *)from + at;
        EACH {
            uint32_t u = (uint32_t)x[i] << 16;
            int32_t m = u & 0x7FFFFFFF;
            largest = m > largest ? m : largest;
            to[i] = minus ? number(u) - minus[i] : number(u);
        }
    } else if (dtype == FLOAT16) {
        const uint16_t *x = (const uint16_t *)from + at;
        EACH { /* exact: the exponent is moved by a product, which widens subnormal numbers too */
            int32_t m = x[i] & 0x7FFF;
            float wide = number((uint32_t)m << 13) * 0x1p112f;
            largest = m > largest ? m : largest;
            wide = number(bits(wide) | (uint32_t)(x[i] & 0x8000) << 16);
            to[i] = minus ? wide - minus[i] : wide;
        }
        return largest >= 0x7C00;
    } else {
        const float *x = (const float *)from + at;
        EACH {
            int32_t m = bits(x[i]) & 0x7FFFFFFF;
            largest = m > largest ? m : largest;
            to[i] = minus ? x[i] - minus[i] : x[i];
        }
    }
    return largest >= 0x7F800000;
}

INLINE int32_t narrow(float x) { /* to the bits of a float16: subnormal numbers by an addition, others by a carry */
    uint32_t m = bits(x) & 0x7FFFFFFF;
    uint32_t tiny = bits(number(m) + 0.5f) - 0x3F000000u;
    uint32_t large = (m - 0x38000000u + 0xFFF + ((m >> 13) & 1)) >> 13;
    return m < 0x38800000u ? (int32_t)tiny : m >= 0x47800000u ? 0x7C00 : (int32_t)large;
}

INLINE int store(void *to, const float *x, int64_t dtype, int64_t at, int64_t n) {
    int32_t largest = 0;
    if (dtype == BFLOAT16) {
        uint16_t *y = (uint16_t *)to + at;
        EACH {
            uint32_t u = bits(x[i]), v = (u + 0x7FFF + ((u >> 16) & 1)) >> 16;
            int32_t m = v & 0x7FFF;
            largest = m > largest ? m : largest;
            y[i] = (uint16_t)v;
        }
        return largest >= 0x7F80;
    }
    if (dtype == FLOAT16) {
        uint16_t *y = (uint16_t *)to + at;
        EACH {
            int32_t v = narrow(x[i]);
            largest = v > largest ? v : largest;
            y[i] = (uint16_t)(v | (bits(x[i]) >> 16 & 0x8000));
        }
        return largest >= 0x7C00;
    }
    float *y = (float *)to + at;
    EACH { int32_t m = bits(x[i]) & 0x7FFFFFFF; largest = m > largest ? m : largest; y[i] = x[i]; }
    return largest >= 0x7F800000;
}

/* Copies past the caches: a live model is far larger than they are, and its old values need not be read. */
INLINE void stream(float *to, const float *from, int64_t n) {
    int64_t i = 0;
#ifdef __SSE2__
    for (; i < n && (uintptr_t)(to + i) % 16; i++) to[i] = from[i];
    for (; i + 4 <= n; i += 4) _mm_stream_ps(to + i, _mm_loadu_ps(from + i));
#endif
    memcpy(to + i, from + i, (size_t)(n - i) * 4);
}

/* Rounding to a narrow type, stored in float32. `x` is rounded in place. */
INLINE int store_rounded(float *to, float *x, int64_t dtype, int64_t at, int64_t n) {
    int32_t largest = 0;
    const int32_t limit = dtype == ROUNDED_BFLOAT16 ? 0x7F800000 : 0x7C00;
    if (dtype == ROUNDED_BFLOAT16) EACH {
        uint32_t u = bits(x[i]), v = (u + 0x7FFF + ((u >> 16) & 1)) & 0xFFFF0000u;
        int32_t m = v & 0x7FFFFFFF;
        largest = m > largest ? m : largest;
        x[i] = number(v);
    } else EACH {
        int32_t v = narrow(x[i]);
        largest = v > largest ? v : largest;
        x[i] = number(bits(number((uint32_t)v << 13) * 0x1p112f) | (bits(x[i]) & 0x80000000u));
    }
    stream(to + at, x, n);
    return largest >= limit;
}

/* The sum of x, or of the products x y, in float64 and numpy's order: eight interleaved sums over runs of up to 128,
 * halves of what is longer. */

typedef double Eight __attribute__((vector_size(64)));
typedef float EightFloats __attribute__((vector_size(32)));

INLINE Eight widen(const float *x, const float *y) {
    EightFloats v, w;
    memcpy(&v, x, 32);
    if (y) memcpy(&w, y, 32), v *= w;
    return __builtin_convertvector(v, Eight);
}

INLINE double across(Eight s) { return ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7])); }

INLINE double leaf(const float *x, const float *y, int64_t n) {
    double sum = -0.0;
    int64_t i = 0;
    if (n >= 8) {
        Eight sums = widen(x, y);
        for (i = 8; i + 8 <= n; i += 8) sums += widen(x + i, y ? y + i : y);
        sum = across(sums);
    }
    for (; i < n; i++) sum += y ? x[i] * y[i] : x[i];
    return sum;
}

static double pairwise(const float *x, const float *y, int64_t n) {
    if (n <= 128) return leaf(x, y, n);
    int64_t half = n / 2 - n / 2 % 8;
    return pairwise(x, y, half) + pairwise(x + half, y ? y + half : y, n - half);
}

/* A whole run: its eight leaves side by side, since one addition waits for the one before. */
INLINE double sum_run(const float *x, const float *y) {
    double sums[8];
    for (int part = 0; part < 8; part += 4) {
        Eight a[4];
        for (int k = 0; k < 4; k++) a[k] = widen(x + (part + k) * 128, y ? y + (part + k) * 128 : y);
        for (int i = 8; i < 128; i += 8)
            for (int k = 0; k < 4; k++) a[k] += widen(x + (part + k) * 128 + i, y ? y + (part + k) * 128 + i : y);
        for (int k = 0; k < 4; k++) sums[part + k] = across(a[k]);
    }
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

/* The draws of `Group.random_bits`: PCG64 DXSM, addressed by element, four 16-bit numbers a word, eight words a group. */

#define MULTIPLIER 0xda942042e4dd58b5u
enum { GROUP = 32, WORDS = 8 };

INLINE uint64_t output(Wide state) {
    uint64_t high = (uint64_t)(state >> 64), low = (uint64_t)state | 1;
    high ^= high >> 32;
    high *= MULTIPLIER;
    high ^= high >> 48;
    return high * low;
}

/* What `words` steps at once multiply a state by, and add to it. */
INLINE void leap(Wide step, uint64_t words, Wide *factor, Wide *sum) {
    Wide one = MULTIPLIER;
    for (*factor = 1, *sum = 0; words; words >>= 1) {
        if (words & 1) *factor *= one, *sum = *sum * one + step;
        step = (one + 1) * step, one *= one;
    }
}

void draw_groups(Stream *stream, int16_t *to, int64_t groups) {
    Wide state = stream->state;
    for (int64_t k = 0; k < WORDS * groups; k++) {
        uint64_t word = output(state);
        memcpy(to + 4 * k, &word, 8);
        state = state * MULTIPLIER + stream->step;
    }
    stream->state = state;
    stream->group += groups;
}

#ifdef WITH_WIDE_VECTORS
typedef uint64_t Words __attribute__((vector_size(8 * WORDS)));

/* The upper halves of the products. */
WITH_WIDE_VECTORS static inline Words multiply_high(Words x, uint64_t y) {
    const uint64_t half = 0xFFFFFFFF, low = y & half, high = y >> 32;
    Words right = (x & half) * low, left = (x >> 32) * low + (right >> 32), middle = (x & half) * high + (left & half);
    return (x >> 32) * high + (left >> 32) + (middle >> 32);
}

/* The same, with the states of a group side by side. */
WITH_WIDE_VECTORS void draw_groups_wide(Stream *stream, int16_t *to, int64_t groups) {
    Wide state = stream->state, factor, sum;
    Words low, high;
    for (int i = 0; i < WORDS; i++) {
        low[i] = (uint64_t)state, high[i] = (uint64_t)(state >> 64);
        state = state * MULTIPLIER + stream->step;
    }
    leap(stream->step, WORDS, &factor, &sum);
    const uint64_t factor_low = (uint64_t)factor, factor_high = (uint64_t)(factor >> 64);
    const uint64_t sum_low = (uint64_t)sum, sum_high = (uint64_t)(sum >> 64);
    for (int64_t k = 0; k < groups; k++) {
        Words word = high ^ high >> 32;
        word *= MULTIPLIER;
        word ^= word >> 48;
        word *= low | 1;
        memcpy(to + GROUP * k, &word, sizeof word);
        high = high * factor_low + low * factor_high + multiply_high(low, factor_low) + sum_high;
        low = low * factor_low + sum_low;
        high -= (Words)(low < sum_low); /* the carry: a true comparison is -1 */
    }
    stream->state = (Wide)high[0] << 64 | low[0];
    stream->group += groups;
}
#endif

/* `n` draws from the element `at` on; those of the next tile begin where these end. */
INLINE const int16_t *draw(Stream *stream, int16_t *to, int64_t at, int64_t n) {
    void (*draw_more)(Stream *, int16_t *, int64_t) = draw_groups;
#ifdef WITH_WIDE_VECTORS
    if (__builtin_cpu_supports("avx512dq")) draw_more = draw_groups_wide;
#endif
    const int64_t first = at / GROUP, next = (at + n) / GROUP;
    if (first != stream->group) {
        Wide factor, sum;
        leap(stream->step, WORDS * (uint64_t)(first - stream->group), &factor, &sum);
        stream->state = stream->state * factor + sum;
        stream->group = first;
    }
    draw_more(stream, to, next - first);
    if ((at + n) % GROUP) { /* the next tile needs this group too */
        Stream ahead = *stream;
        draw_more(&ahead, to + GROUP * (next - first), 1);
    }
    return to + at % GROUP;
}

/* Entries of rank k in their row times gains[k] where draw k lies below bounds[k]. A rank is the number of smaller
 * magnitudes, told apart by the bits that bfloat16 keeps, plus that of equal ones to the left. */
INLINE void drop_by_rank(float *to, const float *x, const int16_t *draws, const Step *s, Scratch *scratch, int64_t n) {
    const int32_t *bounds = s->table;
    const float *gains = s->more;
    uint16_t *codes = scratch->codes;
    uint32_t *ranks = scratch->ranks;
    float *factors = scratch->factors;
    uint32_t top = 0, low = CODES, total = 0;
    EACH {
        uint32_t code = (bits(x[i]) >> 16) & (CODES - 1), above = code - 1; /* a zero wraps around */
        top = code > top ? code : top;
        low = above < low ? above : low;
    }
    low = low < top ? low : top;
    EACH { uint32_t code = (bits(x[i]) >> 16) & (CODES - 1); codes[i] = (uint16_t)((code > low ? code : low) - low); }
    EACH factors[i] = draws[i] < bounds[i] ? gains[i] : 0;
    memset(ranks, 0, (top - low + 1) * sizeof *ranks);
    for (int64_t i = 0; i < n; i++) ranks[codes[i]]++;
    for (uint32_t k = 0; k <= top - low; k++) { uint32_t held = ranks[k]; ranks[k] = total; total += held; }
    for (int64_t i = 0; i < n; i++) to[i] = x[i] * factors[ranks[codes[i]]++];
}

/* What lies above a bracket of scores, on its ends, and inside, where scores are kept as long as there is room. */
INLINE void scan(const float *x, const Step *s, uint32_t mask, int64_t *counts, uint32_t *kept, int64_t room, int64_t n) {
    int32_t low = s->low, high = s->high, above = 0, highs = 0, lows = 0;
    uint32_t width = (uint32_t)(high - low) - 1;
    uint8_t hits[RUN + 8];
    memset(hits + n, 0, 8);
    EACH {
        int32_t u = (int32_t)(bits(x[i]) & mask);
        above += u > high;
        highs += u == high;
        lows += u == low;
        hits[i] = (uint32_t)u - (uint32_t)low - 1 < width;
    }
    counts[0] += above;
    counts[1] += highs;
    counts[2] += lows;
    if (high - low < 2) return;
    for (int64_t i = 0; i < n; i += 8) {
        uint64_t word;
        memcpy(&word, hits + i, 8);
        for (; word; word &= word - 1, counts[3]++)
            if (counts[3] < room) kept[counts[3]] = bits(x[i + __builtin_ctzll(word) / 8]) & mask;
    }
}

/* What lies outside ±bound, or its sign; zero elsewhere. */
INLINE void shrink(float *y, const float *a, float bound, int signs, int64_t n) {
    if (signs) EACH y[i] = a[i] >= -bound && a[i] <= bound ? 0 : sign(a[i]);
    else EACH y[i] = a[i] >= -bound && a[i] <= bound ? 0 : a[i];
}

/* Lets the processor fetch the next tile while it computes this one; beyond the end of a block this does no harm. */
INLINE void fetch(const Source *source, int64_t at, int64_t n) {
    const int64_t size = source->dtype == FLOAT32 ? 4 : 2;
    const char *from = (const char *)source->data + at * size;
    for (int64_t i = 0; i < n * size; i += 64) __builtin_prefetch(from + i);
}

INLINE int step(const Step *s, const Job *job, Scratch *scratch, int64_t n) {
    float *base = scratch->registers;
    const int64_t pitch = scratch->pitch;
    float *y = base + s->to * pitch;
    const float *a = base + s->a * pitch, *b = base + s->b * pitch, *c = base + s->c * pitch;
    const float x = s->x;
    const int64_t at = scratch->at, flat = job->offset + at;
    switch (s->op) {
    case LOAD: case LOAD_MINUS: {
        const Source *source = &job->sources[s->place];
        int bad = load(y, source, s->op == LOAD ? NULL : a, job->start + at, n);
        fetch(source, job->start + at + job->tile * job->stride, n);
        return bad;
    }
    case STORE: /* the last step */
        if (job->dtype >= ROUNDED_BFLOAT16)
            return store_rounded(job->out, base + s->a * pitch, job->dtype, scratch->taken, n);
        return store(job->out, a, job->dtype, scratch->taken, n);
    case FILL: EACH y[i] = x; break;
    case ADD: EACH y[i] = a[i] + b[i]; break;
    case SUB: EACH y[i] = a[i] - b[i]; break;
    case MUL: EACH y[i] = a[i] * b[i]; break;
    case DIV: EACH y[i] = a[i] / b[i]; break;
    case MAX: EACH y[i] = a[i] > b[i] ? a[i] : b[i]; break;
    case MIN: EACH y[i] = a[i] < b[i] ? a[i] : b[i]; break;
    case COPYSIGN: EACH y[i] = number((bits(a[i]) & 0x7FFFFFFF) | (bits(b[i]) & 0x80000000u)); break;
    case AXPY: EACH y[i] = fmaf(b[i], x, a[i]); break; /* a + x b */
    case ADDCMUL: EACH y[i] = fmaf(x * b[i], c[i], a[i]); break; /* a + x b c */
    case LERP: EACH y[i] = fmaf(x, b[i] - a[i], s->place ? b[i] : a[i]); break; /* place: from the end, x is w − 1 */
    case ADDS: EACH y[i] = a[i] + x; break;
    case MULS: EACH y[i] = a[i] * x; break;
    case MAXS: EACH y[i] = a[i] < x ? x : a[i]; break;
    case MINS: EACH y[i] = a[i] > x ? x : a[i]; break;
    case ABS: EACH y[i] = fabsf(a[i]); break;
    case NEG: EACH y[i] = -a[i]; break;
    case SIGN: EACH y[i] = sign(a[i]); break;
    case SHRINK: case SIGN_SHRINK: { /* what lies above x; from the flat place on above y, a little more */
        int64_t ties = s->place - flat;
        ties = ties < 0 ? 0 : ties > n ? n : ties;
        shrink(y, a, x, s->op == SIGN_SHRINK, ties);
        shrink(y + ties, a + ties, s->y, s->op == SIGN_SHRINK, n - ties);
        break;
    }
    case GES: EACH y[i] = a[i] >= x ? 1 : 0; break;
    case SELECT: EACH y[i] = a[i] == s->y ? x : b[i]; break; /* x where a equals y, b elsewhere */
    case BY_ROW: { /* times the factor of the row */
        const float *factors = s->table;
        for (int64_t done = 0; done < n;) {
            int64_t row = (flat + done) / job->row, end = (row + 1) * job->row - flat, stop = end < n ? end : n;
            const float factor = factors[row];
            for (int64_t i = done; i < stop; i++) y[i] = a[i] * factor;
            done = stop;
        }
        break;
    }
    case DROP: { /* zero where a draw is not below `low` */
        const int16_t *draws = draw(&scratch->streams[s->place], scratch->draws, flat, n);
        const int32_t bound = s->low;
        EACH y[i] = number(bits(a[i]) & (draws[i] < bound ? 0xFFFFFFFFu : 0));
        break;
    }
    case DROP_BY_RANK:
        drop_by_rank(y, a, draw(&scratch->streams[s->place], scratch->draws, flat, n), s, scratch, n);
        break;
    case SUM: case SUM_MUL: {
        double *sums = job->sums + s->place * ((job->size + RUN - 1) / RUN) + scratch->number;
        if (s->op == SUM) *sums = n == RUN ? sum_run(a, NULL) : pairwise(a, NULL, n);
        else *sums = n == RUN ? sum_run(a, b) : pairwise(a, b, n);
        break;
    }
    case NONZERO: { int64_t found = 0; EACH found += a[i] != 0; job->counts[4 * s->place] += found; break; }
    case SCAN: case SCAN_ABS: {
        const uint32_t mask = s->op == SCAN ? 0xFFFFFFFFu : 0x7FFFFFFFu;
        scan(a, s, mask, job->counts + 4 * s->place, job->kept + s->place * job->room, job->room, n);
        break;
    }
    case ADDCMUL_SUB: EACH { float v = b[i] - c[i]; y[i] = fmaf(x * v, v, a[i]); } break; /* a + x (b − c)² */
    case ADD_MUL: EACH y[i] = a[i] + b[i] * c[i]; break;
    case MUL_MAXS: EACH { float v = a[i] * b[i]; y[i] = v < x ? x : v; } break;
    case DIV_MAXS: EACH y[i] = a[i] / (b[i] < x ? x : b[i]); break;
    case AXPY_SIGN: EACH y[i] = fmaf(sign(b[i]), x, a[i]); break;
    case SIGN_ADDS: EACH y[i] = sign(a[i]) + x; break;
    case DIVERGENCE: /* of rows, of which a tile has whole ones */
        divergences(job->rows + s->place * (job->size / job->row) + scratch->taken / job->row, a, b, scratch->softmaxes,
                    n / job->row, job->row);
        break;
    case TAKE: memcpy(job->kept + s->place * job->room + scratch->taken, a, (size_t)n * 4); break;
    }
    return 0;
}

/* Raised with every change of what Python and this file tell each other. */
const int tiles_version = 6;

/* Run the steps over a block. Returns 0; 1 if an input or a result is not finite; -1 if memory is short. */
FOR_EACH_PROCESSOR
int run_tiles(const Step *steps, int64_t count, int64_t registers, int64_t streams, const Job *job) {
    Scratch s = {0};
    int ranked = 0, divergent = 0;
    for (int64_t k = 0; k < count; k++) ranked |= steps[k].op == DROP_BY_RANK, divergent |= steps[k].op == DIVERGENCE;
    s.pitch = job->tile + 48 - job->tile % 16;
    size_t tile = (size_t)job->tile + 2 * GROUP, held = (size_t)registers * (size_t)s.pitch * 4;
    size_t softmaxes = divergent ? (size_t)job->row * 2 * sizeof(double) : 0;
    size_t ranking = ranked ? CODES * 4 + tile * 6 : 0;
    char *arena = malloc(64 + (size_t)streams * sizeof(Stream) + softmaxes + held + tile * 2 + ranking);
    if (!arena) return -1;
    char *p = arena + (64 - (uintptr_t)arena % 64) % 64;
    s.streams = (Stream *)p, p += (size_t)streams * sizeof(Stream);
    s.softmaxes = (double *)p, p += softmaxes;
    s.registers = (float *)p, p += held;
    if (ranked) {
        s.ranks = (uint32_t *)p, p += CODES * 4;
        s.factors = (float *)p, p += tile * 4;
        s.codes = (uint16_t *)p, p += tile * 2;
    }
    s.draws = (int16_t *)p;
    for (int64_t k = 0; k < streams; k++) {
        const Seed *seed = &job->seeds[k];
        s.streams[k] = (Stream){(Wide)seed->high << 64 | seed->low, (Wide)seed->step_high << 64 | seed->step_low, 0};
    }
    int bad = 0;
    for (; s.at < job->size && !bad; s.at += job->tile * job->stride, s.number++) {
        int64_t n = job->size - s.at < job->tile ? job->size - s.at : job->tile;
        for (int64_t k = 0; k < count; k++) bad |= step(&steps[k], job, &s, n);
        s.taken += n;
    }
    free(arena);
#ifdef __SSE2__
    _mm_sfence(); /* other threads see what was streamed */
#endif
    return bad;
}
