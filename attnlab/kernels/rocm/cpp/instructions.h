// The wave-wide instructions of gfx9, each as a function of the registers of all 64 lanes.
//
// Source: AMD's "Instinct MI300" (CDNA3) and "Instinct MI200" (CDNA2) instruction set documents, chapters
// on matrix arithmetic and data parallel processing. A matrix instruction multiplies A [M×K] by B [K×N]
// and adds C [M×N]; the documents define which lane and register holds which element. They do not
// define the order and rounding of the additions: here each sum runs over k in ascending order, in float.
//
// ATTNLAB_FAULT_… plants a fault in one of them, for the tests.
#pragma once
#include "numbers.h"

namespace attnlab {

constexpr int WAVE = 64;
enum class Element { f32, f16, bf16, fp8_fnuz, fp8_ocp };

// Element `n` of a lane's register pair that holds packed elements.
inline float element(Element type, uint64_t packed, int n) {
  switch (type) {
    case Element::f32: return bits<float>((uint32_t)packed);
    case Element::f16: return f16_to_float((uint16_t)(packed >> 16 * n));
    case Element::bf16: return bf16_to_float((uint16_t)(packed >> 16 * n));
    case Element::fp8_fnuz: return fp8_to_float<true>((uint8_t)(packed >> 8 * n));
    default: return fp8_to_float<false>((uint8_t)(packed >> 8 * n));
  }
}

// V_MFMA_F32_4X4X{K}_16B: sixteen products of 4×K by K×4; block b is in lanes 4b … 4b+3.
// Lane 4b+i holds A[i][0 … K-1], lane 4b+j holds B[0 … K-1][j] and, in its four registers, D[0 … 3][j].
// cbsz and abid share one block's A: of each group of 2^cbsz blocks, all use the A of block abid.
template <Element TYPE, int K>
inline void mfma_4x4(const uint64_t a[WAVE], const uint64_t b[WAVE], const float c[WAVE][4],
                     float d[WAVE][4], int cbsz, int abid) {
  float rows[WAVE / 4][K][4];
  for (int lane = 0; lane < WAVE; lane++)
    for (int k = 0; k < K; k++) rows[lane / 4][k][lane % 4] = element(TYPE, a[lane], k);
  for (int lane = 0; lane < WAVE; lane++) {
    const int block = lane / 4, shared = (block & ~((1 << cbsz) - 1)) | (cbsz ? abid : 0);
    float sum[4] = {c[lane][0], c[lane][1], c[lane][2], c[lane][3]};
    for (int k = 0; k < K; k++) {
      const float right = element(TYPE, b[lane], k);
#ifdef ATTNLAB_FAULT_MFMA4_LAYOUT
      for (int i = 0; i < 4; i++) sum[i] += rows[shared][k][i ^ 1] * right;
#else
      for (int i = 0; i < 4; i++) sum[i] += rows[shared][k][i] * right;
#endif
    }
    for (int i = 0; i < 4; i++) d[lane][i] = sum[i];
  }
}

// V_MFMA_F32_16X16X{4·PER}: one product of 16×K by K×16, K = 4·PER. Lane l holds of A row l%16 and of B
// column l%16, each k = PER·(l/16) … +PER-1; its four registers hold D[4·(l/16) … +3][l%16].
template <Element TYPE, int PER>
inline void mfma_16x16(const uint64_t a[WAVE], const uint64_t b[WAVE], const float c[WAVE][4],
                       float d[WAVE][4]) {
  float left[4 * PER][16], right[4 * PER][16], sum[16][16];
  for (int lane = 0; lane < WAVE; lane++)
    for (int n = 0; n < PER; n++) {
      left[lane / 16 * PER + n][lane % 16] = element(TYPE, a[lane], n);
#ifdef ATTNLAB_FAULT_MFMA16_LAYOUT
      right[n * 4 + lane / 16][lane % 16] = element(TYPE, b[lane], n);
#else
      right[lane / 16 * PER + n][lane % 16] = element(TYPE, b[lane], n);
#endif
    }
  for (int lane = 0; lane < WAVE; lane++)
    for (int v = 0; v < 4; v++) sum[lane / 16 * 4 + v][lane % 16] = c[lane][v];
  for (int k = 0; k < 4 * PER; k++)
    for (int i = 0; i < 16; i++) {
      const float one = left[k][i];
      for (int j = 0; j < 16; j++) sum[i][j] += one * right[k][j];
    }
  for (int lane = 0; lane < WAVE; lane++)
    for (int v = 0; v < 4; v++) d[lane][v] = sum[lane / 16 * 4 + v][lane % 16];
}

// DPP row_ror:n: rows of 16 lanes rotate right by n, so lane i of a row gets lane i-n.
inline int row_ror_source(int lane, int n) { return (lane & ~15) | ((lane - n) & 15); }

// DS_BPERMUTE_B32: a lane selects its source by a byte address, 4 bytes per lane; higher bits are ignored.
inline int bpermute_source(int, int address) { return (address >> 2) & (WAVE - 1); }

// __shfl_xor and __shfl_down (HIP's amd_warp_functions.h), over segments of `width` lanes: a lane whose
// source is outside its segment keeps its own value.
inline int shfl_xor_source(int lane, int mask, int width) {
  const int source = lane ^ mask;
#ifdef ATTNLAB_FAULT_SHUFFLE
  return (source + 1) % WAVE;
#endif
  return source >= ((lane + width) & ~(width - 1)) ? lane : source;
}

inline int shfl_down_source(int lane, int delta, int width) {
  return (lane & (width - 1)) + delta >= width ? lane : lane + delta;
}

}  // namespace attnlab
