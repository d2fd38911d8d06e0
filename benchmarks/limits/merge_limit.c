/* What a merge of bfloat16 files costs at least: the reads, arithmetic and writes of each family of methods, with
 * nothing around them. Two threads, mapped inputs, whole tensors as the unit of work, one fsync.
 *
 *     merge_limit FAMILY TENSORS OUT INPUT...
 *
 * TENSORS is a text file with a line "offset rows columns" for each tensor; all inputs are laid out alike. The first
 * input is the base for every family but linear. The work is that of the methods, not every detail of their results:
 * draws come from another generator, a chunk that spans rows is scored by its first one.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { THREADS = 2, MODELS = 3, CHUNK = 1 << 10, BUFFER = 1 << 18, SAMPLE = 1 << 15, CODES = 1 << 15 };
typedef uint16_t bf16;
typedef struct { int64_t offset, rows, columns; } Tensor;

static const char *family;
static Tensor *tensors;
static int count, inputs, out;
static const char *maps[MODELS + 1];
static atomic_int next_tensor;

static inline float widen(bf16 x) { uint32_t u = (uint32_t)x << 16; float f; memcpy(&f, &u, 4); return f; }
static inline uint32_t bits(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
static inline bf16 narrow(float x) { uint32_t u = bits(x); return (bf16)((u + 0x7FFF + ((u >> 16) & 1)) >> 16); }
static inline float sign(float x) { return (float)((x > 0) - (x < 0)); }
static void fail(const char *what) { perror(what); exit(1); }
static inline int is(const char *name) { return !strcmp(family, name); }

/* A chunk of the base and of the task vectors, or of the models themselves. */
typedef struct { float base[CHUNK], x[MODELS][CHUNK]; } Chunk;

static inline void load(Chunk *c, const bf16 *const *in, int64_t at, int n, int deltas) {
    int first = deltas ? 1 : 0;
    if (deltas) for (int i = 0; i < n; i++) c->base[i] = widen(in[0][at + i]);
    for (int t = first; t < inputs; t++) {
        float *x = c->x[t - first];
        const bf16 *source = in[t] + at;
        if (deltas) for (int i = 0; i < n; i++) x[i] = widen(source[i]) - c->base[i];
        else for (int i = 0; i < n; i++) x[i] = widen(source[i]);
    }
}

/* ⟨x_i, x_j⟩ of the first `m` vectors. */
static void gram(const bf16 *const *in, int64_t n, int deltas, int m, double g[MODELS][MODELS]) {
    Chunk c;
    memset(g, 0, sizeof(double) * MODELS * MODELS);
    for (int64_t at = 0; at < n; at += CHUNK) {
        int size = n - at < CHUNK ? (int)(n - at) : CHUNK;
        load(&c, in, at, size, deltas);
        for (int i = 0; i < m; i++)
            for (int j = 0; j <= i; j++) {
                float sum = 0;
                for (int k = 0; k < size; k++) sum += c.x[i][k] * c.x[j][k];
                g[i][j] += sum;
            }
    }
}

static int ascending(const void *a, const void *b) { float x = *(float *)a, y = *(float *)b; return (x > y) - (x < y); }

/* The score whose quantiles a family wants: a variance, an importance (by the row a chunk starts in), a magnitude. */
static void scores(const Chunk *c, int t, int n, const float *factors, int64_t at, int64_t columns, float *to) {
    if (is("sce")) { for (int i = 0; i < n; i++) {
        float mean = (c->x[0][i] + c->x[1][i] + c->x[2][i]) * (1 / 3.0f);
        float a = c->x[0][i] - mean, b = c->x[1][i] - mean, d = c->x[2][i] - mean;
        to[i] = a * a + b * b + d * d;
    } } else if (factors) { float factor = factors[at / columns];
        for (int i = 0; i < n; i++) to[i] = fabsf(c->x[t][i]) * factor;
    }
    else for (int i = 0; i < n; i++) to[i] = fabsf(c->x[t][i]);
}

