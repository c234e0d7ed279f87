// One round's draws and its decision on a CPU: what verification.py and rng.py define, each in one call.
//
// Behind a target's pass nothing of a program is left in the caches, so what a round does beside its passes costs
// by how much code it touches and not by how much it computes. This is little code, in plain C++: it is compiled
// within seconds, and called by address. Sums are taken in double precision, some in another order than
// in the definitions: all agree up to rounding (tests/test_deciding.py).

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace {

// A distribution as it is given, in single or double precision, read as numbers that sum to one.
template <class Number>
struct Probs {
  const Number* chance;
  double scale = 1;
  double operator[](int64_t token) const { return static_cast<double>(chance[token]) * scale; }
};

template <class Of>
double sum(int64_t count, Of of) {
  double total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < count; i++) total += of(i);
  return total;
}

double positive(double x) { return x > 0 ? x : 0; }

template <class Number>
Probs<Number> normalised(const Number* chance, int64_t vocab) {
  return {chance, 1 / sum(vocab, [=](int64_t i) { return static_cast<double>(chance[i]); })};
}

// Which clock rings first; none at a rate of 0, or at one that is no number.
template <class Rate>
int64_t first(const double* clock, int64_t count, Rate rate) {
  int64_t found = 0;
  double soonest = std::numeric_limits<double>::infinity();
  for (int64_t i = 0; i < count; i++) {
    const double r = rate(i), rings = clock[i] / r;
    if (r > 0 && rings < soonest) soonest = rings, found = i;
  }
  return found;
}

// rng.race: heats of `heat` tokens race by their sums, then the tokens of the one that won.
template <class Rate>
int64_t race(const double* clock, int64_t heat, int64_t vocab, Rate rate) {
  const int64_t heats = (vocab + heat - 1) / heat;
  const int64_t won = first(clock, heats, [=](int64_t h) {
    return sum(std::min(heat, vocab - h * heat), [=](int64_t i) { return rate(h * heat + i); });
  });
  const int64_t inside = std::min(heat, vocab - won * heat);
  return won * heat + first(clock + heat, inside, [=](int64_t i) { return rate(won * heat + i); });
}

// rng.inverse_cdf: the token at which the cumulated probabilities first exceed the uniform; never one of probability 0.
template <class Number>
int64_t inverse_cdf(const Number* probs, int64_t vocab, double uniform) {
  constexpr int64_t SOME = 256;  // tokens that are summed at once
  const Probs<Number> chance{probs};
  const auto of_some = [=](int64_t from) {
    return sum(std::min(SOME, vocab - from), [=](int64_t i) { return chance[from + i]; });
  };
  double total = 0;
  for (int64_t from = 0; from < vocab; from += SOME) total += of_some(from);
  const double mark = uniform * total;
  int64_t last = vocab - 1;  // with a chance, of those passed
  double before = 0;
  for (int64_t from = 0; from < vocab; from += SOME) {
    const double behind = before + of_some(from);
    const bool here = behind > mark;
    if (here || from + SOME >= vocab) {
      double rising = before;
      for (int64_t i = from; i < std::min(from + SOME, vocab); i++) {
        rising += chance[i];
        if (chance[i] > 0) last = i;
        if (rising > mark) return i;
      }
      if (here) return last;  // rounding: one after the other they sum to a little less
    }
    before = behind;
  }
  return last;
}

struct Rows {
  int64_t rows, k, vocab, heat;
  const int64_t *drafted, *count, *idle;
  const double *coin, *clock;
  int64_t coin_row, coin_step, clock_row;
};

