// Attention of a few new tokens over a long cache on a CPU: every key and every value is read once.
//
// The queries of a KV head, of all its heads and of all new tokens of a row, are taken together. The row's slots are
// divided into parts of PART, whose results are merged, so that threads share long texts. In a part, keys and values
// are rearranged in the cache of the processor, TILE slots at a time: then a register holds one word of 16 keys, or of
// 16 numbers of a value, and a query's word is multiplied with all of them at once. What a query gets does not depend
// on the other queries, on the number of threads, or on anything behind its position.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 16;
constexpr int64_t TILE = 64;   // slots
constexpr int64_t PART = 1024;  // slots
constexpr int MOST = 256;      // numbers of a head
constexpr float LOWEST = -3e38f;

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Words __attribute__((vector_size(64)));

Floats all(float x) { return x - Floats{}; }

constexpr Words COUNTED = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

Floats turned(Floats x, int by) {
  const Words from = (COUNTED + by) & (LANES - 1);
  return __builtin_shuffle(x, from);
}

float largest_of(Floats x) {
  for (int by : {8, 4, 2, 1}) {
    const Floats other = turned(x, by);
    x = x > other ? x : other;
  }
  return x[0];
}

float sum_of(Floats x) {
  for (int by : {8, 4, 2, 1}) x += turned(x, by);
  return x[0];
}

// A number format: how many numbers a word of 32 bits has, and the sum of a word's products.
struct Single {
  using Number = float;
  static constexpr int PER = 1;
  static Floats add(Floats sum, Words w, int32_t x) { return sum + (Floats)w * (Floats)(x - Words{}); }
};

struct Brain {
  using Number = c10::BFloat16;
  static constexpr int PER = 2;
  static Floats add(Floats sum, Words w, int32_t x) {
#if defined(__AVX512BF16__)
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)_mm512_set1_epi32(x));
#else
    const Words both = x - Words{};
    const int32_t upper = int32_t(0xffff0000);
    return sum + (Floats)(w << 16) * (Floats)(both << 16) + (Floats)(w & upper) * (Floats)(both & upper);
#endif
  }
};

