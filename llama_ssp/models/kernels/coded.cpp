// y = x W^T + b for a few rows of x, on a CPU, at the speed at which the codes of W can be read.
//
// A weight is the number that a table has for its code of 4 or 8 bits, times the scale of its group of inputs, less
// the group's offset; an offset in bytes is a zero, and is scaled too. Codes are packed in blocks of BLOCK outputs,
// which are read from end to end: for each word of 32 bits, of 8 or 4 inputs, the words of all outputs of the block.
// Numbers of a group are multiplied as the table has them, and their sum is scaled. A row is summed in the same order
// whatever the number of rows, so its result does not depend on other rows.

#define TORCH_TARGET_VERSION 0x020b000000000000  // 2.11: its stable headers compile in a quarter of the time
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>
#if defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define PAIRS  // instructions for products of pairs of 16-bit numbers
#endif

#define UNROLLED _Pragma("GCC unroll 16")  // so that arrays of registers are registers

namespace {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

#if defined(__AVX512F__)
constexpr int64_t LANES = 16, ROWS = 6;  // sums of a register; rows of x at a time: their sums stay in registers
#else
constexpr int64_t LANES = 8, ROWS = 2;
#endif
constexpr int64_t BLOCK = 32;     // outputs
constexpr int64_t SIDE = 2 * LANES;  // those that are summed at a time
constexpr int64_t TOGETHER = 32;  // inputs
constexpr int64_t AHEAD = 64;   // words of an output: prefetched this far ahead of the multiplication
constexpr int CHAINS = 2;       // sums of a row and an output: one would wait for its own last addition

typedef float Sums __attribute__((vector_size(4 * LANES)));
typedef int32_t Words __attribute__((vector_size(4 * LANES)));

// The number of each code, of 4 or 8 bits.
struct Table {
  alignas(64) float number[256];
  alignas(64) uint8_t lower[256], upper[256];  // the bytes of the number in 16 bits
  alignas(64) uint16_t pair[32];               // numbers of 4-bit codes in 16 bits, twice
  bool brief;                                  // whether 16 bits have the numbers exactly
  bool whole = true;                           // whether a byte is its number, as a signed integer

  Table(const float* numbers, int codes) {
    std::memcpy(number, numbers, codes * sizeof *numbers);
    uint32_t rest = 0;
    for (int i = 0; i < codes; i++) {
      uint32_t bits;
      std::memcpy(&bits, &number[i], sizeof bits);
      rest |= bits << 16, lower[i] = bits >> 16, upper[i] = bits >> 24;
      whole = whole && number[i] == static_cast<int8_t>(i);
    }
    brief = rest == 0;
    for (int i = 0; i < 32; i++) pair[i] = lower[i % 16] | upper[i % 16] << 8;
  }
};

// How words of codes become numbers, of which the product with those of x is added to sums. `COUNT` registers come
// from one of codes; `place` is the number of the input that the i-th word or half word of x has.
template <int bits>
struct Single {
  static constexpr int COUNT = 32 / bits, INPUTS = 32 / bits;
  using Input = float;
  const Table& table;

  static constexpr int place(int i) { return i; }

  void decode(Words codes, Sums (&numbers)[COUNT]) const {
    UNROLLED for (int i = 0; i < COUNT; i++) {
      const Words code = codes >> (bits * i) & ((1 << bits) - 1);
#if defined(__AVX512F__)
      if constexpr (bits == 4)
        numbers[i] = (Sums)_mm512_permutexvar_ps((__m512i)code, _mm512_load_ps(table.number));
      else
        numbers[i] = (Sums)_mm512_i32gather_ps((__m512i)code, table.number, 4);
#elif defined(__AVX2__)
      if constexpr (bits == 4) {
        const auto found = [code](const float* half) {
          return _mm256_permutevar8x32_ps(_mm256_load_ps(half), (__m256i)code);
        };
        numbers[i] = (Sums)_mm256_blendv_ps(found(table.number), found(table.number + 8), (__m256)(code << 28));
      } else if (table.whole) {
        numbers[i] = __builtin_convertvector(codes << (24 - 8 * i) >> 24, Sums);
      } else {
        numbers[i] = (Sums)_mm256_i32gather_ps(table.number, (__m256i)code, 4);
      }
#else
      for (int lane = 0; lane < LANES; lane++) numbers[i][lane] = table.number[code[lane]];
#endif
    }
  }

