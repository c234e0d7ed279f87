// Attention over a cache on a CPU: in a step every key and every value is read once.
//
// The cache is plain: a slot's numbers stand together. In a step, the slots of a row of the batch are divided into
// parts of PART, which the threads share and whose results are merged. Of a prompt the threads share the tokens. A part
// is divided into tiles of TILE. All queries of a KV head, of all its heads and of all tokens, take a tile together.
//
// Scores: a word is one number of 32 bits, or two of 16. A register has `phases` words of some queries. It is
// multiplied with the same words of a key, repeated for each query. In a step, the heads of a KV head fill a register:
// 8 heads have 2 phases in 16 lanes, one head has 16. So how a query is summed does not depend on the number of tokens.
// In a prompt the tokens fill it. Sums over phases are made of `phases` keys together, which then take the lanes of the
// phases: all work on weights is by lane. Values: a register has one word of LANES numbers, of two slots where a word
// has two.
//
// What a query gets does not depend on other rows, on the number of threads, on slots behind its position, or in a step
// on other tokens: parts and tiles begin at fixed positions, and a slot that a query does not see adds nothing, to the
// bit.

#define TORCH_TARGET_VERSION 0x020b000000000000  // 2.11: its stable headers compile in a quarter of the time
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/BFloat16.h>

#include <algorithm>
#include <array>
#include <bit>
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
constexpr int LANES = 16, WIDE = 4, REGISTERS = 3;  // a product has WIDE registers of values, or REGISTERS of queries
#else
constexpr int LANES = 8, WIDE = 2, REGISTERS = 2;
#endif
constexpr int QUERIES = 4;                // in a product with values: QUERIES * WIDE sums stay in registers
constexpr int64_t PANEL = LANES * WIDE;   // numbers of values
constexpr int64_t TILE = 64, PART = 512;  // slots
constexpr int64_t MOST = 512;             // numbers of a head
constexpr int64_t STEP = 72;              // tokens of a row, at most, in a step; WIDEST in steps.py
constexpr int64_t TOGETHER = 128;         // queries of a KV head, about, that a thread takes of a prompt
constexpr int64_t HELD = 1 << 16;         // registers of results, about, that wait to be merged
constexpr float LOWEST = -1e30f, LOG2E = 1.44269504f;

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Words __attribute__((vector_size(4 * LANES)));
typedef int16_t Halves __attribute__((vector_size(4 * LANES)));
typedef int16_t Short __attribute__((vector_size(2 * LANES)));

constexpr auto EVERY = std::make_integer_sequence<int, LANES>{};

template <int... lane>
constexpr Words counted(std::integer_sequence<int, lane...>) {
  return Words{lane...};
}

// Lanes of x, and of y, whose first has the number behind x's last.
template <int... lane, class Register>
auto picked(Register x, Register y) {
#if __has_builtin(__builtin_shufflevector)
  return __builtin_shufflevector(x, y, lane...);
#else  // g++ 11
  typedef int32_t More __attribute__((vector_size(4 * sizeof...(lane))));
  if constexpr (sizeof...(lane) * sizeof x[0] == sizeof x)
    return __builtin_shuffle(x, y, decltype(x < y){lane...});
  else
    return More{x[lane]...};
#endif
}

Floats all_lanes(float x) { return x - Floats{}; }

Floats larger(Floats x, Floats y) { return x > y ? x : y; }

// In each lane the largest of those whose numbers differ from its own in bits below `count`.
template <int by = LANES / 2, int... lane>
Floats largest(Floats x, int64_t count, std::integer_sequence<int, lane...> every) {
  if (by < count) x = larger(x, picked<(lane ^ by)...>(x, x));
  if constexpr (by > 1) x = largest<by / 2>(x, count, every);
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
  static Floats add(Floats sum, Words a, Words b) { return sum + (Floats)a * (Floats)b; }
  static void zip(Words (&)[1]) {}
  static Words pack(const Floats* weights) { return (Words)weights[0]; }
  static Floats narrow(Floats x) { return x; }
};

struct Brain {
  using Number = BFloat16;
  static constexpr int PER = 2;

