// What lower bounds ask of all sequences; see pack_bounds.packs_needed and rank_bounds.RankBounds.

#pragma once

#include "native_order.hpp"

inline Int ceil_div(Int a, Int b) { return (a + b - 1) / b; }

// They grow with the sequences, so that most divisions are but comparisons with the most so far.
inline void packs_for(Int n, const Int* length, Int capacity, Int* packs) {
  std::vector<Int> sums(n + 1);
  std::partial_sum(length, length + n, sums.begin() + 1);
  Int num_halves = 0, num_longer = n, per_pack = 0, most = 0;
  while (num_halves < n && length[num_halves] > capacity / 2) ++num_halves;
  for (Int i = 0; i < n; ++i) {
    const Int shortest = std::max<Int>(length[i], 1), num_large = std::min(num_halves, i + 1);
    while (num_longer > 0 && length[num_longer - 1] <= capacity - length[i]) --num_longer;
    const Int num_alone = std::min(num_longer, num_large);
    const Int room_beside_large = (num_large - num_alone) * capacity - (sums[num_large] - sums[num_alone]);
    const Int overflow = sums[i + 1] - sums[num_large] - room_beside_large;
    if (i == 0 || length[i] < length[i - 1]) per_pack = capacity / shortest;
    most = std::max(most, num_large);
    if (overflow > (most - num_large) * capacity) most = num_large + ceil_div(overflow, capacity);
    if (i + 1 > most * per_pack) most = ceil_div(i + 1, per_pack);
    if (i >= num_halves && length[i] > capacity / 3) {
      const Int unpaired = (i + 1 - num_halves) - (num_halves - num_longer);
      if (unpaired > 2 * (most - num_halves)) most = num_halves + ceil_div(unpaired, 2);
    }
    packs[i] = most;
  }
}

// The sequences whose costs `count` [k] looks at, as positions from 1; see RankBounds._holds.
inline bool ranks_hold(Int k, const Int* count, const Int* cost, const Int* sums, Int total, Int num_ranks, Int time,
                       Int more, Int mean, Int room, Int most_per_rank, Int num_first) {
  // The costliest of the first ranks, each the costliest sequence that those before it can't hold.
  const Int end = count[k - 1];
  std::vector<Int> costliest;
  Int held = 0, place = 0;
  while (place < end && static_cast<Int>(costliest.size()) < std::min(num_ranks, num_first)) {
    costliest.push_back(place);
    held += time - more * cost[place];
    place = std::upper_bound(sums + place, sums + total + 1, held) - sums - 1;
  }
  if (place < end) costliest.push_back(place);
  Wide lost = 0;
  size_t so_far = 0;
  for (Int i = 0; i < k; ++i) {
    const Int large = cost[count[i] - 1], room_beside = time - more * large;
    const Int most = std::min(room_beside / large, most_per_rank);
    while (so_far < costliest.size() && costliest[so_far] < count[i]) ++so_far;
    const Int ranks = std::max({ceil_div(sums[count[i]], room_beside), ceil_div(count[i], most), static_cast<Int>(so_far)});
    if (ranks > num_ranks) return false;
    const Int next = i + 1 < k ? cost[count[i + 1] - 1] : std::min(mean, large);
    lost += static_cast<Wide>(ranks) * (large - next);
  }
  return room - more * lost >= sums[total];
}