// One row's decision: accepted, token, damaged, then of each draft itself, its acceptance probability, and the
// chances that those before it stand, and that it stands as well (RoundResult.of).
template <class Target, class Draft>
void decide_row(const Rows& given, int64_t row, bool block, const Target* targets, const Draft* drafts,
                double* decided) {
  const int64_t k = given.k, vocab = given.vocab, count = given.count[row];
  const int64_t* drafted = given.drafted + row * k;
  const double* coin = given.coin + row * given.coin_row;
  double *overlap = decided + 3 + k, *before = overlap + k, *standing = before + k;

  bool damaged = std::isnan(targets[count * vocab]);
  for (int64_t i = 0; i < count; i++) damaged |= std::isnan(targets[i * vocab]) || std::isnan(drafts[i * vocab]);

  std::vector<Probs<Target>> target;
  std::vector<Probs<Draft>> draft;
  for (int64_t i = 0; i <= count; i++) target.push_back(normalised(targets + i * vocab, vocab));
  for (int64_t i = 0; i < count; i++) draft.push_back(normalised(drafts + i * vocab, vocab));

  int64_t accepted = 0;
  double weight = 1, carried = 1, alive = 1;
  for (int64_t i = 0; i < count; i++) {
    const Probs<Target> p = target[i];
    const Probs<Draft> q = draft[i];
    const double ratio = q[drafted[i]] > 0 ? p[drafted[i]] / q[drafted[i]] : 0;
    overlap[i] = sum(vocab, [=](int64_t z) { return std::min(p[z], q[z]); });
    if (block) {
      before[i] = carried;
      carried = std::min(carried * ratio, 1.0);
      double chance = carried;  // of the whole block
      if (i + 1 < count) {
        const Probs<Target> next = target[i + 1];
        const Probs<Draft> other = draft[i + 1];
        const double spare = sum(vocab, [=](int64_t z) { return positive(carried * next[z] - other[z]); });
        const double whole = spare + 1 - carried;
        chance = spare / (whole > 0 ? whole : 1);
        standing[i + 1] = carried - spare;
      }
      if (i == 0) standing[0] = overlap[0];
      if (coin[i * given.coin_step] < chance) accepted = i + 1, weight = carried;
    } else {
      const double chance = ratio < 1 ? ratio : 1;
      before[i] = alive;
      standing[i] = alive * overlap[i];
      alive *= chance;
      if (accepted == i && coin[i * given.coin_step] < chance) accepted = i + 1;
    }
  }

  int64_t token = 0;
  if (!given.idle[row]) {
    const double* clock = given.clock + row * given.clock_row;
    const Probs<Target> p = target[accepted];
    double rest = 0;  // of the target's distribution, what the draft did not cover
    if (accepted < count) {
      const Probs<Draft> q = draft[accepted];
      const auto left = [=](int64_t z) { return positive(weight * p[z] - q[z]); };
      rest = sum(vocab, left);
      if (rest > 0) token = race(clock, given.heat, vocab, left);
    }
    if (!(rest > 0)) token = race(clock, given.heat, vocab, [=](int64_t z) { return p[z]; });
  }
  decided[0] = static_cast<double>(accepted);
  decided[1] = static_cast<double>(token);
  decided[2] = damaged;
  for (int64_t i = 0; i < k; i++) decided[3 + i] = static_cast<double>(drafted[i]);
}

struct Trees {
  int64_t columns, most;                 // of the target's pass; siblings of a draft
  const int64_t *main, *aside, *tokens;  // columns of drafts and of siblings, and these
  const int64_t* each;                   // siblings of each of a row's drafts
  const double* coin;
  int64_t coin_row, coin_step, coin_draft;
};

// A draft's position when the draft and then its siblings have failed (traversal.closed).
template <class Target, class Draft>
class Node {
 public:
  std::vector<double> child, rest;  // of the draft's distribution and of the target's, what is left

  // The weight after each of the children, and the chance of each sibling's draw.
  void close(Probs<Target> p, Probs<Draft> q, int64_t vocab, double weight, int64_t draft, const int64_t* sibling,
             int64_t each, double* weights, double* chances) {
    child.resize(vocab), rest.resize(vocab);
    for (int64_t z = 0; z < vocab; z++) child[z] = q[z], rest[z] = p[z];
    double mass = 1, left = 1;  // of the child's distribution, and of the rest
    for (int64_t j = 0; j <= each; j++) {
      if (j) {
        child[j == 1 ? draft : sibling[j - 2]] = 0;
        mass = sum(vocab, [this](int64_t z) { return child[z]; });
        if (!(mass > 0)) {
          std::fill(weights + j, weights + each + 1, weight);
          return;
        }
        const int64_t token = sibling[j - 1];
        const double given = child[token] / mass;
        chances[j - 1] = given > 0 ? std::min(weight * (rest[token] / left) / given, 1.0) : 0;
      }
      const double grown = weight / left, shrunk = 1 / mass;
      const auto next = [=, this](int64_t z) { return positive(grown * rest[z] - shrunk * child[z]); };
      const double total = sum(vocab, next);
      if (total > 0) {
        for (int64_t z = 0; z < vocab; z++) rest[z] = next(z);
        left = total;
      }
      const double whole = total + 1 - weight;
      weights[j] = weight = total / (whole > 0 ? whole : 1);
    }
  }
};