  static Floats add(Floats sum, Words a, Words b) {
#if defined(__AVX512BF16__)
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else  // a number of 16 bits is the upper half of one of 32
    const int32_t upper = int32_t(0xffff0000);
    return sum + (Floats)(a << 16) * (Floats)(b << 16) + (Floats)(a & upper) * (Floats)(b & upper);
#endif
  }

  // Numbers of two slots, to words of one number of each slot.
  static void zip(Words (&slots)[2]) { zip(slots, std::make_integer_sequence<int, 2 * LANES>{}); }

  template <int... i>
  static void zip(Words (&slots)[2], std::integer_sequence<int, i...>) {
    const Halves a = (Halves)slots[0], b = (Halves)slots[1];
    slots[0] = (Words)picked<(i % 2 * 2 * LANES + i / 2)...>(a, b);
    slots[1] = (Words)picked<(i % 2 * 2 * LANES + i / 2 + LANES)...>(a, b);
  }

  // To the nearest number of 16 bits, in the lower half.
  static Words rounded(Floats x) {
    typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
    return (Words)(((Bits)x + 0x7fff + ((Bits)x >> 16 & 1)) >> 16);
  }

  static auto narrow(Floats x) { return __builtin_convertvector(rounded(x), Short); }

  // Weights of two slots, to words of one weight of each slot.
  static Words pack(const Floats* weights) {
#if defined(__AVX512BF16__)
    const auto narrow = _mm512_cvtne2ps_pbh((__m512)weights[1], (__m512)weights[0]);
    Words slots[2] = {(Words)narrow, (Words)_mm512_shuffle_i64x2((__m512i)narrow, (__m512i)narrow, 0x4e)};
    zip(slots);
    return slots[0];
#else
    return rounded(weights[0]) | rounded(weights[1]) << 16;
#endif
  }
};

struct Model {
  int64_t heads, groups, size, slots;
  int64_t window;        // 0: none
  float scale, softcap;  // softcap 0: none
  int64_t words;         // of a head
  int64_t registers;     // of what a part gives for a query
};

// Tokens of a row of the batch, and the slots that they see: `parts` times `length` of them, from `first` on.
struct Chunk {
  int64_t begin, end;
  int64_t first, parts, length;
  int64_t phases;
};

// All tokens of a step's row are one chunk, whose slots the threads share. Of a prompt they share the tokens.
std::vector<Chunk> chunks_of(const int64_t* firsts, const int64_t* positions, int64_t tokens, const Model& model) {
  const int64_t per = model.heads / model.groups;
  std::vector<Chunk> chunks;
  for (int64_t row = 0, next; row < tokens; row = next) {
    for (next = row + 1; next < tokens && firsts[next] == firsts[row];) next++;
    const bool step = next - row <= STEP;
    int64_t phases = step ? LANES / std::min<int64_t>(LANES, std::bit_ceil(uint64_t(per))) : 1;
    while (model.words % phases) phases /= 2;
    for (int64_t begin = row, end; begin < next; begin = end) {
      end = step ? next : std::min(next, begin + (TOGETHER + per - 1) / per);
      const int64_t seen = positions[end - 1] + 1, length = step ? PART : (seen + TILE - 1) / TILE * TILE;
      const int64_t behind = model.window ? std::max<int64_t>(positions[begin] - model.window + 1, 0) : 0;
      const int64_t first = behind / length * length;
      chunks.push_back({begin, end, first, (seen - first + length - 1) / length, length, phases});
    }
  }
  return chunks;
}

// What a part gives for a query: a register with the largest score and the sum of weights, and behind it the sums of
// values. A weight is 2 to the power score - largest score.
constexpr int LARGEST = 0, TOTAL = 1;  // lanes of the first register

// Words in turn, until they fill a register.
template <int count>
struct Some {
  typedef int32_t Type __attribute__((vector_size(4 * count)));
};

template <int count, int... lane>
Words repeated(typename Some<count>::Type words, std::integer_sequence<int, lane...>) {
  const auto twice = picked<(lane % count)...>(words, words);
  if constexpr (2 * count == LANES)
    return twice;
  else
    return repeated<2 * count>(twice, std::make_integer_sequence<int, 4 * count>{});
}

