// Products of rows with a weight that was packed when its model was loaded.
//
// A packed weight is read once, in order: `packed[panel][input / 2][column][input % 2]`, with kPanel
// columns in a panel, and zeros where there are no more columns or inputs. Both inputs of a pair lie
// together because the processors' instructions for bfloat16 multiply and add pairs.
//
// Every sum runs over the inputs in one order, whatever the number of rows, the tile that an output
// falls into, or the thread. The order is the family's (`Family`), and a process has one family.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "matrix_units.h"
#include "norms.h"
#include "threads.h"
#include "vectors.h"

namespace jaxspec {

constexpr int64_t kPanel = 16;         // columns
constexpr int64_t kInputs = 32;        // inputs are filled up to a multiple of this
constexpr int64_t kGroup = 4;          // panels that a thread takes at a time
constexpr int64_t kAheadBytes = 4096;  // of a panel, what is fetched before it is needed

// Bytes of a panel to fetch ahead, for a weight of this many bytes and this many rows.
//
// Large weights come from memory, which AMD's processors with AVX-512 stream fastest on their own: on
// Zen 4, prefetching made products of up to seven rows up to 1.2 times slower, made no difference for
// eight, and helped a little from twelve rows on. Smaller weights may come from the third-level cache,
// where prefetching helps from three rows on. AMD's older processors were not measured.
inline int64_t AheadBytes(int64_t weight_bytes, int64_t num_rows) {
#if defined(__AVX512F__)
  static const bool is_amd = __builtin_cpu_is("amd");
  if (is_amd && weight_bytes > int64_t{4} << 20 && num_rows <= 8) return 0;
#endif
  return kAheadBytes;
}

// ------------------------------------------------------------------------------------------ packing

// Asks for huge pages: what is read from end to end would need a new page of 4 KiB all the time.
inline void AdviseHugePages(void* data, size_t num_bytes) {
#if defined(__linux__)
  constexpr uintptr_t kHuge = uintptr_t{1} << 21;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kHuge - 1) / kHuge * kHuge;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + num_bytes) / kHuge * kHuge;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

// weight [num_inputs, num_outputs] -> packed [panels, padded inputs / 2, kPanel, 2].
template <typename T>
void Pack(const T* weight, T* packed, int64_t num_inputs, int64_t num_outputs) {
  const int64_t num_panels = RoundUp(num_outputs, kPanel) / kPanel;
  const int64_t num_padded = RoundUp(num_inputs, kInputs);
  AdviseHugePages(packed, num_panels * num_padded * kPanel * sizeof(T));
  Team::Get().For(RoundUp(num_panels, kGroup) / kGroup, [=](int64_t group) {
    const int64_t begin = group * kGroup, end = std::min(begin + kGroup, num_panels);
    for (int64_t input = 0; input < num_padded; ++input) {
      for (int64_t panel = begin; panel < end; ++panel) {
        T* const to = packed + (panel * num_padded + input / 2 * 2) * kPanel + input % 2;
        const T* const from = weight + input * num_outputs + panel * kPanel;
        const int64_t count = input < num_inputs ? num_outputs - panel * kPanel : 0;
        for (int64_t i = 0; i < kPanel; ++i) to[2 * i] = i < count ? from[i] : T{};
      }
    }
  });
}

// ---------------------------------------------------------------------------------- with vectors

// Vectors that hold a row's sums of a panel. Those of floats are apart for even and odd inputs until
// the end: a vector has kLanes / 2 columns.
template <typename T>
constexpr int kVectors = (std::is_same_v<T, float> ? 2 : 1) * kPanel / kLanes;

template <typename T>
constexpr int kTileSums = std::is_same_v<T, float> ? kNumSums : kNumSumsOfPairs;

template <typename T>
constexpr int kTileRows = std::min(kTileSums<T> / kVectors<T>, 12);

// Panels of a tile of so many rows, as many as registers hold.
template <typename T>
constexpr int PanelsOf(int num_rows) {
  const int most = kTileSums<T> / (num_rows * kVectors<T>);
  return most >= kGroup ? kGroup : most >= 2 ? 2 : 1;
}

