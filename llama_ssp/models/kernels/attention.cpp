// Attention of a few new tokens over a long cache on a CPU: every key and every value is read once.
//
// The cache is plain: a slot's numbers stand together. The slots of a row of the batch are divided into parts of PART,
// which the threads share and whose results are merged, and a part into tiles of TILE. All queries of a KV head, of
// all its heads and of all tokens of the row, take a tile together. Keys and values of the tile are rearranged in the
// processor's cache, so that a register has one word (one number of 32 bits, or two of 16) of LANES keys, or words of
// LANES numbers of the values. Then scores and sums of values are the same product, and no sum goes over lanes.
//
// What a query gets does not depend on other queries, on the number of threads, or on slots behind its position: parts
// and tiles begin at fixed positions, and a slot that a query does not see adds nothing, to the bit.

#define TORCH_TARGET_VERSION 0x020b000000000000  // 2.11: its stable headers compile in a quarter of the time
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/BFloat16.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#define UNROLLED _Pragma("GCC unroll 16")  // so that arrays of registers are registers

namespace {

using torch::headeronly::BFloat16;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

#if defined(__AVX512F__)
constexpr int LANES = 16, WIDE = 4;  // numbers of a register; registers of the tile in one product
#else
constexpr int LANES = 8, WIDE = 2;
#endif
constexpr int QUERIES = 4;               // in one product: QUERIES * WIDE sums fill half of the registers
constexpr int64_t TILE = LANES * WIDE;   // slots
constexpr int64_t PART = 512;            // slots, a multiple of TILE
constexpr int64_t MOST = 256;            // numbers of a head
constexpr float LOWEST = -1e30f, LOG2E = 1.44269504f;

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Words __attribute__((vector_size(4 * LANES)));
typedef int16_t Halves __attribute__((vector_size(4 * LANES)));

constexpr auto EVERY = std::make_integer_sequence<int, LANES>{};

template <int... lane>
constexpr Words counted(std::integer_sequence<int, lane...>) {
  return Words{lane...};
}

Floats all_lanes(float x) { return x - Floats{}; }

Floats larger(Floats x, Floats y) { return x > y ? x : y; }

// All lanes of the result: `combine` over all lanes of x.
template <class Combine>
Floats over_lanes(Floats x, Combine combine) {
  UNROLLED for (int by = LANES / 2; by; by /= 2)
    x = combine(x, __builtin_shuffle(x, (counted(EVERY) + by) & (LANES - 1)));
  return x;
}

// 2 to the power x, for x <= 126, with an error of 1e-7: exactly 1 for 0, and exactly 0 from -127 down.
Floats power(Floats x) {
  x = larger(all_lanes(-127.0f), x);
  const Floats shifted = x + 12582912.0f, r = x - (shifted - 12582912.0f);  // rounded: the number is in the low bits
  const Floats y = ((((1.32647e-3f * r + 9.67151e-3f) * r + 5.550734e-2f) * r + 2.4022242e-1f) * r + 6.9314698e-1f) * r;
  return (Floats)((Words)(y + 1.0f) + ((Words)shifted << 23));
}

// A number format: how many numbers a word of 32 bits has, the sum of a word's products, and weights as words.
struct Single {
  using Number = float;
  static constexpr int PER = 1;
  static Floats add(Floats sum, Words w, int32_t x) { return sum + (Floats)w * (Floats)(x - Words{}); }
  static void zip(Words (&)[1]) {}
  static void write(Floats weight, int32_t* to) { std::memcpy(to, &weight, sizeof weight); }
};

struct Brain {
  using Number = BFloat16;
  static constexpr int PER = 2;

