// The sums of attention: scores of slots, and the values of slots by their weights.
//
// Slots come in blocks of kLanes, each in one piece. A score is a sum over a head's numbers, an output
// one over the slots, in an order of the family's (`Family` in product.h): the same for any number of
// queries and blocks.
//
// Keys and values may be int8 codes, with a scale for each slot. Codes are small integers, which are
// widened a few blocks at a time and multiplied as any other numbers. The scales multiply what there
// is one of for each slot: those of keys the scores, those of values the weights.

#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "matrix_units.h"
#include "vectors.h"

namespace jaxspec {

// Queries that share what they read: a matrix register has 16 rows.
#if defined(__AMX_BF16__)
constexpr int64_t kQueries = 16;
#else
constexpr int64_t kQueries = 32;
#endif

// Blocks of slots that follow one another, and which queries read them.
struct Run {
  int64_t slot;  // the first of the first block
  int64_t block, num_blocks, query, num_queries;

  bool IsReadBy(int64_t q) const { return q >= query && q < query + num_queries; }
};

// First what all queries read, in one run or two, then what only some do.
struct Runs {
  int64_t count = 0, num_blocks = 0;
  Run of[kQueries + 2];

  void Add(int64_t slot, int64_t num_slots, int64_t query, int64_t num_queries) {
    const int64_t more = RoundUp(std::max<int64_t>(num_slots, 0), kLanes) / kLanes;
    of[count++] = {slot, num_blocks, more, query, num_queries};
    num_blocks += more;
  }

  const Run* begin() const { return of; }
  const Run* end() const { return of + count; }
};

struct alignas(64) Line {
  float floats[16];
};
constexpr int64_t kLineFloats = 16;

// How the numbers of a head are taken: so many at a time, a register full or a matrix row. Of
// bfloat16 in pairs, and sums of the first numbers of pairs are apart from those of the second.
template <typename T>
struct HeadShape {
  int64_t size, step, padded;      // padded: kNumbers for each step
  float query_scale, score_scale;  // a query of bfloat16 stays as it is, and its scores are scaled
  bool has_tiles;

