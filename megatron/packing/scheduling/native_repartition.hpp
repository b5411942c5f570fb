// The sequences of two packs split between them anew, again and again; see repartition.

#pragma once

#include <array>
#include <limits>

#include "native_order.hpp"

class Repartition {
 public:
  Repartition(Int n, const Int* cost, const Int* length, Int num_ranks, Int packs_per_rank, Int capacity, Int limit,
              const Int* initial, Int* pack)
      : cost_(cost), length_(length), per_rank_(packs_per_rank), capacity_(capacity), limit_(limit),
        token_weight_(std::max<Int>(sum_of(n, cost) / std::max<Int>(sum_of(n, length), 1), 1)),
        most_worse_(token_weight_ * std::min(capacity, sum_of(n, length)) >> 10), pack_(pack),
        held_(num_ranks * packs_per_rank), tokens_(num_ranks * packs_per_rank), loads_(num_ranks),
        place_(num_ranks * packs_per_rank, -1) {
    if (initial) loads_.assign(initial, initial + num_ranks);
    for (Int i = 0; i < n; ++i) {
      held_[pack[i]].push_back(i);
      tokens_[pack[i]] += length[i];
      loads_[pack[i] / packs_per_rank] += cost[i];
    }
  }

  // What is left of the budget with all within their limits; below 0 where that is not reached.
  Int run(Int most_split, Int step, Int budget) {
    const Int num_packs = static_cast<Int>(held_.size()), whole = budget;
    for (Int p = 0; p < num_packs; ++p) note(p);
    while (!above_.empty() && num_packs > 1) {
      const Int a = above_[random_below(above_.size())];
      Int b = random_below(num_packs - 1);
      if (b >= a) ++b;
      const Int half = most_split / 2, size_a = held_[a].size(), size_b = held_[b].size();
      const Int from_a = std::min(size_a, std::max(half, most_split - size_b));
      const Int from_b = std::min(size_b, most_split - from_a);
      budget -= step + (Int(1) << std::max<Int>(from_a + from_b - 1, 0));
      if (budget < 0) return budget;
      split(a, from_a, b, from_b, most_worse_ * budget / whole);
    }
    return above_.empty() ? budget : -1;
  }

 private:
  // The first of both packs' sequences, but for the last one of these, change sides as leaves the least excess, unless
  // that is worse than before by more than some chance number up to `worse`. They go to the end of their packs.
  void split(Int a, Int from_a, Int b, Int from_b, Int worse) {
    const Int rank_a = a / per_rank_, rank_b = b / per_rank_, size = from_a + from_b;
    std::array<Int, 64> items;
    std::copy_n(held_[a].begin(), from_a, items.begin());
    std::copy_n(held_[b].begin(), from_b, items.begin() + from_a);
    const Int num_splits = Int(1) << std::max<Int>(size - 1, 0), over = rank_a == rank_b ? std::numeric_limits<Int>::max() : limit_;
    given_.resize(num_splits);
    given_[0] = {0, 0};
    const Int emptying = from_a == static_cast<Int>(held_[a].size()) ? (Int(1) << from_a) - 1 : -1;
    Int least = std::numeric_limits<Int>::max(), best = 0;
    for (Int k = 0; k + 1 < size; ++k) {
      const Int sign = k < from_a ? 1 : -1, tokens = sign * length_[items[k]], cost = sign * cost_[items[k]];
      for (Int without = 0, with = Int(1) << k; without < Int(1) << k; ++without, ++with) {
        const Given given = given_[with] = {given_[without].tokens + tokens, given_[without].cost + cost};
        const Int now = excess(a, b, rank_a, rank_b, over, given);
        if (now < least && with != emptying) {
          least = now;
          best = with;
        }
      }
    }
    const Int before = excess(a, b, rank_a, rank_b, over, {0, 0});
    if (best != 0 && least > before && least - before > random_below(worse + 1)) best = 0;
    tokens_[a] -= given_[best].tokens;
    tokens_[b] += given_[best].tokens;
    loads_[rank_a] -= given_[best].cost;
    loads_[rank_b] += given_[best].cost;
    held_[a].erase(held_[a].begin(), held_[a].begin() + from_a);
    held_[b].erase(held_[b].begin(), held_[b].begin() + from_b);
    for (Int k = 0; k < size; ++k) {
      const Int to = (k < from_a) != (best >> k & 1) ? a : b;
      held_[to].push_back(items[k]);
      pack_[items[k]] = to;
    }
    if (best == 0) return;
    for (Int p = rank_a * per_rank_; p < (rank_a + 1) * per_rank_; ++p) note(p);
    for (Int p = rank_b * per_rank_; p < (rank_b + 1) * per_rank_; ++p) note(p);
  }

  // From the first pack to the second one, less what comes back.
  struct Given {
    Int tokens, cost;
  };

  Int excess(Int a, Int b, Int rank_a, Int rank_b, Int limit, Given given) const {
    const Int tokens = std::max<Int>(tokens_[a] - given.tokens - capacity_, 0) +
                       std::max<Int>(tokens_[b] + given.tokens - capacity_, 0);
    return token_weight_ * tokens + std::max<Int>(loads_[rank_a] - given.cost - limit, 0) +
           std::max<Int>(loads_[rank_b] + given.cost - limit, 0);
  }

  // Keep `above_` up to date for this pack.
  void note(Int p) {
    const bool is_above = tokens_[p] > capacity_ || loads_[p / per_rank_] > limit_;
    if (is_above == (place_[p] >= 0)) return;
    if (is_above) {
      place_[p] = above_.size();
      above_.push_back(p);
    } else {
      const Int last = above_.back();
      place_[above_[place_[p]] = last] = place_[p];
      above_.pop_back();
      place_[p] = -1;
    }
  }

  // Knuth's MMIX generator, the high bits.
  Int random_below(Int number) {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return (state_ >> 33) % number;
  }

  const Int *cost_, *length_;
  Int per_rank_, capacity_, limit_, token_weight_, most_worse_;
  Int* pack_;
  std::vector<std::vector<Int>> held_;
  std::vector<Int> tokens_, loads_, above_, place_;  // packs above a limit; the place of each pack among them, or -1
  std::vector<Given> given_;                         // by split
  uint64_t state_ = 0;
};
