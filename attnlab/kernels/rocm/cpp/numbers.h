// Number formats of AMD's matrix cores as bit patterns: float16, bfloat16, and the two kinds of FP8 e4m3.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace attnlab {

template <class To, class From>
inline To bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

inline float f16_to_float(uint16_t h) { return (float)bits<_Float16>(h); }

inline float bf16_to_float(uint16_t h) { return bits<float>((uint32_t)h << 16); }

// Round to nearest even; NaN stays NaN.
inline uint16_t float_to_bf16(float f) {
  uint32_t u = bits<uint32_t>(f);
  if (f != f) return (uint16_t)(u >> 16 | 0x40);
  return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

// Round towards zero, as v_cvt_pkrtz_f16_f32 does.
inline _Float16 float_to_f16_rtz(float f) {
  _Float16 h = (_Float16)f;
  if (f == f && std::fabs((float)h) > std::fabs(f)) h = bits<_Float16>((uint16_t)(bits<uint16_t>(h) - 1));
  return h;
}

// e4m3: one sign, four exponent and three fraction bits. The OCP kind (gfx950, software elsewhere) has
// bias 7 and NaN 0x7f, 0xff; the FNUZ kind of gfx94x has bias 8, no negative zero, and NaN 0x80.
template <bool FNUZ>
inline float fp8_to_float(uint8_t b) {
  const int bias = FNUZ ? 8 : 7, exponent = b >> 3 & 15, fraction = b & 7;
  if (FNUZ ? b == 0x80 : (b & 0x7f) == 0x7f) return NAN;
  const float size = exponent ? std::ldexp(1.0f + fraction / 8.0f, exponent - bias)
                              : std::ldexp(fraction / 8.0f, 1 - bias);
  return b & 0x80 ? -size : size;
}

// Round to nearest even. A value out of range becomes NaN, as in v_cvt_pk_fp8_f32 unless its mode register
// enables saturation.
template <bool FNUZ>
inline uint8_t float_to_fp8(float f) {
  const uint8_t sign = std::signbit(f) ? 0x80 : 0, nan = FNUZ ? 0x80 : sign | 0x7f;
  const float largest = FNUZ ? 240.0f : 448.0f, size = std::fabs(f);
  if (!(size <= largest * 2)) return nan;
  const int bias = FNUZ ? 8 : 7, least = 1 - bias;
  const int exponent = size > 0 ? std::max(least, std::ilogb(size)) : least;
  const float step = std::ldexp(1.0f, exponent - 3), rounded = std::nearbyint(size / step) * step;
  if (rounded > largest) return nan;
  if (rounded == 0) return FNUZ ? 0 : sign;
  const int e = std::max(least, std::ilogb(rounded));
  const int m = (int)std::ldexp(rounded, 3 - e);  // 8 to 15, less for subnormals
  return sign | (uint8_t)(m < 8 ? m : (e + bias) << 3 | (m - 8));
}

}  // namespace attnlab