  static Floats add(Floats sum, Words w, int32_t x) {
#if defined(__AVX512BF16__)
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)_mm512_set1_epi32(x));
#else  // a number of 16 bits is the upper half of one of 32
    const Words both = x - Words{};
    const int32_t upper = int32_t(0xffff0000);
    return sum + (Floats)(w << 16) * (Floats)(both << 16) + (Floats)(w & upper) * (Floats)(both & upper);
#endif
  }

  // Numbers of two slots, to words of one number of each slot.
  static void zip(Words (&slots)[2]) { zip(slots, std::make_integer_sequence<int, 2 * LANES>{}); }

  template <int... i>
  static void zip(Words (&slots)[2], std::integer_sequence<int, i...>) {
    const Halves a = (Halves)slots[0], b = (Halves)slots[1];
    slots[0] = (Words)__builtin_shufflevector(a, b, (i % 2 * 2 * LANES + i / 2)...);
    slots[1] = (Words)__builtin_shufflevector(a, b, (i % 2 * 2 * LANES + i / 2 + LANES)...);
  }

  static void write(Floats weight, int32_t* to) {
#if defined(__AVX512BF16__)
    const __m256bh narrow = _mm512_cvtneps_pbh((__m512)weight);
#else
    Number narrow[LANES];
    for (int i = 0; i < LANES; i++) narrow[i] = weight[i];
#endif
    std::memcpy(to, &narrow, sizeof narrow);
  }
};

// In each four lanes, the first two words of a and b (or with `part` 1 the last two), in turn.
template <int part, int... lane>
Words zipped(Words a, Words b, std::integer_sequence<int, lane...>) {
  return __builtin_shufflevector(a, b, (lane / 4 * 4 + lane % 4 / 2 + 2 * part + lane % 2 * LANES)...);
}

// Every second four lanes of a, and then of b.
template <int part, int... lane>
Words fours(Words a, Words b, std::integer_sequence<int, lane...>) {
  return __builtin_shufflevector(a, b, (lane / 4 * 8 + lane % 4 + 4 * part)...);
}

// By instructions that many processors have: within fours of rows and lanes, and then fours as a whole.
inline __attribute__((always_inline)) void transpose(Words (&rows)[LANES]) {
  constexpr int FOURS = LANES / 4;
  Words next[LANES];
  UNROLLED for (int round = 0; round < 2; round++) {
    UNROLLED for (int i = 0; i < LANES; i += 2) {
      const int from = i / 4 * 4 + i % 4 / 2;
      next[i] = zipped<0>(rows[from], rows[from + 2], EVERY);
      next[i + 1] = zipped<1>(rows[from], rows[from + 2], EVERY);
    }
    UNROLLED for (int i = 0; i < LANES; i++) rows[i] = next[i];
  }
  UNROLLED for (int round = 1; round < FOURS; round *= 2) {
    UNROLLED for (int i = 0; i < LANES / 2; i++) {
      const int from = i / 4 * 8 + i % 4;
      next[i] = fours<0>(rows[from], rows[from + 4], EVERY);
      next[i + LANES / 2] = fours<1>(rows[from], rows[from + 4], EVERY);
    }
    UNROLLED for (int i = 0; i < LANES; i++) rows[i] = next[i];
  }
}

struct Model {
  int64_t heads, groups, size, slots;
  int64_t window;        // 0: none
  float scale, softcap;  // softcap 0: none
  int64_t words = 0, registers = 0;  // of a query, padded with zeros, and of what a part gives for it
};

// What a part gives for a query: the largest score, a sum of weights in each lane, and the sums of values. A weight is
// 2 to the power score - largest score.
enum { LARGEST, TOTAL, SUMS };

struct Query {
  const int32_t* words;
  int64_t position;
  Floats* found;
};

// Adds to the sums the products of words of `count` rows with WIDE registers for each word.
template <class Kind, int count>
void multiply(const int32_t* const* rows, int64_t words, const Words (*wide)[WIDE], Floats* const* sums) {
  Floats own[count][WIDE];
  UNROLLED for (int row = 0; row < count; row++)
    UNROLLED for (int i = 0; i < WIDE; i++) own[row][i] = sums[row][i];
  for (int64_t word = 0; word < words; word++)
    UNROLLED for (int row = 0; row < count; row++)
      UNROLLED for (int i = 0; i < WIDE; i++) own[row][i] = Kind::add(own[row][i], wide[word][i], rows[row][word]);
  UNROLLED for (int row = 0; row < count; row++)
    UNROLLED for (int i = 0; i < WIDE; i++) sums[row][i] = own[row][i];
}

