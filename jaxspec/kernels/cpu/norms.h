// What stands before a product: norms, gates, other dtypes.

#pragma once

#include <cmath>
#include <cstdint>

#include "vectors.h"

namespace jaxspec {

// `weight * (x / rms(x))`, as `layers.rms_norm`; in place if `to` is `x`.
template <typename T, typename In, typename To>
void Norm(const In* x, const T* weight, float epsilon, To* to, int64_t size) {
  Vector squares = {};
  for (int64_t i = 0; i < size; i += kLanes) {
    const Vector part = Load(x + i, size - i);
    squares = MulAdd(part, part, squares);
  }
  const float scale = 1.0f / std::sqrt(Sum<kLanes>(squares) / static_cast<float>(size) + epsilon);
  for (int64_t i = 0; i < size; i += kLanes) {
    const Vector normed = Round<T>(Load(x + i, size - i) * scale);
    Store(to + i, Round<T>(Load(weight + i, size - i) * normed), size - i);
  }
}

// `silu(gate) * up`; x holds the gates, then the ups.
template <typename T>
void Gate(const T* x, T* to, int64_t size) {
  for (int64_t i = 0; i < size; i += kLanes) {
    const Vector gated = Silu(Load(x + i, size - i)) * Load(x + size + i, size - i);
    Store(to + i, Round<T>(gated), size - i);
  }
}

template <typename T>
void Widen(const T* x, float* to, int64_t size) {
  for (int64_t i = 0; i < size; i += kLanes) Store(to + i, Load(x + i, size - i), size - i);
}

}  // namespace jaxspec