/* The smallest of the `share` largest scores of each vector: a sample brackets it, a pass counts what lies above and
 * collects what lies inside. */
static void thresholds(const bf16 *const *in, int64_t n, int64_t columns, int vectors, float share,
                       const float *factors, float *found) {
    static _Thread_local float sample[SAMPLE + CHUNK];
    Chunk c;
    float row[CHUNK], low[MODELS], high[MODELS];
    uint8_t hits[CHUNK + 8] = {0};
    for (int t = 0; t < vectors; t++) {
        int held = 0;
        int64_t step = n / SAMPLE > 1 ? (n / SAMPLE) * CHUNK : CHUNK;
        for (int64_t at = 0; at < n && held < SAMPLE; at += step) {
            int size = n - at < CHUNK ? (int)(n - at) : CHUNK;
            load(&c, in, at, size, 1);
            scores(&c, t, size, factors, at, columns, sample + held);
            held += size;
        }
        qsort(sample, held, sizeof(float), ascending);
        int place = (int)((1 - share) * held), width = held / 128;
        low[t] = sample[place > width ? place - width : 0];
        high[t] = sample[place + width < held ? place + width : held - 1];
    }
    int64_t above[MODELS] = {0}, inside[MODELS] = {0};
    int64_t room = n / 16 + CHUNK;
    float *kept = malloc(vectors * room * sizeof(float));
    for (int64_t at = 0; at < n; at += CHUNK) {
        int size = n - at < CHUNK ? (int)(n - at) : CHUNK;
        load(&c, in, at, size, 1);
        for (int t = 0; t < vectors; t++) {
            scores(&c, t, size, factors, at, columns, row);
            int over = 0;
            for (int i = 0; i < size; i++) over += row[i] > high[t], hits[i] = (row[i] >= low[t]) & (row[i] <= high[t]);
            above[t] += over;
            for (int a = 0; a < size; a += 8) {
                uint64_t word;
                for (memcpy(&word, hits + a, 8); word && inside[t] < room; word &= word - 1)
                    kept[t * room + inside[t]++] = row[a + __builtin_ctzll(word) / 8];
            }
        }
    }
    for (int t = 0; t < vectors; t++) {
        float *mine = kept + t * room;
        int64_t rank = inside[t] - ((int64_t)(share * n) - above[t]);
        qsort(mine, inside[t] < SAMPLE ? inside[t] : SAMPLE, sizeof(float), ascending); /* selecting costs about this */
        found[t] = inside[t] ? mine[rank < 0 ? 0 : rank < inside[t] ? rank : inside[t] - 1] : low[t];
    }
    free(kept);
}

static inline uint32_t mix(uint32_t z) {
    z = (z ^ (z >> 16)) * 0x7feb352du;
    z = (z ^ (z >> 15)) * 0x846ca68bu;
    return z ^ (z >> 16);
}

/* Half of the entries, at random, doubled. */
static void drop(float *x, int n, uint32_t at) {
    for (int i = 0; i < n; i++) x[i] = (int32_t)mix(at + i) < 0 ? 2 * x[i] : 0;
}

/* Entries of a row kept with a probability that rises with their rank. */
static void drop_by_rank(float *x, int n, const float *gains) {
    static _Thread_local uint32_t ranks[CODES];
    uint32_t top = 0, low = CODES, total = 0;
    for (int i = 0; i < n; i++) {
        uint32_t code = (bits(x[i]) >> 16) & (CODES - 1);
        top = code > top ? code : top, low = code && code < low ? code : low;
    }
    low = low > top ? top : low;
    memset(ranks, 0, (top - low + 1) * sizeof(uint32_t));
    for (int i = 0; i < n; i++) {
        uint32_t code = (bits(x[i]) >> 16) & (CODES - 1);
        ranks[(code > low ? code : low) - low]++;
    }
    for (uint32_t i = 0; i <= top - low; i++) { uint32_t held = ranks[i]; ranks[i] = total; total += held; }
    for (int i = 0; i < n; i++) {
        uint32_t code = (bits(x[i]) >> 16) & (CODES - 1);
        x[i] *= gains[ranks[(code > low ? code : low) - low]++];
    }
}