// decision.decide_tree of one row.
template <class Target, class Draft>
void decide_tree_row(const Rows& given, const Trees& trees, int64_t row, const Target* targets, const Draft* drafts,
                     double* decided) {
  const int64_t k = given.k, vocab = given.vocab, most = trees.most, count = given.count[row], size = most + 1;
  const int64_t each = count ? trees.each[row] : 0;
  const int64_t *drafted = given.drafted + row * k, *tokens = trees.tokens + row * k * most;
  const int64_t *main = trees.main + row * (k + 1), *aside = trees.aside + row * k * most;
  const double *coin = given.coin + row * given.coin_row, *beside = trees.coin + row * trees.coin_row;
  double *overlap = decided + 3 + k, *before = overlap + k, *standing = before + k, *told = standing + k;
  double *chances = told + k * most, *weights = chances + k * most, *last = weights + k * size;

  bool damaged = std::isnan(targets[main[count] * vocab]);
  std::vector<Probs<Target>> target;
  std::vector<Probs<Draft>> draft;
  for (int64_t i = 0; i <= count; i++) target.push_back(normalised(targets + main[i] * vocab, vocab));
  for (int64_t i = 0; i < count; i++) {
    draft.push_back(normalised(drafts + i * vocab, vocab));
    damaged |= std::isnan(targets[main[i] * vocab]) || std::isnan(drafts[i * vocab]);
    for (int64_t j = 0; j < each; j++) damaged |= std::isnan(targets[aside[i * most + j] * vocab]);
  }

  Node<Target, Draft> node;
  std::vector<double> carried{1};
  for (int64_t i = 0; i < count; i++) {
    const Probs<Target> p = target[i];
    const Probs<Draft> q = draft[i];
    const double weight = carried.back(), ratio = q[drafted[i]] > 0 ? p[drafted[i]] / q[drafted[i]] : 0;
    overlap[i] = sum(vocab, [=](int64_t z) { return std::min(p[z], q[z]); });
    node.close(p, q, vocab, weight, drafted[i], tokens + i * most, each, weights + i * size, chances + i * most);
    before[i] = weight;
    const double spare = i ? sum(vocab, [=](int64_t z) { return positive(weight * p[z] - q[z]); }) : 0;
    standing[i] = i ? weight - spare : overlap[0];
    carried.push_back(std::min(weight * ratio, 1.0));
  }
  *last = carried.back();

  int64_t accepted = 0, place = 0;
  if (count && coin[(count - 1) * given.coin_step] < *last) accepted = count;
  for (int64_t i = count - 1; i >= 0 && !accepted && !place; i--) {
    for (int64_t j = 0; j < each && !place; j++) {
      const double own = beside[i * trees.coin_draft + j * trees.coin_step];
      if (own < chances[i * most + j]) accepted = i, place = size - 1 - j;
    }
    if (!place && i && coin[(i - 1) * given.coin_step] < weights[i * size + each]) accepted = i;
  }

  int64_t token = 0;
  if (!given.idle[row]) {
    const double* clock = given.clock + row * given.clock_row;
    Probs<Target> p = target[accepted];
    if (place)
      p = normalised(targets + aside[accepted * most + size - 1 - place] * vocab, vocab);
    else if (accepted < count) {
      std::vector<double> spent(2 * size);
      node.close(p, draft[accepted], vocab, carried[accepted], drafted[accepted], tokens + accepted * most, each,
                 spent.data(), spent.data() + size);
      token = race(clock, given.heat, vocab, [&](int64_t z) { return node.rest[z]; });
    }
    if (place || accepted == count) token = race(clock, given.heat, vocab, [=](int64_t z) { return p[z]; });
  }
  decided[0] = static_cast<double>(accepted * size + place);
  decided[1] = static_cast<double>(token);
  decided[2] = damaged;
  for (int64_t i = 0; i < k; i++) decided[3 + i] = static_cast<double>(drafted[i]);
  for (int64_t i = 0; i < k * most; i++) told[i] = static_cast<double>(tokens[i]);
}

template <class Target, class Draft>
void decide_rows(const Rows& given, bool block, const void* targets, const void* drafts, double* decided) {
  const auto* target = static_cast<const Target*>(targets);
  const auto* draft = static_cast<const Draft*>(drafts);
  for (int64_t row = 0; row < given.rows; row++)
    decide_row(given, row, block, target + row * (given.k + 1) * given.vocab, draft + row * given.k * given.vocab,
               decided + row * (3 + 4 * given.k));
}

template <class Target, class Draft>
void decide_tree_rows(const Rows& given, const Trees& trees, const void* targets, const void* drafts, double* decided,
                      int64_t width) {
  const auto* target = static_cast<const Target*>(targets);
  const auto* draft = static_cast<const Draft*>(drafts);
  for (int64_t row = 0; row < given.rows; row++)
    decide_tree_row(given, trees, row, target + row * trees.columns * given.vocab,
                    draft + row * given.k * given.vocab, decided + row * width);
}

