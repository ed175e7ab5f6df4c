// Attention of a window over a row's own live KV, read where it lies.
//
// The queries of a row's KV head share what they read, kQueries of them at a time, and go through it
// in blocks of kLanes slots. A block may hold slots that a query does not see: their weight is 0,
// which changes no sum, whatever other queries a query shares its blocks with. With a sliding window a
// query may also see the first slots of its row, attention sinks; the blocks between are not read.
//
// The entries of a tree share the blocks that lie before the tree. From there on each has blocks of
// its own: the KV of its path is copied to where it would lie if the path were a chain. So a node's
// sums are those of a chain, wherever the tree begins.
//
// T is what is computed with, float or bfloat16, S what KV is stored in: T, or int8 with scales.

#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "attention_sums.h"
#include "norms.h"
#include "threads.h"
#include "vectors.h"

namespace jaxspec {

template <typename T, typename S>
struct AttentionInputs {
  int64_t window, num_heads, group, head_size, block, num_blocks, depth;
  int64_t rotary_size, sliding_window, num_sinks;  // sliding_window 0: none
  float epsilon;
  bool is_interleaved;
  const T *qkv, *bias, *query_norm, *key_norm;  // the last three may be null
  const float *cos, *sin;                       // [B, T, rotary_size / 2]
  S *k, *v;                                     // [P, K, block, H]
  float *k_scale, *v_scale;                     // [P, K, block] of codes, or null
  const int32_t *table, *positions, *slots, *start;
  const int32_t *paths, *ends;  // [B, T, depth] and [B, T], or null
  T* output;
};

// The components of a head (a, b) -> (a cos - b sin, b cos + a sin), in pairs.
inline void Rotate(float* x, const float* cos, const float* sin, int64_t size, bool is_interleaved) {
  const int64_t num_pairs = size / 2;
  int64_t i = 0;
  for (; !is_interleaved && i + kLanes <= num_pairs; i += kLanes) {
    float *const first = x + i, *const second = first + num_pairs;
    const Vector a = Load(first), b = Load(second), of_cos = Load(cos + i), of_sin = Load(sin + i);
    Store(first, a * of_cos - b * of_sin);
    Store(second, b * of_cos + a * of_sin);
  }
  for (; i < num_pairs; ++i) {
    float& a = x[is_interleaved ? 2 * i : i];
    float& b = x[is_interleaved ? 2 * i + 1 : i + num_pairs];
    const float was = a;
    a = was * cos[i] - b * sin[i];
    b = b * cos[i] + was * sin[i];
  }
}

// A row's KV head.
template <typename T, typename S>
struct RowHead {
  const AttentionInputs<T, S>& in;
  int64_t row, head;

  int64_t capacity() const { return in.num_blocks * in.block; }

  int64_t IndexOf(int64_t slot) const {
    const int64_t page = in.table[row * in.num_blocks + slot / in.block];
    return (page * in.num_heads + head) * in.block + slot % in.block;
  }
  S* At(S* pages, int64_t slot) const { return pages + IndexOf(slot) * in.head_size; }

  int64_t Token(int64_t query) const { return row * in.window + query / in.group; }

  // What a query sees; positions beyond the capacity, or deeper than a tree, are of no row that lives.
  // A sliding window counts from the query's position, wherever its end is.
  int64_t End(int64_t query) const {
    const int64_t after_self = int64_t{in.positions[Token(query)]} + 1;
    const int64_t end = in.ends == nullptr ? after_self : in.ends[Token(query)];
    return Clamp(in.paths == nullptr ? end : std::min(end, in.start[row] + in.depth));
  }
  int64_t Begin(int64_t query) const {
    if (in.sliding_window == 0) return 0;
    const int64_t after_self = int64_t{in.positions[Token(query)]} + 1;
    return std::max<int64_t>(Clamp(after_self) - in.sliding_window, 0);
  }
  bool Sees(int64_t query, int64_t slot) const {
    return slot < End(query) && (slot >= Begin(query) || slot < in.num_sinks);
  }
  int64_t Clamp(int64_t slot) const { return std::clamp<int64_t>(slot, 0, capacity()); }