  explicit HeadShape(int64_t head_size) : size(head_size), step(kNumbers<T>) {
    const float scale = 1.0f / std::sqrt(static_cast<float>(size));
    query_scale = std::is_same_v<T, float> ? scale : 1.0f;
    score_scale = std::is_same_v<T, float> ? 1.0f : scale;
    has_tiles = !std::is_same_v<T, float> && HasMatrixUnits() && size % 2 == 0;
    if (has_tiles) {
      while (size % step != 0) step -= 2;
    }
    padded = RoundUp(size, step) / step * kNumbers<T>;
  }
};

constexpr int64_t kAhead = 4;  // blocks that are fetched before they are needed
constexpr int64_t kManyQueries = 8;  // for which it pays to transpose the keys of a block

template <typename T>
inline void Fetch(const T* block, int64_t size) {
  for (int64_t i = 0; i < kLanes * size; i += 64 / sizeof(T)) __builtin_prefetch(block + i);
}

// Numbers [rows, width] that stand `stride` apart, for what multiplies them.
template <typename T>
struct Matrix {
  const T* numbers;
  int64_t stride;
};

// The first `width` of each row's `stride` numbers: where they lie, or widened codes in `scratch`,
// which has room for the width up to a multiple of kLanes in each row.
template <typename T, typename S>
inline Matrix<T> Widened(const S* rows, int64_t num_rows, int64_t stride, int64_t width, T* scratch) {
  if constexpr (std::is_same_v<S, T>) {
    return {rows, stride};
  } else {
    const int64_t padded = RoundUp(width, kLanes);
    for (int64_t row = 0; row < num_rows; ++row, rows += stride) {
      T* const to = scratch + row * padded;
      int64_t i = 0;
      for (; i + kLanes <= width; i += kLanes) Store(to + i, Load(rows + i));
      if (i < width) Store(to + i, Load(rows + i, width - i));
    }
    return {scratch, padded};
  }
}

// A whole block, [kLanes, size]; scratch as large.
template <typename T, typename S>
inline const T* WidenedBlock(const S* block, int64_t size, T* scratch) {
  return Widened(block, 1, 0, kLanes * size, scratch).numbers;
}

// Room for so many numbers of T where these are widened from S.
template <typename T, typename S>
inline T* ScratchFor(int64_t count) {
  if constexpr (std::is_same_v<S, T>) return nullptr;
  thread_local std::vector<Line> lines;
  const int64_t needed = RoundUp(count * sizeof(T), sizeof(Line)) / sizeof(Line);
  if (static_cast<int64_t>(lines.size()) < needed) lines.resize(needed);
  return reinterpret_cast<T*>(lines.data());
}

// ---------------------------------------------------------------------------------- with vectors

// Scores of kCount queries and a block, to scores [kCount, kLanes].
template <typename T, int kCount>
void ScoreTile(const T* queries, int64_t padded, const T* keys, int64_t size, float* scores) {
  constexpr int kSlots = kLanes / kCount;
  for (int slot = 0; slot < kLanes; slot += kSlots) {
    Vector products[kLanes] = {};  // [kCount, kSlots]
    const auto add = [&](int64_t i, auto load) {
      Numbers<T> query[kCount];
      for (int q = 0; q < kCount; ++q) query[q] = LoadNumbers(queries + q * padded + i);
      for (int s = 0; s < kSlots; ++s) {
        const Numbers<T> key = load(keys + (slot + s) * size + i);
        for (int q = 0; q < kCount; ++q) {
          products[q * kSlots + s] = AddPairs(query[q], key, products[q * kSlots + s]);
        }
      }
    };
    int64_t i = 0;
    for (; i + kNumbers<T> <= size; i += kNumbers<T>) {
      add(i, [](const T* from) { return LoadNumbers(from); });
    }
    if (i < size) add(i, [=](const T* from) { return LoadNumbers(from, size - i); });
    const Vector sums = Sums(products);
    for (int q = 0; q < kCount; ++q) {
      std::memcpy(scores + q * kLanes + slot, reinterpret_cast<const float*>(&sums) + q * kSlots,
                  kSlots * sizeof(float));
    }
  }
}

// What transposed keys and their queries are multiplied as: pairs of bfloat16 where there is an
// instruction for these, and otherwise floats, so that each number is widened once.
#if defined(__AVX512BF16__)
template <typename T>
using Factor = T;
#else
template <typename T>
using Factor = float;
#endif

// The keys of a block by what lies in a register's lane: [steps, lane of a register] of [slot], and
// where pairs are widened first the first ones of a lane, then the second.
template <typename T>
struct TransposedKeys {
  const Numbers<Factor<T>>* registers;
};

// Of vectors in memory, lane i of vector j becomes lane j of vector i.
inline void Transpose(const Vector (&from)[kLanes], Vector* to) {
#if defined(__AVX512F__)
  Integers low = {}, high = {};
  for (int lane = 0; lane < kLanes; ++lane) {
    low[lane] = lane / 2 + lane % 2 * kLanes;
    high[lane] = low[lane] + kLanes / 2;
  }
  Vector x[kLanes];
  std::copy(from, from + kLanes, x);
#pragma GCC unroll 4
  for (int level = 1; level < kLanes; level *= 2) {
    Vector y[kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < kLanes / 2; ++i) {
      y[2 * i] = _mm512_permutex2var_ps(x[i], Bits<__m512i>(low), x[i + kLanes / 2]);
      y[2 * i + 1] = _mm512_permutex2var_ps(x[i], Bits<__m512i>(high), x[i + kLanes / 2]);
    }
    std::copy(y, y + kLanes, x);
  }
  std::copy(x, x + kLanes, to);
#else
  for (int i = 0; i < kLanes; ++i) {
    for (int j = 0; j < kLanes; ++j) to[i][j] = from[j][i];
  }
#endif
}

// `to` has room for as many numbers as a block, with heads filled up to whole registers.
template <typename T>
TransposedKeys<T> TransposeKeys(const T* keys, int64_t size, Numbers<Factor<T>>* to) {
  for (int64_t i = 0, step = 0; i < size; i += kNumbers<T>, ++step) {
    Vector of_slots[kLanes];
    for (int slot = 0; slot < kLanes; ++slot) {
      const T* const from = keys + slot * size + i;
      const bool is_full = i + kNumbers<T> <= size;
      of_slots[slot] = Bits<Vector>(is_full ? LoadNumbers(from) : LoadNumbers(from, size - i));
    }
    Vector of_lanes[kLanes];
    Transpose(of_slots, of_lanes);
    for (int lane = 0; lane < kLanes; ++lane) {
      const auto numbers = Bits<Numbers<T>>(of_lanes[lane]);
      const int64_t index = step * kLanes + lane;
      if constexpr (std::is_same_v<Factor<T>, T>) {
        to[index] = numbers;
      } else {
        to[2 * index] = Part<0>(numbers);
        to[2 * index + 1] = Part<1>(numbers);
      }
    }
  }
  return {to};
}

// For kCount queries, what `Sums` makes of kSpan lanes from `lane` on, for all slots at once.
template <typename T, int kCount, int kSpan>
__attribute__((always_inline)) inline void SumLanes(const Factor<T>* queries, int64_t padded,
                                                    const Numbers<Factor<T>>* keys, int64_t lane,
                                                    Vector (&sums)[kCount]) {
  if constexpr (kSpan == 4) {
    constexpr int kFactors = kParts<T> / kParts<Factor<T>>;  // of a lane
    Vector of_lanes[4][kCount] = {};
    for (int64_t i = lane; i < padded / kParts<T>; i += kLanes) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
#pragma GCC unroll 2
        for (int factor = 0; factor < kFactors; ++factor) {
          const int64_t index = (i + j) * kFactors + factor;
          const auto key = keys[index];
#pragma GCC unroll 4
          for (int q = 0; q < kCount; ++q) {
            const Factor<T>* const query = queries + q * padded + index * kParts<Factor<T>>;
            of_lanes[j][q] = AddPairs(SplatNumbers(query), key, of_lanes[j][q]);
          }
        }
      }
    }
#pragma GCC unroll 4
    for (int q = 0; q < kCount; ++q) {
      sums[q] = (of_lanes[0][q] + of_lanes[1][q]) + (of_lanes[2][q] + of_lanes[3][q]);
    }
  } else {
    Vector others[kCount];
    SumLanes<T, kCount, kSpan / 2>(queries, padded, keys, lane, sums);
    SumLanes<T, kCount, kSpan / 2>(queries, padded, keys, lane + kSpan / 2, others);
#pragma GCC unroll 4
    for (int q = 0; q < kCount; ++q) sums[q] += others[q];
  }
}

