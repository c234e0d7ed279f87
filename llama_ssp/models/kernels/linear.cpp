// y = x W^T + b for a few rows of x, on a CPU, at the speed at which W can be read.
//
// W is packed in blocks of BLOCK outputs, which are read from end to end: for each word of the inputs (one number of
// 32 bits, or two of 16), the words of all outputs of the block. A row is summed in the same order whatever the
// number of rows, so its result does not depend on other rows.

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
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

using torch::headeronly::BFloat16;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t BLOCK = 32;  // outputs that are stored together
constexpr int64_t ROWS = 12;   // of x, with one reading of a block
#if defined(__AVX512F__)
constexpr int WIDTH = 64, REGISTERS = 32;
#elif defined(__AVX__)
constexpr int WIDTH = 32, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int WIDTH = 16, REGISTERS = 32;
#else
constexpr int WIDTH = 16, REGISTERS = 16;
#endif
constexpr int LANES = WIDTH / 4, PARTS = BLOCK / LANES;
// Rows whose sums stay in registers, and words that stay in the first cache for the next of them.
constexpr int AT_ONCE = std::min<int>(ROWS, (REGISTERS - 4) / PARTS);
constexpr int64_t CHUNK = AT_ONCE == ROWS ? INT64_MAX : 64;

typedef float Sums __attribute__((vector_size(WIDTH)));
typedef int32_t Words __attribute__((vector_size(WIDTH)));

struct Single {
  using Number = float;
  static Sums add(Sums sum, Words w, int32_t x) { return sum + (Sums)w * (Sums)(x - Words{}); }
};

struct Brain {
  using Number = BFloat16;
  static Sums add(Sums sum, Words w, int32_t x) {
#if defined(__AVX512BF16__)
    return (Sums)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)_mm512_set1_epi32(x));
#else  // a number of 16 bits is the upper half of one of 32
    const Words all = x - Words{};
    const int32_t upper = int32_t(0xffff0000);
    sum += (Sums)(w << 16) * (Sums)(all << 16);
    return sum + (Sums)(w & upper) * (Sums)(all & upper);
#endif
  }
};

// Adds the products of `count` rows with some words of a block.
template <class Kind, int count>
void add(const int32_t* x, int64_t words, const int32_t* w, int64_t begin, int64_t end, Sums (*all)[PARTS]) {
  Sums sums[count][PARTS];
#pragma GCC unroll 64
  for (int i = 0; i < count * PARTS; i++) sums[i / PARTS][i % PARTS] = all[i / PARTS][i % PARTS];
  for (int64_t word = begin; word < end; word++) {
    const int32_t* at = w + word * BLOCK;
    __builtin_prefetch(at + 32 * BLOCK);
    __builtin_prefetch(at + 32 * BLOCK + BLOCK / 2);
    Words own[PARTS];
#pragma GCC unroll 8
    for (int part = 0; part < PARTS; part++) std::memcpy(&own[part], at + part * LANES, WIDTH);
#pragma GCC unroll 12
    for (int row = 0; row < count; row++) {
      const int32_t one = x[row * words + word];
#pragma GCC unroll 8
      for (int part = 0; part < PARTS; part++) sums[row][part] = Kind::add(sums[row][part], own[part], one);
    }
  }
#pragma GCC unroll 64
  for (int i = 0; i < count * PARTS; i++) all[i / PARTS][i % PARTS] = sums[i / PARTS][i % PARTS];
}

// Up to ROWS rows with one block of W, which has `width` outputs and begins at number `first`.
template <class Kind, class Out, int count>
void multiply(const int32_t* x, int64_t words, const int32_t* w, const typename Kind::Number* bias, Out* y,
              int64_t width, int64_t first) {
  constexpr int rest = count % AT_ONCE;
  Sums sums[count][PARTS] = {};
  for (int64_t begin = 0, end; begin < words; begin = end) {
    end = words - begin > CHUNK ? begin + CHUNK : words;
    for (int row = 0; row < count - rest; row += AT_ONCE)
      add<Kind, AT_ONCE>(x + row * words, words, w, begin, end, sums + row);
    if constexpr (rest > 0) add<Kind, rest>(x + (count - rest) * words, words, w, begin, end, sums + count - rest);
  }
  const int64_t real = std::min(BLOCK, width - first);
  for (int row = 0; row < count; row++)
    for (int64_t i = 0; i < real; i++) {
      const float sum = sums[row][i / LANES][i % LANES];
      y[row * width + first + i] = bias ? sum + static_cast<float>(bias[first + i]) : sum;
    }
}

template <class Kind, class Out, int... counts>
constexpr auto for_counts(std::integer_sequence<int, counts...>) {
  return std::array{&multiply<Kind, Out, counts + 1>...};
}

template <class Kind, class Out>
void run(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, Tensor& y, int64_t rows) {
  using Number = typename Kind::Number;
  static constexpr auto by_count = for_counts<Kind, Out>(std::make_integer_sequence<int, ROWS>{});
  const int64_t words = packed.size(1), width = y.size(-1);
  const auto* from = static_cast<const int32_t*>(x.const_data_ptr());
  const auto* weights = static_cast<const int32_t*>(packed.const_data_ptr());
  const Number* shift = bias ? bias->const_data_ptr<Number>() : nullptr;
  Out* to = y.mutable_data_ptr<Out>();
  torch::stable::parallel_for(0, packed.size(0), 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; block++)
      for (int64_t row = 0; row < rows; row += ROWS)  // the block stays in the cache for the next rows
        by_count[std::min(ROWS, rows - row) - 1](from + row * words, words, weights + block * words * BLOCK,
                                                 shift, to + row * width, width, block * BLOCK);
  });
}

template <bool wide>  // sums of bf16 as they are, in fp32
Tensor linear(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, int64_t width) {
  const Tensor dense = x.is_contiguous() ? x : torch::stable::contiguous(x);
  STD_TORCH_CHECK(packed.is_contiguous() && packed.scalar_type() == x.scalar_type(), "the weight is not packed for x");
  STD_TORCH_CHECK(packed.size(1) * packed.size(3) == x.size(-1), "the weight takes another number of inputs");
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = width;
  Tensor y = wide ? torch::stable::new_empty(x, shape, ScalarType::Float) : torch::stable::new_empty(x, shape);
  const int64_t rows = x.numel() / x.size(-1);
  if (x.scalar_type() == ScalarType::Float) {
    run<Single, float>(dense, packed, bias, y, rows);
  } else {
    STD_TORCH_CHECK(x.scalar_type() == ScalarType::BFloat16, "only float and bfloat16 are multiplied here");
    run<Brain, std::conditional_t<wide, float, BFloat16>>(dense, packed, bias, y, rows);
  }
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(llama_ssp, library) {
  library.def("linear(Tensor x, Tensor packed, Tensor? bias, int width) -> Tensor");
  library.def("linear_wide(Tensor x, Tensor packed, Tensor? bias, int width) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(llama_ssp, CPU, library) {
  library.impl("linear", TORCH_BOX(&linear<false>));
  library.impl("linear_wide", TORCH_BOX(&linear<true>));
}
