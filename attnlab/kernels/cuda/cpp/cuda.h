// CUDA for vLLM's cache writes (csrc/cache_kernels.cu) on the emulated device: number types and conversions, vector
// types, the shuffle, and launches. Host code and kernels are one text, compiled once with checked memory accesses.
//
// An access of 2, 4, 8 or 16 bytes at an address that is no multiple of its size is an error, as on a GPU.
#include <cassert>
#include <cmath>
#include <string>
#include <utility>

#include "checked.h"
#include "threads.h"
#include "torch.h"

#undef USE_ROCM
#undef __HIPCC__
#define ENABLE_FP8 1
#define __CUDA_ARCH__ 900
#define __align__(bytes) alignas(bytes)
#define STD_TORCH_CHECK TORCH_CHECK

struct int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }

// bfloat16 and FP8 of cuda_bf16.h and cuda_fp8.h.
struct __nv_bfloat16 {
  uint16_t data;
  operator float() const { return attnlab::bf16_to_float(data); }
};
struct __nv_bfloat162 { __nv_bfloat16 x, y; };
inline float __bfloat162float(__nv_bfloat16 h) { return h; }
inline __nv_bfloat16 attnlab_to_bfloat16(float f) { return {attnlab::float_to_bf16(f)}; }
#define __float2bfloat16 attnlab_to_bfloat16

struct __half_raw { uint16_t x; };
struct __half2_raw { uint16_t x, y; };
enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };
enum __nv_saturation_t { __NV_NOSAT, __NV_SATFINITE };
using __nv_fp8_storage_t = uint8_t;

namespace attnlab {

// Round to nearest even; a value out of range becomes the largest, NaN stays NaN.
template <int FRACTION, int BIAS>
inline uint8_t saturated(float f, float largest, uint8_t nan) {
  const uint8_t sign = std::signbit(f) ? 0x80 : 0;
  if (f != f) return nan;
  const float size = std::fmin(std::fabs(f), largest);
  const int least = 1 - BIAS, exponent = size > 0 ? std::max(least, std::ilogb(size)) : least;
  const float steps = std::nearbyint(std::ldexp(size, FRACTION - exponent));  // exact but for the rounding
  // A subnormal has exponent bits 0 and the exponent of the smallest normal number; a carry moves up by itself.
  const int code = ((exponent - least) << FRACTION) + (int)steps;
  return sign | (uint8_t)code;
}

}  // namespace attnlab

inline __nv_fp8_storage_t __nv_cvt_float_to_fp8(float f, __nv_saturation_t, __nv_fp8_interpretation_t type) {
  return type == __NV_E4M3 ? attnlab::saturated<3, 7>(f, 448.0f, 0x7f) : attnlab::saturated<2, 15>(f, 57344.0f, 0x7f);
}
inline __half_raw __nv_cvt_fp8_to_halfraw(uint8_t b, __nv_fp8_interpretation_t type) {
  if (type == __NV_E5M2) return {(uint16_t)(b << 8)};
  return {attnlab::bits<uint16_t>((_Float16)attnlab::fp8_to_float<false>(b))};
}
inline __half2_raw __nv_cvt_fp8x2_to_halfraw2(uint16_t two, __nv_fp8_interpretation_t type) {
  return {__nv_cvt_fp8_to_halfraw((uint8_t)two, type).x, __nv_cvt_fp8_to_halfraw((uint8_t)(two >> 8), type).x};
}

// c10's number types, which the conversions name.
namespace c10 {
struct from_bits_t {};
struct Float8_e4m3fn {
  uint8_t x;
  Float8_e4m3fn(uint8_t bits, from_bits_t) : x(bits) {}
  static from_bits_t from_bits() { return {}; }
};
struct Float8_e4m3fnuz { uint8_t x; };
struct BFloat16 { uint16_t x; };
struct Half { uint16_t x; };
}  // namespace c10

