// Registers that hold matrices, and whether there are any: AMX.

#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "vectors.h"

namespace jaxspec {

struct TileShape {
  int64_t num_rows, num_bytes;  // of a row: at most 16 rows of 64 bytes
};

#if defined(__AMX_BF16__) && defined(__linux__)

// Whether this process may use AMX: Linux gives its registers to those that ask.
inline bool HasMatrixUnits() {
  constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool is_granted = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  return is_granted;
}

// The matrix registers of this thread, in these shapes while this lives.
class MatrixRegisters {
 public:
  explicit MatrixRegisters(const std::array<TileShape, 8>& shapes) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t num_bytes[16] = {};
      uint8_t num_rows[16] = {};
    } layout;
    for (int i = 0; i < 8; ++i) {
      layout.num_bytes[i] = shapes[i].num_bytes;
      layout.num_rows[i] = shapes[i].num_rows;
    }
    // GCC does not know that these instructions read memory: all must have been written by now.
    std::atomic_signal_fence(std::memory_order_seq_cst);
    _tile_loadconfig(&layout);
  }
  ~MatrixRegisters() { _tile_release(); }
};

#else

inline bool HasMatrixUnits() { return false; }

#endif

}  // namespace jaxspec
