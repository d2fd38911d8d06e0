/* The divergence of a vector's softmax from another's: the operations of `divergence.py`, which says what they mean, one
 * by one. Contraction of expressions is switched off, so that every processor gives the bits of numpy.
 */
#include <stdint.h>
#include <string.h>

#include "vectors.h"

INLINE int64_t bits(double x) { int64_t u; memcpy(&u, &x, 8); return u; }
INLINE double number(int64_t u) { double x; memcpy(&x, &u, 8); return x; }

/* A number whose last bit is worth one: integers added to it, or to its bits, change from one type to the other. */
#define UNITS 0x1.8p52

INLINE double exponential(double x) {
    x = x < -708 ? -708 : x;
    double rounded = x * 1.4426950408889634 + UNITS, k = rounded - UNITS;
    double r = (x - k * 0.6931471803691238) - k * 1.9082149292705877e-10;
    double q = 2.510038549551032e-08;
    q = q * r + 2.7620088445409746e-07;
    q = q * r + 2.7557268459997064e-06;
    q = q * r + 2.4801521295954376e-05;
    q = q * r + 0.00019841269863053618;
    q = q * r + 0.0013888888917213717;
    q = q * r + 0.008333333333330062;
    q = q * r + 0.04166666666662413;
    q = q * r + 0.16666666666666669;
    q = q * r + 0.5000000000000001;
    double y = r * r * q + r + 1;
    return number(bits(y) + (int64_t)((uint64_t)bits(rounded) << 52));
}

INLINE double relative_entropy(double p, double q) {
    int64_t k = (bits(p) - bits(q) + ((int64_t)1 << 51)) >> 52;
    double near = q * number((k + 1023) << 52), turns = number(bits(UNITS) + k) - UNITS;
    double sum = p + near, z = (p - near) / sum, w = z * z;
    double s = 0.07560689717850949;
    s = s * w + 0.07641692413781613;
    s = s * w + 0.0909231166129282;
    s = s * w + 0.11111091266044083;
    s = s * w + 0.14285714419043646;
    s = s * w + 0.1999999999966471;
    s = s * w + 0.3333333333333347;
    return (w * z * s * (z + 1) + w) * sum + (turns * 0.6931471805599453 * p + (q - near));
}

/* numpy's sum: eight interleaved sums over runs of up to 128, halves of what is longer. */
typedef double Four __attribute__((vector_size(32)));

INLINE Four four(const double *x) { Four v; memcpy(&v, x, 32); return v; }

INLINE double leaf(const double *x, int64_t n) {
    if (n < 8) {
        double sum = -0.0;
        for (int64_t i = 0; i < n; i++) sum += x[i];
        return sum;
    }
    Four a = four(x), b = four(x + 4);
    int64_t i = 8;
    for (; i + 8 <= n; i += 8) a += four(x + i), b += four(x + i + 4);
    double sum = ((a[0] + a[1]) + (a[2] + a[3])) + ((b[0] + b[1]) + (b[2] + b[3]));
    for (; i < n; i++) sum += x[i];
    return sum;
}

static double total(const double *x, int64_t n) {
    if (n <= 128) return leaf(x, n);
    int64_t half = n / 2 - n / 2 % 8;
    return total(x, half) + total(x + half, n - half);
}

/* By the bits, made to rise with the numbers: the compiler turns only this into vectors. */
INLINE float largest(const float *x, int64_t n) {
    int32_t top = INT32_MIN;
    EACH { int32_t u; memcpy(&u, x + i, 4); u ^= u >> 31 & 0x7FFFFFFF; top = u > top ? u : top; }
    top ^= top >> 31 & 0x7FFFFFFF;
    float found;
    memcpy(&found, &top, 4);
    return found;
}

INLINE void softmax(double *to, const float *x, int64_t n) {
    const double top = largest(x, n);
    EACH to[i] = exponential(x[i] - top);
    const double factor = 1 / total(to, n);
    EACH to[i] = to[i] * factor + 1e-8;
}

/* The divergence of each of `rows` vectors of `n` numbers; `room` is for 2 n numbers. */
FOR_EACH_PROCESSOR
void divergences(double *to, const float *model, const float *base, double *room, int64_t rows, int64_t n) {
    double *p = room, *q = room + n;
    for (int64_t row = 0; row < rows; row++, model += n, base += n) {
        softmax(p, model, n);
        softmax(q, base, n);
        EACH p[i] = relative_entropy(p[i], q[i]);
        to[row] = total(p, n);
    }
}