template <int phases>
Words repeated(const int32_t* words) {
  typedef int64_t Pairs __attribute__((vector_size(4 * LANES)));
  typename Some<phases>::Type some;
  std::memcpy(&some, words, sizeof some);
  if constexpr (phases == 1)
    return *words - Words{};  // one instruction, and so are two words
  else if constexpr (phases == 2)
    return (Words)((int64_t)some - Pairs{});
  else if constexpr (phases == LANES)
    return some;
  else
    return repeated<phases>(some, std::make_integer_sequence<int, 2 * phases>{});
}

// Sums of x and y over pairs of lanes whose numbers differ in the bit `by`: of x in the lanes without it.
template <int by, int... lane>
Floats folded(Floats x, Floats y, std::integer_sequence<int, lane...>) {
  return picked<(lane & by ? LANES + lane : lane)...>(x, y) +
         picked<((lane & by ? LANES + lane : lane) ^ by)...>(x, y);
}

// Sums over phases, of `phases` keys in each register.
template <int phases, int by, int keys, int count>
inline __attribute__((always_inline)) void fold(Floats (&sums)[keys][count]) {
  if constexpr (by < phases) {
    UNROLLED for (int at = 0; at < keys; at += 2 * by)
      UNROLLED for (int i = 0; i < count; i++) sums[at][i] = folded<by>(sums[at][i], sums[at + by][i], EVERY);
    fold<phases, 2 * by>(sums);
  }
}

constexpr int keys_at_once(int phases, int count) { return std::max(phases, count == 1 ? LANES : LANES / 2); }

// Products of keys with `count` registers of queries: in each result, those of as many keys as there are phases.
// Meanwhile as much memory is asked for from `next` on.
template <class Kind, int phases, int count>
void multiply_keys(const int32_t* key, int64_t words, const Words* queries, const int32_t* next,
                   Floats (*products)[TILE]) {
  constexpr int keys = keys_at_once(phases, count);
  Floats sums[keys][count] = {};
  const int64_t steps = words / phases;
  const int32_t* half[] = {key, key + keys / 2 * words};
  for (const int32_t*& one : half) asm("" : "+r"(one));  // addresses relative to both: there are not enough registers
  for (int64_t step = 0; step < steps; step++) {
    Words query[count];
    UNROLLED for (int i = 0; i < count; i++) query[i] = queries[i * steps + step];
    UNROLLED for (int i = 0; i < keys * phases; i += 16) __builtin_prefetch(next + step * keys * phases + i);
    UNROLLED for (int at = 0; at < keys; at++) {
      const Words own = repeated<phases>(half[at / (keys / 2)] + at % (keys / 2) * words + step * phases);
      UNROLLED for (int i = 0; i < count; i++) sums[at][i] = Kind::add(sums[at][i], query[i], own);
    }
  }
  fold<phases, 1>(sums);
  UNROLLED for (int at = 0; at < keys; at += phases)
    UNROLLED for (int i = 0; i < count; i++) products[i][at / phases] = sums[at][i];
}

// Adds values of a tile's slots times weights of `count` queries to the sums of a panel.
template <class Kind, int count>
void multiply_values(const int32_t* const* weights, int64_t phases, int64_t words, const Words (*values)[WIDE],
                     Floats* const* sums) {
  Floats own[count][WIDE];
  UNROLLED for (int query = 0; query < count; query++)
    UNROLLED for (int i = 0; i < WIDE; i++) own[query][i] = sums[query][i];
  for (int64_t word = 0, at = 0; word < words; at += REGISTERS * phases * LANES)
    for (int64_t phase = 0; phase < phases; phase++, word++)
      UNROLLED for (int query = 0; query < count; query++)
        UNROLLED for (int i = 0; i < WIDE; i++)
          own[query][i] = Kind::add(own[query][i], values[word][i], weights[query][at + phase] - Words{});
  UNROLLED for (int query = 0; query < count; query++)
    UNROLLED for (int i = 0; i < WIDE; i++) sums[query][i] = own[query][i];
}

template <class Kind, int phases, int... counts>
constexpr auto keys_for_counts(std::integer_sequence<int, counts...>) {
  return std::array{&multiply_keys<Kind, phases, phases == LANES ? 1 : counts + 1>...};
}

template <class Kind, int... powers>
constexpr auto keys_for_phases(std::integer_sequence<int, powers...>) {
  return std::array{keys_for_counts<Kind, 1 << powers>(std::make_integer_sequence<int, REGISTERS>{})...};
}