/* The factor of each rank: zero, or one over its probability. */
static void draw(float *gains, int n, uint32_t at) {
    for (int i = 0; i < n; i++) {
        float chance = 0.3f + 0.4f / n * i;
        gains[i] = (mix(at + i) >> 16) < chance * 65536 ? 1 / chance : 0;
    }
}

/* The mean (or sum) of the entries that agree with the sign of their sum. */
static inline float elect(float a, float b, float c, const float *w, int mean) {
    float votes = w[0] * a + w[1] * b + w[2] * c, side = votes < 0 ? -1 : 1;
    float pa = fmaxf(a * side, 0), pb = fmaxf(b * side, 0), pc = fmaxf(c * side, 0);
    float total = w[0] * pa + w[1] * pb + w[2] * pc;
    if (!mean) return side * total;
    float weight = w[0] * sign(pa) + w[1] * sign(pb) + w[2] * sign(pc);
    return side * total / fmaxf(weight, 1e-30f);
}

typedef struct { float cut[MODELS], top[MODELS], w[MODELS], t; float *divergence; } State;

/* In float64, like the method: the divergence is smaller than the rounding of float32. */
static void divergences(const bf16 *const *in, const Tensor *tensor, float *to) {
    int64_t n = tensor->columns;
    double *p = malloc(n * sizeof(double)), *q = malloc(n * sizeof(double));
    for (int64_t row = 0; row < tensor->rows; row++) {
        const bf16 *a = in[1] + row * n, *b = in[0] + row * n;
        float pm = -INFINITY, qm = -INFINITY;
        double ps = 0, qs = 0, sum = 0;
        for (int64_t i = 0; i < n; i++) { pm = fmaxf(pm, widen(a[i])); qm = fmaxf(qm, widen(b[i])); }
        for (int64_t i = 0; i < n; i++) ps += p[i] = exp((double)widen(a[i]) - pm);
        for (int64_t i = 0; i < n; i++) qs += q[i] = exp((double)widen(b[i]) - qm);
        for (int64_t i = 0; i < n; i++) {
            double x = p[i] * (1 / ps) + 1e-8, y = q[i] * (1 / qs) + 1e-8;
            sum += x * log(x / y) - x + y;
        }
        to[row] = (float)sum;
    }
    free(p); free(q);
}

static void reduce(const bf16 *const *in, const Tensor *tensor, State *s) {
    int64_t n = tensor->rows * tensor->columns;
    double g[MODELS][MODELS];
    for (int t = 0; t < MODELS; t++) s->w[t] = 0.4f;
    if (is("ties") || is("breadcrumbs")) thresholds(in, n, tensor->columns, 3, 0.2f, NULL, s->cut);
    if (is("breadcrumbs")) for (int t = 0; t < 3; t++) s->top[t] = 4 * s->cut[t];
    if (is("sce")) {
        thresholds(in, n, tensor->columns, 1, 0.1f, NULL, s->cut);
        gram(in, n, 1, 3, g); /* the energies of what was selected: as much to read, not more to compute */
        for (int t = 0; t < 3; t++) s->w[t] = g[t][t] / (g[0][0] + g[1][1] + g[2][2] + 1e-30);
    }
    if (is("slerp") || is("nuslerp") || is("model_stock")) {
        int m = is("model_stock") ? 3 : 2;
        gram(in, n, !is("slerp"), m, g);
        double cosine = g[1][0] / (sqrt(g[0][0] * g[1][1]) + 1e-30), angle = acos(fmin(1, fmax(-1, cosine)));
        s->w[0] = sin(0.6 * angle) / sin(angle + 1e-30), s->w[1] = sin(0.4 * angle) / sin(angle + 1e-30);
        s->t = 3 * cosine / (1 + 2 * cosine);
    }
    if (is("arcee_fusion")) {
        s->divergence = malloc(tensor->rows * sizeof(float));
        divergences(in, tensor, s->divergence);
        thresholds(in, n, tensor->columns, 1, 0.25f, s->divergence, s->cut);
    }
}