// The same scores, to the bit: what ScoreTile does with the lanes of a register, this does with
// registers. It needs no shuffles, and costs less than half as much.
template <typename T, int kCount>
void ScoreTile(const Factor<T>* queries, int64_t padded, TransposedKeys<T> keys, int64_t,
               float* scores) {
  Vector sums[kCount];
  SumLanes<T, kCount, kLanes>(queries, padded, keys.registers, 0, sums);
  for (int q = 0; q < kCount; ++q) Store(scores + q * kLanes, sums[q]);
}

// Scores of all queries and a block, in tiles of four, two and one.
template <typename T, typename Query, typename Keys, int kCount = std::max(kLanes / 4, 1)>
void ScoreBlock(const HeadShape<T>& shape, const Query* queries, int64_t count, Keys keys,
                float* scores) {
  int64_t q = 0;
  for (; q + kCount <= count; q += kCount) {
    ScoreTile<T, kCount>(queries + q * shape.padded, shape.padded, keys, shape.size,
                         scores + q * kLanes);
  }
  if constexpr (kCount > 1) {
    ScoreBlock<T, Query, Keys, kCount / 2>(shape, queries + q * shape.padded, count - q, keys,
                                           scores + q * kLanes);
  }
}

// Queries that take a register full of values at the same time.
template <typename T>
constexpr int kTileQueries = std::min<int>(kNumSums / kParts<T>, kQueries);

