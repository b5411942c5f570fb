// Sequences traded between ranks to lower the cost of the costliest; see placement.trade.

#pragma once

#include "native_order.hpp"

class Trades {
 public:
  Trades(Int n, const Int* cost, const Int* length, Int num_ranks, Int packs_per_rank, Int capacity, const Int* initial,
         Int* pack)
      : cost_(cost), length_(length), num_ranks_(num_ranks), per_rank_(packs_per_rank), capacity_(capacity), pack_(pack),
        loads_(num_ranks), by_rank_(n), starts_(num_ranks + 1), tokens_(num_ranks * packs_per_rank),
        counts_(num_ranks * packs_per_rank), held_(num_ranks), is_held_(num_ranks) {
    if (initial) loads_.assign(initial, initial + num_ranks);
    std::vector<Int> rank_of(n);
    for (Int i = 0; i < n; ++i) {
      rank_of[i] = pack[i] / packs_per_rank;
      loads_[rank_of[i]] += cost[i];
      tokens_[pack[i]] += length[i];
      ++counts_[pack[i]];
      ++starts_[rank_of[i] + 1];
    }
    std::partial_sum(starts_.begin(), starts_.end(), starts_.begin());
    std::vector<Int> next(starts_.begin(), starts_.end() - 1);
    for (Int i = 0; i < n; ++i) by_rank_[next[rank_of[i]]++] = i;
  }

  void run(Int partners, Int traded, Int budget) {
    std::vector<std::pair<Int, Int>> by_load(num_ranks_);
    partners = std::min(partners, num_ranks_);
    Int asked = partners;
    while (true) {
      giver_ = 0;
      for (Int rank = 0; rank < num_ranks_; ++rank) {
        by_load[rank] = {loads_[rank], rank};
        if (loads_[rank] > loads_[giver_]) giver_ = rank;
      }
      std::partial_sort(by_load.begin(), by_load.begin() + asked, by_load.end());
      best_ = {loads_[giver_], -1, -1, -1, -1};
      offer(held(giver_), traded, &offered_);
      for (Int p = 0; p < asked; ++p) {
        const Int other = by_load[p].second;
        if (loads_[giver_] - loads_[other] < 2) break;
        offer(held(other), traded, &wanted_);
        budget -= static_cast<Int>(offered_.size() * (wanted_.size() + 1));
        if (budget < 0) return;
        look_at(other);
      }
      if (best_.given < 0) {
        if (asked == num_ranks_) return;
        asked = num_ranks_;
        continue;
      }
      asked = partners;
      const Int from_pack = pack_[best_.given];
      hand_over(best_.given, giver_, best_.taker, best_.place);
      if (best_.taken >= 0) hand_over(best_.taken, best_.taker, giver_, from_pack);
    }
  }

 private:
  // A sequence given to a rank, into a pack of it, for another one taken, or for none (-1).
  struct Trade {
    Int higher_load;  // of the two ranks, afterwards
    Int given, taken, taker, place;
  };
  struct Offer {
    Int sequence, cost, length;
    Int longest;  // sequence that its pack has room for in its stead
  };

  // At most so many of the sequences that a rank holds, of all costs.
  void offer(const std::vector<Int>& held, Int most, std::vector<Offer>* offered) const {
    const Int size = static_cast<Int>(held.size()), count = std::min(size, most);
    offered->clear();
    for (Int k = 0; k < count; ++k) {
      const Int i = held[k * size / count];
      offered->push_back({i, cost_[i], length_[i], capacity_ - tokens_[pack_[i]] + length_[i]});
    }
  }

  // What a rank holds, ascending: copied when first asked for, as most never are.
  std::vector<Int>& held(Int rank) {
    if (!is_held_[rank]) held_[rank].assign(by_rank_.begin() + starts_[rank], by_rank_.begin() + starts_[rank + 1]);
    is_held_[rank] = true;
    return held_[rank];
  }

  // Lower `best_` by what the giver and this rank may trade.
  void look_at(Int other) {
    const Int load = loads_[giver_], other_load = loads_[other], first = other * per_rank_;
    const Int emptiest = std::min_element(&tokens_[first], &tokens_[first] + per_rank_) - &tokens_[0];
    const Int room = capacity_ - tokens_[emptiest];
    for (const Offer& i : offered_) {
      const Int alone = std::max(load - i.cost, other_load + i.cost);
      if (alone < best_.higher_load && counts_[pack_[i.sequence]] > 1 && i.length <= room)
        best_ = {alone, i.sequence, -1, other, emptiest};
      for (const Offer& j : wanted_) {
        const Int difference = i.cost - j.cost;
        const Int both = std::max(load - difference, other_load + difference);
        if (both < best_.higher_load && j.length <= i.longest && i.length <= j.longest)
          best_ = {both, i.sequence, j.sequence, other, pack_[j.sequence]};
      }
    }
  }

  void hand_over(Int i, Int from, Int to, Int to_pack) {
    std::vector<Int>&source = held(from), &target = held(to);
    source.erase(std::lower_bound(source.begin(), source.end(), i));
    target.insert(std::lower_bound(target.begin(), target.end(), i), i);
    loads_[from] -= cost_[i];
    loads_[to] += cost_[i];
    tokens_[pack_[i]] -= length_[i];
    --counts_[pack_[i]];
    tokens_[to_pack] += length_[i];
    ++counts_[to_pack];
    pack_[i] = to_pack;
  }

  const Int *cost_, *length_;
  Int num_ranks_, per_rank_, capacity_;
  Int* pack_;
  std::vector<Int> loads_, by_rank_, starts_, tokens_, counts_;
  std::vector<std::vector<Int>> held_;
  std::vector<char> is_held_;
  std::vector<Offer> offered_, wanted_;
  Int giver_ = 0;
  Trade best_{};
};