template <class Kind, int... counts>
constexpr auto values_for_counts(std::integer_sequence<int, counts...>) {
  return std::array{&multiply_values<Kind, counts + 1>...};
}

// The queries of a KV head and of a chunk of tokens, and one tile after the other of the row's slots.
template <class Kind>
class alignas(64) Part {
 public:
  using Number = typename Kind::Number;

  // The queries of a chunk of tokens and of the KV head `group`.
  void load(const Number* query, const int64_t* positions, const Chunk& chunk, int64_t group, const Model& model) {
    phases = chunk.phases;
    const int64_t per = model.heads / model.groups, words = model.words;
    steps = words / phases;
    of_register = LANES / phases;
    numbers.clear();
    for (int64_t token = chunk.begin; token < chunk.end; token++)
      for (int64_t head = group * per; head < (group + 1) * per; head++) numbers.push_back(token * model.heads + head);
    count = numbers.size();
    registers.resize((count + of_register - 1) / of_register);
    pieces.resize(registers.size() * steps);
    std::fill_n(pieces.end() - steps, steps, Words{});  // the last register may have lanes without queries
    for (int64_t at = 0, i = 0; i < count; at++) {
      Register& own = registers[at];
      own.lowest = positions[numbers[i] / model.heads];
      own.position = int32_t(own.lowest) - Words{};
      for (int64_t lane = 0; lane < LANES && i < count; lane += phases, i++) {
        const int64_t token = numbers[i] / model.heads;
        own.lowest = std::min(own.lowest, positions[token]);
        own.highest = positions[token];
        const auto* from = reinterpret_cast<const int32_t*>(query + numbers[i] * model.size);
        auto* to = reinterpret_cast<int32_t*>(&pieces[at * steps]) + lane;
        for (int64_t step = 0; step < steps; step++, to += LANES)
          for (int64_t phase = 0; phase < phases; phase++) to[phase] = *from++;
        for (int64_t phase = 0; phase < phases; phase++) own.position[lane + phase] = int32_t(positions[token]);
      }
    }
  }

  // Slots `first` to `end`, as far as the queries see them; `key` and `value` are those of the row's first slot. What
  // is found for query i of the pass goes to found + i * registers.
  void attend(const Number* key, const Number* value, int64_t first, int64_t end, const Model& model, Floats* found) {
    results.clear();
    for (const int64_t number : numbers) results.push_back(found + number * model.registers);
    for (Floats* result : results) std::fill_n(result, model.registers, Floats{});
    for (Register& own : registers) own.largest = all_lanes(LOWEST), own.total = Floats{};
    end = std::min(end, registers.back().highest + 1);
    if (model.window) first = std::max(first, (registers[0].lowest - model.window + 1) / TILE * TILE);
    for (; first < end; first += TILE)
      attend_tile(key + first * model.size, value + first * model.size, first, std::min(TILE, end - first), model);
    for (int64_t at = 0, i = 0; i < count; at++)
      for (int64_t lane = 0; lane < LANES && i < count; lane += phases, i++) {
        float total = 0;
        for (int64_t phase = 0; phase < phases; phase++) total += registers[at].total[lane + phase];
        *results[i] = Floats{registers[at].largest[lane], total};
      }
  }

 private:
  static constexpr int PER = Kind::PER;
  static constexpr auto multiplies_keys = keys_for_phases<Kind>(std::make_integer_sequence<int, LANES == 16 ? 5 : 4>{});
  static constexpr auto multiplies_values = values_for_counts<Kind>(std::make_integer_sequence<int, QUERIES>{});

  struct Register {
    Words position;  // of each query: the last slot that it sees
    Floats largest, total;
    int64_t lowest, highest;  // of the positions
  };

  Words values[MOST / PANEL][TILE / PER][WIDE];  // by panel and word of slots
  Words weights[TILE / PER][REGISTERS];          // by `phases` words of slots, and register of a block of queries
  Floats scores[REGISTERS][TILE];                // by register and `phases` slots
  int32_t copied[LANES * MOST / PER];            // the last keys, which are fewer than are multiplied at once
  int64_t phases, steps, of_register, count;
  std::vector<Register> registers;
  std::vector<Words> pieces;     // by register and step
  std::vector<int64_t> numbers;  // of the queries, in the pass
  std::vector<Floats*> results;