// Whether the values of two slots are added at once. The instruction adds the product of the high halves
// first, so that the first of two slots belongs there: the sums are then those of one slot at a time.
template <typename T>
constexpr bool kHasPairsOfSlots = std::is_same_v<Factor<T>, uint16_t>;

// Stores a block's weights as `AddValues` takes them, in pairs [kLanes / 2] or one by one [kLanes].
template <typename T>
inline void StoreWeights(float* to, Vector weights) {
#if defined(__AVX512BF16__)
  if constexpr (kHasPairsOfSlots<T>) {
    auto pairs = Bits<VectorOf<uint32_t, kLanes / 2>::type>(_mm512_cvtneps_pbh(weights));
    pairs = pairs << 16 | pairs >> 16;
    std::memcpy(to, &pairs, sizeof(pairs));
    return;
  }
#endif
  Store(to, Round<T>(weights));
}

// Adds the values of some blocks by weights [block, stride, kLanes] to sums [kCount, padded].
template <typename T, int kCount>
void AddValues(const float* weights, int64_t stride, const T* const* values, int64_t num_blocks,
               const HeadShape<T>& shape, float* sums) {
  for (int64_t i = 0; i < shape.size; i += kNumbers<T>) {
    Vector of[kCount][kParts<T>];
    for (int q = 0; q < kCount; ++q) {
      for (int p = 0; p < kParts<T>; ++p) of[q][p] = Load(sums + q * shape.padded + i + p * kLanes);
    }
    const auto add = [&](auto load) {
      for (int64_t b = 0; b < num_blocks; ++b) {
        const float* const of_block = weights + b * stride * kLanes;
        if constexpr (kHasPairsOfSlots<T>) {
          for (int64_t slot = 0; slot < kLanes; slot += 2) {
            const Numbers<T> first = load(values[b] + slot * shape.size + i);
            const Numbers<T> second = load(values[b] + (slot + 1) * shape.size + i);
            const Numbers<T> evens = (first << 16) | (second & 0xffffu);
            const Numbers<T> odds = (first & 0xffff0000u) | (second >> 16);
            for (int q = 0; q < kCount; ++q) {
              const auto pair = Bits<Numbers<T>>(Splat(of_block[q * kLanes + slot / 2]));
              of[q][0] = AddPairs(pair, evens, of[q][0]);
              of[q][1] = AddPairs(pair, odds, of[q][1]);
            }
          }
        } else {
          for (int64_t slot = 0; slot < kLanes; ++slot) {
            const Numbers<T> value = load(values[b] + slot * shape.size + i);
            for (int q = 0; q < kCount; ++q) {
              const Vector weight = Splat(of_block[q * kLanes + slot]);
              of[q][0] = MulAdd(weight, Part<0>(value), of[q][0]);
              if constexpr (kParts<T> == 2) of[q][1] = MulAdd(weight, Part<1>(value), of[q][1]);
            }
          }
        }
      }
    };
    if (i + kNumbers<T> <= shape.size) {
      add([](const T* from) { return LoadNumbers(from); });
    } else {
      add([&](const T* from) { return LoadNumbers(from, shape.size - i); });
    }
    for (int q = 0; q < kCount; ++q) {
      for (int p = 0; p < kParts<T>; ++p) Store(sums + q * shape.padded + i + p * kLanes, of[q][p]);
    }
  }
}