  // The first slot of the blocks that each entry has of its own: that which holds the start of a tree,
  // and those behind it.
  int64_t OwnBegin() const {
    return in.paths == nullptr ? capacity() : Clamp(in.start[row]) / kLanes * kLanes;
  }

  // Where the KV of a slot is stored that a query of a tree sees. In a row that has ended it may be
  // outside the capacity.
  int64_t StoredAt(int64_t query, int64_t slot) const {
    const int64_t start = in.start[row], depth = slot - start;
    return depth < 0 ? slot : start + in.paths[Token(query) * in.depth + depth];
  }

  T* Output(int64_t query) const {
    const int64_t of_head = Token(query) * in.num_heads + head;
    return in.output + (of_head * in.group + query % in.group) * in.head_size;
  }
};

inline bool AreNumbers(const float* x, int64_t size) {
  Integers are_not = {};
  for (int64_t i = 0; i < size; i += kLanes) {
    const Vector part = Load(x + i, size - i);
    are_not |= part - part != 0.0f;
  }
  int32_t any = 0;
  for (int lane = 0; lane < kLanes; ++lane) any |= are_not[lane];
  return any == 0;
}

// Codes of `size` numbers and their scale, as `quantise` in cache/pages.py defines them.
inline void StoreCodes(const float* x, int64_t size, int8_t* codes, float* scale) {
  if (!AreNumbers(x, size)) {
    std::fill_n(codes, size, int8_t{});
    *scale = std::nanf("");
    return;
  }
  float largest = 0.0f;
  for (int64_t i = 0; i < size; ++i) largest = std::max(largest, std::fabs(x[i]));
  *scale = largest * (1.0f / 127.0f);
  if (*scale < FLT_MIN) *scale = 1.0f;
  const float inverse = 1.0f / *scale;
  const float kShift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, to even on a tie
  for (int64_t i = 0; i < size; i += kLanes) {
    const Vector shifted = Load(x + i, size - i) * inverse + kShift;
    Store(codes + i, shifted - kShift, size - i);
  }
}

// Norms and turns queries and keys of entries `begin` to `end` of the window, and writes their KV.
// queries [entries * group, padded]; null if only the KV is wanted.
template <typename T, typename S>
void WriteWindow(const RowHead<T, S>& of, const HeadShape<T>& shape, int64_t begin, int64_t end,
                 T* queries, bool writes_kv) {
  const AttentionInputs<T, S>& in = of.in;
  const int64_t size = shape.size, num_parts = in.group + 2;
  thread_local std::vector<float> scratch;
  scratch.resize(3 * shape.padded);
  float* const query = scratch.data();
  float *const key = query + shape.padded, *const value = key + shape.padded;
  const int64_t first_part = queries == nullptr ? in.group : 0;
  const int64_t end_of_parts = writes_kv ? num_parts : in.group;
  for (int64_t t = begin; t < end; ++t) {
    const int64_t token = of.row * in.window + t;
    for (int64_t part = first_part; part < end_of_parts; ++part) {
      const bool is_query = part < in.group, is_value = part == in.group + 1;
      float* const x = is_query ? query : is_value ? value : key;
      const int64_t of_head = (of.head * num_parts + part) * size;
      Widen(in.qkv + token * in.num_heads * num_parts * size + of_head, x, size);
      if (in.bias != nullptr) {
        for (int64_t i = 0; i < size; i += kLanes) {
          Store(x + i, Round<T>(Load(x + i) + Load(in.bias + of_head + i, size - i)));
        }
      }
      if (is_value) continue;
      const T* const norm = is_query ? in.query_norm : in.key_norm;
      if (norm != nullptr) Norm<T>(x, norm, in.epsilon, x, size);
      const int64_t angle = token * in.rotary_size / 2;
      Rotate(x, in.cos + angle, in.sin + angle, in.rotary_size, in.is_interleaved);
      for (int64_t i = 0; i < size; i += kLanes) Store(x + i, Round<T>(Load(x + i)));
      if (!is_query) continue;
      T* const to = queries + ((t - begin) * in.group + part) * shape.padded;
      for (int64_t i = 0; i < size; i += kLanes) {
        Store(to + i, Load(x + i) * shape.query_scale, size - i);
      }
      std::fill(to + size, to + shape.padded, T{});
    }
    const int32_t slot = in.slots[token];
    if (!writes_kv || slot < 0 || slot >= of.capacity()) continue;
    // 0 * NaN is NaN: a value that is no number would reach the queries before it, which do not see
    // it. As a key it reaches those that do.
    if (!AreNumbers(value, size)) {
      std::fill(key, key + size, std::nanf(""));
      std::fill(value, value + size, 0.0f);
    }
    if constexpr (std::is_same_v<S, T>) {
      for (int64_t i = 0; i < size; i += kLanes) {
        Store(of.At(in.k, slot) + i, Load(key + i), size - i);
        Store(of.At(in.v, slot) + i, Load(value + i), size - i);
      }
    } else {
      const int64_t index = of.IndexOf(slot);
      StoreCodes(key, size, of.At(in.k, slot), in.k_scale + index);
      StoreCodes(value, size, of.At(in.v, slot), in.v_scale + index);
    }
  }
}

// What some queries see: runs of blocks that hold all of it, and of these slots the ones from a query's
// begin to its end, and the sinks. The first runs are common to all of them, the others are each an
// entry's own.
struct Seen {
  int64_t count;  // queries
  Runs runs;
  int64_t num_common, num_common_blocks;  // runs, and their blocks
  int64_t num_sinks;
  int64_t shared_begin, shared_end;                  // of the slots that all of them see
  Integers begins[kQueries], ends[kQueries], lanes;  // of each query, in all lanes