  void attend_tile(const Number* key, const Number* value, int64_t first, int64_t slots, const Model& model) {
    const int64_t words = model.words, all = registers.size();
    const int64_t at_once = phases == LANES ? 1 : REGISTERS, block = REGISTERS * phases;
    const auto& multiplies = multiplies_keys[std::countr_zero(uint64_t(phases))];
    const auto* keys = reinterpret_cast<const int32_t*>(key);
    bool ready = false;  // whether values have been read
    for (int64_t begin = 0; begin < all; begin += block) {
      const int64_t end = std::min(all, begin + block);
      const int64_t behind = model.window ? registers[begin].lowest - model.window : -1;
      if (registers[end - 1].highest < first || behind >= first + TILE - 1) continue;
      for (int64_t i = begin; i < end; i += at_once) {
        const int64_t now = std::min(at_once, end - i), step = keys_at_once(phases, now);
        for (int64_t slot = 0; slot < slots; slot += step) {
          const bool asked = ready || i > begin;  // for the next tile
          const int32_t *next = asked ? keys : keys + (TILE + slot) * words, *from = keys + slot * words;
          if (slots - slot < step) from = std::copy(from, keys + slots * words, copied) - (slots - slot) * words;
          const auto to = reinterpret_cast<Floats (*)[TILE]>(&scores[0][slot / phases]);
          multiplies[now - 1](from, words, &pieces[i * steps], next, to);
        }
        for (int64_t at = 0; at < now; at++) weigh(scores[at], i + at, i + at - begin, first, model);
      }
      if (!ready) read_values(value, slots, model);
      ready = true;
      add_values(value, begin * of_register, std::min(count, end * of_register), slots, model);
    }
  }

  // Asks for one of `all` shares of a tile, while products keep the processor busy.
  static void prefetch(const Number* from, int64_t share, int64_t all, const Model& model) {
    const int64_t numbers = TILE * model.size;
    for (int64_t i = numbers * share / all; i < numbers * (share + 1) / all; i += 64 / sizeof(Number))
      __builtin_prefetch(from + i);
  }

  int64_t words_of(int64_t slots) const { return (slots + PER * phases - 1) / (PER * phases) * phases; }

  // Values of slots that the tile does not have are those of its last: their weights are 0.
  __attribute__((noinline)) void read_values(const Number* value, int64_t slots, const Model& model) {
    const int64_t size = model.size, all = words_of(slots);
    for (int64_t word = 0; word < all; word++) {
      const int64_t slot = word + (word & -phases) * (PER - 1);
      const Number* from[PER];
      UNROLLED for (int i = 0; i < PER; i++) from[i] = value + std::min(slot + i * phases, slots - 1) * size;
      Words* to = values[0][word];
      for (int64_t rest = size; rest > 0; to += values[1][0] - values[0][0])
        UNROLLED for (int i = 0; i < WIDE && rest > 0; i += PER, rest -= LANES * PER) {
          Words found[PER];
          UNROLLED for (int j = 0; j < PER; j++) found[j] = piece(from[j], rest), from[j] += LANES * PER;
          Kind::zip(found);
          UNROLLED for (int j = 0; j < PER; j++) to[i + j] = found[j];
        }
    }
  }

  // Numbers of a slot, at most as many as `rest`.
  static Words piece(const Number* from, int64_t rest) {
    Words whole, some = {};
    if (rest >= LANES * PER) {
      std::memcpy(&whole, from, sizeof whole);
      return whole;
    }
    std::memcpy(&some, from, rest * sizeof(Number));
    return some;
  }