// Sums of kRows rows of x and of kPanels neighbouring panels, to sums [kRows, kGroup * kPanel]. What
// lies `ahead` numbers after those of a panel that are read is fetched.
template <typename T, int kRows, int kPanels>
void Tile(const T* x, const T* packed, int64_t num_inputs, int64_t ahead, float* sums) {
  constexpr int kSums = kPanels * kVectors<T>, kPerPanel = kVectors<T>, kOut = kPanel / kLanes;
  using Pair = std::conditional_t<std::is_same_v<T, float>, uint64_t, uint32_t>;
  using Pairs = typename VectorOf<Pair, sizeof(Vector) / sizeof(Pair)>::type;
  Vector of[kRows][kSums] = {};
  // One pointer for two rows: with one for each row, as GCC would have it, there are too many for the
  // general registers.
  const T* of_two_rows[(kRows + 1) / 2];
#pragma GCC unroll 64
  for (int i = 0; i < (kRows + 1) / 2; ++i) {
    of_two_rows[i] = x + 2 * i * num_inputs;
    asm("" : "+r"(of_two_rows[i]));  // GCC does not know where it points
  }
  const auto inputs_of = [&](int r, int64_t input) {
    Pair pair;
    std::memcpy(&pair, of_two_rows[r / 2] + (input + r % 2 * num_inputs), sizeof(pair));
    Numbers<T> inputs = Bits<Numbers<T>>(Pairs{} + pair);
    Keep(inputs);
    return inputs;
  };
  const auto weights_of = [&](int i, int64_t input) {
    const T* const from = packed + (i / kPerPanel * num_inputs + input) * kPanel +
                          i % kPerPanel * kNumbers<T>;
    if (i * sizeof(Vector) % 64 == 0) __builtin_prefetch(from + ahead);
    return LoadNumbers(from);
  };
  // Registers hold the sums and the fewer of the rows' inputs and the weights. GCC unrolls loops over
  // registers where it is told to; if it does not, it keeps them in memory.
  for (int64_t input = 0; input < num_inputs; input += 2) {
    if constexpr (kRows < kSums) {
      Numbers<T> inputs[kRows];
#pragma GCC unroll 64
      for (int r = 0; r < kRows; ++r) inputs[r] = inputs_of(r, input);
#pragma GCC unroll 64
      for (int i = 0; i < kSums; ++i) {
        Numbers<T> weights = weights_of(i, input);
        Keep(weights);
#pragma GCC unroll 64
        for (int r = 0; r < kRows; ++r) of[r][i] = AddPairs(inputs[r], weights, of[r][i]);
      }
    } else {
      Numbers<T> weights[kSums];
#pragma GCC unroll 64
      for (int i = 0; i < kSums; ++i) weights[i] = weights_of(i, input);
#pragma GCC unroll 64
      for (int r = 0; r < kRows; ++r) {
        const Numbers<T> inputs = inputs_of(r, input);
#pragma GCC unroll 64
        for (int i = 0; i < kSums; ++i) of[r][i] = AddPairs(inputs, weights[i], of[r][i]);
      }
    }
  }
#pragma GCC unroll 64
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 64
    for (int i = 0; i < kPanels * kOut; ++i) {
      Vector sum = of[r][i];
      if constexpr (kPerPanel > kOut) sum = AddNeighbours(of[r][2 * i], of[r][2 * i + 1]);
      Store(sums + r * kGroup * kPanel + i * kLanes, sum);
    }
  }
}

template <typename T, int kWide, int... kRows>
constexpr auto TilesOfRows(std::integer_sequence<int, kRows...>) {
  return std::array{Tile<T, kRows + 1, kWide ? PanelsOf<T>(kRows + 1) : 1>...};
}

