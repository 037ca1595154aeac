// A linear layer, as both ways of computing its products see it.
#pragma once

#include <cstdint>

extern "C" {

struct Linear {
    const void* packed;
    const float* bias;  // [columns] or null
    const float* norm;  // [features] or null: RMSNorm of each row of x first
    float eps;
    int32_t gated;  // the weight is [2 * columns, features] and the result silu(first half) * second half
    int64_t features, columns;
};
}