Floats exponential(Floats x) {
  x = x < -87.0f ? all(-87.0f) : x;
  const Floats shifted = x * 1.44269504f + 12582912.0f, whole = shifted - 12582912.0f;
  const Floats r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
  Floats y = all(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    y = y * r + c;
  y = y * r * r + r + 1.0f;
  return (Floats)((Words)y + (((Words)shifted - 0x4b400000) << 23));
}

template <int step, int... lane>
void exchange(Words& a, Words& b, std::integer_sequence<int, lane...>) {
  const Words low = __builtin_shufflevector(a, b, (lane & step ? LANES + lane - step : lane)...);
  b = __builtin_shufflevector(a, b, (lane & step ? LANES + lane : lane + step)...);
  a = low;
}

template <int step>
void stage(Words (&rows)[LANES]) {
  for (int i = 0; i < LANES; i++)
    if (!(i & step)) exchange<step>(rows[i], rows[i + step], std::make_integer_sequence<int, LANES>{});
}

void transpose(Words (&rows)[LANES]) { stage<1>(rows), stage<2>(rows), stage<4>(rows), stage<8>(rows); }

struct Model {
  int64_t heads, groups, size, slots, words;  // words of a head, padded to whole registers
  int64_t window;                             // 0: none
  float scale, softcap;                       // softcap 0: none
};

// Tokens of one row of the batch.
struct Row {
  int64_t begin, count, first;  // tokens, and the row's first slot
};

// What a part gives for a query: the largest score, the sum of exponentials, and the sum of values.
struct Found {
  float most = LOWEST, total = 0;
  float sums[MOST] = {};
};

template <class Kind>
Words piece(const typename Kind::Number* row, int64_t word, int64_t size) {
  Words found = {};
  const int64_t at = word * Kind::PER, left = std::min<int64_t>(LANES * Kind::PER, size - at);
  if (left == LANES * Kind::PER)
    std::memcpy(&found, row + at, sizeof found);
  else if (left > 0)
    std::memcpy(&found, row + at, left * sizeof *row);
  return found;
}

// Keys and values of a tile, rearranged, and the queries.
template <class Kind>
struct Tile {
  using Number = typename Kind::Number;
  Words keys[TILE / LANES][MOST / Kind::PER];       // by 16 slots and word: that word of the 16 keys
  Words values[TILE / Kind::PER][MOST / LANES];     // by word of slots and 16 numbers of the value
  Floats scores[TILE / LANES];

  // Of slots first, first + 1, ...; those from `count` on repeat the last.
  void read(const Number* key, const Number* value, int64_t count, const Model& model) {
    for (int64_t block = 0; block < TILE / LANES; block++) {
      if (block * LANES >= count) break;
      for (int64_t word = 0; word < model.words; word += LANES) {
        Words rows[LANES];
        for (int64_t i = 0; i < LANES; i++)
          rows[i] = piece<Kind>(key + std::min(block * LANES + i, count - 1) * model.size, word, model.size);
        transpose(rows);
        std::copy(rows, rows + LANES, keys[block] + word);
      }
    }
    for (int64_t slot = 0; slot < count; slot += Kind::PER) {
      const Number* one = value + slot * model.size;
      const Number* other = value + std::min(slot + 1, count - 1) * model.size;
      for (int64_t at = 0; at < model.size; at += LANES) interleave(one, other, at, model.size, values[slot / Kind::PER][at / LANES]);
    }
  }

  static void interleave(const Number* one, const Number* other, int64_t at, int64_t size, Words& found) {
    if constexpr (Kind::PER == 1) {
      found = piece<Kind>(one, at, size);
    } else {
      typedef uint16_t Halves __attribute__((vector_size(32)));
      typedef int32_t Whole __attribute__((vector_size(64)));
      Halves low = {}, high = {};
      const size_t bytes = 2 * std::min<int64_t>(LANES, size - at);
      if (bytes == sizeof low)
        std::memcpy(&low, one + at, sizeof low), std::memcpy(&high, other + at, sizeof high);
      else
        std::memcpy(&low, one + at, bytes), std::memcpy(&high, other + at, bytes);
      found = __builtin_convertvector(low, Whole) | (__builtin_convertvector(high, Whole) << 16);
    }
  }

  // Adds the tile's slots from..last, of which it holds `count`, to what the query has found.
  void attend(const int32_t* query, int64_t count, int64_t from, int64_t last, const Model& model, Found& found) {
    const int64_t blocks = (std::min(count, last + 1) + LANES - 1) / LANES;
    Floats most = all(LOWEST);
    for (int64_t block = 0; block < blocks; block++) {
      Floats sums[4] = {};
      for (int64_t word = 0; word < model.words; word += 4)
        for (int i = 0; i < 4; i++) sums[i] = Kind::add(sums[i], keys[block][word + i], query[word + i]);
      Floats score = (sums[0] + sums[1] + sums[2] + sums[3]) * model.scale;
      if (model.softcap != 0.0f)
        score = model.softcap - 2 * model.softcap / (exponential(score * (2 / model.softcap)) + 1);
      const Words slot = COUNTED + int32_t(block * LANES);
      score = (slot >= int32_t(from)) & (slot <= int32_t(last)) ? score : all(LOWEST);
      scores[block] = score;
      most = most > score ? most : score;
    }
    const float largest = std::max(found.most, largest_of(most));
    const float shrink = std::exp(found.most - largest);
    Floats total = {};
    alignas(64) int32_t weights[TILE];
    for (int64_t block = 0; block < blocks; block++) {
      const Floats weight = scores[block] == LOWEST ? all(0) : exponential(scores[block] - largest);
      total += weight;
      write(weight, weights, block);
    }
    found.total = found.total * shrink + sum_of(total);
    found.most = largest;
    for (int64_t at = 0; at < model.size; at += 4 * LANES) add_values(weights, blocks, count, at, shrink, model, found);
  }

  // Up to four registers of the values' sum.
  void add_values(const int32_t* weights, int64_t blocks, int64_t count, int64_t at, float shrink, const Model& model,
                  Found& found) {
    Floats sums[4];
    std::memcpy(&sums, found.sums + at, sizeof sums);
    for (Floats& sum : sums) sum *= shrink;
    const int64_t words = (std::min(blocks * LANES, count) + Kind::PER - 1) / Kind::PER;
    for (int64_t word = 0; word < words; word++)
      for (int i = 0; i < 4; i++) sums[i] = Kind::add(sums[i], values[word][at / LANES + i], weights[word]);
    std::memcpy(found.sums + at, &sums, sizeof sums);
  }

  static void write(Floats weight, int32_t* weights, int64_t block) {
    if constexpr (Kind::PER == 1) {
      std::memcpy(weights + block * LANES, &weight, sizeof weight);
    } else {
#if defined(__AVX512BF16__)
      const __m256bh narrow = _mm512_cvtneps_pbh((__m512)weight);
      std::memcpy(weights + block * LANES / 2, &narrow, sizeof narrow);
#else
      Number narrow[LANES];
      for (int i = 0; i < LANES; i++) narrow[i] = weight[i];
      std::memcpy(weights + block * LANES / 2, &narrow, sizeof narrow);
#endif
    }
  }
};

// All queries of a row and a KV head, over one part of the row's slots.
template <class Kind>
void attend_part(const int32_t* queries, const typename Kind::Number* keys, const typename Kind::Number* values,
                 const int64_t* positions, const Row& row, int64_t group, int64_t part, const Model& model,
                 Found* found) {
  const int64_t per = model.heads / model.groups, furthest = positions[row.begin + row.count - 1];
  thread_local Tile<Kind> own;
  Tile<Kind>& tile = own;
  const int64_t earliest = model.window ? std::max<int64_t>(positions[row.begin] - model.window + 1, 0) : 0;
  const int64_t begin = std::max(part * PART, earliest), end = std::min((part + 1) * PART, furthest + 1);
  const int64_t offset = (group * model.slots + row.first) * model.size;
  for (int64_t slot = begin; slot < end; slot += TILE) {
    const int64_t count = std::min(TILE, end - slot);
    tile.read(keys + offset + slot * model.size, values + offset + slot * model.size, count, model);
    for (int64_t token = 0; token < row.count; token++) {
      const int64_t position = positions[row.begin + token], last = std::min(position - slot, count - 1);
      const int64_t from = model.window ? std::max<int64_t>(position - model.window + 1 - slot, 0) : 0;
      if (last < from) continue;
      for (int64_t head = 0; head < per; head++) {
        const int64_t query = (row.begin + token) * model.heads + group * per + head;
        tile.attend(queries + query * model.words, count, from, last, model, found[token * per + head]);
      }
    }
  }
}

// One query's result from those of its parts, which are `stride` apart.
template <class Number>
void merge(const Found* parts, int64_t count, int64_t stride, const float* sink, int64_t size, Number* y) {
  float most = sink ? *sink : LOWEST;
  for (int64_t part = 0; part < count; part++) most = std::max(most, parts[part * stride].most);
  float total = sink ? std::exp(*sink - most) : 0, sums[MOST] = {};
  for (int64_t part = 0; part < count; part++) {
    const Found& one = parts[part * stride];
    const float weight = one.total > 0 ? std::exp(one.most - most) : 0;
    total += one.total * weight;
    if (weight > 0)
      for (int64_t i = 0; i < size; i++) sums[i] += one.sums[i] * weight;
  }
  for (int64_t i = 0; i < size; i++) y[i] = static_cast<Number>(sums[i] / total);
}

std::vector<Row> rows_of(const int64_t* firsts, int64_t tokens) {
  std::vector<Row> rows;
  for (int64_t token = 0; token < tokens; token++) {
    if (rows.empty() || firsts[token] != rows.back().first)
      rows.push_back({token, 1, firsts[token]});
    else
      rows.back().count++;
  }
  return rows;
}

template <class Kind>
void run(const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values, const int64_t* firsts,
         const int64_t* positions, const float* sinks, Model model, at::Tensor& y) {
  using Number = typename Kind::Number;
  const int64_t tokens = query.size(0), per = model.heads / model.groups;
  const int64_t register_ = LANES * Kind::PER;
  model.words = (model.size + register_ - 1) / register_ * LANES;
  std::vector<int32_t> queries(tokens * model.heads * model.words);  // padded with zeros
  const Number* from = query.const_data_ptr<Number>();
  for (int64_t i = 0; i < tokens * model.heads; i++)
    std::memcpy(queries.data() + i * model.words, from + i * model.size, model.size * sizeof(Number));
  struct Item {
    int64_t row, group, part, found;
  };
  const std::vector<Row> rows = rows_of(firsts, tokens);
  std::vector<Item> items;
  std::vector<int64_t> parts, places;  // of each row
  int64_t results = 0;
  for (size_t i = 0; i < rows.size(); i++) {
    parts.push_back(positions[rows[i].begin + rows[i].count - 1] / PART + 1);
    places.push_back(results);
    for (int64_t group = 0; group < model.groups; group++)
      for (int64_t part = 0; part < parts.back(); part++, results += rows[i].count * per)
        items.push_back({int64_t(i), group, part, results});
  }
  std::vector<Found> found(results);
  at::parallel_for(0, int64_t(items.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++)
      attend_part<Kind>(queries.data(), keys.const_data_ptr<Number>(), values.const_data_ptr<Number>(), positions,
                        rows[items[i].row], items[i].group, items[i].part, model, found.data() + items[i].found);
  });
  Number* to = y.mutable_data_ptr<Number>();
  for (size_t i = 0; i < rows.size(); i++)
    for (int64_t group = 0; group < model.groups; group++)
      for (int64_t one = 0; one < rows[i].count * per; one++) {
        const int64_t stride = rows[i].count * per, head = group * per + one % per;
        const Found* own = found.data() + places[i] + group * parts[i] * stride + one;
        merge(own, parts[i], stride, sinks ? sinks + head : nullptr, model.size,
              to + ((rows[i].begin + one / per) * model.heads + head) * model.size);
      }
}