template <class Kind, int... counts>
constexpr auto for_counts(std::integer_sequence<int, counts...>) {
  return std::array{&multiply<Kind, counts + 1>...};
}

// A tile of slots, and its keys and values, rearranged.
template <class Kind>
struct alignas(64) Tile {
  using Number = typename Kind::Number;
  static constexpr int PER = Kind::PER;
  static constexpr auto multiplies = for_counts<Kind>(std::make_integer_sequence<int, QUERIES>{});
  Words keys[MOST / PER][WIDE];                 // by word: that word of the keys
  Words values[MOST / TILE][TILE / PER][WIDE];  // by TILE numbers and word of slots: those numbers of the values
  const Number *key, *value;                    // of the row's first slot
  int64_t first, slots;

  // Asks for one of `all` shares of the next tile, while the products keep the processor busy.
  void prefetch(int64_t share, int64_t all, int64_t size) const {
    const int64_t begin = (first + TILE) * size, numbers = TILE * size;
    for (int64_t i = begin + numbers * share / all; i < begin + numbers * (share + 1) / all; i += 64 / sizeof(Number))
      __builtin_prefetch(key + i), __builtin_prefetch(value + i);
  }

  // LANES words of a slot, from a number on, with zeros behind its end.
  Words piece(const Number* numbers, int64_t slot, int64_t at, int64_t size) const {
    const Number* from = numbers + (first + std::min(slot, slots - 1)) * size + at;
    __builtin_prefetch(from + TILE * size);  // what `prefetch` asks for at once may be more than the processor takes
    Words found = {};
    if (size - at >= LANES * PER)
      std::memcpy(&found, from, sizeof found);
    else
      std::memcpy(&found, from, (size - at) * sizeof(Number));
    return found;
  }

  // Keys of slots that the tile does not have are arbitrary; of values, a whole word is read.
  void read(int64_t size) {
    for (int64_t slot = 0; slot < slots; slot += LANES)
      for (int64_t at = 0; at < size; at += LANES * PER) {
        Words rows[LANES];
        UNROLLED for (int i = 0; i < LANES; i++) rows[i] = piece(key, slot + i, at, size);
        transpose(rows);
        UNROLLED for (int i = 0; i < LANES; i++) keys[at / PER + i][slot / LANES] = rows[i];
      }
    for (int64_t slot = 0; slot < slots; slot += PER)
      for (int64_t at = 0; at < size; at += LANES * PER) {
        Words found[PER];
        for (int i = 0; i < PER; i++) found[i] = piece(value, slot + i, at, size);
        Kind::zip(found);
        std::copy_n(found, PER, &values[at / TILE][slot / PER][at % TILE / LANES]);
      }
  }

  // Makes one query's scores of the tile into weights, and what it has found relative to the new largest score.
  void weigh(Floats (&scores)[WIDE], const Query& query, const Model& model, int32_t* weights) const {
    const int64_t last = query.position - first, from = model.window ? last - model.window + 1 : 0;
    float scale = model.scale * LOG2E;
    if (model.softcap != 0.0f) {
      const float cap = model.softcap * LOG2E, twice = 2 * scale / model.softcap;
      UNROLLED for (Floats& score : scores)
        score = cap - 2 * cap / (power(-larger(-score * twice, all_lanes(-126.0f))) + 1.0f);
      scale = 1;
    }
    if (from > 0 || last < TILE - 1) {
      UNROLLED for (int i = 0; i < WIDE; i++) {
        const Words slot = counted(EVERY) + i * LANES;
        scores[i] = (slot >= int32_t(from)) & (slot <= int32_t(last)) ? scores[i] : all_lanes(-INFINITY);
      }
    }
    Floats most = all_lanes(LOWEST);
    UNROLLED for (const Floats& score : scores) most = larger(most, score);
    most = over_lanes(most, larger) * scale;
    Floats* found = query.found;
    if (most[0] > found[LARGEST][0]) {
      const Floats shrink = power(found[LARGEST] - most);
      for (int64_t i = TOTAL; i < model.registers; i++) found[i] *= shrink;
      found[LARGEST] = most;
    }
    most = found[LARGEST];
    Floats total = found[TOTAL];
    UNROLLED for (int i = 0; i < WIDE; i++) {
      const Floats weight = power(scores[i] * scale - most);
      total += weight;
      Kind::write(weight, weights + i * LANES / PER);
    }
    found[TOTAL] = total;
  }