  template <typename T, typename S>
  Seen(const RowHead<T, S>& of, int64_t first, int64_t count)
      : count(count), num_sinks(of.in.num_sinks), shared_begin(0), shared_end(of.capacity()) {
    int64_t begin_of_all = of.capacity(), end_of_all = 1;
    for (int64_t q = 0; q < count; ++q) {
      const int64_t begin = of.Begin(first + q), end = of.End(first + q);
      begins[q] = Integers{} + static_cast<int32_t>(begin);
      ends[q] = Integers{} + static_cast<int32_t>(end);
      begin_of_all = std::min(begin_of_all, begin);
      end_of_all = std::max({end_of_all, end, begin + 1});
      shared_begin = std::max(shared_begin, begin);
      shared_end = std::min(shared_end, end);
    }
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = lane;
    const int64_t own_begin = of.OwnBegin(), sinks_end = RoundUp(num_sinks, kLanes);
    int64_t slot = begin_of_all / kLanes * kLanes;
    if (slot <= sinks_end) {
      slot = 0;
    } else if (num_sinks > 0) {
      runs.Add(0, std::min(sinks_end, own_begin), 0, count);
    }
    runs.Add(slot, std::min(end_of_all, own_begin) - slot, 0, count);
    num_common = runs.count;
    num_common_blocks = runs.num_blocks;
    if (of.in.paths == nullptr) return;
    const int64_t group = of.in.group;
    for (int64_t q = 0, next; q < count; q = next) {
      next = std::min(count, q + group - (first + q) % group);
      const int64_t own = of.Begin(first + q) / kLanes * kLanes;
      const int64_t begin = own_begin < sinks_end ? own_begin : std::max(own_begin, own);
      runs.Add(begin, std::max<int64_t>(of.End(first + q) - begin, 1), q, next - q);
    }
  }

  // Whether all queries see every slot of a block.
  bool IsShared(int64_t slot) const {
    return (slot >= shared_begin || slot + kLanes <= num_sinks) && slot + kLanes <= shared_end;
  }

  // The lanes of x whose slots, from `slot` on, the query sees, and `other` in the others.
  Vector Of(int64_t query, int64_t slot, Vector x, float other) const {
    const Integers slots = lanes + static_cast<int32_t>(slot);
    const Integers sinks_end = Integers{} + static_cast<int32_t>(num_sinks);
    const Integers is_near = (slots >= begins[query]) | (slots < sinks_end);
    return is_near & (slots < ends[query]) ? x : Vector{} + other;
  }

