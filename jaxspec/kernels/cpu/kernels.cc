// Attention and products of a few rows, for CPUs: what XLA:CPU does far below the hardware's rate.
//
// Two XLA FFI handlers, called from `jaxspec.kernels.cpu`, which says what they compute:
//   jaxspec_product    a product with what stands before and behind it in a decoder layer
//   jaxspec_attention  attention of a window over a row's own live KV, read where it lies
//
// An output's bits depend on its own row's numbers only. Every sum runs in one order, over the inputs
// of a product, the components of a head, the slots of a row from first to last, whatever the number
// of rows, the tile an output falls into, or the thread that computes it.
//
// Values are float, or bfloat16 as uint16_t. Sums are float; what XLA would round to bfloat16 (normed
// inputs, gated inputs, probabilities, results) is rounded here too.

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <pthread.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

// ---------------------------------------------------------------------------------------- vectors

#if defined(__AVX512F__)
constexpr int kLanes = 16, kTileVectors = 3, kTileRows = 8;  // of 32 registers, 24 hold sums
#elif defined(__AVX__)
constexpr int kLanes = 8, kTileVectors = 2, kTileRows = 6;  // of 16 registers, 12
#else
constexpr int kLanes = 4, kTileVectors = 3, kTileRows = 8;
#endif
static_assert(kTileVectors <= 3);

template <typename T, int n>
struct VectorOf {
  typedef T type __attribute__((vector_size(n * sizeof(T))));
};
using Vector = VectorOf<float, kLanes>::type;
using Integers = VectorOf<int32_t, kLanes>::type;
using Unsigned = VectorOf<uint32_t, kLanes>::type;

inline Vector Splat(float x) {
#if defined(__AVX512F__)
  return _mm512_set1_ps(x);
#elif defined(__AVX__)
  return _mm256_set1_ps(x);
#else
  return Vector{x, x, x, x};
#endif
}

// a * b + c. Said and not left to the compiler (-ffp-contract=off): it fuses here and not there, and
// tiles of different heights would differ in their last bits.
inline Vector MulAdd(Vector a, Vector b, Vector c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX__) && defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}

template <typename To, typename From>
inline To Bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

inline Vector Load(const float* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof(vector));
  return vector;
}

inline Vector Load(const uint16_t* from) {
  VectorOf<uint16_t, kLanes>::type halves;
  std::memcpy(&halves, from, sizeof(halves));
  return Bits<Vector>(__builtin_convertvector(halves, Unsigned) << 16);
}

// The first `count` lanes; the others are 0, and what lies behind is not read.
template <typename T>
inline Vector Load(const T* from, int64_t count) {
  if (count >= kLanes) return Load(from);
  T lanes[kLanes] = {};
  if (count > 0) std::memcpy(lanes, from, count * sizeof(T));
  return Load(lanes);
}

// Rounds to the nearest value of T, to even on a tie, and leaves it a float.
template <typename T>
inline Vector Round(Vector x) {
  if constexpr (std::is_same_v<T, float>) return x;
  const Unsigned bits = Bits<Unsigned>(x);
  const Unsigned rounded = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
  // Rounding must not carry a NaN's mantissa over into infinity.
  return Bits<Vector>(x == x ? rounded : (bits | 0x400000u) & 0xffff0000u);
}

// Stores the first `count` lanes; they must be values of T.
template <typename T>
inline void Store(T* to, Vector x, int64_t count = kLanes) {
  const int64_t size = std::min<int64_t>(count, kLanes) * sizeof(T);
  if (size <= 0) return;
  if constexpr (std::is_same_v<T, float>) {
    std::memcpy(to, &x, size);
  } else {
    const auto bits = Bits<Unsigned>(x) >> 16;
    const auto halves = __builtin_convertvector(bits, VectorOf<uint16_t, kLanes>::type);
    std::memcpy(to, &halves, size);
  }
}

template <int n>
inline float Sum(typename VectorOf<float, n>::type x) {
  if constexpr (n == 2) {
    return x[0] + x[1];
  } else {
    typename VectorOf<float, n / 2>::type halves[2];
    std::memcpy(halves, &x, sizeof(x));
    return Sum<n / 2>(halves[0] + halves[1]);
  }
}

