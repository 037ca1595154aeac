// Vectors as wide as the machine's registers, in the compiler's portable notation, and the storage types they load from.
#pragma once

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

inline float sum(vec v) {
    float lanes[LANES];
    for (int width = LANES / 2; width > 0; width /= 2) {
        store(lanes, v);
        vec other{};
        for (int i = 0; i < width; i++) other[i] = lanes[i + width];
        v += other;
    }
    return v[0];
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
