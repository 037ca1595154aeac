// Vectors as wide as the machine's registers, in the compiler's portable notation, and the storage types they load from.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));
typedef uint32_t uvec __attribute__((vector_size(LANES * 4)));
typedef uint16_t hvec __attribute__((vector_size(LANES * 2)));
typedef float quad __attribute__((vector_size(16)));
typedef int32_t iquad __attribute__((vector_size(16)));

struct bf16 {
    uint16_t bits;
};

template <typename To, typename From>
inline To bits_of(const From& from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}

inline vec splat(float x) { return x - vec{}; }  // not x + 0, which the compiler may not drop for x = -0

inline vec load(const float* p) {
    vec v;
    std::memcpy(&v, p, sizeof(v));
    return v;
}

inline vec load(const bf16* p) {
    hvec half;
    std::memcpy(&half, p, sizeof(half));
    return bits_of<vec>(__builtin_convertvector(half, uvec) << 16);
}

inline vec to_float(ivec v) { return __builtin_convertvector(v, vec); }

inline ivec load(const int32_t* p) {
    ivec v;
    std::memcpy(&v, p, sizeof(v));
    return v;
}

// v, kept in a register: the compiler may otherwise read it from memory again for every use, and loads are what is short.
inline vec in_register(vec v) {
#ifdef __AVX512F__
    asm("" : "+v"(v));
#elif defined(__x86_64__)
    asm("" : "+x"(v));
#endif
    return v;
}

inline void store(float* p, vec v) { std::memcpy(p, &v, sizeof(v)); }

// Rounds to nearest even, as torch does. NaN stays NaN: its mantissa is set, since rounding up could turn it into inf.
inline void store(bf16* p, vec v) {
    uvec bits = bits_of<uvec>(v);
    uvec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    uvec nan = (uvec)(v != v);
    hvec half = __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), hvec);
    std::memcpy(p, &half, sizeof(half));
}

inline float widen(float x) { return x; }
inline float widen(bf16 x) { return bits_of<float>(uint32_t(x.bits) << 16); }

inline void narrow(float x, float* p) { *p = x; }
inline void narrow(float x, bf16* p) {
    uint32_t bits = bits_of<uint32_t>(x);
    p->bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// What is left of a value that is stored as A and read again.
template <typename A>
inline vec rounded(vec v) {
    A stored[LANES];
    store(stored, v);
    return load(stored);
}

template <typename A>
inline float rounded(float x) {
    A stored;
    narrow(x, &stored);
    return widen(stored);
}

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (iquad){__VA_ARGS__})
#endif

inline quad quarter(vec v) {
    quad parts[LANES / 4];
    std::memcpy(parts, &v, sizeof(v));
    quad total = parts[0] + parts[1];
    for (int i = 2; i < LANES / 4; i++) total += parts[i];
    return total;
}

// {sum(a), sum(b), sum(c), sum(d)}
inline quad sums(vec a, vec b, vec c, vec d) {
    const quad p = quarter(a), q = quarter(b), r = quarter(c), s = quarter(d);
    const quad pq = SHUFFLE(p, q, 0, 4, 1, 5) + SHUFFLE(p, q, 2, 6, 3, 7);
    const quad rs = SHUFFLE(r, s, 0, 4, 1, 5) + SHUFFLE(r, s, 2, 6, 3, 7);
    return SHUFFLE(pq, rs, 0, 1, 4, 5) + SHUFFLE(pq, rs, 2, 3, 6, 7);
}

inline float sum(vec v) {
    const quad q = quarter(v);
    return (q[0] + q[2]) + (q[1] + q[3]);
}

// e^x to about 2 ulp. What underflows is 0, what overflows inf, and NaN stays NaN: it must show in the end result.
inline vec exp(vec x) {
    vec clamped = x < -87.0f ? splat(-87.0f) : x > 88.0f ? splat(88.0f) : x;
    vec scaled = clamped * 1.44269504088896341f;
    ivec whole = __builtin_convertvector(scaled + (scaled < 0 ? splat(-0.5f) : splat(0.5f)), ivec);
    vec n = __builtin_convertvector(whole, vec);
    vec r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    vec power = bits_of<vec>((whole + 127) << 23);
    vec result = x > 88.0f ? splat(__builtin_inff()) : p * power;
    return x < -87.0f ? splat(0.0f) : result;
}

inline vec silu(vec x) { return x / (1.0f + exp(-x)); }

// The factor by which RMSNorm scales a row.
template <typename A>
inline float rms_scale(const A* x, int64_t size, float eps) {
    vec squares{};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) squares += load(x + i) * load(x + i);
    float total = sum(squares);
    for (; i < size; i++) total += widen(x[i]) * widen(x[i]);
    return 1.0f / std::sqrt(total / float(size) + eps);
}