  static Sums add(Sums sum, Sums numbers, int32_t x) { return sum + numbers * (Sums)(x - Words{}); }
};

#if defined(PAIRS)
template <int bits>
struct Brain {
  static constexpr int COUNT = 16 / bits, INPUTS = 32 / bits;
  using Input = BFloat16;
  const Table& table;

  static constexpr int place(int i) { return i / 2 + i % 2 * COUNT; }

  void decode(Words codes, Sums (&numbers)[COUNT]) const {
    const auto all = (__m512i)codes;
    if constexpr (bits == 4) {  // the code is in the lowest bits of each half word, and one more bit changes nothing
      const __m512i pair = _mm512_load_si512(table.pair);
      UNROLLED for (int i = 0; i < COUNT; i++)
        numbers[i] = (Sums)_mm512_permutexvar_epi16(_mm512_srli_epi16(all, 4 * i), pair);
    } else {
      const __mmask64 high = _mm512_movepi8_mask(all);
      const auto found = [all, high](const uint8_t* part) {
        const auto half = [all, part](int from) {
          return _mm512_permutex2var_epi8(_mm512_load_si512(part + from), all, _mm512_load_si512(part + from + 64));
        };
        return _mm512_mask_mov_epi8(half(0), high, half(128));
      };
      const __m512i lower = found(table.lower), upper = found(table.upper);
      const __mmask64 second = 0xaaaaaaaaaaaaaaaa;
      numbers[0] = (Sums)_mm512_mask_mov_epi8(lower, second, _mm512_slli_epi16(upper, 8));
      numbers[1] = (Sums)_mm512_mask_mov_epi8(_mm512_srli_epi16(lower, 8), second, upper);
    }
  }

  static Sums add(Sums sum, Sums numbers, int32_t x) {
    return (Sums)_mm512_dpbf16_ps((__m512)sum, (__m512bh)numbers, (__m512bh)_mm512_set1_epi32(x));
  }
};
#endif

// Numbers of each group of a block's outputs, in any format.
struct Factors {
  const void* numbers;
  ScalarType kind;
  int64_t groups;

  explicit Factors(const Tensor& of) : numbers(of.const_data_ptr()), kind(of.scalar_type()), groups(of.size(1)) {
    STD_TORCH_CHECK(of.is_contiguous() && of.size(2) == BLOCK, "a number of each output of a block");
    STD_TORCH_CHECK(kind == ScalarType::Float || kind == ScalarType::BFloat16 || kind == ScalarType::Half ||
                    kind == ScalarType::Byte, "scales of another format");
  }

  template <class Number>
  Sums read(int64_t at) const {
    const Number* from = static_cast<const Number*>(numbers) + at;
#if defined(__AVX512F__)
    if constexpr (std::is_same_v<Number, Half>)
      return (Sums)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#endif
    Sums found;
    for (int i = 0; i < LANES; i++) found[i] = static_cast<float>(from[i]);
    return found;
  }

  // From output `from` of the block on.
  Sums of(int64_t block, int64_t group, int64_t from) const {
    const int64_t at = (block * groups + group) * BLOCK + from;
    switch (kind) {
      case ScalarType::Float: return read<float>(at);
      case ScalarType::BFloat16: return read<BFloat16>(at);
      case ScalarType::Half: return read<Half>(at);
      default: return read<uint8_t>(at);
    }
  }
};

struct Weight {
  const int32_t* codes;
  int64_t words, outputs, inputs, group;  // a group in words, too
  Factors scales;
  std::optional<Factors> offsets;
  const Tensor* bias;

  int64_t end_of(int64_t number) const { return std::min(words, (number + 1) * group); }

  Sums offset(int64_t block, int64_t number, int64_t from, Sums scale) const {
    const Sums found = offsets->of(block, number, from);
    return offsets->kind == ScalarType::Byte ? found * scale : found;
  }
};

// Rows of x in the order in which words of codes have their inputs, with zeros behind the last; and sums of groups.
// Rows that are multiplied together stand together: of each word of 32 bits those of all of them.
template <class Kind>
struct Rows {
  using Input = typename Kind::Input;
  const int64_t rows, parts, length;  // `length`: words of a row
  std::vector<int32_t> words;
  std::vector<float> sums;