  // Calls `body` with a function like `Of` for the slots of a block, which lets all lanes through where
  // every query sees all of them.
  template <typename Body>
  void WithBlock(int64_t slot, const Body& body) const {
    if (IsShared(slot)) {
      body([](int64_t, Vector x, float) { return x; });
    } else {
      body([=](int64_t query, Vector x, float other) { return Of(query, slot, x, other); });
    }
  }
};

// Multiplies scores [block, query, kLanes] of codes by the scales of their keys [block] [kLanes].
inline void ScaleScores(const Seen& seen, const float* const* scales, float* scores) {
  for (const Run& run : seen.runs) {
    for (int64_t b = run.block; b < run.block + run.num_blocks; ++b) {
      const Vector scale = Load(scales[b]);
      float* score = scores + (b * seen.count + run.query) * kLanes;
      for (int64_t q = 0; q < run.num_queries; ++q, score += kLanes) Store(score, Load(score) * scale);
    }
  }
}

// Makes scores [block, query, kLanes] weights, and adds them up to totals; the weights of codes are
// then multiplied by the scales of their values [block] [kLanes], null where there are none. Where
// there are matrix units, the weights follow a second time, as the first numbers of pairs.
template <typename T>
void Softmax(const Seen& seen, const HeadShape<T>& shape, const float* const* scales, float* scores,
             float* totals) {
  Vector highest[kQueries], sums[kQueries] = {};
  std::fill(highest, highest + kQueries, Splat(-1e30f));
  for (const Run& run : seen.runs) {
    for (int64_t b = 0; b < run.num_blocks; ++b) {
      const float* from = scores + ((run.block + b) * seen.count + run.query) * kLanes;
      const int64_t slot = run.slot + b * kLanes;
      const auto raise = [&](auto visible) {
        for (int64_t q = run.query; q < run.query + run.num_queries; ++q, from += kLanes) {
          const Vector score = visible(q, Load(from), -1e30f);
          highest[q] = score > highest[q] ? score : highest[q];
        }
      };
      seen.WithBlock(slot, raise);
    }
  }
  for (int64_t q = 0; q < seen.count; ++q) {
    float most = highest[q][0];
    for (int lane = 1; lane < kLanes; ++lane) most = std::max(most, highest[q][lane]);
    highest[q] = Splat(most);
  }
  const int64_t to_firsts = seen.runs.num_blocks * seen.count * kLanes;
  for (const Run& run : seen.runs) {
    for (int64_t b = 0; b < run.num_blocks; ++b) {
      float* const of_block = scores + (run.block + b) * seen.count * kLanes;
      const auto weigh = [&](auto visible) {
        for (int64_t q = run.query; q < run.query + run.num_queries; ++q) {
          float* const to = of_block + q * kLanes;
          const Vector exp = Exp((Load(to) - highest[q]) * shape.score_scale);
          const Vector weight = visible(q, exp, 0.0f);
          // The scale of a slot that the query does not see may be NaN.
          const Vector scaled =
              scales == nullptr ? weight : visible(q, exp * Load(scales[run.block + b]), 0.0f);
          sums[q] += weight;
          if (shape.has_tiles) {
            const Vector rounded = Round<T>(scaled);
            Store(to, rounded);
            Store(to + to_firsts, Bits<Vector>(Bits<Unsigned>(rounded) >> 16));
          } else {
            StoreWeights<T>(to, scaled);
          }
        }
      };
      seen.WithBlock(run.slot + b * kLanes, weigh);
      // Matrix units multiply with the weights of those too that do not read the block.
      if (!shape.has_tiles || run.num_queries == seen.count) continue;
      for (int64_t q = 0; q < seen.count; ++q) {
        if (run.IsReadBy(q)) continue;
        Store(of_block + q * kLanes, Vector{});
        Store(of_block + q * kLanes + to_firsts, Vector{});
      }
    }
  }
  for (int64_t q = 0; q < seen.count; ++q) totals[q] = Sum<kLanes>(sums[q]);
}

// A slot that not all queries see may hold anything, and 0 * NaN is NaN: what is no number becomes 0.
template <typename T>
void CopyNumbers(const T* from, T* to, int64_t count) {
  const auto number = [](Vector x) { return x - x == 0.0f ? x : Vector{}; };
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) Store(to + i, number(Load(from + i)));
  if (i < count) Store(to + i, number(Load(from + i, count - i)), count - i);
}