  // Adds the tile to what the queries have found, QUERIES at a time. Scores become weights behind the sums of values of
  // the queries before: meanwhile the processor can begin the next scores, which do not need these weights.
  void attend(const std::vector<Query>& queries, const Model& model) const {
    Floats scores[QUERIES][WIDE], *sums[QUERIES];
    alignas(64) int32_t weights[QUERIES][TILE / PER];
    const int32_t* rows[QUERIES];
    const int64_t all = queries.size();
    for (int64_t before = 0, at = 0, count; before < all; before = at, at += count) {
      count = std::min<int64_t>(QUERIES, all - at);
      if (count > 0) {
        for (int64_t i = 0; i < count; i++) rows[i] = queries[at + i].words, sums[i] = scores[i];
        std::fill_n(scores[0], QUERIES * WIDE, Floats{});
        multiplies[count - 1](rows, model.words, keys, sums);
      }
      if (at > 0) {
        const int64_t done = at - before;
        for (int64_t i = 0; i < done; i++) rows[i] = weights[i], sums[i] = queries[before + i].found + SUMS;
        for (int64_t panel = 0; panel * TILE < model.size; panel++) {
          multiplies[done - 1](rows, (slots + PER - 1) / PER, values[panel], sums);
          for (int64_t i = 0; i < done; i++) sums[i] += WIDE;
        }
      }
      for (int64_t i = 0; i < count; i++) {
        prefetch(at + i, all, model.size);
        weigh(scores[i], queries[at + i], model, weights[i]);
      }
    }
  }

  // All queries of a KV head of a row of the batch, over one part of the row's slots.
  void attend_part(const std::vector<Query>& queries, int64_t part, const Model& model) {
    const int64_t end = std::min((part + 1) * PART, queries.back().position + 1);
    first = part * PART;
    if (model.window) first = std::max(first, (queries[0].position - model.window + 1) / TILE * TILE);
    for (; first < end; first += TILE) {
      slots = std::min(TILE, end - first);
      read(model.size);
      attend(queries, model);
    }
  }
};

// One query's result from those of its parts, which are `stride` registers apart.
template <class Number>
void merge(const Floats* parts, int64_t count, int64_t stride, const float* sink, int64_t size, Number* y) {
  const Floats sunk = all_lanes(sink ? *sink * LOG2E : LOWEST);
  Floats most = sunk, total = {}, sums[MOST / LANES] = {};
  for (int64_t part = 0; part < count; part++) most = larger(most, parts[part * stride + LARGEST]);
  for (int64_t part = 0; part < count; part++) {
    const Floats* one = parts + part * stride;
    const Floats weight = power(one[LARGEST] - most);
    total += one[TOTAL] * weight;
    for (int64_t i = 0; i * LANES < size; i++) sums[i] += one[SUMS + i] * weight;
  }
  total = over_lanes(total, std::plus<Floats>()) + power(sunk - most);
  for (int64_t i = 0; i < size; i++) y[i] = static_cast<Number>(sums[i / LANES][i % LANES] / total[0]);
}

