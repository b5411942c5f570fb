// CRC-32 as zlib computes it, several times as fast: a plain C function, called through ctypes (see
// checksums.py). It needs the carry-less multiplication of x86 processors.
//
// The CRC of a message is its remainder modulo a polynomial P of degree 32. Bytes [0, 16) of a
// message may be added to bytes [n, n + 16) after multiplication by x^(8 n) modulo P: the rest of
// the message then has the same remainder. So 64 bytes at a time become part of the next 64, and
// the last 16 bytes are divided bit by bit.
//
// Bits are reflected: bit 0 of byte 0 is the highest coefficient.

#include <cstdint>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define WITH_MULTIPLICATION __attribute__((target("sse4.1,pclmul")))

namespace {

constexpr uint32_t kPolynomial = 0xEDB88320;

constexpr uint32_t divided(uint32_t remainder, int num_bits) {
  for (; num_bits > 0; --num_bits)
    remainder = (remainder >> 1) ^ (remainder & 1 ? kPolynomial : 0);
  return remainder;
}

// x^power modulo P, in the upper half of 64 bits: there lie the lowest coefficients.
constexpr uint64_t power_of_x(int power) { return uint64_t{divided(0x80000000, power)} << 32; }

WITH_MULTIPLICATION inline __m128i load(const uint8_t* data) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data));
}

// Adds 16 bytes to those `num_bits` later. Their first half is x^64 times the second, and a product
// of two reflected numbers of 64 bits lies one bit too low, as if it were multiplied by x.
template <int num_bits>
WITH_MULTIPLICATION inline __m128i folded(__m128i bytes, __m128i later) {
  constexpr uint64_t first = power_of_x(num_bits + 64 - 1), second = power_of_x(num_bits - 1);
  const __m128i powers = _mm_set_epi64x(second, first);
  return _mm_xor_si128(later, _mm_xor_si128(_mm_clmulepi64_si128(bytes, powers, 0x00),
                                            _mm_clmulepi64_si128(bytes, powers, 0x11)));
}

uint32_t bit_by_bit(uint32_t remainder, const uint8_t* data, int64_t num_bytes) {
  for (; num_bytes > 0; --num_bytes) remainder = divided(remainder ^ *data++, 8);
  return remainder;
}

}  // namespace

extern "C" {

int has_multiplication() {
  return __builtin_cpu_supports("sse4.1") && __builtin_cpu_supports("pclmul");
}

// Continues a CRC with at least 64 bytes.
WITH_MULTIPLICATION uint32_t crc32_continued(uint32_t crc, const uint8_t* data, int64_t num_bytes) {
  __m128i a = _mm_xor_si128(load(data), _mm_cvtsi32_si128(static_cast<int>(~crc)));
  __m128i b = load(data + 16), c = load(data + 32), d = load(data + 48);
  for (data += 64, num_bytes -= 64; num_bytes >= 64; data += 64, num_bytes -= 64) {
    a = folded<512>(a, load(data)), b = folded<512>(b, load(data + 16));
    c = folded<512>(c, load(data + 32)), d = folded<512>(d, load(data + 48));
  }
  uint8_t rest[16];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(rest),
                   folded<128>(folded<128>(folded<128>(a, b), c), d));
  return ~bit_by_bit(bit_by_bit(0, rest, 16), data, num_bytes);
}
}

#endif
