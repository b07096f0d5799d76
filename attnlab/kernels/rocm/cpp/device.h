// Declarations shared by kernels, host code and the emulated device: its functions and a thread's record.
#pragma once
#include <cstddef>
#include <cstdint>

namespace attnlab {

constexpr size_t STACK_BYTES = 1 << 16;  // of a thread; aligned to its size, so a thread finds itself

enum Operation {  // operations at which the lanes of a wave synchronise
  MFMA_4X4X1_F32,
  MFMA_4X4X4_F16,
  MFMA_4X4X4_BF16,
  MFMA_16X16X16_F16,
  MFMA_16X16X16_BF16,
  MFMA_16X16X32_FNUZ,
  MFMA_16X16X32_OCP,
  ROW_ROR,
  BPERMUTE,
  SHFL_XOR,
  SHFL_DOWN,
};

struct Index {
  unsigned x, y, z;
};

struct Device;

// A thread of a block. Its record is at the lowest address of its stack.
struct Thread {
  Index thread, block, block_dim, grid_dim;
  const Device* device;
  void* worker;     // the device's record of the worker that runs it
  unsigned number;  // index in its block
};

struct alignas(16) Float4 {
  float at[4];
};

struct Launch;

// The functions of the device, called by a kernel's thread. `line` is the line of the source.
struct Device {
  Float4 (*mfma)(int operation, uint64_t a, uint64_t b, const Float4* c, int cbsz, int abid, int line);
  uint32_t (*move)(int operation, uint32_t value, int operand, int width, int line);
  void (*barrier)(int line);
  void* (*shared)(int name, size_t bytes);
  void (*access)(const void* address, size_t bytes, bool writes, const void* code);
  void (*fail)(const char* text, const void* code);  // code: where; null for the caller
  int (*launch)(const Launch*);  // called by the host; returns 0 unless a thread failed
};

// A launch of a kernel: `invoke` calls it with its arguments, on a thread's stack.
struct Launch {
  const char* kernel;
  Index grid, block;
  void (*invoke)(const Launch*);
  void* function;
  void* arguments;
};

inline Thread* self() {
  return (Thread*)((uintptr_t)__builtin_frame_address(0) & ~(uintptr_t)(STACK_BYTES - 1));
}

}  // namespace attnlab