template <class Kind>
void run(const Tensor& query, const Tensor& keys, const Tensor& values, const int64_t* firsts,
         const int64_t* positions, const float* sinks, Model model, Tensor& y) {
  using Number = typename Kind::Number;
  const int64_t tokens = query.size(0), per = model.heads / model.groups, all = tokens * model.heads;
  model.words = (model.size + LANES * Kind::PER - 1) / (LANES * Kind::PER) * LANES;
  model.registers = SUMS + (model.size + TILE - 1) / TILE * WIDE;
  std::vector<int32_t> words(all * model.words);
  for (int64_t i = 0; i < all; i++)
    std::memcpy(&words[i * model.words], query.const_data_ptr<Number>() + i * model.size, model.size * sizeof(Number));
  struct Item {
    int64_t begin, end, group, part, place;  // tokens of a row of the batch; the part's number among those they see
  };
  std::vector<Item> items;
  std::vector<int64_t> parts(tokens);  // of the token's row
  for (int64_t begin = 0, end; begin < tokens; begin = end) {
    for (end = begin + 1; end < tokens && firsts[end] == firsts[begin];) end++;
    const int64_t from = model.window ? std::max<int64_t>(positions[begin] - model.window + 1, 0) / PART : 0;
    std::fill(&parts[begin], &parts[end], positions[end - 1] / PART + 1 - from);
    for (int64_t group = 0; group < model.groups; group++)
      for (int64_t i = 0; i < parts[begin]; i++) items.push_back({begin, end, group, from + i, i});
  }
  const int64_t most = *std::max_element(parts.begin(), parts.end()), stride = all * model.registers;
  const std::unique_ptr<Floats[]> results(new Floats[most * stride]);  // not zeroed: a part writes all of its own
  Floats* found = results.get();
  // To begin and end with several threads takes as long as a few hundred slots: shorter texts are not divided.
  const int64_t longest = 1 + *std::max_element(positions, positions + tokens);
  const int64_t together = std::max<int64_t>(1, PART / (model.window ? std::min(model.window, longest) : longest));
  torch::stable::parallel_for(0, int64_t(items.size()), together, [&](int64_t from, int64_t to) {
    thread_local Tile<Kind> tile;
    for (int64_t item = from; item < to; item++) {
      const auto [begin, end, group, part, place] = items[item];
      std::vector<Query> queries;
      for (int64_t token = begin; token < end; token++)
        for (int64_t i = token * model.heads + group * per; i < token * model.heads + (group + 1) * per; i++) {
          Floats* own = found + place * stride + i * model.registers;
          std::fill_n(own, model.registers, Floats{});
          own[LARGEST] = all_lanes(LOWEST);
          queries.push_back({&words[i * model.words], positions[token], own});
        }
      const int64_t offset = (group * model.slots + firsts[begin]) * model.size;
      tile.key = keys.const_data_ptr<Number>() + offset, tile.value = values.const_data_ptr<Number>() + offset;
      tile.attend_part(queries, part, model);
    }
  });
  torch::stable::parallel_for(0, all, 1 + 1024 / most, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i++)
      merge(found + i * model.registers, parts[i / model.heads], stride, sinks ? sinks + i % model.heads : nullptr,
            model.size, y.mutable_data_ptr<Number>() + i * model.size);
  });
}

Tensor dense(const Tensor& x) { return x.is_contiguous() ? x : torch::stable::contiguous(x); }

Tensor attend(const Tensor& query, const Tensor& keys, const Tensor& values, const Tensor& first, const Tensor& position,
              double scale, int64_t window, double softcap, const std::optional<Tensor>& sinks) {
  const ScalarType kind = query.scalar_type();
  STD_TORCH_CHECK(keys.is_contiguous() && values.is_contiguous() && query.size(2) <= MOST,
                  "not a cache of this program");
  STD_TORCH_CHECK(keys.scalar_type() == kind, "the cache has another number format");
  STD_TORCH_CHECK(kind == ScalarType::Float || (kind == ScalarType::BFloat16 && query.size(2) % 2 == 0),
                  "only float, and bfloat16 with heads of even size");
  STD_TORCH_CHECK(!sinks || (sinks->is_contiguous() && sinks->scalar_type() == ScalarType::Float), "sinks are float");
  const Tensor queries = dense(query), firsts = dense(first), positions = dense(position);
  Tensor y = torch::stable::empty_like(queries);
  const Model model{query.size(1), keys.size(0), query.size(2), keys.size(1), window, float(scale), float(softcap)};
  const auto go = kind == ScalarType::Float ? &run<Single> : &run<Brain>;
  go(queries, keys, values, firsts.const_data_ptr<int64_t>(), positions.const_data_ptr<int64_t>(),
     sinks ? sinks->const_data_ptr<float>() : nullptr, model, y);
  return y;
}

}  // namespace

// attention.py has the schema: GPUs have another kernel.
STABLE_TORCH_LIBRARY_IMPL(llama_ssp, CPU, library) { library.impl("attend", TORCH_BOX(&attend)); }