// Types and conversions of vLLM's vec_dtypes (attention_dtypes.h in older releases).
namespace vllm {
struct bf16_4_t { __nv_bfloat162 x, y; };
struct bf16_8_t { __nv_bfloat162 x, y, z, w; };
struct Float4_ { float2 x, y; };
struct Float8_ { float2 x, y, z, w; };
inline float half_to_float(uint16_t h) { return attnlab::f16_to_float(h); }
inline uint16_t float_to_half(float f) { return attnlab::bits<uint16_t>((_Float16)f); }
inline float2 half2_to_float2(uint32_t two) {
  return {half_to_float((uint16_t)two), half_to_float((uint16_t)(two >> 16))};
}
}  // namespace vllm

// Warps of 32 lanes run in waves of 64: a shuffle within 32 lanes or fewer is the same in both.
inline float __shfl_xor_sync(unsigned, float value, int mask, int width = 32, int line = __builtin_LINE()) {
  return attnlab::bits<float>(
      attnlab::device()->move(attnlab::SHFL_XOR, attnlab::bits<uint32_t>(value), mask, width, line));
}
#define VLLM_SHFL_XOR_SYNC(value, mask) __shfl_xor_sync(~0u, value, mask)
#define VLLM_SHFL_XOR_SYNC_WIDTH(value, mask, width) __shfl_xor_sync(~0u, value, mask, width)

namespace torch {
namespace headeronly { using c10::ScalarType; }
namespace stable {
using torch::Tensor;
namespace accelerator { struct DeviceGuard { explicit DeviceGuard(int) {} }; }
}  // namespace stable
}  // namespace torch
inline cudaStream_t get_current_cuda_stream(int = -1) { return 0; }

namespace attnlab {

static bool in_kernel;  // the host code of this text is compiled with the same checks, which skip it
static uint64_t steps;  // basic blocks that the launch ran
constexpr uint64_t MOST_STEPS = 1 << 27;  // some seconds; a loop without end reaches it

UNCHECKED inline void on_access(const void* address, size_t bytes, bool writes, const void* code) {
  if (!in_kernel) return;
  const Device* device = self()->device;
  device->access(address, bytes, writes, code);
  if (bytes <= 16 && (bytes & (bytes - 1)) == 0 && (uintptr_t)address % bytes)
    device->fail("misaligned address", code);
}

// The compiler calls this at the begin of each basic block (-fsanitize-coverage=trace-pc).
extern "C" UNCHECKED __attribute__((no_sanitize_coverage)) void __sanitizer_cov_trace_pc() {
  if (!in_kernel || ++steps < MOST_STEPS) return;
  in_kernel = false;
  device()->fail("the kernel does not end", __builtin_return_address(0));
}

UNCHECKED inline int run(const Launch* launch) {
  in_kernel = true, steps = 0;
  const int failed = context.device->launch(launch);
  in_kernel = false;
  return failed;
}

// `arguments` of a Launch: the address of each argument.
template <class... Parameters, size_t... I>
UNCHECKED inline void call(const Launch* launch, std::index_sequence<I...>) {
  void** given = (void**)launch->arguments;
  ((void (*)(Parameters...))launch->function)(*(Parameters*)given[I]...);
}
template <class... Parameters>
UNCHECKED void invoke(const Launch* launch) {
  call<Parameters...>(launch, std::index_sequence_for<Parameters...>());
}

// kernel<<<grid, block, 0, stream>>>(…) of the source becomes launch("kernel", kernel, grid, block, …).
template <class... Parameters>
struct Kernel {
  const char* name;
  void (*function)(Parameters...);

  void operator()(dim3 grid, dim3 block, Parameters... given) const {
    if (!grid.x) return;  // CUDA refuses an empty grid; vLLM's ops do not check for the error
    void* arguments[] = {(void*)&given...};
    const Launch launch = {name, {grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, invoke<Parameters...>,
                           (void*)function, arguments};
    if (run(&launch)) throw DeviceFailed();
  }
};
template <class... Parameters>
Kernel<Parameters...> launch(const char* name, void (*function)(Parameters...)) { return {name, function}; }

}  // namespace attnlab
