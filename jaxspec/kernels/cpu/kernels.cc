// Attention and products of a few rows, for CPUs: what XLA:CPU does far below the hardware's rate.
//
// XLA FFI handlers, called from `jaxspec.kernels.cpu`, which says what they compute:
//   jaxspec_pack       a weight in the order in which products read it
//   jaxspec_product    a product with what stands before and behind it in a decoder layer
//   jaxspec_attention  attention of a window over a row's own live KV, read where it lies
//   jaxspec_highest    the highest scores of rows, and what all scores of a row add up to
//   jaxspec_move       KV of some slots to other slots of their rows, in all layers
//
// An output's bits depend on its own row's numbers only. Every sum runs in one order, over the inputs
// of a product, the components of a head, the slots of a row from first to last, whatever the number
// of rows, the tile an output falls into, or the thread that computes it.
//
// Values are float, or bfloat16 as uint16_t. Sums are float; what XLA would round to bfloat16 (normed
// inputs, gated inputs, probabilities, results) is rounded here too.

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "attention.h"
#include "highest.h"
#include "move.h"
#include "product.h"
#include "threads.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace jaxspec {
namespace {

namespace ffi = xla::ffi;

template <typename T>
const T* Optional(const ffi::AnyBuffer& buffer) {
  return buffer.element_count() == 0 ? nullptr : static_cast<const T*>(buffer.untyped_data());
}

const int32_t* Optional(const ffi::Buffer<ffi::S32>& buffer) {
  return buffer.element_count() == 0 ? nullptr : buffer.typed_data();
}

ffi::Error PackHandler(ffi::AnyBuffer weight, ffi::Result<ffi::AnyBuffer> packed) {
  auto run = [&](auto of) {
    using T = decltype(of);
    Pack(static_cast<const T*>(weight.untyped_data()), static_cast<T*>(packed->untyped_data()),
         weight.dimensions()[0], weight.dimensions()[1]);
    return ffi::Error::Success();
  };
  return weight.element_type() == ffi::F32 ? run(float{}) : run(uint16_t{});
}

ffi::Error ProductHandler(ffi::AnyBuffer x, ffi::AnyBuffer norm, ffi::AnyBuffer packed,
                          ffi::AnyBuffer residual, ffi::Buffer<ffi::S32> num_live,
                          ffi::Result<ffi::AnyBuffer> y, float epsilon, bool is_gated) {
  const int64_t num_rows = x.dimensions()[0];
  const int64_t num_inputs = x.dimensions()[1] / (is_gated ? 2 : 1);
  const int64_t num_padded = 2 * packed.dimensions()[1], num_outputs = y->dimensions()[1];
  const ffi::DataType type = x.element_type();
  if ((type != ffi::F32 && type != ffi::BF16) || packed.element_type() != type) {
    return ffi::Error::InvalidArgument("x and the packed weight must both be fp32 or both bf16");
  }
  const int64_t num_panels = packed.dimensions()[0], num_packed = packed.element_count();
  if (num_panels * kPanel < num_outputs || num_padded < num_inputs || num_padded % kInputs != 0 ||
      num_packed != num_panels * num_padded * kPanel) {
    return ffi::Error::InvalidArgument("the packed weight is not of this product's shape");
  }
  // Of each of equal parts of the rows, the first ones are computed.
  const int64_t num_parts = num_live.element_count();
  std::vector<int32_t> rows;
  for (int64_t part = 0; part < num_parts; ++part) {
    const int64_t size = num_rows / num_parts;
    const int64_t count = std::clamp<int64_t>(num_live.typed_data()[part], 0, size);
    for (int64_t row = 0; row < count; ++row) rows.push_back(part * size + row);
  }
  const int64_t num_computed = num_parts == 0 ? num_rows : rows.size();
  if (num_computed == 0) return ffi::Error::Success();
  const bool are_first = rows.empty() || rows.back() == num_computed - 1;
  auto run = [&](auto of, auto out) {
    using T = decltype(of);
    using Out = decltype(out);
    Product<T, Out>(static_cast<const T*>(x.untyped_data()), Optional<T>(norm), epsilon, is_gated,
                    static_cast<const T*>(packed.untyped_data()), Optional<T>(residual),
                    static_cast<Out*>(y->untyped_data()), are_first ? nullptr : rows.data(),
                    num_computed, num_inputs, num_padded, num_outputs);
    return ffi::Error::Success();
  };
  if (x.element_type() == ffi::F32) return run(float{}, float{});
  if (y->element_type() == ffi::F32) return run(uint16_t{}, float{});
  return run(uint16_t{}, uint16_t{});
}

ffi::Error CheckTable(const ffi::Buffer<ffi::S32>& table, int64_t num_pages) {
  for (size_t i = 0; i < table.element_count(); ++i) {
    const int32_t page = table.typed_data()[i];
    if (page < 0 || page >= num_pages) {
      return ffi::Error::InvalidArgument("the table names page " + std::to_string(page) +
                                         " of a cache of " + std::to_string(num_pages));
    }
  }
  return ffi::Error::Success();
}

// Of codes there are scales, otherwise these are null.
ffi::Error Attention(ffi::AnyBuffer qkv, ffi::AnyBuffer bias, ffi::AnyBuffer query_norm,
                     ffi::AnyBuffer key_norm, ffi::Buffer<ffi::F32> cos, ffi::Buffer<ffi::F32> sin,
                     ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::Buffer<ffi::S32> table,
                     ffi::Buffer<ffi::S32> positions, ffi::Buffer<ffi::S32> slots,
                     ffi::Buffer<ffi::S32> start, ffi::Buffer<ffi::S32> paths,
                     ffi::Buffer<ffi::S32> ends, ffi::Buffer<ffi::S32> num_live, float* k_scale,
                     float* v_scale,
                     ffi::Result<ffi::AnyBuffer> output, ffi::Result<ffi::AnyBuffer> new_k,
                     ffi::Result<ffi::AnyBuffer> new_v, const ffi::Dictionary& settings) {
  const auto shape = qkv.dimensions();  // [B, T, K, G + 2, H]
  const int64_t num_rows = shape[0], num_heads = shape[2], head_size = shape[4];
  if (new_k->untyped_data() != k.untyped_data() || new_v->untyped_data() != v.untyped_data()) {
    return ffi::Error::Internal("the cache was not handed over in place");
  }
  if (ffi::Error error = CheckTable(table, k.dimensions()[0]); error.failure()) return error;
  const auto epsilon = settings.get<float>("epsilon");
  const auto is_interleaved = settings.get<bool>("is_interleaved");
  const auto has_chunks = settings.get<bool>("has_chunks");
  const auto sliding_window = settings.get<int64_t>("sliding_window");
  ffi::ErrorOr<int64_t> num_sinks = 0;  // given for a ring only
  if (settings.contains("num_sinks")) num_sinks = settings.get<int64_t>("num_sinks");
  if (!epsilon.has_value() || !is_interleaved.has_value() || !has_chunks.has_value() ||
      !sliding_window.has_value() || !num_sinks.has_value()) {
    return ffi::Error::InvalidArgument("a setting is missing");
  }
  auto run = [&](auto element, auto stored) {
    using T = decltype(element);
    using S = decltype(stored);
    AttentionInputs<T, S> in;
    in.window = shape[1];
    in.num_heads = num_heads;
    in.group = shape[3] - 2;
    in.head_size = head_size;
    in.block = k.dimensions()[2];
    in.num_blocks = table.dimensions()[1];
    in.depth = paths.dimensions().back();
    in.rotary_size = 2 * cos.dimensions().back();
    in.sliding_window = *sliding_window;
    in.num_sinks = *num_sinks;
    in.epsilon = *epsilon;
    in.is_interleaved = *is_interleaved;
    in.qkv = static_cast<const T*>(qkv.untyped_data());
    in.bias = Optional<T>(bias);
    in.query_norm = Optional<T>(query_norm);
    in.key_norm = Optional<T>(key_norm);
    in.cos = cos.typed_data();
    in.sin = sin.typed_data();
    in.k = static_cast<S*>(k.untyped_data());
    in.v = static_cast<S*>(v.untyped_data());
    in.k_scale = k_scale;
    in.v_scale = v_scale;
    in.table = table.typed_data();
    in.positions = positions.typed_data();
    in.slots = slots.typed_data();
    in.start = start.typed_data();
    in.paths = Optional(paths);
    in.ends = Optional(ends);
    in.output = static_cast<T*>(output->untyped_data());
    const int32_t* const counts = Optional(num_live);
    if (*has_chunks && counts != nullptr) {
      AttendToChunks(in, num_rows, counts);
      return ffi::Error::Success();
    }
    Team::Get().For(num_rows * num_heads, [&](int64_t task) {
      const RowHead<T, S> of = {in, task / num_heads, task % num_heads};
      const int64_t count = counts == nullptr ? in.window : std::min<int64_t>(counts[of.row], in.window);
      if (count > 0) Attend(of, 0, count, true);
    });
    return ffi::Error::Success();
  };
  const bool is_wide = qkv.element_type() == ffi::F32;
  if (k_scale != nullptr) return is_wide ? run(float{}, int8_t{}) : run(uint16_t{}, int8_t{});
  return is_wide ? run(float{}, float{}) : run(uint16_t{}, uint16_t{});
}

ffi::Error AttentionHandler(ffi::AnyBuffer qkv, ffi::AnyBuffer bias, ffi::AnyBuffer query_norm,
                            ffi::AnyBuffer key_norm, ffi::Buffer<ffi::F32> cos,
                            ffi::Buffer<ffi::F32> sin, ffi::AnyBuffer k, ffi::AnyBuffer v,
                            ffi::Buffer<ffi::S32> table, ffi::Buffer<ffi::S32> positions,
                            ffi::Buffer<ffi::S32> slots, ffi::Buffer<ffi::S32> start,
                            ffi::Buffer<ffi::S32> paths, ffi::Buffer<ffi::S32> ends,
                            ffi::Buffer<ffi::S32> num_live, ffi::Result<ffi::AnyBuffer> output,
                            ffi::Result<ffi::AnyBuffer> new_k, ffi::Result<ffi::AnyBuffer> new_v,
                            ffi::Dictionary settings) {
  return Attention(qkv, bias, query_norm, key_norm, cos, sin, k, v, table, positions, slots, start,
                   paths, ends, num_live, nullptr, nullptr, output, new_k, new_v, settings);
}

ffi::Error CodedAttentionHandler(
    ffi::AnyBuffer qkv, ffi::AnyBuffer bias, ffi::AnyBuffer query_norm, ffi::AnyBuffer key_norm,
    ffi::Buffer<ffi::F32> cos, ffi::Buffer<ffi::F32> sin, ffi::AnyBuffer k, ffi::AnyBuffer v,
    ffi::Buffer<ffi::S32> table, ffi::Buffer<ffi::S32> positions, ffi::Buffer<ffi::S32> slots,
    ffi::Buffer<ffi::S32> start, ffi::Buffer<ffi::S32> paths, ffi::Buffer<ffi::S32> ends,
    ffi::Buffer<ffi::S32> num_live, ffi::Buffer<ffi::F32> k_scale, ffi::Buffer<ffi::F32> v_scale,
    ffi::Result<ffi::AnyBuffer> output, ffi::Result<ffi::AnyBuffer> new_k,
    ffi::Result<ffi::AnyBuffer> new_v, ffi::Result<ffi::Buffer<ffi::F32>> new_k_scale,
    ffi::Result<ffi::Buffer<ffi::F32>> new_v_scale, ffi::Dictionary settings) {
  if (new_k_scale->untyped_data() != k_scale.untyped_data() ||
      new_v_scale->untyped_data() != v_scale.untyped_data()) {
    return ffi::Error::Internal("the scales of the cache were not handed over in place");
  }
  return Attention(qkv, bias, query_norm, key_norm, cos, sin, k, v, table, positions, slots, start,
                   paths, ends, num_live, k_scale.typed_data(), v_scale.typed_data(), output, new_k,
                   new_v, settings);
}

// Without a sharpness of each row it is 1.
ffi::Error HighestHandler(ffi::Buffer<ffi::F32> scores, ffi::Buffer<ffi::F32> sharpness,
                          ffi::Result<ffi::Buffer<ffi::F32>> highest,
                          ffi::Result<ffi::Buffer<ffi::S32>> places,
                          ffi::Result<ffi::Buffer<ffi::F32>> totals) {
  const int64_t num_rows = scores.dimensions()[0], size = scores.dimensions()[1];
  const int64_t count = highest->dimensions()[1];
  if (count < 1 || count > size) {
    return ffi::Error::InvalidArgument(std::to_string(count) + " of " + std::to_string(size) +
                                       " scores were asked for");
  }
  const float* const of_rows = sharpness.element_count() == 0 ? nullptr : sharpness.typed_data();
  Team::Get().For(num_rows, [&](int64_t row) {
    Highest(ScoresOfRow(scores.typed_data() + row * size, size), count,
            of_rows == nullptr ? 1.0f : of_rows[row], highest->typed_data() + row * count,
            places->typed_data() + row * count, totals->typed_data() + row);
  });
  return ffi::Error::Success();
}

// Each of `stored` is `[pages, heads, block]` with the numbers of a head's slot behind, or none for the
// scales of codes. `source` and `target` are `[rows, n]`; slots of `target` outside the row are left out.
ffi::Error MoveHandler(ffi::Buffer<ffi::S32> table, ffi::Buffer<ffi::S32> source,
                       ffi::Buffer<ffi::S32> target, ffi::RemainingArgs stored,
                       ffi::RemainingRets moved) {
  std::vector<Stored> arrays;
  for (size_t i = 0; i < stored.size(); ++i) {
    auto before = stored.get<ffi::AnyBuffer>(i);
    auto after = moved.get<ffi::AnyBuffer>(i);
    if (!before.has_value() || !after.has_value()) {
      return ffi::Error::InvalidArgument("the cache has arrays of another kind");
    }
    if (before->untyped_data() != (*after)->untyped_data()) {
      return ffi::Error::Internal("the cache was not handed over in place");
    }
    const auto shape = before->dimensions();
    arrays.push_back({static_cast<char*>(before->untyped_data()), shape[0], shape[1], shape[2],
                      static_cast<int64_t>(before->size_bytes()) / (shape[0] * shape[1] * shape[2])});
  }
  if (arrays.empty()) return ffi::Error::Success();
  const auto is_like_first = [&](const Stored& array) {
    return array.num_pages == arrays[0].num_pages && array.block == arrays[0].block;
  };
  if (!std::all_of(arrays.begin(), arrays.end(), is_like_first) ||
      source.dimensions()[0] != table.dimensions()[0] ||
      target.dimensions()[0] != table.dimensions()[0] ||
      source.dimensions()[1] != target.dimensions()[1]) {
    return ffi::Error::InvalidArgument("the slots and the cache are not of the table's rows");
  }
  if (ffi::Error error = CheckTable(table, arrays[0].num_pages); error.failure()) return error;
  const int64_t num_blocks = table.dimensions()[1], count = source.dimensions()[1];
  const int64_t block = arrays[0].block, capacity = num_blocks * block;
  std::vector<Move> moves;
  for (int64_t i = 0; i < static_cast<int64_t>(target.element_count()); ++i) {
    const int64_t to = target.typed_data()[i];
    if (to < 0 || to >= capacity) continue;
    const int64_t from = std::clamp<int64_t>(source.typed_data()[i], 0, capacity - 1);
    const int32_t* const pages = table.typed_data() + i / count * num_blocks;
    moves.push_back({pages[from / block], from % block, pages[to / block], to % block});
  }
  if (moves.empty()) return ffi::Error::Success();
  Team::Get().For(arrays.size(), [&](int64_t i) { MoveSlots(arrays[i], moves); });
  return ffi::Error::Success();
}

// What both kinds of attention take first.
auto AttentionArguments() {
  return xla::ffi::Ffi::Bind()
      .Arg<xla::ffi::AnyBuffer>()
      .Arg<xla::ffi::AnyBuffer>()
      .Arg<xla::ffi::AnyBuffer>()
      .Arg<xla::ffi::AnyBuffer>()
      .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
      .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
      .Arg<xla::ffi::AnyBuffer>()
      .Arg<xla::ffi::AnyBuffer>()
      .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
      .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
      .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
      .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
      .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
      .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
      .Arg<xla::ffi::Buffer<xla::ffi::S32>>();
}

}  // namespace
}  // namespace jaxspec

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jaxspec_pack, jaxspec::PackHandler,
    xla::ffi::Ffi::Bind().Arg<xla::ffi::AnyBuffer>().Ret<xla::ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxspec_product, jaxspec::ProductHandler,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<float>("epsilon")
                                  .Attr<bool>("is_gated"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxspec_attention, jaxspec::AttentionHandler,
                              jaxspec::AttentionArguments()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxspec_coded_attention, jaxspec::CodedAttentionHandler,
                              jaxspec::AttentionArguments()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxspec_highest, jaxspec::HighestHandler,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxspec_move, jaxspec::MoveHandler,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .RemainingArgs()
                                  .RemainingRets());

extern "C" int jaxspec_num_lanes() { return jaxspec::kLanes; }

extern "C" const char* jaxspec_family() { return jaxspec::Family(); }

extern "C" void jaxspec_start_threads(int count) { jaxspec::Team::Get().Start(count); }