at::Tensor attend(const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values, const at::Tensor& first,
                  const at::Tensor& position, double scale, int64_t window, double softcap,
                  const std::optional<at::Tensor>& sinks) {
  TORCH_CHECK(keys.is_contiguous() && values.is_contiguous() && query.size(2) <= MOST, "not a cache of this program");
  TORCH_CHECK(keys.scalar_type() == query.scalar_type(), "the cache has another number format");
  const at::Tensor dense = query.contiguous(), firsts = first.contiguous(), positions = position.contiguous();
  at::Tensor y = at::empty_like(dense);
  const at::Tensor wide = sinks ? sinks->to(at::kFloat).contiguous() : at::Tensor();
  const Model model{query.size(1), keys.size(0), query.size(2), keys.size(1), 0, window, float(scale), float(softcap)};
  const auto go = query.scalar_type() == at::kFloat ? &run<Single> : &run<Brain>;
  TORCH_CHECK(query.scalar_type() == at::kFloat || (query.scalar_type() == at::kBFloat16 && query.size(2) % 2 == 0),
              "only float, and bfloat16 with heads of even size");
  go(dense, keys, values, firsts.const_data_ptr<int64_t>(), positions.const_data_ptr<int64_t>(),
     sinks ? wide.const_data_ptr<float>() : nullptr, model, y);
  return y;
}

}  // namespace

// attention.py has the schema: GPUs have another kernel.
TORCH_LIBRARY_IMPL(llama_ssp, CPU, library) { library.impl("attend", &attend); }