template <typename T, int... kCounts>
constexpr auto ValuesOfQueries(std::integer_sequence<int, kCounts...>) {
  return std::array{AddValues<T, kCounts + 1>...};
}

// Adds the values of some blocks by weights [block, stride, kLanes] to sums [count, padded], in tiles
// of equal height, or a query less. A core goes through all numbers of a head for few blocks at a time,
// which its cache holds.
template <typename T, typename S>
void ValuesWithVectors(const HeadShape<T>& shape, const float* weights, int64_t stride, int64_t count,
                       const S* const* values, int64_t num_blocks, float* sums) {
  constexpr auto kCounts = std::make_integer_sequence<int, kTileQueries<T>>();
  static constexpr auto kAdd = ValuesOfQueries<T>(kCounts);
  constexpr int64_t kBlocks = 128 / kLanes;
  const int64_t num_tiles = RoundUp(count, kTileQueries<T>) / kTileQueries<T>;
  T* const scratch = ScratchFor<T, S>(kBlocks * kLanes * shape.size);
  for (int64_t b = 0; b < num_blocks; b += kBlocks) {
    for (int64_t i = b + kAhead; i < std::min(b + kAhead + kBlocks, num_blocks); ++i) {
      Fetch(values[i], shape.size);
    }
    const int64_t num_here = std::min(kBlocks, num_blocks - b);
    const T* here[kBlocks];
    for (int64_t i = 0; i < num_here; ++i) {
      here[i] = WidenedBlock(values[b + i], shape.size, scratch + i * kLanes * shape.size);
    }
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
      const int64_t q = count * tile / num_tiles, height = count * (tile + 1) / num_tiles - q;
      kAdd[height - 1](weights + (b * stride + q) * kLanes, stride, here, num_here, shape,
                       sums + q * shape.padded);
    }
  }
}

// ------------------------------------------------------------------------------ with matrix units

#if defined(__AMX_BF16__) && defined(__linux__)

// As `Widened`. GCC does not know that matrix registers are loaded from memory: what they load must have
// been written by then, and must not be written over before.
template <typename T, typename S>
inline Matrix<T> WidenedForTiles(const S* rows, int64_t num_rows, int64_t stride, int64_t width,
                                 T* scratch) {
  if constexpr (!std::is_same_v<S, T>) std::atomic_signal_fence(std::memory_order_seq_cst);
  const Matrix<T> widened = Widened(rows, num_rows, stride, width, scratch);
  if constexpr (!std::is_same_v<S, T>) std::atomic_signal_fence(std::memory_order_seq_cst);
  return widened;
}

