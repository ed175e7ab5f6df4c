// Attention of a window over a row's own live KV, read where it lies.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "norms.h"
#include "vectors.h"

namespace jaxspec {

template <typename T>
struct AttentionInputs {
  int64_t window, num_heads, group, head_size, block, num_blocks;
  int64_t rotary_size, sliding_window;  // sliding_window 0: none
  float epsilon;
  bool is_interleaved;
  const T *qkv, *bias, *query_norm, *key_norm;  // the last three may be null
  const float *cos, *sin;                       // [B, T, rotary_size / 2]
  T *k, *v;                                     // [P, K, block, H]
  const int32_t *table, *positions, *slots;
  T* output;
};

// The components of a head (a, b) -> (a cos - b sin, b cos + a sin), in pairs.
inline void Rotate(float* x, const float* cos, const float* sin, int64_t size, bool is_interleaved) {
  const int64_t num_pairs = size / 2;
  for (int64_t i = 0; i < num_pairs; ++i) {
    float& a = x[is_interleaved ? 2 * i : i];
    float& b = x[is_interleaved ? 2 * i + 1 : i + num_pairs];
    const float was = a;
    a = was * cos[i] - b * sin[i];
    b = b * cos[i] + was * sin[i];
  }
}

// What one row's KV head does in a round: its queries and keys are normed and turned, its KV is
// written, and its queries, [window, group] of them, see their row's KV up to themselves. A head
// fills kVectors vectors, where kIsWhole; otherwise the last of them are filled up with zeros.
template <typename T, int kVectors, bool kIsWhole>
void Attend(const AttentionInputs<T>& in, int64_t row, int64_t head) {
  constexpr int64_t kPadded = kVectors * kLanes;
  const int64_t size = kIsWhole ? kPadded : in.head_size;
  const auto exist = [=](int64_t i) { return kIsWhole ? kLanes : size - i; };
  const int64_t num_queries = in.window * in.group, capacity = in.num_blocks * in.block;
  const int32_t* const positions = in.positions + row * in.window;
  const int32_t* const slots = in.slots + row * in.window;
  const int32_t* const table = in.table + row * in.num_blocks;
  const auto at_slot = [&](T* pages, int64_t slot) {
    const int64_t page = int64_t{table[slot / in.block]} * in.num_heads + head;
    return pages + (page * in.block + slot % in.block) * size;
  };
  const auto end_of = [&](int64_t query) {  // positions beyond the capacity are of no row that lives
    return std::clamp<int64_t>(positions[query / in.group] + int64_t{1}, 0, capacity);
  };
  const auto begin_of = [&](int64_t query) {
    return in.sliding_window == 0 ? 0 : std::max<int64_t>(end_of(query) - in.sliding_window, 0);
  };
  int64_t first = capacity, last = 0;
  for (int64_t query = 0; query < num_queries; query += in.group) {
    first = std::min(first, begin_of(query) / kLanes * kLanes);
    last = std::max(last, end_of(query));
  }
  const int64_t length = (std::max<int64_t>(last - first, 0) + kLanes - 1) / kLanes * kLanes;
  thread_local std::vector<float> scratch;
  scratch.resize((length + kPadded + 1) * num_queries);
  float* const scores = scratch.data();  // [num_queries, length], then weights
  float* const queries = scores + length * num_queries;
  float* const totals = queries + kPadded * num_queries;  // of each query's weights

  for (int64_t t = 0; t < in.window; ++t) {
    const int64_t token = row * in.window + t;
    float parts[2][kPadded];  // the key, the value
    for (int64_t part = 0; part < in.group + 2; ++part) {
      const bool is_query = part < in.group, is_value = part == in.group + 1;
      float* const x = is_query ? queries + (t * in.group + part) * kPadded : parts[is_value];
      const int64_t of_head = (head * (in.group + 2) + part) * size;
      std::fill(x + size, x + kPadded, 0.0f);
      Widen(in.qkv + token * in.num_heads * (in.group + 2) * size + of_head, x, size);
      if (in.bias != nullptr) {
        for (int64_t i = 0; i < size; i += kLanes) {
          Store(x + i, Round<T>(Load(x + i) + Load(in.bias + of_head + i, exist(i))));
        }
      }
      if (is_value) continue;
      const T* const norm = is_query ? in.query_norm : in.key_norm;
      if (norm != nullptr) Norm<T>(x, norm, in.epsilon, x, size);
      const int64_t angle = token * in.rotary_size / 2;
      Rotate(x, in.cos + angle, in.sin + angle, in.rotary_size, in.is_interleaved);
      for (int64_t i = 0; i < size; i += kLanes) Store(x + i, Round<T>(Load(x + i)));
    }
    if (slots[t] < 0 || slots[t] >= capacity) continue;
    // 0 * NaN is NaN: a value that is no number would reach the queries before it, which do not see
    // it. As a key it reaches those that do.
    bool is_finite = true;
    for (float x : parts[1]) is_finite &= std::isfinite(x);
    for (int64_t i = 0; i < size; i += kLanes) {
      const Vector nan = Vector{} + std::nanf("");
      Store(at_slot(in.k, slots[t]) + i, is_finite ? Load(parts[0] + i) : nan, exist(i));
      Store(at_slot(in.v, slots[t]) + i, is_finite ? Load(parts[1] + i) : Vector{}, exist(i));
    }
  }

  const float scale = 1.0f / std::sqrt(static_cast<float>(size));
  for (int64_t query = 0; query < num_queries; ++query) {
    float* const of_slot = scores + query * length - first;
    const int64_t begin = begin_of(query), end = end_of(query);
    Vector wide[kVectors];
    for (int i = 0; i < kVectors; ++i) wide[i] = Load(queries + query * kPadded + i * kLanes) * scale;
    Vector highest = Vector{} - 1e30f;
    for (int64_t slot = begin / kLanes * kLanes; slot < end; slot += kLanes) {
      const T* const keys = at_slot(in.k, slot);
      Vector products[kLanes];
      for (int lane = 0; lane < kLanes; ++lane) {
        products[lane] = wide[0] * Load(keys + lane * size, exist(0));
        for (int i = 1; i < kVectors; ++i) {
          const Vector key = Load(keys + lane * size + i * kLanes, exist(i * kLanes));
          products[lane] = MulAdd(wide[i], key, products[lane]);
        }
      }
      const Vector sums = Sums(products);
      Store(of_slot + slot, sums);
      Vector seen = sums;
      for (int64_t lane = 0; lane < begin - slot; ++lane) seen[lane] = -1e30f;
      for (int64_t lane = end - slot; lane < kLanes; ++lane) seen[lane] = -1e30f;
      highest = seen > highest ? seen : highest;
    }
    float most = highest[0];
    for (int lane = 1; lane < kLanes; ++lane) most = std::max(most, highest[lane]);
    Vector total = {};
    for (int64_t slot = begin / kLanes * kLanes; slot < end; slot += kLanes) {
      Vector weights = Exp(Load(of_slot + slot) - most);
      for (int64_t lane = 0; lane < begin - slot; ++lane) weights[lane] = 0.0f;
      for (int64_t lane = end - slot; lane < kLanes; ++lane) weights[lane] = 0.0f;
      total += weights;
      Store(of_slot + slot, Round<T>(weights));
    }
    totals[query] = Sum<kLanes>(total);
  }

  // As many queries at a time as the registers hold share what they all see.
  constexpr int kTogether = std::clamp(16 / kVectors, 1, 4);
  for (int64_t start = 0; start < num_queries; start += kTogether) {
    const int count = std::min<int64_t>(kTogether, num_queries - start);
    Vector sums[kTogether][kVectors] = {};
    const auto add = [&](int q, int64_t slot, const T* value) {
      const Vector weight = Splat(scores[(start + q) * length + slot - first]);
      for (int i = 0; i < kVectors; ++i) {
        sums[q][i] = MulAdd(weight, Load(value + i * kLanes, exist(i * kLanes)), sums[q][i]);
      }
    };
    int64_t shared_begin = 0, shared_end = capacity;
    for (int q = 0; q < count; ++q) {
      shared_begin = std::max(shared_begin, begin_of(start + q));
      shared_end = std::min(shared_end, end_of(start + q));
    }
    shared_end = std::max(shared_begin, shared_end);
    for (int q = 0; q < count; ++q) {
      const int64_t stop = std::min(shared_begin, end_of(start + q));
      for (int64_t slot = begin_of(start + q); slot < stop; ++slot) add(q, slot, at_slot(in.v, slot));
    }
    for (int64_t slot = shared_begin; slot < shared_end; ++slot) {
      const T* const value = at_slot(in.v, slot);
      if (count == kTogether) {
        for (int q = 0; q < kTogether; ++q) add(q, slot, value);
      } else {
        for (int q = 0; q < count; ++q) add(q, slot, value);
      }
    }
    for (int q = 0; q < count; ++q) {
      const int64_t query = start + q, end = end_of(query);
      for (int64_t slot = shared_end; slot < end; ++slot) add(q, slot, at_slot(in.v, slot));
      const int64_t token = row * in.window + query / in.group;
      T* const to = in.output + (token * in.num_heads * in.group + head * in.group +
                                 query % in.group) * size;
      for (int i = 0; i < kVectors; ++i) {
        Store(to + i * kLanes, Round<T>(sums[q][i] / totals[query]), exist(i * kLanes));
      }
    }
  }
}

template <typename T>
using AttendFunction = decltype(&Attend<T, 1, true>);

// The function for the least number of vectors, of 1, 2, 4, ... 32, that hold a head.
template <typename T, int kVectors = 1>
AttendFunction<T> AttendOf(int64_t head_size) {
  if constexpr (kVectors > 32) {
    return nullptr;
  } else {
    if (head_size > kVectors * kLanes) return AttendOf<T, 2 * kVectors>(head_size);
    return head_size == kVectors * kLanes ? Attend<T, kVectors, true> : Attend<T, kVectors, false>;
  }
}

}  // namespace jaxspec
