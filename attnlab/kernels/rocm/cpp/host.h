// The host side of HIP and torch for csrc/rocm's attention: tensors as plain structs, torch's two checks
// with their texts, and launches that call the emulated device.
//
// Compiled like hipcc's host pass, without platform macros: the kernels are the source's own empty stubs, and
// a launch passes their names to the device.
#pragma once
#include <tuple>
#include <vector>

#include "torch.h"

enum class MFMAType;

#define WARP_SIZE attnlab::warp_size()
#undef assert
#define assert(condition) \
  ((condition) ? (void)0  \
               : throw attnlab::Aborted("the op's host code aborts the process: assertion failed: " #condition))

namespace attnlab {
inline int warp_size() { return context.warp_size; }
}  // namespace attnlab

struct hipDeviceProp_t { const char* gcnArchName; };
inline int hipGetDevice(int* device) { return *device = 0; }
inline int hipGetDeviceProperties(hipDeviceProp_t* properties, int) {
  properties->gcnArchName = attnlab::context.platform;
  return 0;
}

namespace attnlab {

inline std::vector<std::string> noted;  // names of the kernels that a call launches

// A template argument of a kernel as C++ text; a type is passed as type<T>.
template <class T> constexpr T* type = nullptr;
struct Part {
  const char* text;
  int value;
  constexpr Part(_Float16*) : text("_Float16"), value(-1) {}
  constexpr Part(__hip_bfloat16*) : text("__hip_bfloat16"), value(-1) {}
  constexpr Part(uint8_t*) : text("uint8_t"), value(-1) {}
  constexpr Part(int value) : text(""), value(value) {}
  constexpr Part(bool value) : text("(bool)"), value(value) {}
  constexpr Part(MFMAType value) : text("(MFMAType)"), value((int)value) {}
  constexpr Part(vllm::Fp8KVCacheDataType value) : text("(vllm::Fp8KVCacheDataType)"), value((int)value) {}
};

template <class... Arguments>
void invoke(const Launch* launch) {
  std::apply((void (*)(Arguments...))launch->function, *(std::tuple<Arguments...>*)launch->arguments);
}

// K<template arguments…> as text; called with the arguments of <<<grid, block, 0, stream>>>(…) in the source.
struct Named {
  std::string name;

  template <class... Arguments>
  void operator()(dim3 grid, dim3 block, Arguments... arguments) const {
    if (!context.find) {
      noted.push_back(name);
      return;
    }
    std::tuple<Arguments...> packed(arguments...);
    const Launch launch = {name.c_str(), {grid.x, grid.y, grid.z}, {block.x, block.y, block.z},
                           invoke<Arguments...>, context.find(name.c_str()), &packed};
    if (context.device->launch(&launch)) throw DeviceFailed();
  }
};

inline Named launch(const char* kernel, std::initializer_list<Part> parts) {
  std::string name = kernel;
  for (const Part& part : parts) {
    name += (&part == parts.begin() ? "<" : ", ") + std::string(part.text);
    if (part.value >= 0) name += std::to_string(part.value);
  }
  return {name + ">"};
}

}  // namespace attnlab