// The panels of a group, in tiles of equal height, or a row less: `put` takes the sums [height, kGroup *
// kPanel] of each tile, and its first row. The last tile, which finds the panels in the cache, fetches
// what lies `ahead` numbers after them.
template <typename T, typename Put>
void SumWithVectors(const T* x, const T* packed, int64_t num_rows, int64_t num_inputs,
                    int64_t num_panels, int64_t ahead, const Put& put) {
  constexpr auto kRows = std::make_integer_sequence<int, kTileRows<T>>();
  static constexpr auto kWide = TilesOfRows<T, 1>(kRows), kNarrow = TilesOfRows<T, 0>(kRows);
  alignas(64) float sums[kTileRows<T> * kGroup * kPanel];
  const int64_t num_tiles = RoundUp(num_rows, kTileRows<T>) / kTileRows<T>;
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    const int64_t row = num_rows * tile / num_tiles;
    const int64_t height = num_rows * (tile + 1) / num_tiles - row, width = PanelsOf<T>(height);
    const int64_t fetched = tile == num_tiles - 1 ? ahead : 0;
    for (int64_t panel = 0; panel < num_panels;) {
      const bool is_wide = num_panels - panel >= width;
      (is_wide ? kWide : kNarrow)[height - 1](x + row * num_inputs,
                                              packed + panel * num_inputs * kPanel, num_inputs, fetched,
                                              sums + panel * kPanel);
      panel += is_wide ? width : 1;
    }
    put(row, height, sums);
  }
}

// --------------------------------------------------------------------------------- with matrix units

// How the rows of x lie in tiles of equal height: [tile, inputs / kInputs, height, kInputs], so that
// what a register is loaded with is in one piece.
struct RowTiles {
  int64_t count, height, num_inputs;

  RowTiles(int64_t num_rows, int64_t num_inputs)
      : count(RoundUp(num_rows, 16) / 16),
        height(RoundUp(num_rows, count) / count),
        num_inputs(num_inputs) {}

  int64_t num_rows() const { return count * height; }  // some of the last may be none of x

  void Put(const uint16_t* inputs, int64_t row, uint16_t* tiles) const {
    tiles += row / height * height * num_inputs + row % height * kInputs;
    for (int64_t i = 0; i < num_inputs; i += kInputs) {
      std::memcpy(tiles + i * height, inputs + i, kInputs * sizeof(*inputs));
    }
  }
};

#if defined(__AMX_BF16__) && defined(__linux__)

constexpr int64_t kTile = kInputs * kPanel, kSumsBytes = kGroup * kPanel * sizeof(float);

// What is needed kAheadBytes after this tile.
inline void FetchTile(const uint16_t* tile) {
  const uint16_t* const ahead = tile + kAheadBytes / sizeof(*tile);
  for (int64_t i = 0; i < kTile; i += 64 / sizeof(*tile)) __builtin_prefetch(ahead + i);
}

// The matrix registers are numbered in the text of a program, so each arrangement of tiles is written
// out: x begins with the first tile of rows, sums are [rows, kGroup * kPanel].

// One tile of rows, and one to four panels.
template <int kPanels>
void MultiplyOneByFour(const uint16_t* x, const RowTiles& of, const uint16_t* packed, float* sums) {
  const int64_t panel = of.num_inputs * kPanel;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t i = 0; i < of.num_inputs; i += kInputs, packed += kTile) {
    for (int p = 0; p < kPanels; ++p) FetchTile(packed + p * panel);
    _tile_loadd(4, x + i * of.height, 64);
    _tile_loadd(6, packed, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kPanels > 1) {
      _tile_loadd(7, packed + panel, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kPanels > 2) {
      _tile_loadd(6, packed + 2 * panel, 64);
      _tile_dpbf16ps(2, 4, 6);
    }
    if constexpr (kPanels > 3) {
      _tile_loadd(7, packed + 3 * panel, 64);
      _tile_dpbf16ps(3, 4, 7);
    }
  }
  _tile_stored(0, sums, kSumsBytes);
  if constexpr (kPanels > 1) _tile_stored(1, sums + kPanel, kSumsBytes);
  if constexpr (kPanels > 2) _tile_stored(2, sums + 2 * kPanel, kSumsBytes);
  if constexpr (kPanels > 3) _tile_stored(3, sums + 3 * kPanel, kSumsBytes);
}