template <class Number>
void draw_rows(const void* probs, int64_t rows, int64_t vocab, const double* uniform, int64_t step, int64_t* token) {
  const auto* chance = static_cast<const Number*>(probs);
  for (int64_t row = 0; row < rows; row++) token[row] = inverse_cdf(chance + row * vocab, vocab, uniform[row * step]);
}

// Philox4x64-10 (Salmon et al. 2011), as numpy counts: the first block is that of counter 1.
struct Philox {
  std::array<uint64_t, 2> key;
  std::array<uint64_t, 4> counter;

  std::array<uint64_t, 4> next() {
    counter[0]++;
    auto [a, b, c, d] = counter;
    auto [one, other] = key;
    for (int round = 0; round < 10; round++, one += 0x9E3779B97F4A7C15, other += 0xBB67AE8584CAA73B) {
      const auto left = static_cast<unsigned __int128>(0xD2E7470EE14C6C93) * a;
      const auto right = static_cast<unsigned __int128>(0xCA5A826395121157) * c;
      a = static_cast<uint64_t>(right >> 64) ^ b ^ one;
      b = static_cast<uint64_t>(right);
      c = static_cast<uint64_t>(left >> 64) ^ d ^ other;
      d = static_cast<uint64_t>(left);
    }
    return {a, b, c, d};
  }
};

}  // namespace

extern "C" {

// Rows of `count` numbers of a stream: uniforms of 53 bits or, for a race, exponentials of 52, none of them 0.
void numbers(bool of_race, int64_t rows, const uint64_t* seed, const uint64_t* key, const uint64_t* base,
             uint64_t stream, int64_t count, double* number) {
  for (int64_t row = 0; row < rows; row++, number += count) {
    Philox source{{seed[row], key[row]}, {0, 0, stream, base[row]}};
    for (int64_t from = 0; from < count; from += 4) {
      const auto drawn = source.next();
      for (int64_t i = 0; i < std::min<int64_t>(4, count - from); i++) {
        const double half = static_cast<double>(drawn[i] >> 12) + 0.5;
        number[from + i] = of_race ? -std::log(half * 0x1p-52) : static_cast<double>(drawn[i] >> 11) * 0x1p-53;
      }
    }
  }
}

// A token a row, from probabilities of (rows, vocab).
void draw(bool wide, const void* probs, int64_t rows, int64_t vocab, const double* uniform, int64_t step,
          int64_t* token) {
  (wide ? draw_rows<double> : draw_rows<float>)(probs, rows, vocab, uniform, step, token);
}

// The target's probabilities are (rows, k + 1, vocab), the draft's (rows, k, vocab); `decided` is zeros,
// (rows, 3 + 4 k).
void decide(bool block, bool wide, const void* targets, bool draft_wide, const void* drafts, int64_t rows, int64_t k,
            int64_t vocab, int64_t heat, const int64_t* drafted, const int64_t* count, const int64_t* idle,
            const double* coin, int64_t coin_row, int64_t coin_step, const double* clock, int64_t clock_row,
            double* decided) {
  const Rows given{rows, k, vocab, heat, drafted, count, idle, coin, clock, coin_row, coin_step, clock_row};
  if (wide)
    (draft_wide ? decide_rows<double, double> : decide_rows<double, float>)(given, block, targets, drafts, decided);
  else
    (draft_wide ? decide_rows<float, double> : decide_rows<float, float>)(given, block, targets, drafts, decided);
}

// The same of trees, by the block rule: the target's are (rows, columns, vocab); `decided` has `width` columns.
void decide_tree(bool wide, const void* targets, bool draft_wide, const void* drafts, int64_t rows, int64_t k,
                 int64_t vocab, int64_t heat, const int64_t* drafted, const int64_t* count, const int64_t* idle,
                 const double* coin, int64_t coin_row, int64_t coin_step, const double* clock, int64_t clock_row,
                 int64_t columns, int64_t most, const int64_t* main, const int64_t* aside, const int64_t* tokens,
                 const int64_t* each, const double* beside, int64_t beside_row, int64_t beside_step,
                 int64_t beside_draft, double* decided, int64_t width) {
  const Rows given{rows, k, vocab, heat, drafted, count, idle, coin, clock, coin_row, coin_step, clock_row};
  const Trees trees{columns, most, main, aside, tokens, each, beside, beside_row, beside_step, beside_draft};
  const auto go = wide ? draft_wide ? decide_tree_rows<double, double> : decide_tree_rows<double, float>
                       : draft_wide ? decide_tree_rows<float, double> : decide_tree_rows<float, float>;
  go(given, trees, targets, drafts, decided, width);
}
}