static void combine(Chunk *c, int n, int64_t at, int64_t columns, const State *s, bf16 *to) {
    float *a = c->x[0], *b = c->x[1], *d = c->x[2], *base = c->base;
    const float *w = s->w;
    if (is("linear")) for (int i = 0; i < n; i++) to[i] = narrow((a[i] + b[i] + d[i]) * (1 / 3.0f));
    else if (is("slerp")) for (int i = 0; i < n; i++) to[i] = narrow(w[0] * a[i] + w[1] * b[i]);
    else if (is("nuslerp")) for (int i = 0; i < n; i++) to[i] = narrow(base[i] + w[0] * a[i] + w[1] * b[i]);
    else if (is("task_arithmetic") || is("dare_linear") || is("della_linear"))
        for (int i = 0; i < n; i++) to[i] = narrow(base[i] + w[0] * a[i] + w[1] * b[i] + w[2] * d[i]);
    else if (is("model_stock"))
        for (int i = 0; i < n; i++) to[i] = narrow(base[i] + s->t * (a[i] + b[i] + d[i]) * (1 / 3.0f));
    else if (is("breadcrumbs")) for (int i = 0; i < n; i++) {
        float sum = 0;
        for (int t = 0; t < 3; t++) {
            float x = c->x[t][i], size = fabsf(x);
            sum += (size > s->cut[t]) & (size < s->top[t]) ? w[t] * x : 0;
        }
        to[i] = narrow(base[i] + sum);
    }
    else if (is("ties") || is("dare_ties") || is("della") || is("sce")) {
        if (is("ties")) for (int t = 0; t < 3; t++)
            for (int i = 0; i < n; i++) c->x[t][i] = fabsf(c->x[t][i]) > s->cut[t] ? c->x[t][i] : 0;
        if (is("sce")) {
            float row[CHUNK];
            scores(c, 0, n, NULL, 0, 1, row);
            for (int t = 0; t < 3; t++) for (int i = 0; i < n; i++) c->x[t][i] = row[i] > s->cut[0] ? c->x[t][i] : 0;
        }
        int mean = !is("dare_ties");
        if (mean) for (int i = 0; i < n; i++) to[i] = narrow(base[i] + elect(a[i], b[i], d[i], w, 1));
        else for (int i = 0; i < n; i++) to[i] = narrow(base[i] + elect(a[i], b[i], d[i], w, 0));
    }
    else if (is("consensus_ta")) for (int i = 0; i < n; i++) {
        float sum = a[i] + b[i] + d[i], agree = 0;
        for (int t = 0; t < 3; t++) agree += fabsf(c->x[t][i]) > 0.4f * fabsf(sum - c->x[t][i]);
        to[i] = narrow(base[i] + (agree >= 2 ? sum : 0));
    }
    else if (is("ram")) for (int i = 0; i < n; i++) {
        float sum = 0, changed = 0;
        for (int t = 0; t < 3; t++) { float x = c->x[t][i], big = fabsf(x) > 1e-5f; sum += big * x; changed += big; }
        to[i] = narrow(base[i] + sum / fmaxf(changed, 1));
    }
    else { /* arcee_fusion */
        float factor = s->divergence[at / columns];
        for (int i = 0; i < n; i++) to[i] = narrow(base[i] + (fabsf(a[i]) * factor > s->cut[0] ? a[i] : 0));
    }
}

