// Rows made shorter by simulated annealing; see anneal.

#pragma once

#include <functional>

#include "native_order.hpp"

class Annealing {
 public:
  Annealing(Int n, const Int* cost, const Int* length, Int num_ranks, Int num_rows, Int capacity, Int* pack)
      : n_(n), cost_(cost), length_(length), num_ranks_(num_ranks), num_rows_(num_rows), capacity_(capacity),
        pack_(pack), best_(pack, pack + n), costs_(num_ranks * num_rows), tokens_(costs_.size()),
        heights_(costs_.size()), place_(n), held_(costs_.size()), row_(num_ranks) {
    for (Int i = 0; i < n; ++i) {
      costs_[pack[i]] += cost[i];
      tokens_[pack[i]] += length[i];
      place_[i] = held_[pack[i]].size();
      held_[pack[i]].push_back(i);
    }
  }

  void run(Int most_back, Int near, Int halvings, Int num_rounds, Int steps, Int temperature, Int costlier, Int enough) {
    Int least = look(1);
    for (Int round = 0; round <= num_rounds; ++round) {
      const Int place = 256 * halvings * round / num_rounds, halved = place >> 8, part = 512 - (place & 255);
      const Int above = std::max<Int>(costlier * part >> (9 + halved), 1), time = look(above);
      if (time < least) {
        least = time;
        std::copy_n(pack_, n_, best_.begin());
      }
      if (least <= enough || round == num_rounds) break;
      heat_ = (temperature * part >> (9 + halved)) * above;
      for (Int left = steps / num_rounds; left > 0;) left -= step(most_back, near);
    }
    std::copy(best_.begin(), best_.end(), pack_);
  }

 private:
  // All rows' time; the height of each becomes the cost of its so manyeth costliest pack.
  Int look(Int number) {
    Int time = 0;
    for (Int r = 0; r < num_rows_; ++r) {
      for (Int k = 0; k < num_ranks_; ++k) row_[k] = costs_[k * num_rows_ + r];
      std::nth_element(row_.begin(), row_.begin() + number - 1, row_.end(), std::greater<Int>());
      time += *std::max_element(row_.begin(), row_.begin() + number);
      for (Int k = 0; k < num_ranks_; ++k) heights_[k * num_rows_ + r] = row_[number - 1];
    }
    return time;
  }

  // One change, done or not; how much of the steps it takes.
  Int step(Int most_back, Int near) {
    Int i = random_below(n_);
    if (random_below(2)) i = i * i / n_;
    const Int p = pack_[i], kind = random_below(8);
    Int q, j = -1;
    if (kind < 2) {
      q = random_below(held_.size());
      if (held_[p].size() < 2 && n_ >= static_cast<Int>(held_.size())) return 1;
    } else {
      j = kind < 7 ? i + random_below(2 * near + 1) - near : random_below(n_);
      if (j < 0 || j >= n_) return 1;
      q = pack_[j];
    }
    const Int more = cost_[i] - (j < 0 ? 0 : cost_[j]), longer = length_[i] - (j < 0 ? 0 : length_[j]);
    if (q == p || more == 0) return 1;
    const Int sign = more > 0 ? 1 : -1, to = more > 0 ? q : p, giver = more > 0 ? p : q, gain = sign * more;
    Pair pair{to, costs_[to] + gain, tokens_[to] + sign * longer, costs_[giver] - gain, tokens_[giver] - sign * longer};
    give_back(most_back, i, j, gain, &pair);
    const Int taken = 1 + static_cast<Int>(back_.size()) / 2;
    if (pair.to_tokens > capacity_) return taken;
    const Int worse = above(to, pair.to_cost) + above(giver, pair.giver_cost) - above(to, costs_[to]) -
                      above(giver, costs_[giver]);
    if (worse > 0 && worse * 256 > heat_ * random_exponential()) return taken;
    costs_[to] = pair.to_cost;
    tokens_[to] = pair.to_tokens;
    costs_[giver] = pair.giver_cost;
    tokens_[giver] = pair.giver_tokens;
    move(i, q);
    if (j >= 0) move(j, p);
    for (const Int other : back_) move(other, giver);
    return taken;
  }

  // A pack that gains cost and one that gives it: what they would hold.
  struct Pair {
    Int to, to_cost, to_tokens, giver_cost, giver_tokens;
  };

  // Others of the pack that gains, from a random one on, go the other way until it is within its limits.
  void give_back(Int most_back, Int i, Int j, Int gain, Pair* pair) {
    const std::vector<Int>& held = held_[pair->to];
    const Int size = held.size(), height = heights_[pair->to];
    back_.clear();
    if ((pair->to_tokens <= capacity_ && pair->to_cost <= height) || size < 2) return;
    Int at = random_below(size);
    for (Int left = std::min(size, most_back); left > 0; --left, at = at + 1 < size ? at + 1 : 0) {
      if (pair->to_tokens <= capacity_ && pair->to_cost <= height) return;
      const Int other = held[at];
      if (other == i || other == j || cost_[other] > gain || pair->giver_tokens + length_[other] > capacity_) continue;
      back_.push_back(other);
      pair->to_cost -= cost_[other];
      pair->to_tokens -= length_[other];
      pair->giver_cost += cost_[other];
      pair->giver_tokens += length_[other];
    }
  }

  Int above(Int p, Int cost) const { return std::max<Int>(cost - heights_[p], 0); }

  void move(Int i, Int to) {
    std::vector<Int>& held = held_[pack_[i]];
    held[place_[i]] = held.back();
    place_[held.back()] = place_[i];
    held.pop_back();
    place_[i] = held_[to].size();
    held_[to].push_back(i);
    pack_[i] = to;
  }

  // Knuth's MMIX generator, the high bits.
  Int random_below(Int number) {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return (state_ >> 33) * static_cast<uint64_t>(number) >> 31;
  }

  // Some 256 * -log2 of a uniform number: the logarithm is taken for straight between powers of two.
  Int random_exponential() {
    const Int number = random_below(Int(1) << 31) + 1, bits = bits_of(number) - 1;
    return (31 - bits) * 256 - ((number << 8 >> bits) & 255);
  }

  const Int n_, *cost_, *length_, num_ranks_, num_rows_, capacity_;
  Int* pack_;
  std::vector<Int> best_, costs_, tokens_, heights_, place_;  // by pack: costs, tokens, heights; places among the held
  std::vector<std::vector<Int>> held_;
  std::vector<Int> row_, back_;
  Int heat_ = 0;
  uint64_t state_ = 0;
};
