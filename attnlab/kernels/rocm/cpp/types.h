// HIP's vector and number types that csrc/rocm's attention uses, and the names it uses from vLLM's helper
// headers (cuda_compat.h, dtype_fp8.cuh, quant_utils.cuh).
#pragma once
#include <algorithm>
#include <cfloat>
#include <climits>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>

#include "device.h"
#include "numbers.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __HIPCC__ 1
#define HIP_FP8_TYPE_OCP 1  // ROCm 6.3 and newer
#define USE_ROCM 1

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }

using __half = _Float16;
using half = _Float16;
struct __half2 { __half x, y; };
inline __half2 __float22half2_rn(float2 f) { return {(__half)f.x, (__half)f.y}; }
inline __half2 operator+(__half2 a, __half2 b) {
  return {(__half)((float)a.x + (float)b.x), (__half)((float)a.y + (float)b.y)};
}

struct __hip_bfloat16 { uint16_t data; };
struct __hip_bfloat162 { __hip_bfloat16 x, y; };
inline float __bfloat162float(__hip_bfloat16 h) { return attnlab::bf16_to_float(h.data); }
inline __hip_bfloat16 __float2bfloat16(float f) { return {attnlab::float_to_bf16(f)}; }
inline __hip_bfloat162 __float22bfloat162_rn(float2 f) {
  return {__float2bfloat16(f.x), __float2bfloat16(f.y)};
}

struct __hip_fp8_e4m3 {
  enum { __default_saturation = 1, __default_interpret = 0 };
};
struct __hip_fp8_e5m2 {};

namespace vllm {
enum class Fp8KVCacheDataType { kAuto = 0, kFp8E4M3 = 1, kFp8E5M2 = 2 };
}

namespace attnlab {
// The source sets a vector to zero by `vector = {0};`, which g++ rejects.
template <class Vector>
inline void clear(Vector& vector) { vector = Vector{}; }
}  // namespace attnlab
