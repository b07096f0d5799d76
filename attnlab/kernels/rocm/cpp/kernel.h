// The device side of HIP for a kernel: thread indices, shared memory, barriers and instructions call the
// emulated device. Compiled with the platform's macros, as hipcc does.
#pragma once
#include "checked.h"
#include "threads.h"

#define WARP_SIZE 64
constexpr int warpSize = 64;

namespace attnlab {

template <class Vector>
inline Vector matrix(int operation, uint64_t a, uint64_t b, const Vector& c, int cbsz, int abid,
                     int blgp, int line) {
  if (blgp) device()->fail("blgp of a matrix instruction is not emulated", nullptr);
  return bits<Vector>(device()->mfma(operation, a, b, (const Float4*)&c, cbsz, abid, line));
}

template <class Vector>
inline uint64_t packed(const Vector& vector) { return bits<uint64_t>(vector); }

#ifdef __gfx942__
constexpr bool FNUZ = true;
#else
constexpr bool FNUZ = false;  // gfx950 in hardware, gfx90a by vLLM's software conversion
#endif
constexpr int FP8_OPERATION = FNUZ ? MFMA_16X16X32_FNUZ : MFMA_16X16X32_OCP;

using Float2 __attribute__((vector_size(8))) = float;
using Half2 __attribute__((vector_size(4))) = _Float16;

}  // namespace attnlab

#define ATTNLAB_MATRIX(name, operation)                                                        \
  template <class A, class C>                                                                  \
  inline C name(const A& a, const A& b, const C& c, int cbsz, int abid, int blgp,              \
                int line = __builtin_LINE()) {                                                 \
    return attnlab::matrix(attnlab::operation, attnlab::packed(a), attnlab::packed(b), c, cbsz, \
                           abid, blgp, line);                                                  \
  }
ATTNLAB_MATRIX(__builtin_amdgcn_mfma_f32_4x4x4f16, MFMA_4X4X4_F16)
ATTNLAB_MATRIX(__builtin_amdgcn_mfma_f32_4x4x4bf16_1k, MFMA_4X4X4_BF16)
ATTNLAB_MATRIX(__builtin_amdgcn_mfma_f32_16x16x16f16, MFMA_16X16X16_F16)
ATTNLAB_MATRIX(__builtin_amdgcn_mfma_f32_16x16x16bf16_1k, MFMA_16X16X16_BF16)
ATTNLAB_MATRIX(__builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8, FP8_OPERATION)
#undef ATTNLAB_MATRIX

template <class C>
inline C __builtin_amdgcn_mfma_f32_4x4x1f32(float a, float b, const C& c, int cbsz, int abid, int blgp,
                                            int line = __builtin_LINE()) {
  return attnlab::matrix(attnlab::MFMA_4X4X1_F32, attnlab::bits<uint32_t>(a),
                         attnlab::bits<uint32_t>(b), c, cbsz, abid, blgp, line);
}

template <class C>
inline C __builtin_amdgcn_mfma_f32_16x16x32_bf8_bf8(long, long, const C& c, int, int, int) {
  attnlab::device()->fail("mfma_f32_16x16x32_bf8_bf8 is not emulated", nullptr);
  return c;
}

inline int __builtin_amdgcn_ds_bpermute(int address, int value, int line = __builtin_LINE()) {
  return (int)attnlab::device()->move(attnlab::BPERMUTE, (uint32_t)value, address, 64, line);
}

inline float __shfl_xor(float value, int mask, int width = 64, int line = __builtin_LINE()) {
  return attnlab::bits<float>(attnlab::device()->move(
      attnlab::SHFL_XOR, attnlab::bits<uint32_t>(value), mask, width, line));
}

inline float __shfl_down(float value, int delta, int width = 64, int line = __builtin_LINE()) {
  return attnlab::bits<float>(attnlab::device()->move(
      attnlab::SHFL_DOWN, attnlab::bits<uint32_t>(value), delta, width, line));
}

namespace attnlab {

// v_max_f32_dpp and v_add_f32_dpp with row_ror: the first source comes from another lane of the row.
// v_max_f32 returns the number if one source is NaN, as fmaxf does.
inline float rotated(float value, int n, int line = __builtin_LINE()) {
  return bits<float>(device()->move(ROW_ROR, bits<uint32_t>(value), n, 64, line));
}
inline float v_max_f32_dpp_row_ror(float value, int n, int line = __builtin_LINE()) {
  return fmaxf(rotated(value, n, line), value);
}
inline float v_add_f32_dpp_row_ror(float value, int n, int line = __builtin_LINE()) {
  return rotated(value, n, line) + value;
}

}  // namespace attnlab

inline attnlab::Float2 __builtin_amdgcn_cvt_pk_f32_fp8(int packed, bool high) {
  const int word = high ? packed >> 16 : packed;
  return attnlab::Float2{attnlab::fp8_to_float<attnlab::FNUZ>((uint8_t)word),
                         attnlab::fp8_to_float<attnlab::FNUZ>((uint8_t)(word >> 8))};
}
inline int __builtin_amdgcn_cvt_pk_fp8_f32(float low, float high, int old, bool upper) {
  const int word = attnlab::float_to_fp8<attnlab::FNUZ>(low) |
                   attnlab::float_to_fp8<attnlab::FNUZ>(high) << 8;
  return upper ? (old & 0xffff) | word << 16 : (old & ~0xffff) | word;
}
inline attnlab::Half2 __builtin_amdgcn_cvt_pkrtz(float x, float y) {
  return attnlab::Half2{attnlab::float_to_f16_rtz(x), attnlab::float_to_f16_rtz(y)};
}

// Hardware approximates these with an error of about 1 unit in the last place.
inline float __expf(float x) { return expf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float max(float a, float b) { return fmaxf(a, b); }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }

namespace attnlab {
inline uint8_t saturated_fp8(float f) {  // as HIP's conversions do by default
  const float largest = FNUZ ? 240.0f : 448.0f;
  return float_to_fp8<FNUZ>(f == f ? std::fmin(std::fmax(f, -largest), largest) : f);
}
}  // namespace attnlab

// Replacements for the functions of quantization/w8a8/fp8/amd/quant_utils.cuh that the kernel uses.
namespace vllm::fp8 {
using fp8_type = __hip_fp8_e4m3;
template <class To, class From>
inline To vec_conversion(const From& from) {  // gfx90a: four OCP bytes
  return {attnlab::fp8_to_float<false>((uint8_t)from), attnlab::fp8_to_float<false>((uint8_t)(from >> 8)),
          attnlab::fp8_to_float<false>((uint8_t)(from >> 16)),
          attnlab::fp8_to_float<false>((uint8_t)(from >> 24))};
}
template <class To, class From>
inline To scaled_vec_conversion(const From& from, float scale) {  // two floats, divided by scale, to FP8
  return (To)(attnlab::saturated_fp8(from.x / scale) | attnlab::saturated_fp8(from.y / scale) << 8);
}
}  // namespace vllm::fp8

inline uint8_t __hip_cvt_float_to_fp8(float f, int, int) { return attnlab::saturated_fp8(f); }

namespace attnlab {
UNCHECKED inline void on_access(const void* address, size_t bytes, bool writes, const void* code) {
  self()->device->access(address, bytes, writes, code);
}
}  // namespace attnlab
