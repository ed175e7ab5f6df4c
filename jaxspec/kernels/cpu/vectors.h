// Vectors of floats on whatever this is compiled for, through the compiler's vector extension.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace jaxspec {

inline int64_t RoundUp(int64_t count, int64_t multiple) {
  return (count + multiple - 1) / multiple * multiple;
}

// Of a product, registers that hold sums of floats, and of pairs of bfloat16, which may have to be taken
// apart.
#if defined(__AVX512F__)
constexpr int kLanes = 16, kNumSums = 24, kNumSumsOfPairs = 24;  // of 32 registers
#elif defined(__AVX__)
constexpr int kLanes = 8, kNumSums = 12, kNumSumsOfPairs = 8;  // of 16
#elif defined(__aarch64__)
constexpr int kLanes = 4, kNumSums = 24, kNumSumsOfPairs = 24;
#else
constexpr int kLanes = 4, kNumSums = 8, kNumSumsOfPairs = 8;
#endif

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

inline Vector Load(const int8_t* from) {
#if defined(__AVX512F__)
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(__AVX2__)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
  VectorOf<int8_t, kLanes>::type codes;
  std::memcpy(&codes, from, sizeof(codes));
  const auto wider = __builtin_convertvector(codes, VectorOf<int16_t, kLanes>::type);
  return __builtin_convertvector(__builtin_convertvector(wider, Integers), Vector);
#endif
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

// Stores all lanes; they must be values of T.
template <typename T>
inline void Store(T* to, Vector x) {
  if constexpr (std::is_same_v<T, float>) {
    std::memcpy(to, &x, sizeof(x));
  } else if constexpr (std::is_same_v<T, int8_t>) {
    const auto integers = __builtin_convertvector(x, Integers);
    const auto codes = __builtin_convertvector(integers, VectorOf<int8_t, kLanes>::type);
    std::memcpy(to, &codes, sizeof(codes));
  } else {
    const auto bits = Bits<Unsigned>(x) >> 16;
    const auto halves = __builtin_convertvector(bits, VectorOf<uint16_t, kLanes>::type);
    std::memcpy(to, &halves, sizeof(halves));
  }
}

// Stores the first `count` lanes.
template <typename T>
inline void Store(T* to, Vector x, int64_t count) {
  if (count >= kLanes) return Store(to, x);
  T lanes[kLanes];
  Store(lanes, x);
  if (count > 0) std::memcpy(to, lanes, count * sizeof(T));
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

// A register full of T: floats, or pairs of bfloat16.
template <typename T>
using Numbers = std::conditional_t<std::is_same_v<T, float>, Vector, Unsigned>;
template <typename T>
constexpr int kNumbers = sizeof(Vector) / sizeof(T);

template <typename T>
inline Numbers<T> LoadNumbers(const T* from) {
  Numbers<T> numbers;
  std::memcpy(&numbers, from, sizeof(numbers));
  return numbers;
}

// The first `count` numbers; the others are 0, and what lies behind is not read.
template <typename T>
inline Numbers<T> LoadNumbers(const T* from, int64_t count) {
#if defined(__AVX512BW__)
  const uint64_t bytes = (uint64_t{1} << count * sizeof(T)) - 1;
  return Bits<Numbers<T>>(_mm512_maskz_loadu_epi8(bytes, from));
#else
  Numbers<T> numbers = {};
  std::memcpy(&numbers, from, count * sizeof(T));
  return numbers;
#endif
}

// A register full of what lies in one lane: a float, or a pair.
inline Vector SplatNumbers(const float* from) { return Splat(*from); }

inline Unsigned SplatNumbers(const uint16_t* from) {
  uint32_t pair;
  std::memcpy(&pair, from, sizeof(pair));
  return Unsigned{} + pair;
}

// The floats that a register holds, in kParts vectors: of pairs all the first ones, then the second.
template <typename T>
constexpr int kParts = kNumbers<T> / kLanes;

template <int kPart>
inline Vector Part(Vector numbers) {
  return numbers;
}

template <int kPart>
inline Vector Part(Unsigned pairs) {
  return Bits<Vector>(kPart == 0 ? pairs << 16 : pairs & 0xffff0000u);
}

// Stores the first `count` numbers of a register with these parts, which must be values of T.
inline void StoreParts(float* to, Vector numbers, Vector, int64_t count) {
  Store(to, numbers, count);
}

inline void StoreParts(uint16_t* to, Vector first, Vector second, int64_t count) {
  const Unsigned pairs = Bits<Unsigned>(first) >> 16 | Bits<Unsigned>(second);
  if (count >= kNumbers<uint16_t>) {
    std::memcpy(to, &pairs, sizeof(pairs));  // of a constant size: without a call
  } else {
    std::memcpy(to, &pairs, count * sizeof(*to));
  }
}

// c + a * b, where the lanes of a and b are floats.
inline Vector AddPairs(Vector a, Vector b, Vector c) { return MulAdd(a, b, c); }

// c + a * b, where a lane of a and b holds two bfloat16: the products of both are added.
inline Vector AddPairs(Unsigned a, Unsigned b, Vector c) {
#if defined(__AVX512BF16__)
  return _mm512_dpbf16_ps(c, Bits<__m512bh>(a), Bits<__m512bh>(b));
#else
  return MulAdd(Part<1>(a), Part<1>(b), MulAdd(Part<0>(a), Part<0>(b), c));
#endif
}

// Keeps a vector in its register. With only 16 registers GCC would load it again wherever it is used, and
// would take pairs apart one by one before it copies them to all lanes.
template <typename V>
inline void Keep(V& x) {
#if defined(__AVX__) && !defined(__AVX512F__)
  asm("" : "+x"(x));
#endif
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

}  // namespace jaxspec
