// A kernel's thread on the emulated device: its indices, shared memory, barriers and assertions.
#pragma once
#include "types.h"

#define threadIdx (attnlab::self()->thread)
#define blockIdx (attnlab::self()->block)
#define blockDim (attnlab::self()->block_dim)
#define gridDim (attnlab::self()->grid_dim)
#define __syncthreads() attnlab::device()->barrier(__LINE__)

#undef assert
#define assert(condition) \
  ((condition) ? (void)0 : attnlab::device()->fail("assertion failed: " #condition, nullptr))

namespace attnlab {

inline const Device* device() { return self()->device; }

// `__shared__ T name` of the source: the block's object of that name.
template <class T>
inline T& shared(int name) { return *(T*)device()->shared(name, sizeof(T)); }

}  // namespace attnlab
