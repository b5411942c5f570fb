// Where sequences may go: packs with the fewest tokens, ranks of the least cost, and ranks with room.

#pragma once

#include "native_order.hpp"

// The packs of all ranks; of each rank the emptiest is at hand.
template <class Key>
class Packs {
 public:
  void reset(Int num_ranks, Int packs_per_rank, const Int* tokens) {
    pairs_ = Pairs<Key>(packs_per_rank);
    per_rank_ = packs_per_rank;
    heap_.resize(num_ranks * packs_per_rank);
    for (Int rank = 0, at = 0; rank < num_ranks; ++rank) {
      for (Int pack = 0; pack < per_rank_; ++pack, ++at) heap_[at] = pairs_.of(tokens ? tokens[at] : 0, pack);
      if (tokens) std::make_heap(first(rank), first(rank) + per_rank_, std::greater<Key>());
    }
  }
  Int least(Int rank) const { return pairs_.value(heap_[rank * per_rank_]); }
  Int add(Int rank, Int length) {  // to the emptiest pack, whose number is returned
    const Key grown = *first(rank) + pairs_.times(length);
    sift_down(first(rank), per_rank_, grown);
    return rank * per_rank_ + pairs_.number(grown);
  }

 private:
  Key* first(Int rank) { return heap_.data() + rank * per_rank_; }
  Pairs<Key> pairs_{1};
  Int per_rank_ = 1;
  std::vector<Key> heap_;
};

// Each sequence to the rank of the least cost with room; see placement.spread. Keeps its memory for the next call.
template <class Key>
class Spread {
 public:
  // The cost of the costliest rank; -1 where a sequence finds no room. With a `limit` of ranks' costs, which is not
  // negative, sequences without room are in no pack, -1, instead.
  Int run(Int n, const Int* cost, const Int* length, Int num_ranks, Int packs_per_rank, Int capacity, const Int* loads,
          const Int* tokens, Int* pack, Int limit = -1) {
    const Pairs<Key> pairs(num_ranks);
    Key* leaves = cheapest_.leaves(num_ranks);
    for (Int rank = 0; rank < num_ranks; ++rank) leaves[rank] = pairs.of(loads ? loads[rank] : 0, rank);
    Key costliest = *std::max_element(leaves, leaves + num_ranks);
    cheapest_.build();
    packs_.reset(num_ranks, packs_per_rank, tokens);
    waiting_.clear();
    for (Int i = 0; i < n; ++i) {
      const Int most = capacity - length[i];
      while (!waiting_.empty() && waiting_[0].first <= most) {
        cheapest_.set(pairs.number(waiting_[0].second), waiting_[0].second);
        std::pop_heap(waiting_.begin(), waiting_.end(), std::greater<Waiting>());
        waiting_.pop_back();
      }
      Key chosen = cheapest_.top();
      for (; chosen != pairs.above_all(); chosen = cheapest_.top()) {
        const Int rank = pairs.number(chosen), least = packs_.least(rank);
        if (least <= most) break;
        cheapest_.set(rank, pairs.above_all());
        waiting_.push_back({least, chosen});
        std::push_heap(waiting_.begin(), waiting_.end(), std::greater<Waiting>());
      }
      if (chosen == pairs.above_all() || (limit >= 0 && pairs.value(chosen) + cost[i] > limit)) {
        if (limit < 0) return -1;
        pack[i] = -1;
        continue;
      }
      const Int rank = pairs.number(chosen);
      const Key grown = chosen + pairs.times(cost[i]);
      costliest = std::max(costliest, grown);
      cheapest_.set(rank, grown);
      pack[i] = packs_.add(rank, length[i]);
    }
    return pairs.value(costliest);
  }

 private:
  using Waiting = std::pair<Int, Key>;  // tokens of the emptiest pack; cost and number of the rank
  Least<Key> cheapest_;
  Packs<Key> packs_;
  std::vector<Waiting> waiting_;
};

inline Int sum_of(Int n, const Int* values) { return values ? std::accumulate(values, values + n, Int(0)) : 0; }
inline Int most_of(Int n, const Int* values) { return values && n ? *std::max_element(values, values + n) : 0; }

// Whether costs and tokens of ranks and packs, beside their numbers, fit an Int: `call(Int())`, or else `call(Wide())`.
template <class Call>
auto with_keys(Int num_ranks, Int most_cost, Int packs_per_rank, Int most_tokens, Call call) {
  const bool fit = Pairs<Int>(num_ranks).fit(most_cost) && Pairs<Int>(packs_per_rank).fit(most_tokens);
  return fit ? call(Int()) : call(Wide());
}

inline Int spread_over(Int n, const Int* cost, const Int* length, Int num_ranks, Int packs_per_rank, Int capacity,
                       const Int* loads, const Int* tokens, Int* pack) {
  const Int most_cost = sum_of(n, cost) + most_of(num_ranks, loads);
  const Int most_tokens = sum_of(n, length) + most_of(num_ranks * packs_per_rank, tokens);
  return with_keys(num_ranks, most_cost, packs_per_rank, most_tokens, [&](auto key) {
    Spread<decltype(key)> spread;
    return spread.run(n, cost, length, num_ranks, packs_per_rank, capacity, loads, tokens, pack);
  });
}

// Rooms of the ranks in use, in cost and in tokens; finds the first with room for both: a tree of maxima.
class Rooms {
 public:
  explicit Rooms(Int num_ranks) {
    while (size_ < num_ranks) size_ *= 2;
    tree_.assign(2 * size_, {-1, -1});
  }
  Int first(Int cost, Int tokens) const {
    const auto has_room = [&](Int node) { return (tree_[node].cost >= cost) & (tree_[node].tokens >= tokens); };
    if (!has_room(1)) return -1;
    Int node = 1;
    while (node < size_) node = 2 * node + !has_room(2 * node);
    // Of a node whose rooms are of different ranks there may be no rank with both: then on to the right.
    while (true) {
      if (has_room(node)) {
        if (node >= size_) return node - size_;
        node *= 2;
      } else {
        while (node & 1) {
          if (node == 1) return -1;
          node /= 2;
        }
        ++node;
      }
    }
  }
  Int cost(Int rank) const { return tree_[size_ + rank].cost; }
  void set(Int rank, Int cost, Int tokens) {
    Int node = size_ + rank;
    tree_[node] = {cost, tokens};
    for (node /= 2; node; node /= 2) {
      const Room &left = tree_[2 * node], &right = tree_[2 * node + 1];
      const Room most = {std::max(left.cost, right.cost), std::max(left.tokens, right.tokens)};
      if (tree_[node].cost == most.cost && tree_[node].tokens == most.tokens) break;
      tree_[node] = most;
    }
  }

 private:
  struct Room {
    Int cost, tokens;
  };
  Int size_ = 1;
  std::vector<Room> tree_;
};