// Scores of all queries, as ScoreBlock of each block. Keys are multiplied as they lie: a matrix of 16
// slots with one of 16 queries, which lie in pairs of numbers.
template <typename S>
void ScoresWithMatrixUnits(const HeadShape<uint16_t>& shape, const uint16_t* queries, int64_t count,
                           const S* const* keys, int64_t num_blocks, float* scores) {
  thread_local std::vector<Line> scratch;
  scratch.resize(shape.size / 2 + 4 * kLanes);
  float* const sums = scratch.front().floats;  // [4, slot, query]
  float* const pairs = sums + 4 * kLanes * kLanes;
  std::fill(pairs, pairs + shape.size / 2 * kQueries, 0.0f);
  for (int64_t q = 0; q < count; ++q) {
    for (int64_t i = 0; i < shape.size / 2; ++i) {
      std::memcpy(pairs + i * kQueries + q, queries + q * shape.padded + 2 * i, sizeof(float));
    }
  }
  const int64_t block_size = kLanes * shape.size;
  uint16_t* const widened = ScratchFor<uint16_t, S>(4 * block_size);
  const TileShape of_sums = {16, 64}, of_keys = {16, 2 * shape.step};
  const TileShape of_pairs = {shape.step / 2, 64};
  const MatrixRegisters registers(
      {of_sums, of_sums, of_sums, of_sums, of_keys, of_keys, of_pairs, of_pairs});
  for (int64_t b = 0; b < num_blocks; b += 4) {
    const uint16_t* block[4];  // past the end, the last one again
    for (int64_t i = 0; i < 4; ++i) {
      block[i] = WidenedForTiles(keys[std::min(b + i, num_blocks - 1)], 1, 0, block_size,
                                 widened + i * block_size)
                     .numbers;
    }
    for (int64_t i = b; i < std::min(b + 4, num_blocks); ++i) Fetch(keys[i + kAhead], shape.size);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < shape.size; i += shape.step) {
      _tile_loadd(6, pairs + i / 2 * kQueries, 64);
      _tile_loadd(4, block[0] + i, 2 * shape.size);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(5, block[1] + i, 2 * shape.size);
      _tile_dpbf16ps(1, 5, 6);
      _tile_loadd(4, block[2] + i, 2 * shape.size);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(5, block[3] + i, 2 * shape.size);
      _tile_dpbf16ps(3, 5, 6);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + kLanes * kLanes, 64);
    _tile_stored(2, sums + 2 * kLanes * kLanes, 64);
    _tile_stored(3, sums + 3 * kLanes * kLanes, 64);
    for (int64_t i = 0; i < std::min<int64_t>(4, num_blocks - b); ++i) {
      Vector of_queries[kLanes];
      for (int s = 0; s < kLanes; ++s) of_queries[s] = Load(sums + (i * kLanes + s) * kLanes);
      Transpose(of_queries, of_queries);
      for (int64_t q = 0; q < count; ++q) {
        Store(scores + ((b + i) * count + q) * kLanes, of_queries[q]);
      }
    }
  }
}