// What attention reads of one block of slots.
template <typename S>
struct BlockOfSlots {
  S *keys, *values;             // [kLanes, H]
  float *k_scales, *v_scales;  // [kLanes] of codes
};

// The KV of a block of slots as a query sees them. Nothing looks at the scores of keys that it does not
// see, nor at any scales: these are left out.
template <typename T, typename S>
void Gather(const RowHead<T, S>& of, int64_t query, int64_t slot, const BlockOfSlots<S>& block) {
  const int64_t size = of.in.head_size;
  S *keys = block.keys, *values = block.values;
  for (int64_t i = 0; i < kLanes; ++i, ++slot, keys += size, values += size) {
    const int64_t stored = of.Sees(query, slot) ? of.StoredAt(query, slot) : -1;
    if (stored < 0 || stored >= of.capacity()) {
      std::fill_n(values, size, S{});
    } else {
      std::copy_n(of.At(of.in.k, stored), size, keys);
      if constexpr (std::is_same_v<S, T>) {
        CopyNumbers(of.At(of.in.v, stored), values, size);
      } else {
        std::copy_n(of.At(of.in.v, stored), size, values);
        block.k_scales[i] = of.in.k_scale[of.IndexOf(stored)];
        block.v_scales[i] = of.in.v_scale[of.IndexOf(stored)];
      }
    }
  }
}

// Attention of `count` queries, at most kQueries, from `first` on; `queries` begins with the first.
template <typename T, typename S>
void AttendTogether(const RowHead<T, S>& of, const HeadShape<T>& shape, const T* queries,
                    int64_t first, int64_t count) {
  constexpr bool kIsCoded = !std::is_same_v<S, T>;
  const Seen seen(of, first, count);
  const Run* const common_end = seen.runs.begin() + seen.num_common;
  const int64_t num_blocks = seen.runs.num_blocks, block_size = kLanes * shape.size;
  thread_local std::vector<const S*> blocks;
  blocks.resize(2 * num_blocks + kAhead);
  const S **const keys = blocks.data(), **const values = keys + num_blocks;
  thread_local std::vector<const float*> scales;  // of codes
  scales.resize(kIsCoded ? 2 * num_blocks : 0);
  const float **const k_scales = scales.data(), **const v_scales = k_scales + num_blocks;
  int64_t num_copies = 0;
  for (const Run* run = seen.runs.begin(); run < common_end; ++run) {
    for (int64_t b = run->block, slot = run->slot; b < run->block + run->num_blocks; ++b) {
      keys[b] = of.At(of.in.k, slot);
      values[b] = of.At(of.in.v, slot);
      if (b < kAhead) Fetch(keys[b], shape.size);
      if constexpr (kIsCoded) {
        k_scales[b] = of.in.k_scale + of.IndexOf(slot);
        v_scales[b] = of.in.v_scale + of.IndexOf(slot);
      } else {
        num_copies += !seen.IsShared(slot);
      }
      slot += kLanes;
    }
  }
  const int64_t num_own = num_blocks - seen.num_common_blocks;
  thread_local std::vector<S> gathered;  // keys and values of each block
  gathered.resize(2 * num_own * block_size);
  thread_local std::vector<float> gathered_scales;  // likewise
  gathered_scales.resize(kIsCoded ? 2 * num_own * kLanes : 0);
  S* own = gathered.data();
  float* own_scales = gathered_scales.data();
  for (const Run* run = common_end; run < seen.runs.end(); ++run) {
    for (int64_t i = 0; i < run->num_blocks; ++i, own += 2 * block_size) {
      const int64_t b = run->block + i;
      keys[b] = own;
      values[b] = own + block_size;
      if constexpr (kIsCoded) {
        k_scales[b] = own_scales;
        v_scales[b] = own_scales + kLanes;
      }
      Gather(of, first + run->query, run->slot + i * kLanes,
             BlockOfSlots<S>{own, own + block_size, own_scales, own_scales + kLanes});
      own_scales += kIsCoded ? 2 * kLanes : 0;
    }
  }
  std::fill_n(values + num_blocks, kAhead, values[num_blocks - 1]);

  thread_local std::vector<Line> scratch;
  const int64_t num_weights = num_blocks * count * kLanes;
  scratch.resize(RoundUp(2 * num_weights + count * shape.padded, kLineFloats) / kLineFloats);
  float* const weights = scratch.front().floats;  // [block, count, kLanes], twice
  float* const sums = weights + 2 * num_weights;  // [count, padded]
  float totals[kQueries];
  Scores(shape, queries, count, keys, seen.runs, weights);
  if constexpr (kIsCoded) ScaleScores(seen, k_scales, weights);
  Softmax(seen, shape, kIsCoded ? v_scales : nullptr, weights, totals);

  if constexpr (!kIsCoded) {  // codes are numbers
    thread_local std::vector<T> copies;
    copies.resize(num_copies * block_size);
    T* copy = copies.data();
    for (const Run* run = seen.runs.begin(); run < common_end; ++run) {
      for (int64_t b = 0; b < run->num_blocks; ++b) {
        if (seen.IsShared(run->slot + b * kLanes)) continue;
        const T*& block = values[run->block + b];
        CopyNumbers(block, copy, block_size);
        block = copy;
        copy += block_size;
      }
    }
  }
  WeightedValues(shape, weights, count, values, seen.runs, sums);

  for (int64_t q = 0; q < count; ++q) {
    T* const to = of.Output(first + q);
    const float* from = sums + q * shape.padded;
    for (int64_t i = 0; i < shape.size; i += shape.step, from += kNumbers<T>) {
      // 0 is added because of -0, which does not outlast weights of 0: how many of them follow
      // depends on the other queries.
      const auto part = [&](int p) {
        return Round<T>((Load(from + p * kLanes) + 0.0f) / totals[q]);
      };
      StoreParts(to + i, part(0), part(kParts<T> - 1), std::min(shape.step, shape.size - i));
    }
  }
}

