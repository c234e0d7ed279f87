// y = x (C s)^T + b for a few rows of x on a CPU, from a weight as bitsandbytes holds it: a row of 8-bit codes C
// for each output, and its scale s. Only codes are read from memory; x stays in 16 bit.
//
// A row is summed in the same order whatever the number of rows, so its result does not depend on other rows.

#define TORCH_TARGET_VERSION 0x020b000000000000  // 2.11: its stable headers compile in a quarter of the time
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/BFloat16.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#include <immintrin.h>
#endif

namespace {

using Number = torch::headeronly::BFloat16;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t STEP = 64;     // inputs at a time: as many codes fill a register
constexpr int64_t OUTPUTS = 4;   // a portion
constexpr int64_t ROWS = 10;     // of x at a time: each piece of the weight that was read is used this many times
constexpr int64_t FEW = 5;       // rows: up to these, codes are read from end to end; with more, of two outputs at a time
constexpr int64_t AHEAD = 2048;  // codes: prefetched this far ahead of the multiplication

typedef float Sums __attribute__((vector_size(64)));
typedef float Totals __attribute__((vector_size(4 * OUTPUTS)));

// STEP codes, or STEP inputs, as they are multiplied; their products are added to sixteen sums.
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
using Input = Number;

struct Piece {
  __m512bh first, second;
};

// The two bytes of each number from 0 to 127 in 16 bits. No code is larger, so codes are exact.
struct Table {
  alignas(64) uint8_t upper[128], lower[128];
  constexpr Table() : upper(), lower() {
    for (int number = 1; number < 128; number++) {
      int exponent = 0;
      while (number >> (exponent + 1)) exponent++;
      const int bits = (127 + exponent) << 7 | ((number << (7 - exponent)) & 127);
      upper[number] = uint8_t(bits >> 8);
      lower[number] = uint8_t(bits & 255);
    }
  }
};
constexpr Table TABLE;

Piece piece_of(const int8_t* codes, uint64_t real) {
  const __m512i code = _mm512_maskz_loadu_epi8(real, codes), size = _mm512_abs_epi8(code);
  const auto found = [size](const uint8_t* table) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(table), size, _mm512_load_si512(table + 64));
  };
  const __m512i lower = found(TABLE.lower), sign = _mm512_set1_epi8(-128);
  const __m512i upper = _mm512_ternarylogic_epi64(found(TABLE.upper), code, sign, 0xf8);  // a | (b & c)
  return {(__m512bh)_mm512_unpacklo_epi8(lower, upper), (__m512bh)_mm512_unpackhi_epi8(lower, upper)};
}

Piece piece_of(const Input* x) {
  return {(__m512bh)_mm512_load_si512(x), (__m512bh)_mm512_load_si512(x + STEP / 2)};
}

// The order of a step's inputs that matches the order of its unpacked codes.
constexpr int64_t TOGETHER = 8;
constexpr int64_t place(int64_t i) { return i / 8 % 2 * 32 + i / 16 * 8; }

Sums add(Sums sums, const Piece& w, const Piece& x) {
  const __m512 half = _mm512_dpbf16_ps((__m512)sums, w.first, x.first);
  return (Sums)_mm512_dpbf16_ps(half, w.second, x.second);
}

__m512 pairs(__m512 a, __m512 b) { return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)); }

Totals totals(const Sums* sums) {
  const auto first = (__m512d)pairs((__m512)sums[0], (__m512)sums[1]);
  const auto second = (__m512d)pairs((__m512)sums[2], (__m512)sums[3]);
  const auto low = (__m512)_mm512_unpacklo_pd(first, second), high = (__m512)_mm512_unpackhi_pd(first, second);
  const __m512 all = _mm512_add_ps(low, high);
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  return (Totals)_mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}
#else
using Input = float;

struct Piece {
  Sums part[STEP / 16];
};

Piece piece_of(const int8_t* codes, uint64_t real) {
  Piece piece;
  for (int i = 0; i < STEP; i++) piece.part[i / 16][i % 16] = real >> i & 1 ? codes[i] : 0;
  return piece;
}

Piece piece_of(const Input* x) {
  Piece piece;
  std::memcpy(&piece, x, sizeof piece);
  return piece;
}

constexpr int64_t TOGETHER = STEP;
constexpr int64_t place(int64_t i) { return i; }

Sums add(Sums sums, const Piece& w, const Piece& x) {
  for (int i = 0; i < STEP / 16; i++) sums += w.part[i] * x.part[i];
  return sums;
}

Totals totals(const Sums* sums) {
  Totals found = {};
  for (int out = 0; out < OUTPUTS; out++)
    for (int i = 0; i < 16; i++) found[out] += sums[out][i];
  return found;
}
#endif

struct Weight {
  const int8_t* codes;
  const float* scales;
  const Number* bias;
  int64_t inputs, outputs;
};

constexpr int64_t padded(int64_t inputs) { return (inputs + STEP - 1) / STEP * STEP; }

// Inputs of a step, aligned for loads of whole registers.
struct alignas(64) Inputs {
  Input part[STEP];
};

