/* Solves a linear assignment problem: the permutation p that maximises the sum of profit[u][p[u]] over the rows u.
 *
 * Every column has a price, and a row wants the column with the largest profit after its price. Rows take free columns
 * or outbid each other for a few rounds; each row left over then takes a shortest augmenting path (Jonker and
 * Volgenant, 1987). At the end every row has a column that it wants: this proves the permutation optimal, whatever the
 * prices were at the start. With the prices of a similar problem few rows have to move. Loaded with ctypes: no Python
 * API, and the interpreter's lock is free while this runs. Numbers must be finite, and small compared with FAR.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif
#define FAR 1e300

/* Rounds of bidding: in our problems more of them save no time. */
enum { ROUNDS = 8, ARRAYS = 9 };

/* Raised with every change of what Python and this file tell each other. */
const int linear_assignment_version = 1;

typedef struct {
    int64_t size, waiting;  /* rows of the problem, and rows without a column */
    const void *profit;
    int narrow;  /* whether profits are float32 */
    double *price, *cost, *held, *least, *reached;  /* by column, by column in a search, the same, by row, by step */
    double *wide;  /* a row in float64 */
    int64_t *column, *row, *from, *queue, *visited;  /* of a row, of a column, by column in a search, rows, by step */
} Problem;

FOR_EACH_PROCESSOR
static void widen(int64_t n, const float *restrict narrow, double *restrict wide) {
    for (int64_t j = 0; j < n; j++) wide[j] = narrow[j];
}

/* Returns the profits of a row in float64. */
static const double *profits(const Problem *a, int64_t row) {
    if (!a->narrow) return (const double *)a->profit + row * a->size;
    widen(a->size, (const float *)a->profit + row * a->size, a->wide);
    return a->wide;
}

/* Writes what each column would cost a row, its price less the profit, and returns the least. */
FOR_EACH_PROCESSOR
static double costs(int64_t n, const double *restrict profit, const double *restrict price, double *restrict cost) {
    double least = FAR;
    for (int64_t j = 0; j < n; j++) {
        cost[j] = price[j] - profit[j];
        least = cost[j] < least ? cost[j] : least;
    }
    return least;
}

FOR_EACH_PROCESSOR
static double smallest(int64_t n, const double *restrict cost) {
    double least = FAR;
    for (int64_t j = 0; j < n; j++) least = cost[j] < least ? cost[j] : least;
    return least;
}

/* Offers every column a path that goes through one more row, and returns the length of the shortest path. */
FOR_EACH_PROCESSOR
static double relax(
    int64_t n, const double *restrict profit, const double *restrict price, double start, int64_t row,
    double *restrict length, int64_t *restrict from
) {
    double least = FAR;
    for (int64_t j = 0; j < n; j++) {
        double through = start + (price[j] - profit[j]);
        from[j] = through < length[j] ? row : from[j];
        length[j] = through < length[j] ? through : length[j];
        least = length[j] < least ? length[j] : least;
    }
    return least;
}

static int64_t place(const double *values, double value) {
    int64_t j = 0;
    while (values[j] != value) j++;
    return j;
}

/* Gives a row a column; the row that had it waits. */
static void take(Problem *a, int64_t row, int64_t column) {
    int64_t before = a->row[column];
    if (before >= 0) a->column[before] = -1, a->queue[a->waiting++] = before;
    a->row[column] = row, a->column[row] = column;
}

/* Every row takes the column it wants if that is free. */
static void choose(Problem *a) {
    for (int64_t i = 0; i < a->size; i++) {
        a->least[i] = costs(a->size, profits(a, i), a->price, a->cost);
        int64_t j = place(a->cost, a->least[i]);
        if (a->row[j] < 0) take(a, i, j);
        else a->column[i] = -1, a->queue[a->waiting++] = i;
    }
}

/* Every waiting row takes the column it wants, and raises its price until it is as good as the second best. */
static void bid(Problem *a) {
    int64_t waiting = a->waiting;
    a->waiting = 0;
    for (int64_t k = 0; k < waiting; k++) { /* the queue is overwritten no faster than it is read */
        int64_t i = a->queue[k];
        double least = costs(a->size, profits(a, i), a->price, a->cost);
        int64_t j = place(a->cost, least);
        a->cost[j] = FAR;
        double second = a->size > 1 ? smallest(a->size, a->cost) : least;
        a->least[i] = second;
        if (second > least || a->row[j] < 0) {
            a->price[j] += second - least;
            take(a, i, j);
        } else {
            a->queue[a->waiting++] = i;
        }
    }
}

/* Finds the shortest path from a row to a free column, moves the rows on it, and corrects the prices on the way. */
static void augment(Problem *a, int64_t start) {
    int64_t n = a->size, i = start, j, steps = 0;
    double length = 0;
    a->least[start] = costs(n, profits(a, start), a->price, a->cost);
    for (j = 0; j < n; j++) a->cost[j] = FAR;
    memcpy(a->held, a->price, n * sizeof *a->held);
    for (;;) {
        length = relax(n, profits(a, i), a->held, length - a->least[i], i, a->cost, a->from);
        j = place(a->cost, length);
        i = a->row[j];
        if (i < 0) break;
        a->reached[steps] = length, a->visited[steps++] = j;
        a->cost[j] = FAR, a->held[j] = 2 * FAR; /* no path is offered again */
    }
    a->least[start] += length;
    for (int64_t s = 0; s < steps; s++) {
        double rise = length - a->reached[s];
        a->price[a->visited[s]] += rise;
        a->least[a->row[a->visited[s]]] += rise;
    }
    do {
        i = a->from[j];
        int64_t next = a->column[i];
        a->row[j] = i, a->column[i] = j;
        j = next;
    } while (i != start);
}

/* Writes the column of every row. `price` is where to begin (zero, or the prices of a similar problem), and returns the
 * prices that prove the solution, the least of them zero. Returns 0, or 1 if there is no memory.
 */
int assign_rows(int64_t n, const void *profit, int narrow, double *price, int64_t *column) {
    if (n < 1) return 0;
    double *room = malloc(ARRAYS * n * sizeof *room);
    if (!room) return 1;
    int64_t *whole = (int64_t *)(room + 5 * n);
    Problem a = {
        n, 0, profit, narrow, price, room, room + n, room + 2 * n, room + 3 * n, room + 4 * n,
        column, whole, whole + n, whole + 2 * n, whole + 3 * n,
    };
    for (int64_t j = 0; j < n; j++) a.row[j] = -1;
    choose(&a);
    for (int round = 0; round < ROUNDS && a.waiting; round++) bid(&a);
    for (int64_t k = 0; k < a.waiting; k++) augment(&a, a.queue[k]);
    double least = smallest(n, price);
    for (int64_t j = 0; j < n; j++) price[j] -= least;
    free(room);
    return 0;
}