// Lane i is the sum of the lanes of the i-th vector: neighbours are added, level by level.
inline Vector AddNeighbours(Vector a, Vector b) {
#if defined(__clang__) && defined(__AVX512F__)
  return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
         __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#elif defined(__clang__) && defined(__AVX__)
  return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14) +
         __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
#elif defined(__clang__)
  return __builtin_shufflevector(a, b, 0, 2, 4, 6) + __builtin_shufflevector(a, b, 1, 3, 5, 7);
#else
  Integers even = {};
  for (int lane = 0; lane < kLanes; ++lane) even[lane] = 2 * lane;
  return __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, even + 1);
#endif
}

inline Vector Sums(Vector (&x)[kLanes]) {
  for (int count = kLanes; count > 1; count /= 2) {
    for (int i = 0; i < count / 2; ++i) x[i] = AddNeighbours(x[2 * i], x[2 * i + 1]);
  }
  return x[0];
}

// exp of x <= 0, to about one unit in the last place; below -87 it is 0; NaN stays NaN.
// Cody and Waite's reduction to |r| <= log(2) / 2, and the polynomial of the Cephes library.
inline Vector Exp(Vector x) {
  const float kShift = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const Vector shifted = MulAdd(x, Splat(1.44269504f), Splat(kShift));
  const Vector n = shifted - kShift;
  const Vector r = MulAdd(n, Splat(2.12194440e-4f), MulAdd(n, Splat(-0.693359375f), x));
  Vector p = MulAdd(r, Splat(1.9875691500e-4f), Splat(1.3981999507e-3f));
  for (float next : {8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
    p = MulAdd(p, r, Splat(next));
  }
  p = MulAdd(p, r * r, r) + 1.0f;
  p *= Bits<Vector>((Bits<Unsigned>(shifted) << 23) + (127u << 23));
  return x < -87.0f ? Vector{} : p;
}

inline Vector Silu(Vector x) {
  const Vector e = Exp(x < 0.0f ? x : -x);
  return x * ((x < 0.0f ? e : Vector{} + 1.0f) / (1.0f + e));
}

// ---------------------------------------------------------------------------------------- threads

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Threads that share out the iterations of a loop. XLA's own pool takes some 12 us to hand over work,
// as long as a product of five rows; these wait in a busy loop, for a fraction of a millisecond.
// There is one team: a caller that finds it at work runs its loop alone.
class Team {
 public:
  static Team& Get() {
    static Team* const team = new Team();  // never destroyed: its threads run until the process ends
    return *team;
  }

  // Before the first loop. Where no more threads can be had, those that could share the work.
  void Start(int num_threads) {
    if (num_helpers_ > 0) return;
    try {
      for (; num_helpers_ < num_threads - 1; ++num_helpers_) {
        std::thread([this] { Help(); }).detach();
      }
    } catch (const std::system_error&) {
    }
    // A forked child has none of these threads: it works alone.
    pthread_atfork(nullptr, nullptr, [] { Get().num_helpers_ = 0; });
  }

  template <typename Body>
  void For(int64_t count, const Body& body) {
    if (count < 2 || num_helpers_ == 0 || !mutex_.try_lock()) {
      for (int64_t i = 0; i < count; ++i) body(i);
      return;
    }
    run_ = [](const void* body, int64_t i) { (*static_cast<const Body*>(body))(i); };
    body_ = &body;
    num_done_.store(0, std::memory_order_relaxed);
    loop_.store(static_cast<uint64_t>(count) << 32);
    if (num_asleep_.load() > 0) {
      { std::lock_guard<std::mutex> lock(sleep_); }
      wake_.notify_all();
    }
    Work();
    for (int spins = 1; num_done_.load(std::memory_order_acquire) < count; ++spins) Wait(spins);
    mutex_.unlock();
  }

  int64_t num_threads() const { return num_helpers_ + 1; }

 private:
  static constexpr int kSpins = 1 << 14;

  static void Wait(int spins) {
    Pause();
    if (spins % 1024 == 0) std::this_thread::yield();  // more threads than cores: let others finish
  }

  static bool IsOpen(uint64_t loop) { return (loop & 0xffffffffu) < loop >> 32; }

  // Whoever takes an iteration keeps the loop from ending, and with it `run_` and `body_`, until it
  // has been done; one that comes late finds none left, or takes one of the next loop.
  void Work() {
    while (IsOpen(loop_.load(std::memory_order_relaxed))) {
      const uint64_t loop = loop_.fetch_add(1, std::memory_order_acquire);
      if (!IsOpen(loop)) return;
      run_(body_, static_cast<int64_t>(loop & 0xffffffffu));
      num_done_.fetch_add(1, std::memory_order_release);
    }
  }

  void Help() {
    for (;;) {
      for (int spins = 1; !IsOpen(loop_.load(std::memory_order_relaxed)); ++spins) {
        Wait(spins);
        if (spins < kSpins) continue;
        std::unique_lock<std::mutex> lock(sleep_);
        num_asleep_.fetch_add(1);
        wake_.wait(lock, [this] { return IsOpen(loop_.load()); });
        num_asleep_.fetch_sub(1);
      }
      Work();
    }
  }

  int num_helpers_ = 0;
  std::mutex mutex_, sleep_;
  std::condition_variable wake_;
  void (*run_)(const void*, int64_t) = nullptr;
  const void* body_ = nullptr;
  std::atomic<uint64_t> loop_{0};  // number of iterations, and in the low half the next one
  std::atomic<int64_t> num_done_{0};
  std::atomic<int> num_asleep_{0};
};

// ---------------------------------------------------------------------------------------- product

// `weight * (x / rms(x))`, as `layers.rms_norm`.
template <typename T, typename In>
void Norm(const In* x, const T* weight, float epsilon, float* to, int64_t size) {
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
void Gate(const T* x, float* to, int64_t size) {
  for (int64_t i = 0; i < size; i += kLanes) {
    const Vector gated = Silu(Load(x + i, size - i)) * Load(x + size + i, size - i);
    Store(to + i, Round<T>(gated), size - i);
  }
}

template <typename T>
void Widen(const T* x, float* to, int64_t size) {
  for (int64_t i = 0; i < size; i += kLanes) Store(to + i, Load(x + i, size - i), size - i);
}

// kRows rows times kVectors vectors of columns, sums held in registers over all inputs. Of the last
// vector `count` columns exist; where that is all of them, kIsWhole, the compiler is told so. The
// columns that begin at `ahead` are fetched meanwhile: a tile jumps from row to row of the weights,
// which no prefetcher of the hardware follows.
template <typename T, typename Out, int kRows, int kVectors, bool kIsWhole>
void Tile(const float* x, const T* weight, const T* ahead, const T* residual, Out* y,
          int64_t num_inputs, int64_t num_outputs, int64_t count) {
  const auto exist = [=](int v) { return kIsWhole || v + 1 < kVectors ? kLanes : count; };
  Vector sums[kRows][kVectors] = {};
  for (int64_t k = 0; k < num_inputs; ++k) {
    const T* row = weight + k * num_outputs;
    Vector columns[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      __builtin_prefetch(ahead + k * num_outputs + v * kLanes);
      columns[v] = Load(row + v * kLanes, exist(v));
    }
    for (int r = 0; r < kRows; ++r) {
      const Vector input = Splat(x[r * num_inputs + k]);
      for (int v = 0; v < kVectors; ++v) sums[r][v] = MulAdd(input, columns[v], sums[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      const int64_t at = r * num_outputs + v * kLanes;
      Vector sum = Round<Out>(sums[r][v]);
      if (residual != nullptr) sum = Round<Out>(Load(residual + at, exist(v)) + sum);
      Store(y + at, sum, exist(v));
    }
  }
}

template <typename T, typename Out, int kVectors, bool kIsWhole, int... kRows>
constexpr auto TilesOfRows(std::integer_sequence<int, kRows...>) {
  return std::array{Tile<T, Out, kRows + 1, kVectors, kIsWhole>...};
}

// All rows of a strip of columns, in tiles of equal height, or one row less. The first tile fetches
// its weights some rows ahead, the second one those of the strip that comes next.
template <typename T, typename Out, int kVectors, bool kIsWhole>
void Strip(const float* x, const T* weight, const T* next, const T* residual, Out* y,
           int64_t num_rows, int64_t num_inputs, int64_t num_outputs, int64_t count) {
  static constexpr auto kTiles = TilesOfRows<T, Out, kVectors, kIsWhole>(
      std::make_integer_sequence<int, kTileRows>());
  const int64_t num_tiles = (num_rows + kTileRows - 1) / kTileRows;
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    const int64_t row = num_rows * tile / num_tiles, stop = num_rows * (tile + 1) / num_tiles;
    const T* const ahead = tile == 0 ? weight + 12 * num_outputs : tile == 1 ? next : weight;
    kTiles[stop - row - 1](x + row * num_inputs, weight, ahead,
                           residual ? residual + row * num_outputs : nullptr,
                           y + row * num_outputs, num_inputs, num_outputs, count);
  }
}

template <typename T, typename Out>
void Product(const T* x, const T* norm, float epsilon, bool is_gated, const T* weight,
             const T* residual, Out* y, int64_t num_rows, int64_t num_inputs, int64_t num_outputs) {
  thread_local std::vector<float> scratch;
  const float* inputs = nullptr;
  if constexpr (std::is_same_v<T, float>) inputs = x;
  if (norm != nullptr || is_gated || inputs == nullptr) {
    scratch.resize(num_rows * num_inputs);
    float* const to = scratch.data();
    inputs = to;
    auto prepare = [=](int64_t row) {
      if (is_gated) {
        Gate(x + row * 2 * num_inputs, to + row * num_inputs, num_inputs);
      } else if (norm != nullptr) {
        Norm(x + row * num_inputs, norm, epsilon, to + row * num_inputs, num_inputs);
      } else {
        Widen(x + row * num_inputs, to + row * num_inputs, num_inputs);
      }
    };
    if (num_rows * num_inputs >= 4096) {
      Team::Get().For(num_rows, prepare);
    } else {
      for (int64_t row = 0; row < num_rows; ++row) prepare(row);
    }
  }
  // Strips of at most kTileVectors vectors, and about as many for each thread.
  const int64_t num_whole = num_outputs / kLanes, rest = num_outputs % kLanes;
  const int64_t num_threads = Team::Get().num_threads();
  const int64_t least = (num_whole + kTileVectors - 1) / kTileVectors;
  const int64_t num_strips =
      std::min(num_whole, (least + num_threads - 1) / num_threads * num_threads);
  const auto begin_of = [=](int64_t strip) {
    return strip < num_strips ? num_whole * strip / num_strips : num_whole;
  };
  Team::Get().For(num_strips + (rest > 0), [=](int64_t strip) {
    const int64_t begin = begin_of(strip), end = begin_of(strip + 1);
    auto run = Strip<T, Out, 1, false>;
    if (end - begin == 1) run = Strip<T, Out, 1, true>;
    if (end - begin == 2) run = Strip<T, Out, 2, true>;
    if (end - begin == 3) run = Strip<T, Out, 3, true>;
    const int64_t at = begin * kLanes;
    const T* const next = weight + begin_of(strip + num_threads) * kLanes;
    run(inputs, weight + at, next, residual ? residual + at : nullptr, y + at, num_rows, num_inputs,
        num_outputs, rest);
  });
}

template <typename T>
const T* Optional(const ffi::AnyBuffer& buffer) {
  return buffer.element_count() == 0 ? nullptr : static_cast<const T*>(buffer.untyped_data());
}

ffi::Error ProductHandler(ffi::AnyBuffer x, ffi::AnyBuffer norm, ffi::AnyBuffer weight,
                          ffi::AnyBuffer residual, ffi::Result<ffi::AnyBuffer> y, float epsilon,
                          bool is_gated) {
  const int64_t num_rows = x.dimensions()[0], num_inputs = weight.dimensions()[0];
  const int64_t num_outputs = weight.dimensions()[1];
  auto run = [&](auto of, auto out) {
    using T = decltype(of);
    using Out = decltype(out);
    Product<T, Out>(static_cast<const T*>(x.untyped_data()), Optional<T>(norm), epsilon, is_gated,
                    static_cast<const T*>(weight.untyped_data()), Optional<T>(residual),
                    static_cast<Out*>(y->untyped_data()), num_rows, num_inputs, num_outputs);
    return ffi::Error::Success();
  };
  if (x.element_type() == ffi::F32) return run(float{}, float{});
  if (y->element_type() == ffi::F32) return run(uint16_t{}, float{});
  return run(uint16_t{}, uint16_t{});
}

// -------------------------------------------------------------------------------------- attention

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

ffi::Error AttentionHandler(ffi::AnyBuffer qkv, ffi::AnyBuffer bias, ffi::AnyBuffer query_norm,
                            ffi::AnyBuffer key_norm, ffi::Buffer<ffi::F32> cos,
                            ffi::Buffer<ffi::F32> sin, ffi::AnyBuffer k, ffi::AnyBuffer v,
                            ffi::Buffer<ffi::S32> table, ffi::Buffer<ffi::S32> positions,
                            ffi::Buffer<ffi::S32> slots, ffi::Result<ffi::AnyBuffer> output,
                            ffi::Result<ffi::AnyBuffer> new_k, ffi::Result<ffi::AnyBuffer> new_v,
                            float epsilon, bool is_interleaved, int64_t sliding_window) {
  const auto shape = qkv.dimensions();  // [B, T, K, G + 2, H]
  const int64_t num_rows = shape[0], num_heads = shape[2], head_size = shape[4];
  if (new_k->untyped_data() != k.untyped_data() || new_v->untyped_data() != v.untyped_data()) {
    return ffi::Error::Internal("the cache was not handed over in place");
  }
  const int64_t num_pages = k.dimensions()[0];
  for (size_t i = 0; i < table.element_count(); ++i) {
    const int32_t page = table.typed_data()[i];
    if (page < 0 || page >= num_pages) {
      return ffi::Error::InvalidArgument("the table names page " + std::to_string(page) +
                                         " of a cache of " + std::to_string(num_pages));
    }
  }
  auto run = [&](auto element) {
    using T = decltype(element);
    const AttendFunction<T> attend = AttendOf<T>(head_size);
    if (attend == nullptr) return ffi::Error::InvalidArgument("head size not supported");
    AttentionInputs<T> in;
    in.window = shape[1];
    in.num_heads = num_heads;
    in.group = shape[3] - 2;
    in.head_size = head_size;
    in.block = k.dimensions()[2];
    in.num_blocks = table.dimensions()[1];
    in.rotary_size = 2 * cos.dimensions().back();
    in.sliding_window = sliding_window;
    in.epsilon = epsilon;
    in.is_interleaved = is_interleaved;
    in.qkv = static_cast<const T*>(qkv.untyped_data());
    in.bias = Optional<T>(bias);
    in.query_norm = Optional<T>(query_norm);
    in.key_norm = Optional<T>(key_norm);
    in.cos = cos.typed_data();
    in.sin = sin.typed_data();
    in.k = static_cast<T*>(k.untyped_data());
    in.v = static_cast<T*>(v.untyped_data());
    in.table = table.typed_data();
    in.positions = positions.typed_data();
    in.slots = slots.typed_data();
    in.output = static_cast<T*>(output->untyped_data());
    Team::Get().For(num_rows * num_heads, [&](int64_t task) {
      attend(in, task / num_heads, task % num_heads);
    });
    return ffi::Error::Success();
  };
  return qkv.element_type() == ffi::F32 ? run(float{}) : run(uint16_t{});
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxspec_product, ProductHandler,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("epsilon")
                                  .Attr<bool>("is_gated"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxspec_attention, AttentionHandler,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("epsilon")
                                  .Attr<bool>("is_interleaved")
                                  .Attr<int64_t>("sliding_window"));

extern "C" int jaxspec_num_lanes() { return kLanes; }

extern "C" void jaxspec_start_threads(int count) { Team::Get().Start(count); }