  template <class Number>
  Rows(const Number* x, int64_t rows, const Weight& weight)
      : rows(rows), parts((rows + ROWS - 1) / ROWS), length(weight.words * Kind::COUNT), words(rows * length) {
    const int64_t groups = weight.scales.groups, whole = weight.inputs / TOGETHER * TOGETHER;
    if (weight.offsets) sums.resize(rows * groups);
    std::vector<Input> own(weight.words * Kind::INPUTS + TOGETHER);
    for (int64_t part = 0; part < parts; part++)
      for (int64_t row = first(part); row < first(part + 1); row++, x += weight.inputs) {
        for (int64_t at = 0; at < whole; at += TOGETHER) arrange<TOGETHER>(x + at, &own[at]);
        Number last[TOGETHER] = {};
        std::copy(x + whole, x + weight.inputs, last);
        arrange<TOGETHER>(last, &own[whole]);
        const auto* from = reinterpret_cast<const char*>(own.data());
        int32_t* to = &words[first(part) * length + row - first(part)];
        const int64_t together = first(part + 1) - first(part);
        for (int64_t i = 0; i < length; i++) std::memcpy(to + i * together, from + i * sizeof *to, sizeof *to);
        for (int64_t group = 0, at = 0; weight.offsets && group < groups; group++) {
          float found[Kind::INPUTS] = {};
          for (; at < weight.end_of(group) * Kind::INPUTS; at += Kind::INPUTS)
            UNROLLED for (int i = 0; i < Kind::INPUTS; i++) found[i] += static_cast<float>(own[at + i]);
          for (float sum : found) sums[row * groups + group] += sum;
        }
      }
  }

  int64_t first(int64_t part) const { return part * rows / parts; }

  template <int count, class Number>
  static void arrange(const Number* from, Input* to) {
    if constexpr (std::is_same_v<Number, Input>)
      arrange(from, to, std::make_integer_sequence<int, count>{});
    else
      for (int i = 0; i < count; i++) to[i] = static_cast<Input>(from[i]);
  }

  template <int... i>
  static void arrange(const Input* from, Input* to, std::integer_sequence<int, i...>) {
    typedef std::conditional_t<sizeof(Input) == 2, int16_t, int32_t> Bits;
    typedef Bits All __attribute__((vector_size(sizeof...(i) * sizeof(Bits))));
    All all;
    std::memcpy(&all, from, sizeof all);
#if __has_builtin(__builtin_shufflevector)
    all = __builtin_shufflevector(all, all, (i / Kind::INPUTS * Kind::INPUTS + Kind::place(i % Kind::INPUTS))...);
#else  // g++ 11
    all = __builtin_shuffle(all, All{(i / Kind::INPUTS * Kind::INPUTS + Kind::place(i % Kind::INPUTS))...});
#endif
    std::memcpy(to, &all, sizeof all);
  }
};

// Up to ROWS rows, from number `first` on, with the SIDE outputs of one block from number `side` on.
template <class Kind, int count, class Number>
void multiply(const Kind kind, const Rows<Kind>& x, const Weight& weight, int64_t block, int64_t side, int64_t first,
              Number* y) {
  constexpr int COUNT = Kind::COUNT;
  const int64_t groups = weight.scales.groups;
  const int32_t* codes = weight.codes + block * weight.words * BLOCK + side;
  const int32_t* from = x.words.data() + first * x.length;
  Sums totals[count][2] = {};
  for (int64_t group = 0, word = 0; group < groups; group++) {
    Sums sums[count][2][CHAINS] = {};
    for (const int64_t end = weight.end_of(group); word < end; word++, codes += BLOCK, from += COUNT * count) {
      Sums numbers[2][COUNT];
      UNROLLED for (int half = 0; half < 2; half++) {
        Words line;
        std::memcpy(&line, codes + half * LANES, sizeof line);
        __builtin_prefetch(codes + AHEAD * BLOCK + half * LANES);
        kind.decode(line, numbers[half]);
      }
      UNROLLED for (int i = 0; i < COUNT; i++)
        UNROLLED for (int row = 0; row < count; row++)
          UNROLLED for (int half = 0; half < 2; half++) {
            Sums& sum = sums[row][half][i % CHAINS];
            sum = Kind::add(sum, numbers[half][i], from[i * count + row]);
          }
    }
    UNROLLED for (int half = 0; half < 2; half++) {
      const Sums scale = weight.scales.of(block, group, side + half * LANES);
      UNROLLED for (int row = 0; row < count; row++)
        totals[row][half] += scale * (sums[row][half][0] + sums[row][half][1]);
      if (weight.offsets) {
        const Sums offset = weight.offset(block, group, side + half * LANES, scale);
        UNROLLED for (int row = 0; row < count; row++)
          totals[row][half] -= offset * x.sums[(first + row) * groups + group];
      }
    }
  }
  const int64_t begin = block * BLOCK + side, real = std::min(SIDE, weight.outputs - begin);
  const Number* bias = weight.bias ? weight.bias->const_data_ptr<Number>() + begin : nullptr;
  for (int row = 0; row < count; row++)
    for (int64_t i = 0; i < real; i++) {
      const float sum = totals[row][i / LANES][i % LANES];
      y[(first + row) * weight.outputs + begin + i] = bias ? sum + static_cast<float>(bias[i]) : sum;
    }
}

template <class Kind, class Number, int... counts>
constexpr auto for_counts(std::integer_sequence<int, counts...>) {
  return std::array{&multiply<Kind, counts + 1, Number>...};
}

template <class Kind, class Number>
void run(const Tensor& x, const Table& table, const Weight& weight, int64_t blocks, Tensor& y) {
  static constexpr auto by_count = for_counts<Kind, Number>(std::make_integer_sequence<int, ROWS>{});
  const Rows<Kind> from(x.const_data_ptr<Number>(), x.numel() / weight.inputs, weight);
  Number* to = y.mutable_data_ptr<Number>();
  torch::stable::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; block++)
      for (int64_t part = 0; part < from.parts; part++) {  // the block stays in the cache for the next rows
        const int64_t first = from.first(part), together = from.first(part + 1) - first;
        for (int64_t side = 0; side < BLOCK; side += SIDE)
          by_count[together - 1]({table}, from, weight, block, side, first, to);
      }
  });
}