// The weighted values of one or two steps of a head. Values are multiplied as they lie: a row of the
// matrix is a slot, in pairs of numbers. A weight is in a pair with 0: it takes the first numbers, or
// the second.
template <int kSteps, typename S>
void SumSteps(const HeadShape<uint16_t>& shape, const float* weights, int64_t count,
              const S* const* values, int64_t num_blocks, int64_t begin, float* sums) {
  constexpr int64_t kBuffers = 4;  // a block is widened while those before it are multiplied
  const int64_t width = kSteps * shape.step, buffer_size = kLanes * RoundUp(width, kLanes);
  uint16_t* const widened = ScratchFor<uint16_t, S>(kBuffers * buffer_size);
  const float* const first_weights = weights + num_blocks * count * kLanes;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t b = 0; b < num_blocks; ++b) {
    if (begin == 0 && b + kAhead < num_blocks) Fetch(values[b + kAhead], shape.size);
    _tile_loadd(4, first_weights + b * count * kLanes, 64);
    _tile_loadd(5, weights + b * count * kLanes, 64);
    const Matrix<uint16_t> block = WidenedForTiles(values[b] + begin, kLanes, shape.size, width,
                                                   widened + b % kBuffers * buffer_size);
    _tile_loadd(6, block.numbers, 2 * block.stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 5, 6);
    if constexpr (kSteps == 2) {
      _tile_loadd(7, block.numbers + shape.step, 2 * block.stride);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  const int64_t stride = shape.padded * sizeof(float);
  sums += begin / shape.step * kNumbers<uint16_t>;
  _tile_stored(0, sums, stride);
  _tile_stored(1, sums + kLanes, stride);
  if constexpr (kSteps == 2) _tile_stored(2, sums + 2 * kLanes, stride);
  if constexpr (kSteps == 2) _tile_stored(3, sums + 3 * kLanes, stride);
}

// The values of all queries and blocks; behind the weights lie the same ones again, shifted to the
// first of a pair.
template <typename S>
void ValuesWithMatrixUnits(const HeadShape<uint16_t>& shape, const float* weights, int64_t count,
                           const S* const* values, int64_t num_blocks, float* sums) {
  const TileShape of_sums = {count, 2 * shape.step}, of_weights = {count, 64};
  const TileShape of_values = {16, 2 * shape.step};
  const MatrixRegisters registers({of_sums, of_sums, of_sums, of_sums, of_weights, of_weights,
                                   of_values, of_values});
  for (int64_t begin = 0; begin < shape.size; begin += 2 * shape.step) {
    const auto sum = begin + shape.step < shape.size ? SumSteps<2, S> : SumSteps<1, S>;
    sum(shape, weights, count, values, num_blocks, begin, sums);
  }
}

#else

template <typename S>
void ScoresWithMatrixUnits(const HeadShape<uint16_t>&, const uint16_t*, int64_t, const S* const*,
                           int64_t, float*) {}

template <typename S>
void ValuesWithMatrixUnits(const HeadShape<uint16_t>&, const float*, int64_t, const S* const*,
                           int64_t, float*) {}

#endif

// ------------------------------------------------------------------------------------ what is called

// Scores of queries [count, padded] and the blocks of keys that they read, to scores [block, count,
// kLanes]. Behind the keys' blocks there are at least kAhead others, those which are needed next.
// Matrix units take as long for one query as for all: they score blocks for those that do not read them
// too.
template <typename T, typename S>
void Scores(const HeadShape<T>& shape, const T* queries, int64_t count, const S* const* keys,
            const Runs& runs, float* scores) {
  if constexpr (std::is_same_v<T, uint16_t>) {
    if (shape.has_tiles) {
      return ScoresWithMatrixUnits(shape, queries, count, keys, runs.num_blocks, scores);
    }
  }
  T* const scratch = ScratchFor<T, S>(kLanes * shape.size);
  thread_local std::vector<Line> lines;
  const int64_t num_transposed = kLanes * shape.padded;
  lines.resize((num_transposed + count * shape.padded) * sizeof(Factor<T>) / sizeof(Line));
  Factor<T>* const numbers = reinterpret_cast<Factor<T>*>(lines.data());
  const auto transposed = reinterpret_cast<Numbers<Factor<T>>*>(numbers);
  const Factor<T>* factors = nullptr;  // the queries, once they are needed
  for (const Run& run : runs) {
    for (int64_t b = run.block; b < run.block + run.num_blocks; ++b) {
      Fetch(keys[b + kAhead], shape.size);
      const T* const block = WidenedBlock(keys[b], shape.size, scratch);
      const T* const of_run = queries + run.query * shape.padded;
      float* const to = scores + (b * count + run.query) * kLanes;
      if (run.num_queries >= kManyQueries) {
        const auto by_lane = TransposeKeys(block, shape.size, transposed);
        if (factors == nullptr) {
          factors = Widened(queries, count, shape.padded, shape.padded, numbers + num_transposed).numbers;
        }
        ScoreBlock(shape, factors + run.query * shape.padded, run.num_queries, by_lane, to);
      } else {
        ScoreBlock(shape, of_run, run.num_queries, block, to);
      }
    }
  }
}

// The values of blocks by weights [block, count, kLanes], to sums [count, padded]. The weights of
// queries that do not read a block are 0.
template <typename T, typename S>
void WeightedValues(const HeadShape<T>& shape, const float* weights, int64_t count,
                    const S* const* values, const Runs& runs, float* sums) {
  if constexpr (std::is_same_v<T, uint16_t>) {
    if (shape.has_tiles) {
      return ValuesWithMatrixUnits(shape, weights, count, values, runs.num_blocks, sums);
    }
  }
  std::fill(sums, sums + count * shape.padded, 0.0f);
  for (const Run& run : runs) {
    ValuesWithVectors(shape, weights + (run.block * count + run.query) * kLanes, count,
                      run.num_queries, values + run.block, run.num_blocks,
                      sums + run.query * shape.padded);
  }
}

}  // namespace jaxspec