// Two tiles of rows, and one or two panels.
template <int kPanels>
void MultiplyTwoByTwo(const uint16_t* x, const RowTiles& of, const uint16_t* packed, float* sums) {
  const int64_t panel = of.num_inputs * kPanel;
  const uint16_t* const second = x + of.height * of.num_inputs;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t i = 0; i < of.num_inputs; i += kInputs, packed += kTile) {
    for (int p = 0; p < kPanels; ++p) FetchTile(packed + p * panel);
    _tile_loadd(4, x + i * of.height, 64);
    _tile_loadd(5, second + i * of.height, 64);
    _tile_loadd(6, packed, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 5, 6);
    if constexpr (kPanels > 1) {
      _tile_loadd(7, packed + panel, 64);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  float* const sums_of_second = sums + of.height * kGroup * kPanel;
  _tile_stored(0, sums, kSumsBytes);
  _tile_stored(1, sums_of_second, kSumsBytes);
  if constexpr (kPanels > 1) _tile_stored(2, sums + kPanel, kSumsBytes);
  if constexpr (kPanels > 1) _tile_stored(3, sums_of_second + kPanel, kSumsBytes);
}

// Three tiles of rows, as those of a batch's round, and one or two panels.
template <int kPanels>
void MultiplyThreeByTwo(const uint16_t* x, const RowTiles& of, const uint16_t* packed, float* sums) {
  const int64_t panel = of.num_inputs * kPanel;
  const uint16_t* const second = x + of.height * of.num_inputs;
  const uint16_t* const third = second + of.height * of.num_inputs;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  for (int64_t i = 0; i < of.num_inputs; i += kInputs, packed += kTile) {
    for (int p = 0; p < kPanels; ++p) FetchTile(packed + p * panel);
    _tile_loadd(6, x + i * of.height, 64);
    _tile_loadd(7, packed, 64);
    _tile_dpbf16ps(0, 6, 7);
    if constexpr (kPanels > 1) {
      _tile_loadd(7, packed + panel, 64);
      _tile_dpbf16ps(3, 6, 7);
    }
    _tile_loadd(6, second + i * of.height, 64);
    if constexpr (kPanels > 1) {
      _tile_dpbf16ps(4, 6, 7);
      _tile_loadd(7, packed, 64);
    }
    _tile_dpbf16ps(1, 6, 7);
    _tile_loadd(6, third + i * of.height, 64);
    _tile_dpbf16ps(2, 6, 7);
    if constexpr (kPanels > 1) {
      _tile_loadd(7, packed + panel, 64);
      _tile_dpbf16ps(5, 6, 7);
    }
  }
  float* const sums_of_second = sums + of.height * kGroup * kPanel;
  float* const sums_of_third = sums_of_second + of.height * kGroup * kPanel;
  _tile_stored(0, sums, kSumsBytes);
  _tile_stored(1, sums_of_second, kSumsBytes);
  _tile_stored(2, sums_of_third, kSumsBytes);
  if constexpr (kPanels > 1) _tile_stored(3, sums + kPanel, kSumsBytes);
  if constexpr (kPanels > 1) _tile_stored(4, sums_of_second + kPanel, kSumsBytes);
  if constexpr (kPanels > 1) _tile_stored(5, sums_of_third + kPanel, kSumsBytes);
}

// As SumWithVectors, of rows in tiles; sums has `of.num_rows()` rows.
inline void SumWithMatrixUnits(const uint16_t* x, const RowTiles& of, const uint16_t* packed,
                               int64_t num_panels, float* sums) {
  constexpr std::array kOne = {MultiplyOneByFour<1>, MultiplyOneByFour<2>, MultiplyOneByFour<3>,
                               MultiplyOneByFour<4>};
  constexpr std::array kTwo = {MultiplyTwoByTwo<1>, MultiplyTwoByTwo<2>};
  constexpr std::array kThree = {MultiplyThreeByTwo<1>, MultiplyThreeByTwo<2>};
  for (int64_t tile = 0; tile < of.count;) {
    const int64_t num_left = of.count - tile;
    const int64_t num_tiles = num_left == 3 ? 3 : std::min<int64_t>(num_left, 2);
    const uint16_t* const rows = x + tile * of.height * of.num_inputs;
    const TileShape of_rows = {of.height, 64}, of_weights = {16, 64};
    const MatrixRegisters registers({of_rows, of_rows, of_rows, of_rows, of_rows, of_rows,
                                     num_tiles == 3 ? of_rows : of_weights, of_weights});
    for (int64_t p = 0; p < num_panels;) {
      const int64_t width = num_tiles == 1 ? num_panels : std::min<int64_t>(num_panels - p, 2);
      const auto multiply = (num_tiles == 1   ? kOne[width - 1]
                             : num_tiles == 2 ? kTwo[width - 1]
                                              : kThree[width - 1]);
      multiply(rows, of, packed + p * of.num_inputs * kPanel,
               sums + (tile * of.height * kGroup + p) * kPanel);
      p += width;
    }
    tile += num_tiles;
  }
}

#else

inline void SumWithMatrixUnits(const uint16_t*, const RowTiles&, const uint16_t*, int64_t, float*) {}

#endif

// -------------------------------------------------------------------------------------- the product

// What multiplies bfloat16: it decides the order of sums, and with it an output's last bits.
inline const char* Family() {
  if (HasMatrixUnits()) return "AMX";
#if defined(__AVX512BF16__)
  return "AVX512-BF16";
#elif defined(__AVX512F__)
  return "AVX512";
#elif defined(__AVX__) && defined(__FMA__)
  return "AVX2";
#elif defined(__aarch64__)
  return "NEON";
#else
  return "generic";
#endif
}

// Rows in blocks of equal height, or a row less, small enough that a block stays in a core's cache.
struct RowBlocks {
  static constexpr int64_t kRows = 128;
  int64_t num_rows, count;

  explicit RowBlocks(int64_t num_rows)
      : num_rows(num_rows), count(RoundUp(num_rows, kRows) / kRows) {}

  int64_t Begin(int64_t block) const { return num_rows * block / count; }
  int64_t Height(int64_t block) const { return Begin(block + 1) - Begin(block); }
  int64_t BlockOf(int64_t row) const { return ((row + 1) * count - 1) / num_rows; }
};

// Rounds sums, adds the residual, if there is one, and rounds again.
template <typename T, typename Out>
inline void StoreSums(const float* sums, const T* residual, Out* y, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) {
    Vector sum = Round<Out>(Load(sums + i));
    if (residual != nullptr) sum = Round<Out>(Load(residual + i, count - i) + sum);
    Store(y + i, sum, count - i);
  }
}

