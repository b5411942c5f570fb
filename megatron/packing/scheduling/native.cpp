// The inner loops of scheduling, with the same results as their Python twins to the last bit: in integers, ties broken
// by number; only native_simplex.hpp and what it is given have fractions.
// Plain C functions over int64 arrays, called through ctypes (see native.py); no Python headers are needed to build
// them. What they do is told by the Python functions of the same names, in placement, repacking, repartition, anneal,
// pack_search, work, step_time and the bounds.

#include <set>

#include "native_anneal.hpp"
#include "native_bounds.hpp"
#include "native_order.hpp"
#include "native_packs.hpp"
#include "native_repartition.hpp"
#include "native_search.hpp"
#include "native_simulate.hpp"
#include "native_trade.hpp"
#include "native_values.hpp"

extern "C" {

// Raised with every change of a function's arguments or results: native.py must ask for the same.
Int interface_version() { return 5; }

Int spread(Int n, const Int* cost, const Int* length, Int num_ranks, Int packs_per_rank, Int capacity,
           const Int* loads, const Int* tokens, Int* pack) {
  return spread_over(n, cost, length, num_ranks, packs_per_rank, capacity, loads, tokens, pack);
}

Int spread_rest(Int n, const Int* cost, const Int* length, Int num_ranks, Int packs_per_rank, Int capacity,
                const Int* initial, Int* pack) {
  std::vector<Int> costs(num_ranks * packs_per_rank), tokens(num_ranks * packs_per_rank), loads(num_ranks);
  const size_t num_left = std::count(pack, pack + n, Int(-1));
  std::vector<Int> rest(num_left), rest_cost(num_left), rest_length(num_left), found(num_left);
  for (Int i = 0, left = 0; i < n; ++i) {
    if (pack[i] >= 0) {
      costs[pack[i]] += cost[i];
      tokens[pack[i]] += length[i];
    } else {
      rest[left] = i;
      rest_cost[left] = cost[i];
      rest_length[left++] = length[i];
    }
  }
  if (initial) loads.assign(initial, initial + num_ranks);
  for (Int rank = 0; rank < num_ranks; ++rank) loads[rank] += sum_of(packs_per_rank, &costs[rank * packs_per_rank]);
  const Int costliest = spread_over(static_cast<Int>(num_left), rest_cost.data(), rest_length.data(), num_ranks,
                                    packs_per_rank, capacity, loads.data(), tokens.data(), found.data());
  if (costliest >= 0)
    for (size_t k = 0; k < num_left; ++k) pack[rest[k]] = found[k];
  return costliest;
}

Int first_fit(Int n, const Int* cost, const Int* length, Int num_ranks, Int packs_per_rank, Int capacity, Int limit,
              Int ceiling, Int overhead, Int opens_above, Int* pack) {
  return with_keys(1, 0, packs_per_rank, sum_of(n, length), [&](auto key) {
    Packs<decltype(key)> packs;
    packs.reset(num_ranks, packs_per_rank, nullptr);
    Rooms rooms(num_ranks);
    Int in_use = 0, rank = -1, room = 0;
    for (Int i = 0; i < n; ++i) {
      // Ranks before the one that took an equal sequence still have no room.
      const bool is_equal = i > 0 && cost[i] == cost[i - 1] && length[i] == length[i - 1];
      if (!(is_equal && (rank < 0 || (room >= cost[i] && packs.least(rank) + length[i] <= capacity)))) {
        if (rank >= 0) rooms.set(rank, room, capacity - packs.least(rank));
        rank = rooms.first(cost[i], length[i]);
        if (rank >= 0) {
          room = rooms.cost(rank);
        } else {
          room = std::min(limit, ceiling - overhead * cost[i]);
          if (in_use < num_ranks && cost[i] > opens_above && room >= cost[i] && length[i] <= capacity) rank = in_use++;
        }
      }
      if (rank >= 0) room -= cost[i];
      pack[i] = rank < 0 ? -1 : packs.add(rank, length[i]);
    }
    return in_use;
  });
}

void fill(Int n, const Int* cost, const Int* length, Int num_packs, Int capacity, Int limit, Int* pack) {
  with_keys(num_packs, sum_of(n, cost), 1, sum_of(n, length), [&](auto key) {
    Spread<decltype(key)> spread;
    return spread.run(n, cost, length, num_packs, 1, capacity, nullptr, nullptr, pack, limit);
  });
}

Int best_fit(Int n, const Int* length, Int capacity, Int* pack) {
  std::set<std::pair<Int, Int>> rooms;  // room of a pack, its number; none that is too small for all that follow
  Int num_packs = 0;
  for (Int i = 0; i < n; ++i) {
    const auto found = rooms.lower_bound({length[i], 0});
    if (found == rooms.end()) {
      pack[i] = num_packs++;
      if (capacity - length[i] >= length[n - 1]) rooms.insert({capacity - length[i], pack[i]});
      continue;
    }
    auto chosen = rooms.extract(found);
    pack[i] = chosen.value().second;
    chosen.value().first -= length[i];
    if (chosen.value().first >= length[n - 1]) rooms.insert(std::move(chosen));
  }
  return num_packs;
}

void keep(Int n, const Int* cost, const Int* length, const Int* home, Int num_ranks, Int packs_per_rank, Int capacity,
          Int limit, Int* pack) {
  with_keys(1, 0, packs_per_rank, sum_of(n, length), [&](auto key) {
    Packs<decltype(key)> packs;
    packs.reset(num_ranks, packs_per_rank, nullptr);
    std::vector<Int> loads(num_ranks);
    for (Int i = 0; i < n; ++i) {
      const Int rank = home[i];
      if (loads[rank] + cost[i] > limit || packs.least(rank) + length[i] > capacity) {
        pack[i] = -1;
      } else {
        loads[rank] += cost[i];
        pack[i] = packs.add(rank, length[i]);
      }
    }
  });
}

void trade(Int n, const Int* cost, const Int* length, Int num_ranks, Int packs_per_rank, Int capacity, const Int* initial,
           Int partners, Int traded, Int budget, Int* pack) {
  Trades(n, cost, length, num_ranks, packs_per_rank, capacity, initial, pack).run(partners, traded, budget);
}

Int simulate(Int num_ranks, Int num_microbatches, const Int* costs, Int num_stages, Int num_chunks, Int stage_group,
             Int* end) {
  return simulate_ranks(num_ranks, num_microbatches, costs, num_stages, num_chunks, stage_group, end);
}

void stable_order(Int n, const Int* values, Int* order) { order_of(n, values, order); }

Int pack_costs(Int n, const Int* cost, const Int* pack, Int num_packs, Int fixed, Int* costs) {
  std::fill(costs, costs + num_packs, fixed);
  for (Int i = 0; i < n; ++i) {
    if (pack[i] < 0 || pack[i] >= num_packs) return 0;
    costs[pack[i]] += cost[i];
  }
  return 1;
}

void fill_empty(Int n, Int num_packs, Int* pack) {
  std::vector<Int> counts(num_packs), empty;
  for (Int i = 0; i < n; ++i) ++counts[pack[i]];
  for (Int p = 0; p < num_packs; ++p)
    if (counts[p] == 0) empty.push_back(p);
  for (Int i = n - 1; i >= 0 && !empty.empty(); --i)
    if (counts[pack[i]] > 1) {
      --counts[pack[i]];
      pack[i] = empty.back();
      empty.pop_back();
    }
}

void deal(Int n, const Int* cost, const Int* pack, Int num_ranks, Int num_microbatches, Int* dealt) {
  const Int num_packs = num_ranks * num_microbatches;
  std::vector<Int> costs(num_packs), order(num_packs), by_cost(num_packs), ones(num_packs, 1), rank(num_packs);
  for (Int i = 0; i < n; ++i) costs[pack[i]] -= cost[i];
  order_of(num_packs, costs.data(), order.data());
  for (Int k = 0; k < num_packs; ++k) by_cost[k] = -costs[order[k]];
  spread_over(num_packs, by_cost.data(), ones.data(), num_ranks, 1, num_microbatches, nullptr, nullptr, rank.data());
  std::vector<Int> place(num_packs), held(num_ranks);
  for (Int k = 0; k < num_packs; ++k) place[order[k]] = rank[k] * num_microbatches + held[rank[k]]++;
  for (Int i = 0; i < n; ++i) dealt[i] = place[pack[i]];
}

void split_ranks(Int n, const Int* cost, const Int* length, const Int* pack, Int num_ranks, Int packs_per_rank,
                 Int capacity, const Int* weights, Int only_where_lower, Int* other) {
  std::vector<Int> rank_of(num_ranks * packs_per_rank), starts(num_ranks + 1), by_rank(n);
  for (Int p = 0; p < num_ranks * packs_per_rank; ++p) rank_of[p] = p / packs_per_rank;
  for (Int i = 0; i < n; ++i) ++starts[rank_of[pack[i]] + 1];
  std::partial_sum(starts.begin(), starts.end(), starts.begin());
  std::vector<Int> next(starts.begin(), starts.end() - 1);
  for (Int i = 0; i < n; ++i) by_rank[next[rank_of[pack[i]]]++] = i;
  const Int sum_of_weights = sum_of(packs_per_rank, weights), heaviest = most_of(packs_per_rank, weights);
  with_keys(packs_per_rank, 2 * sum_of(n, cost), 1, sum_of(n, length), [&](auto key) {
    Spread<decltype(key)> spread;
    std::vector<Int> costs, lengths, position, loads(packs_per_rank), before(packs_per_rank), after(packs_per_rank);
    for (Int rank = 0; rank < num_ranks; ++rank) {
      const Int first = rank * packs_per_rank, size = starts[rank + 1] - starts[rank];
      const Int* sequences = by_rank.data() + starts[rank];
      for (std::vector<Int>* values : {&costs, &lengths, &position}) values->resize(size);
      for (Int k = 0; k < size; ++k) {
        costs[k] = cost[sequences[k]];
        lengths[k] = length[sequences[k]];
      }
      const Int share = sum_of(size, costs.data()) / sum_of_weights;
      for (Int m = 0; m < packs_per_rank; ++m) loads[m] = (heaviest - weights[m]) * share;
      bool is_taken = spread.run(size, costs.data(), lengths.data(), packs_per_rank, 1, capacity, loads.data(), nullptr,
                                 position.data()) >= 0;
      if (is_taken && only_where_lower) {
        std::fill(before.begin(), before.end(), 0);
        std::fill(after.begin(), after.end(), 0);
        for (Int k = 0; k < size; ++k) {
          before[pack[sequences[k]] - first] += costs[k];
          after[position[k]] += costs[k];
        }
        is_taken = most_of(packs_per_rank, after.data()) < most_of(packs_per_rank, before.data());
      }
      for (Int k = 0; k < size; ++k) other[sequences[k]] = is_taken ? first + position[k] : pack[sequences[k]];
    }
  });
}

void place_by_cost(Int num_ranks, Int num_microbatches, const Int* costs, const Int* order, Int* place) {
  with_keys(num_microbatches, most_of(num_ranks * num_microbatches, costs), 1, 0, [&](auto key) {
    const Pairs<decltype(key)> pairs(num_microbatches);
    std::vector<decltype(key)> by_cost(num_microbatches);
    for (Int rank = 0; rank < num_ranks; ++rank, costs += num_microbatches, place += num_microbatches) {
      for (Int m = 0; m < num_microbatches; ++m) by_cost[m] = pairs.of(-costs[m], m);
      std::sort(by_cost.begin(), by_cost.end());
      for (Int k = 0; k < num_microbatches; ++k) place[pairs.number(by_cost[k])] = order[k];
    }
  });
}

void match(Int n, const Int* part, const Int* place, const Int* weight, Int size, Int most_pairs, Int* place_of) {
  const Int bits = bits_of(size - 1), weight_bits = bits_of(most_of(n, weight));
  std::vector<uint64_t> keys(n);
  for (Int i = 0; i < n; ++i) keys[i] = (part[i] << bits | place[i]) << weight_bits | weight[i];
  sort_by_bits(&keys, weight_bits, 2 * bits);
  std::vector<uint64_t> shared;
  shared.reserve(n);
  uint64_t last = 0;
  for (const uint64_t key : keys) {
    const uint64_t pair = key >> weight_bits;
    if (shared.empty() || pair != last) {
      keys[shared.size()] = last = pair;
      shared.push_back(0);
    }
    shared.back() += key - (pair << weight_bits);
  }
  keys.resize(shared.size());
  const uint64_t most = shared.empty() ? 0 : *std::max_element(shared.begin(), shared.end());
  for (size_t k = 0; k < keys.size(); ++k) keys[k] |= (most - shared[k]) << 2 * bits;
  sort_by_bits(&keys, 2 * bits, bits_of(most));
  keys.resize(std::min<size_t>(keys.size(), most_pairs));
  std::fill(place_of, place_of + size, Int(-1));
  std::vector<char> is_taken(size);
  const uint64_t mask = (uint64_t(1) << bits) - 1;
  for (const uint64_t key : keys) {
    Int& chosen = place_of[key >> bits & mask];
    if (chosen < 0 && !is_taken[key & mask]) is_taken[chosen = key & mask] = true;
  }
  for (Int p = 0, left = 0; p < size; ++p)
    if (place_of[p] < 0) {
      while (is_taken[left]) ++left;
      place_of[p] = left++;
    }
}

void packs_needed(Int n, const Int* length, Int capacity, Int* packs) { packs_for(n, length, capacity, packs); }

Int pack_values(Int n, const Int* length, Int capacity, Int num_packs, Int budget, Int* value) {
  return PackValues(n, length, capacity, num_packs, budget).run(value);
}

Int search_packing(Int n, const Int* length, Int capacity, const Int* value, Int most_value, Int num_packs,
                   Int room_counts, Int swerves, Int most_sets, Int steps_per_pack, Int budget, Int* pack) {
  std::vector<Int> rest(n);
  Int spare = num_packs * capacity, spare_value = num_packs * most_value;
  for (Int i = 0; i < n; ++i) {
    rest[i] = i;
    spare -= length[i];
    spare_value -= value[i];
  }
  return PackSearch(length, capacity, value, most_value, room_counts, most_sets, steps_per_pack, budget, pack)
      .fill(rest, 0, spare, spare_value, swerves);
}

Int repartition(Int n, const Int* cost, const Int* length, Int num_ranks, Int packs_per_rank, Int capacity, Int limit,
                const Int* initial, Int most_split, Int step, Int budget, Int* pack) {
  return Repartition(n, cost, length, num_ranks, packs_per_rank, capacity, limit, initial, pack)
      .run(most_split, step, budget);
}

void anneal(Int n, const Int* cost, const Int* length, Int num_ranks, Int num_rows, Int capacity, Int most_back, Int near,
            Int halvings, Int num_rounds, Int steps, Int temperature, Int costlier, Int enough, Int* pack) {
  Annealing(n, cost, length, num_ranks, num_rows, capacity, pack)
      .run(most_back, near, halvings, num_rounds, steps, temperature, costlier, enough);
}

Int holds(Int k, const Int* count, const Int* cost, const Int* sums, Int total, Int num_ranks, Int time, Int more,
          Int mean, Int room, Int most_per_rank, Int num_first) {
  return ranks_hold(k, count, cost, sums, total, num_ranks, time, more, mean, room, most_per_rank, num_first);
}

}  // extern "C"