template <int bits>
void choose(const Tensor& x, const Table& table, const Weight& weight, int64_t blocks, Tensor& y) {
  if (x.scalar_type() == ScalarType::Float) return run<Single<bits>, float>(x, table, weight, blocks, y);
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::BFloat16, "only float and bfloat16 are multiplied here");
#if defined(PAIRS)
  if (table.brief) return run<Brain<bits>, BFloat16>(x, table, weight, blocks, y);
#endif
  run<Single<bits>, BFloat16>(x, table, weight, blocks, y);
}

// `codes` (blocks, words, BLOCK), scales and offsets (blocks, groups, BLOCK) of `group` inputs each.
Tensor linear_coded(const Tensor& x, const Tensor& codes, const Tensor& table, const Tensor& scales,
                    const std::optional<Tensor>& offsets, const std::optional<Tensor>& bias, int64_t outputs,
                    int64_t group, int64_t) {
  const Tensor dense = x.is_contiguous() ? x : torch::stable::contiguous(x);
  const int64_t bits = table.numel() == 16 ? 4 : 8, inputs = x.size(-1), per = 32 / bits;
  STD_TORCH_CHECK(codes.is_contiguous() && codes.scalar_type() == ScalarType::Int, "the weight is not held in codes");
  STD_TORCH_CHECK(codes.size(1) == (inputs + per - 1) / per, "the weight takes another number of inputs");
  const Weight weight{codes.const_data_ptr<int32_t>(), codes.size(1), outputs, inputs, (group + per - 1) / per,
                      Factors(scales), offsets ? std::optional(Factors(*offsets)) : std::nullopt,
                      bias ? &*bias : nullptr};
  STD_TORCH_CHECK((weight.words + weight.group - 1) / weight.group == weight.scales.groups, "a scale a group");
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = outputs;
  Tensor y = torch::stable::new_empty(x, shape);
  if (x.numel() == 0) return y;
  const Table numbers(table.const_data_ptr<float>(), table.numel());
  (bits == 4 ? choose<4> : choose<8>)(dense, numbers, weight, codes.size(0), y);
  return y;
}

}  // namespace

// coded.py has the schema: GPUs have another kernel.
STABLE_TORCH_LIBRARY_IMPL(llama_ssp, CPU, library) { library.impl("linear_coded", TORCH_BOX(&linear_coded)); }