static void *work(void *unused) {
    bf16 *buffer = malloc(BUFFER * sizeof(bf16));
    int deltas = !is("linear") && !is("slerp"), ranked = is("della") || is("della_linear"), number;
    float *rows[MODELS] = {0}, *gains = NULL;
    Chunk c;
    while ((number = atomic_fetch_add(&next_tensor, 1)) < count) {
        const Tensor *tensor = &tensors[number];
        const bf16 *in[MODELS + 1];
        for (int t = 0; t < inputs; t++) in[t] = (const bf16 *)(maps[t] + tensor->offset);
        State s = {0};
        reduce(in, tensor, &s);
        int64_t n = tensor->rows * tensor->columns, held = 0, started = 0;
        if (ranked) for (int t = 0; t < 3; t++) rows[t] = realloc(rows[t], tensor->columns * sizeof(float));
        if (ranked) gains = realloc(gains, tensor->columns * sizeof(float));
        for (int64_t at = 0; at < n;) {
            int size = n - at < CHUNK ? (int)(n - at) : CHUNK;
            if (ranked && size > tensor->columns - at % tensor->columns) size = tensor->columns - at % tensor->columns;
            if (ranked && at % tensor->columns == 0) for (int t = 0; t < 3; t++) {
                const bf16 *model = in[t + 1] + at, *base = in[0] + at;
                for (int64_t i = 0; i < tensor->columns; i++) rows[t][i] = widen(model[i]) - widen(base[i]);
                draw(gains, tensor->columns, at);
                drop_by_rank(rows[t], tensor->columns, gains);
            }
            load(&c, in, at, size, deltas);
            for (int t = 0; ranked && t < 3; t++) memcpy(c.x[t], rows[t] + at % tensor->columns, size * sizeof(float));
            if (is("dare_ties") || is("dare_linear")) for (int t = 0; t < 3; t++) drop(c.x[t], size, at);
            combine(&c, size, at, tensor->columns, &s, buffer + held);
            held += size, at += size;
            if (held > BUFFER - CHUNK || at == n) {
                if (pwrite(out, buffer, held * 2, tensor->offset + started * 2) != held * 2) fail("write");
                started += held, held = 0;
            }
        }
        free(s.divergence);
    }
    free(buffer);
    return unused;
}

static int largest_first(const void *a, const void *b) {
    const Tensor *x = a, *y = b;
    int64_t difference = y->rows * y->columns - x->rows * x->columns;
    return (difference > 0) - (difference < 0);
}

int main(int argc, char **argv) {
    if (argc < 5 || argc > 5 + MODELS) return fprintf(stderr, "usage: merge_limit FAMILY TENSORS OUT INPUT...\n"), 2;
    family = argv[1];
    inputs = argc - 4;
    FILE *list = fopen(argv[2], "r");
    if (!list) fail(argv[2]);
    tensors = malloc(sizeof(Tensor) << 20);
    for (Tensor t; fscanf(list, "%ld %ld %ld", &t.offset, &t.rows, &t.columns) == 3;) tensors[count++] = t;
    qsort(tensors, count, sizeof(Tensor), largest_first);
    struct stat state;
    for (int i = 0; i < inputs; i++) {
        int file = open(argv[4 + i], O_RDONLY);
        if (file < 0 || fstat(file, &state)) fail(argv[4 + i]);
        maps[i] = mmap(NULL, state.st_size, PROT_READ, MAP_SHARED, file, 0);
        if (maps[i] == MAP_FAILED) fail(argv[4 + i]);
    }
    out = open(argv[3], O_RDWR | O_CREAT | O_TRUNC, 0644);
    if (out < 0 || posix_fallocate(out, 0, state.st_size)) fail(argv[3]);
    int64_t header = state.st_size;
    for (int i = 0; i < count; i++) header = tensors[i].offset < header ? tensors[i].offset : header;
    if (pwrite(out, maps[0], header, 0) != header) fail(argv[3]);
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++) pthread_create(&threads[i], NULL, work, NULL);
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    return fsync(out) || close(out);
}
