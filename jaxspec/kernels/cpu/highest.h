// The highest scores of a row, and what all of its scores add up to.
//
// A row is taken in blocks. Of each the highest score that is left is known, so that the next one of
// the row is looked for among these, and then in one block.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "vectors.h"

namespace jaxspec {

constexpr int64_t kScores = 64;  // of a block
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();  // where there is no score

// A score that was taken. Those of its block that are left are lower, or equal and come later.
struct Taken {
  float score;
  int32_t place;
};

// The higher of two in each lane; NaN counts as none.
template <typename V>
inline V Higher(V a, V b) {
  return (a > b) | (b != b) ? a : b;
}

template <int n = kLanes>
inline float HighestLane(typename VectorOf<float, n>::type x) {
  if constexpr (n == 2) {
    return x[0] > x[1] || x[1] != x[1] ? x[0] : x[1];
  } else {
    typename VectorOf<float, n / 2>::type halves[2];
    std::memcpy(halves, &x, sizeof(x));
    return HighestLane<n / 2>(Higher(halves[0], halves[1]));
  }
}

// A row of scores.
struct ScoresOfRow {
  const float* scores;
  int64_t size;
  Integers lanes;

  ScoresOfRow(const float* scores, int64_t size) : scores(scores), size(size) {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = lane;
  }

  int64_t num_blocks() const { return RoundUp(size, kScores) / kScores; }
  int64_t Begin(int64_t block) const { return block * kScores; }
  int64_t End(int64_t block) const { return std::min((block + 1) * kScores, size); }

  // The scores from a place on, and `other` behind the last one.
  Vector At(int64_t place, float other) const {
    if (place + kLanes <= size) return Load(scores + place);
    const Integers left = Integers{} + static_cast<int32_t>(size - place);
    return lanes < left ? Load(scores + place, size - place) : Vector{} + other;
  }

  // The highest score of a block that is left after one was taken; NaN if none is left.
  float HighestLeft(int64_t block, Taken last) const {
    Vector highest = Vector{} + kNaN;
    for (int64_t i = Begin(block); i < End(block); i += kLanes) {
      const Vector score = At(i, kNaN);
      const Integers is_later = lanes + static_cast<int32_t>(i) > Integers{} + last.place;
      const Integers is_left = (score < last.score) | ((score == last.score) & is_later);
      highest = Higher(is_left ? score : Vector{} + kNaN, highest);
    }
    return HighestLane(highest);
  }

  // Where a score first stands in a block after one was taken.
  int32_t PlaceOf(float score, int64_t block, Taken last) const {
    int64_t i = Begin(block);
    const auto is_taken = [&] { return score == last.score && i <= last.place; };
    while (i + 1 < End(block) && (scores[i] != score || is_taken())) ++i;
    return static_cast<int32_t>(i);
  }
};

// The `count` highest scores of a row in falling order, of equals the first; their places; and the
// logarithm of the sum of exp(sharpness * score). Where a score is NaN or infinity, the highest and the
// sum are NaN. There are at least `count` scores.
inline void Highest(const ScoresOfRow& row, int64_t count, float sharpness, float* highest,
                    int32_t* places, float* total) {
  const int64_t num_blocks = row.num_blocks(), num_padded = RoundUp(num_blocks, kLanes);
  const Taken nothing = {kInfinity, -1};
  thread_local std::vector<Taken> taken;
  taken.assign(num_blocks, nothing);
  thread_local std::vector<float> left;  // the highest score of each block that is left
  left.assign(num_padded, kNaN);
  for (int64_t b = 0; b < num_blocks; ++b) left[b] = row.HighestLeft(b, nothing);

  for (int64_t rank = 0; rank < count; ++rank) {
    Vector of_blocks = Load(left.data());
    for (int64_t b = kLanes; b < num_padded; b += kLanes) {
      of_blocks = Higher(of_blocks, Load(left.data() + b));
    }
    const float score = HighestLane(of_blocks);
    int64_t block = 0;
    while (block + 1 < num_blocks && left[block] != score) ++block;
    places[rank] = row.PlaceOf(score, block, taken[block]);
    highest[rank] = score;
    taken[block] = {score, places[rank]};
    left[block] = row.HighestLeft(block, taken[block]);
  }

  const float shift = highest[0] == -kInfinity ? 0.0f : highest[0];
  Vector sums = {};
  for (int64_t i = 0; i < row.size; i += kLanes) {
    sums += Exp((row.At(i, -kInfinity) - shift) * sharpness);
  }
  *total = sharpness * shift + std::log(Sum<kLanes>(sums));
  if (std::isnan(*total)) std::fill(highest, highest + count, kNaN);
}

}  // namespace jaxspec