  // Makes a register's scores into weights, and what has been found relative to a new largest score if it has grown.
  // Inlined, it would lack registers.
  __attribute__((noinline)) void weigh(Floats* scores, int64_t number, int64_t place, int64_t first,
                                       const Model& model) {
    Register& own = registers[number];
    const int64_t all = TILE / phases;
    float scale = model.scale * LOG2E;
    if (model.softcap != 0.0f) {
      const float cap = model.softcap * LOG2E, twice = 2 * scale / model.softcap;
      for (int64_t i = 0; i < all; i++)
        scores[i] = cap - 2 * cap / (power(-larger(-scores[i] * twice, all_lanes(-126.0f))) + 1.0f);
      scale = 1;
    }
    if (own.lowest < first + TILE - 1 || (model.window && own.highest - model.window >= first)) {
      const Words last = own.position - int32_t(first);
      const Words behind = model.window ? last - int32_t(model.window) : Words{} - 1;
      for (int64_t i = 0; i < all; i++) {
        const Words slot = (counted(EVERY) & int32_t(phases - 1)) + int32_t(i * phases);
        scores[i] = (slot > behind) & (slot <= last) ? scores[i] : all_lanes(-INFINITY);
      }
    }
    Floats most = all_lanes(LOWEST);
    for (int64_t i = 0; i < all; i++) most = larger(most, scores[i]);
    most = largest(most, phases, EVERY) * scale;
    if (largest(most > own.largest ? all_lanes(1) : Floats{}, LANES, EVERY)[0]) grow(own, number, most, model);
    Floats total = own.total;
    for (int64_t i = 0; i < all; i += PER) {
      UNROLLED for (int j = 0; j < PER; j++) total += scores[i + j] = power(scores[i + j] * scale - own.largest);
      weights[0][i / PER * REGISTERS * phases + place] = Kind::pack(scores + i);
    }
    own.total = total;
  }

  void grow(Register& own, int64_t number, Floats most, const Model& model) {
    const Floats now = larger(most, own.largest), shrink = power(own.largest - now);
    own.largest = now;
    own.total *= shrink;
    for (int64_t lane = 0, i = number * of_register; lane < LANES && i < count; lane += phases, i++)
      for (int64_t at = 1; at < model.registers; at++) results[i][at] *= shrink[lane];
  }

  void add_values(const Number* value, int64_t begin, int64_t end, int64_t slots, const Model& model) {
    const int64_t words = words_of(slots), panels = (model.size + PANEL - 1) / PANEL;
    const int64_t products = (count + QUERIES - 1) / QUERIES * panels;
    const int32_t* rows[QUERIES];
    Floats* sums[QUERIES];
    for (int64_t i = begin; i < end; i += QUERIES) {
      const int64_t now = std::min<int64_t>(QUERIES, end - i);
      for (int64_t at = 0; at < now; at++) {
        rows[at] = reinterpret_cast<const int32_t*>(weights[0]) + (i + at - begin) * phases;
        sums[at] = results[i + at] + 1;
      }
      for (int64_t panel = 0; panel < panels; panel++) {
        prefetch(value + TILE * model.size, i / QUERIES * panels + panel, products, model);
        multiplies_values[now - 1](rows, phases, words, values[panel], sums);
        for (int64_t at = 0; at < now; at++) sums[at] += WIDE;
      }
    }
  }
};

// One query's result from those of its parts, which are `stride` registers apart.
template <class Kind>
void merge(const Floats* parts, int64_t count, int64_t stride, const float* sink, int64_t size,
           typename Kind::Number* y) {
  const float sunk = sink ? *sink * LOG2E : LOWEST;
  float most = sunk;
  for (int64_t part = 0; part < count; part++) most = std::max(most, parts[part * stride][LARGEST]);
  Floats total = power(all_lanes(sunk - most)), sums[MOST / LANES];
  std::fill_n(sums, (size + LANES - 1) / LANES, Floats{});
  for (int64_t part = 0; part < count; part++) {
    const Floats* one = parts + part * stride;
    const Floats weight = power(all_lanes(one[0][LARGEST] - most));
    total += one[0][TOTAL] * weight;
    for (int64_t i = 0; i * LANES < size; i++) sums[i] += one[1 + i] * weight;
  }
  const Floats share = 1 / total;
  int64_t i = 0;
  for (; (i + 1) * LANES <= size; i++) {
    const auto whole = Kind::narrow(sums[i] * share);
    std::memcpy(y + i * LANES, &whole, sizeof whole);
  }
  if (i * LANES < size) {
    const auto some = Kind::narrow(sums[i] * share);
    std::memcpy(y + i * LANES, &some, (size - i * LANES) * sizeof *y);
  }
}