// What one row's KV head does for entries `begin` to `end` of the window: their queries and keys are
// normed and turned, their KV is written, unless it already is, and their queries, [entries, group] of
// them, see their row's KV up to themselves, or to their entry's end.
template <typename T, typename S>
void Attend(const RowHead<T, S>& of, int64_t begin, int64_t end, bool writes_kv) {
  const HeadShape<T> shape(of.in.head_size);
  const int64_t group = of.in.group, num_queries = (end - begin) * group;
  thread_local std::vector<T> queries;
  queries.resize(num_queries * shape.padded);
  WriteWindow(of, shape, begin, end, queries.data(), writes_kv);
  for (int64_t first = 0; first < num_queries; first += kQueries) {
    AttendTogether(of, shape, queries.data() + first * shape.padded, begin * group + first,
                   std::min(kQueries, num_queries - first));
  }
}

// The same for the first `num_live` [num_rows] entries of rows that are chunks of prompts. Several may
// be of one row of the table, so all KV is written before any is read. A head's entries are shared out
// in pieces.
template <typename T, typename S>
void AttendToChunks(const AttentionInputs<T, S>& in, int64_t num_rows, const int32_t* num_live) {
  constexpr int64_t kPiece = 32;
  const int64_t num_pieces = RoundUp(in.window, kPiece) / kPiece;
  const auto for_pieces = [&](const auto& body) {
    Team::Get().For(num_rows * in.num_heads * num_pieces, [&](int64_t task) {
      const int64_t piece = task % num_pieces, of_head = task / num_pieces;
      const RowHead<T, S> of = {in, of_head / in.num_heads, of_head % in.num_heads};
      const int64_t count = std::min<int64_t>(num_live[of.row], in.window);
      const int64_t begin = piece * kPiece, end = std::min(begin + kPiece, count);
      if (begin < end) body(of, begin, end);
    });
  };
  const HeadShape<T> shape(in.head_size);
  for_pieces([&](const RowHead<T, S>& of, int64_t begin, int64_t end) {
    WriteWindow<T, S>(of, shape, begin, end, nullptr, true);
  });
  for_pieces([](const RowHead<T, S>& of, int64_t begin, int64_t end) {
    Attend(of, begin, end, false);
  });
}

}  // namespace jaxspec