// Rows of x in the order in which steps read them, with zeros behind the last input.
std::vector<Inputs> arranged(const Number* x, int64_t rows, int64_t inputs) {
  const int64_t length = padded(inputs);
  std::vector<Inputs> found(rows * length / STEP);
  for (int64_t row = 0; row < rows; row++) {
    const Number* from = x + row * inputs;
    Input* to = found.data()->part + row * length;
    for (int64_t at = 0; at < inputs; at += TOGETHER)
      std::copy(from + at, from + std::min(at + TOGETHER, inputs), to + at / STEP * STEP + place(at % STEP));
  }
  return found;
}

// The sums of `count` rows of x with `width` outputs at once.
template <int count, int width>
void add_up(const Input* x, const int8_t* codes, int64_t inputs, Sums (&kept)[count][OUTPUTS], int64_t first) {
  const int64_t length = padded(inputs);
  Sums sums[count][width] = {};
  for (int64_t at = 0; at < inputs; at += STEP) {
    const uint64_t real = inputs - at < STEP ? (uint64_t(1) << (inputs - at)) - 1 : ~uint64_t(0);
    Piece pieces[width];
    for (int out = 0; out < width; out++) {
      __builtin_prefetch(codes + out * inputs + at + AHEAD);
      pieces[out] = piece_of(codes + out * inputs + at, real);
    }
    for (int row = 0; row < count; row++) {
      const Piece piece = piece_of(x + row * length + at);
      for (int out = 0; out < width; out++) sums[row][out] = add(sums[row][out], pieces[out], piece);
    }
  }
  for (int row = 0; row < count; row++)
    for (int out = 0; out < width; out++) kept[row][first + out] = sums[row][out];
}

// Up to ROWS rows of x with a portion of the outputs, from number `first` on.
template <int count>
void multiply(const Input* x, const Weight& weight, int64_t first, Number* y) {
  constexpr int width = count <= FEW ? 1 : 2;
  const int64_t real = std::min(OUTPUTS, weight.outputs - first);
  const int8_t* codes = weight.codes + first * weight.inputs;
  Sums kept[count][OUTPUTS] = {};
  int64_t out = 0;
  for (; out + width <= real; out += width)
    add_up<count, width>(x, codes + out * weight.inputs, weight.inputs, kept, out);
  for (; out < real; out++) add_up<count, 1>(x, codes + out * weight.inputs, weight.inputs, kept, out);
  for (int row = 0; row < count; row++) {
    const Totals found = totals(kept[row]);
    for (out = 0; out < real; out++) {
      const float shift = weight.bias ? static_cast<float>(weight.bias[first + out]) : 0.0f;
      y[row * weight.outputs + first + out] = found[out] * (weight.scales[first + out] / 127) + shift;
    }
  }
}

using Multiply = decltype(&multiply<1>);

template <int... counts>
constexpr std::array<Multiply, sizeof...(counts)> for_counts(std::integer_sequence<int, counts...>) {
  return {&multiply<counts + 1>...};
}

Tensor linear_int8(const Tensor& x, const Tensor& codes, const Tensor& scales, const std::optional<Tensor>& bias) {
  static constexpr auto by_count = for_counts(std::make_integer_sequence<int, ROWS>{});
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::BFloat16, "only bfloat16 is multiplied with 8 bits");
  STD_TORCH_CHECK(codes.is_contiguous() && codes.scalar_type() == ScalarType::Char, "the weight is not held in codes");
  STD_TORCH_CHECK(codes.size(1) == x.size(-1), "the weight takes another number of inputs");
  STD_TORCH_CHECK(scales.is_contiguous() && scales.numel() == codes.size(0), "a scale an output");
  const Tensor dense = x.is_contiguous() ? x : torch::stable::contiguous(x);
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = codes.size(0);
  Tensor y = torch::stable::new_empty(x, shape);
  const Weight weight{codes.const_data_ptr<int8_t>(), scales.const_data_ptr<float>(),
                      bias ? bias->const_data_ptr<Number>() : nullptr, codes.size(1), codes.size(0)};
  const int64_t rows = x.numel() / weight.inputs, portions = (weight.outputs + OUTPUTS - 1) / OUTPUTS;
  const int64_t parts = (rows + ROWS - 1) / ROWS, length = padded(weight.inputs);
  const std::vector<Inputs> from = arranged(dense.const_data_ptr<Number>(), rows, weight.inputs);
  Number* to = y.mutable_data_ptr<Number>();
  torch::stable::parallel_for(0, portions, 1, [&](int64_t begin, int64_t end) {
    for (int64_t portion = begin; portion < end; portion++)
      for (int64_t part = 0; part < parts; part++) {  // the codes stay in the cache for the next rows
        const int64_t first = part * rows / parts, last = (part + 1) * rows / parts;
        by_count[last - first - 1](from.data()->part + first * length, weight, portion * OUTPUTS,
                                   to + first * weight.outputs);
      }
  });
  return y;
}

}  // namespace

// int8.py has the schema: GPUs have another kernel.
STABLE_TORCH_LIBRARY_IMPL(llama_ssp, CPU, library) { library.impl("linear_int8", TORCH_BOX(&linear_int8)); }