// The tensors of a pass.
template <class Kind>
struct Pass {
  using Number = typename Kind::Number;
  const Number *query, *keys, *values;
  const int64_t *firsts, *positions;
  const float* sinks;
  Number* y;

  // Attention of the chunks from `begin` to `end`.
  void attend(const Chunk* begin, const Chunk* end, const Model& model) const {
    struct Item {
      const Chunk* chunk;
      int64_t group, part;
    };
    std::vector<Item> items;
    for (int64_t group = 0; group < model.groups; group++)
      for (const Chunk* chunk = begin; chunk < end; chunk++)
        for (int64_t part = 0; part < chunk->parts; part++) items.push_back({chunk, group, part});
    std::vector<int64_t> parts;  // that each query's results come from
    int64_t most = 0, longest = 0;
    for (const Chunk* chunk = begin; chunk < end; chunk++) {
      parts.insert(parts.end(), (chunk->end - chunk->begin) * model.heads, chunk->parts);
      most = std::max(most, chunk->parts);
      longest = std::max(longest, positions[chunk->end - 1] + 1 - chunk->first);
    }
    const int64_t from = begin->begin * model.heads, all = parts.size(), stride = all * model.registers;
    const std::unique_ptr<Floats[]> results(new Floats[most * stride]);  // not zeroed: a part writes all of its own
    Floats* found = results.get() - from * model.registers;
    // To begin and end with several threads takes as long as a few hundred slots: shorter texts are not divided.
    torch::stable::parallel_for(0, items.size(), std::max<int64_t>(1, PART / longest), [&](int64_t at, int64_t to) {
      thread_local const auto own = std::make_unique<Part<Kind>>();
      Part<Kind>& work = *own;
      for (bool loaded = false; at < to; at++, loaded = true) {
        const auto [chunk, group, part] = items[at];
        const int64_t offset = (group * model.slots + firsts[chunk->begin]) * model.size;
        const int64_t first = chunk->first + part * chunk->length;
        if (!loaded || part == 0) work.load(query, positions, *chunk, group, model);
        work.attend(keys + offset, values + offset, first, first + chunk->length, model, found + part * stride);
      }
    });
    torch::stable::parallel_for(0, all, 1 + 1024 / most, [&](int64_t at, int64_t to) {
      for (; at < to; at++) {
        const int64_t number = from + at;
        const float* sink = sinks ? sinks + number % model.heads : nullptr;
        merge<Kind>(found + number * model.registers, parts[at], stride, sink, model.size, y + number * model.size);
      }
    });
  }
};

template <class Kind>
void run(const Tensor& query, const Tensor& keys, const Tensor& values, const int64_t* firsts,
         const int64_t* positions, const float* sinks, const Model& model, Tensor& y) {
  using Number = typename Kind::Number;
  const Pass<Kind> pass{query.const_data_ptr<Number>(), keys.const_data_ptr<Number>(), values.const_data_ptr<Number>(),
                        firsts, positions, sinks, y.mutable_data_ptr<Number>()};
  const std::vector<Chunk> chunks = chunks_of(firsts, positions, query.size(0), model);
  const Chunk *begin = chunks.data(), *last = begin + chunks.size();
  for (const Chunk* end = begin; begin < last; begin = end) {
    for (int64_t most = 0; end < last; end++) {
      most = std::max(most, end->parts);
      if (end > begin && (end->end - begin->begin) * model.heads * most * model.registers > HELD) break;
    }
    pass.attend(begin, end, model);
  }
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
  const int64_t size = query.size(2), words = size * query.element_size() / sizeof(int32_t);
  const Model model{query.size(1), keys.size(0),   size,  keys.size(1),                         window,
                    float(scale),  float(softcap), words, 1 + (size + PANEL - 1) / PANEL * WIDE};
  const auto go = kind == ScalarType::Float ? &run<Single> : &run<Brain>;
  go(queries, keys, values, firsts.const_data_ptr<int64_t>(), positions.const_data_ptr<int64_t>(),
     sinks ? sinks->const_data_ptr<float>() : nullptr, model, y);
  return y;
}

}  // namespace

// attention.py has the schema: GPUs have another kernel.
STABLE_TORCH_LIBRARY_IMPL(llama_ssp, CPU, library) { library.impl("attend", TORCH_BOX(&attend)); }
