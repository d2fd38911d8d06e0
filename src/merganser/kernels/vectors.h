/* Loops over arrays that the compiler turns into vectors, for every processor that the code may run on. */
#if defined(__GNUC__) && !defined(__clang__)
#define EACH _Pragma("GCC ivdep") for (int64_t i = 0; i < n; i++)
#else
#define EACH _Pragma("clang loop vectorize(assume_safety)") for (int64_t i = 0; i < n; i++)
#endif
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define WITH_WIDE_VECTORS __attribute__((target("avx512dq")))
#else
#define FOR_EACH_PROCESSOR
#endif
#define INLINE static inline __attribute__((always_inline))
