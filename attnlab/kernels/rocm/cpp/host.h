// The host side of HIP and torch for csrc/rocm's attention: tensors as plain structs, torch's two checks
// with their texts, and launches that call the emulated device.
//
// Compiled like hipcc's host pass, without platform macros: the kernels are the source's own empty stubs, and
// a launch passes their names to the device.
#pragma once
#include <sstream>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "types.h"

enum class MFMAType;

#define WARP_SIZE attnlab::warp_size()
#undef assert
#define assert(condition) \
  ((condition) ? (void)0  \
               : throw attnlab::Aborted("the op's host code aborts the process: assertion failed: " #condition))

namespace attnlab {

struct Rejected : std::runtime_error { using std::runtime_error::runtime_error; };
struct Aborted : std::runtime_error { using std::runtime_error::runtime_error; };
struct DeviceFailed {};

// The device for the current call, its properties, and the function that finds kernels by name.
struct Context {
  const Device* device;
  int warp_size;
  const char* platform;
  void* (*find)(const char* kernel);  // null: record the launch, do not run it
};
inline Context context;
inline int warp_size() { return context.warp_size; }

}  // namespace attnlab

namespace c10 {
// Codes, names (as in error texts) and C++ names of torch's scalar types, from
// torch/headeronly/core/ScalarType.h.
enum class ScalarType : int8_t {
  Byte = 0, Char = 1, Short = 2, Int = 3, Long = 4, Half = 5, Float = 6, Double = 7, Bool = 11,
  BFloat16 = 15, Float8_e5m2 = 23, Float8_e4m3fn = 24, Float8_e4m3fnuz = 26,
};
inline const char* toString(ScalarType type) {
  switch (type) {
    case ScalarType::Byte: return "Byte";
    case ScalarType::Char: return "Char";
    case ScalarType::Short: return "Short";
    case ScalarType::Int: return "Int";
    case ScalarType::Long: return "Long";
    case ScalarType::Half: return "Half";
    case ScalarType::Float: return "Float";
    case ScalarType::Double: return "Double";
    case ScalarType::Bool: return "Bool";
    case ScalarType::BFloat16: return "BFloat16";
    case ScalarType::Float8_e5m2: return "Float8_e5m2";
    case ScalarType::Float8_e4m3fn: return "Float8_e4m3fn";
    case ScalarType::Float8_e4m3fnuz: return "Float8_e4m3fnuz";
  }
  return "Undefined";
}
// tensor.dtype() prints the C++ type (c10/util/typeid.h).
struct TypeMeta {
  ScalarType type;
  bool operator==(ScalarType other) const { return type == other; }
};
inline std::ostream& operator<<(std::ostream& out, TypeMeta meta) {
  switch (meta.type) {
    case ScalarType::Byte: return out << "unsigned char";
    case ScalarType::Char: return out << "signed char";
    case ScalarType::Short: return out << "short";
    case ScalarType::Int: return out << "int";
    case ScalarType::Long: return out << "long";
    case ScalarType::Float: return out << "float";
    case ScalarType::Double: return out << "double";
    case ScalarType::Bool: return out << "bool";
    default: return out << "c10::" << toString(meta.type);
  }
}
template <class T> struct CppTypeToScalarType;
template <> struct CppTypeToScalarType<int> { static constexpr auto value = ScalarType::Int; };
template <> struct CppTypeToScalarType<float> { static constexpr auto value = ScalarType::Float; };
}  // namespace c10

namespace torch {
// A tensor as described by Python; member functions have torch's names.
class Tensor {
 public:
  void* data;
  int64_t scalar_type;
  int64_t dims;
  int64_t sizes[8], strides[8];

  int64_t size(int64_t dim) const { return sizes[at(dim)]; }
  int64_t stride(int64_t dim) const { return strides[at(dim)]; }
  c10::TypeMeta dtype() const { return {(c10::ScalarType)scalar_type}; }
  void* data_ptr() const { return data; }
  // torch: aten/src/ATen/templates/TensorMethods.cpp
  template <class T>
  T* data_ptr() const {
    const auto wanted = c10::CppTypeToScalarType<T>::value, found = (c10::ScalarType)scalar_type;
    if (wanted != found)
      throw attnlab::Rejected(std::string("expected scalar type ") + c10::toString(wanted) +
                              " but found " + c10::toString(found));
    return (T*)data;
  }

 private:
  int64_t at(int64_t dim) const {
    if (dim >= dims || dim < -dims)
      throw attnlab::Rejected("Dimension out of range (expected to be in range of [" +
                              std::to_string(-dims) + ", " + std::to_string(dims - 1) +
                              "], but got " + std::to_string(dim) + ")");
    return dim < 0 ? dim + dims : dim;
  }
};
}  // namespace torch

namespace at {
using c10::ScalarType;
using torch::Tensor;
namespace cuda {
struct OptionalCUDAGuard { explicit OptionalCUDAGuard(int) {} };
inline int getCurrentCUDAStream() { return 0; }
}  // namespace cuda
}  // namespace at
using cudaStream_t = int;
inline int device_of(const torch::Tensor&) { return 0; }

struct hipDeviceProp_t { const char* gcnArchName; };
inline int hipGetDevice(int* device) { return *device = 0; }
inline int hipGetDeviceProperties(hipDeviceProp_t* properties, int) {
  properties->gcnArchName = attnlab::context.platform;
  return 0;
}

#define TORCH_CHECK(condition, ...) \
  if (!(condition)) throw attnlab::Rejected(attnlab::message(__VA_ARGS__))

namespace attnlab {

template <class... Parts>
std::string message(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

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