// Panels that a thread takes at a time: few enough that each thread takes several, and, if `is_even`,
// that none has much more to do than another.
inline int64_t GroupSize(int64_t num_panels, int64_t num_blocks, bool is_even) {
  const int64_t num_threads = Team::Get().num_threads();
  const auto most = [=](int64_t size) {  // panels of one thread
    const int64_t num_groups = num_blocks * (RoundUp(num_panels, size) / size);
    return RoundUp(num_groups, num_threads) / num_threads * size;
  };
  int64_t size = kGroup;
  while (size > 1 && (num_panels < 4 * size * num_threads ||
                      (is_even && most(size) > 1.05 * most(size / 2)))) {
    size /= 2;
  }
  return size;
}

// y [.., num_outputs] = f(x) @ weight + residual. f is an RMS norm, if there is a weight for it, or SiLU
// gates, or nothing. Of x and y only `num_rows` rows are read and written: the first ones, or `rows`.
template <typename T, typename Out>
void Product(const T* x, const T* norm, float epsilon, bool is_gated, const T* packed,
             const T* residual, Out* y, const int32_t* rows, int64_t num_rows, int64_t num_inputs,
             int64_t num_padded, int64_t num_outputs) {
  thread_local std::vector<T> scratch;
  const bool has_tiles = std::is_same_v<T, uint16_t> && HasMatrixUnits();
  const RowBlocks blocks(num_rows);
  const auto place_of = [=](int64_t row) { return rows == nullptr ? row : int64_t{rows[row]}; };
  // Where a block begins in what is prepared; tiles of a block take no more rows than blocks have.
  const auto block_begin = [=](int64_t block) {
    return (has_tiles ? block * RowBlocks::kRows : blocks.Begin(block)) * num_padded;
  };
  if (has_tiles || norm != nullptr || is_gated || num_padded > num_inputs || rows != nullptr) {
    const size_t needed = has_tiles ? block_begin(blocks.count) : num_rows * num_padded;
    if (scratch.size() < needed) scratch.resize(needed);
    T* const to = scratch.data();
    const auto prepare = [=](int64_t row) {
      thread_local std::vector<T> prepared;
      if (has_tiles) prepared.resize(num_padded);
      T* const inputs = has_tiles ? prepared.data() : to + row * num_padded;
      const int64_t place = place_of(row);
      if (is_gated) {
        Gate(x + place * 2 * num_inputs, inputs, num_inputs);
      } else if (norm != nullptr) {
        Norm(x + place * num_inputs, norm, epsilon, inputs, num_inputs);
      } else {
        std::copy_n(x + place * num_inputs, num_inputs, inputs);
      }
      std::fill(inputs + num_inputs, inputs + num_padded, T{});
      if constexpr (std::is_same_v<T, uint16_t>) {
        if (!has_tiles) return;
        const int64_t block = blocks.BlockOf(row);
        const RowTiles tiles(blocks.Height(block), num_padded);
        tiles.Put(inputs, row - blocks.Begin(block), to + block_begin(block));
      }
    };
    if (num_rows * num_inputs >= 4096) {
      const int64_t piece = std::clamp<int64_t>(num_rows / (4 * Team::Get().num_threads()), 1, 8);
      Team::Get().For(RoundUp(num_rows, piece) / piece, [=](int64_t i) {
        const int64_t end = std::min((i + 1) * piece, num_rows);
        for (int64_t row = i * piece; row < end; ++row) prepare(row);
      });
    } else {
      for (int64_t row = 0; row < num_rows; ++row) prepare(row);
    }
    x = to;
  }
  const int64_t num_panels = RoundUp(num_outputs, kPanel) / kPanel;
  const int64_t num_bytes = num_panels * kPanel * num_padded * sizeof(T);
  // Of a few rows, memory is what takes time, and it is read faster in large groups.
  const int64_t size = GroupSize(num_panels, blocks.count, num_rows > 8 && !has_tiles);
  const int64_t num_groups = RoundUp(num_panels, size) / size;
  Team::Get().For(blocks.count * num_groups, [=](int64_t task) {
    const int64_t block = task / num_groups, height = blocks.Height(block);
    const int64_t begin = task % num_groups * size, count = std::min(size, num_panels - begin);
    const T* const panels = packed + begin * num_padded * kPanel;
    const T* const inputs = x + block_begin(block);
    const int64_t first = blocks.Begin(block), column = begin * kPanel;
    const int64_t width = std::min(count * kPanel, num_outputs - column);
    const auto put = [=](int64_t row, int64_t num_here, const float* sums) {
      for (int64_t i = 0; i < num_here; ++i, sums += kGroup * kPanel) {
        const int64_t at = place_of(first + row + i) * num_outputs + column;
        StoreSums(sums, residual == nullptr ? nullptr : residual + at, y + at, width);
      }
    };
    if constexpr (std::is_same_v<T, uint16_t>) {
      if (has_tiles) {
        const RowTiles tiles(height, num_padded);
        thread_local std::vector<float> sums;
        sums.resize(tiles.num_rows() * kGroup * kPanel);
        SumWithMatrixUnits(inputs, tiles, panels, count, sums.data());
        return put(0, height, sums.data());
      }
    }
    // Of many rows, while a thread multiplies one group it fetches the one that it takes next.
    int64_t ahead = AheadBytes(num_bytes, height) / sizeof(T);
    const int64_t next = size * Team::Get().num_threads();
    if (ahead > 0 && begin + next < num_panels) ahead = next * num_padded * kPanel;
    SumWithVectors(inputs, panels, height, num_padded, count, ahead, put);
  });
}

}  // namespace jaxspec
