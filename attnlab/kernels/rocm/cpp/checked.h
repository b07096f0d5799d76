// The checked build: the compiler calls these functions before each access to memory
// (-fsanitize=kernel-address, all checks out of line). They pass it to on_access, which the includer defines.
#pragma once
#include <cstddef>

#define UNCHECKED __attribute__((no_sanitize("kernel-address")))

namespace attnlab {
inline void on_access(const void* address, size_t bytes, bool writes, const void* code);
}

#ifdef ATTNLAB_CHECKED
#define ATTNLAB_ACCESS(bytes)                                               \
  extern "C" UNCHECKED void __asan_load##bytes##_noabort(void* p) {         \
    attnlab::on_access(p, bytes, false, __builtin_return_address(0));       \
  }                                                                         \
  extern "C" UNCHECKED void __asan_store##bytes##_noabort(void* p) {        \
    attnlab::on_access(p, bytes, true, __builtin_return_address(0));        \
  }
ATTNLAB_ACCESS(1)
ATTNLAB_ACCESS(2)
ATTNLAB_ACCESS(4)
ATTNLAB_ACCESS(8)
ATTNLAB_ACCESS(16)
#undef ATTNLAB_ACCESS
extern "C" UNCHECKED void __asan_loadN_noabort(void* p, size_t n) {
  attnlab::on_access(p, n, false, __builtin_return_address(0));
}
extern "C" UNCHECKED void __asan_storeN_noabort(void* p, size_t n) {
  attnlab::on_access(p, n, true, __builtin_return_address(0));
}
extern "C" void __asan_handle_no_return() {}
#endif
