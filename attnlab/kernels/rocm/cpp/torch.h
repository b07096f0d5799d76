// Parts of torch that the host code of vLLM's ops uses: tensors as plain structs, and checks with their texts.
#pragma once
#include <sstream>
#include <stdexcept>
#include <string>

#include "types.h"

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

template <class... Parts>
std::string message(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

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
inline std::ostream& operator<<(std::ostream& out, ScalarType type) { return out << toString(type); }
inline int64_t elementSize(ScalarType type) {
  switch (type) {
    case ScalarType::Short: case ScalarType::Half: case ScalarType::BFloat16: return 2;
    case ScalarType::Int: case ScalarType::Float: return 4;
    case ScalarType::Long: case ScalarType::Double: return 8;
    default: return 1;
  }
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
template <> struct CppTypeToScalarType<int64_t> { static constexpr auto value = ScalarType::Long; };
template <> struct CppTypeToScalarType<float> { static constexpr auto value = ScalarType::Float; };
}  // namespace c10

namespace torch {
struct Sizes {
  const int64_t* at;
  int64_t count;
  bool equals(const Sizes& other) const { return std::equal(at, at + count, other.at, other.at + other.count); }
};
// A tensor as described by Python; member functions have torch's names.
class Tensor {
 public:
  void* data;
  int64_t type;
  int64_t dims;
  int64_t shape[8], steps[8];

  int64_t size(int64_t dim) const { return shape[at(dim)]; }
  int64_t stride(int64_t dim) const { return steps[at(dim)]; }
  int64_t numel() const {
    int64_t count = 1;
    for (int64_t i = 0; i < dims; i++) count *= shape[i];
    return count;
  }
  c10::ScalarType scalar_type() const { return (c10::ScalarType)type; }
  c10::TypeMeta dtype() const { return {scalar_type()}; }
  int64_t element_size() const { return c10::elementSize(scalar_type()); }
  int64_t itemsize() const { return element_size(); }
  Sizes sizes() const { return {shape, dims}; }
  int get_device_index() const { return 0; }
  void* data_ptr() const { return data; }
  // torch: aten/src/ATen/templates/TensorMethods.cpp
  template <class T>
  T* data_ptr() const {
    const auto wanted = c10::CppTypeToScalarType<T>::value, found = scalar_type();
    if (wanted != found)
      throw attnlab::Rejected(std::string("expected scalar type ") + c10::toString(wanted) +
                              " but found " + c10::toString(found));
    return (T*)data;
  }
  template <class T>
  const T* const_data_ptr() const { return data_ptr<T>(); }

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

#define TORCH_CHECK(condition, ...) \
  if (!(condition)) throw attnlab::Rejected(attnlab::message(__VA_ARGS__))
