// Moving what is stored of some slots to others.

#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

namespace jaxspec {

// One array of a layer's cache.
struct Stored {
  char* data;
  int64_t num_pages, num_heads, block;
  int64_t size;  // bytes of a head's slot

  char* At(int64_t page, int64_t head, int64_t slot) const {
    return data + ((page * num_heads + head) * block + slot) * size;
  }
};

// Where a slot lies, and where it goes to.
struct Move {
  int64_t from_page, from_slot, to_page, to_slot;
};

// Everything is read before anything is written.
inline void MoveSlots(const Stored& array, const std::vector<Move>& moves) {
  thread_local std::vector<char> taken;
  taken.resize(moves.size() * array.num_heads * array.size);
  char* next = taken.data();
  for (const Move& move : moves) {
    for (int64_t head = 0; head < array.num_heads; ++head, next += array.size) {
      std::memcpy(next, array.At(move.from_page, head, move.from_slot), array.size);
    }
  }
  next = taken.data();
  for (const Move& move : moves) {
    for (int64_t head = 0; head < array.num_heads; ++head, next += array.size) {
      std::memcpy(array.At(move.to_page, head, move.to_slot), next, array.size);
    }
  }
}

}  // namespace jaxspec
