// The inner loops of placement.py and of step_time.simulate, with the same results to the last bit: integers only, ties
// broken by number.
// Plain C functions over int64 arrays, called through ctypes; no Python headers are needed to build them.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

namespace {

using Int = int64_t;
using Tokens = std::pair<Int, Int>;                 // tokens of a pack, its number
using Load = std::pair<Int, Int>;                   // cost of a rank, its number
using Waiting = std::tuple<Int, Int, Int>;          // tokens of the emptiest pack, cost of the rank, its number

// `item` in the place of the least of a heap.
template <class T>
void sift_down(T* heap, Int size, T item) {
  Int at = 0;
  for (Int child = 1; child < size; child = 2 * at + 1) {
    if (child + 1 < size) child += heap[child + 1] < heap[child];
    if (item < heap[child]) break;
    heap[at] = heap[child];
    at = child;
  }
  heap[at] = item;
}

// The least first; unlike std::priority_queue, it can replace that in one go.
template <class T>
class Heap {
 public:
  Heap() = default;
  explicit Heap(std::vector<T> items) : items_(std::move(items)) {
    std::make_heap(items_.begin(), items_.end(), std::greater<T>());
  }
  bool empty() const { return items_.empty(); }
  const T& top() const { return items_[0]; }
  void push(T item) {
    items_.push_back(item);
    std::push_heap(items_.begin(), items_.end(), std::greater<T>());
  }
  void pop() {
    std::pop_heap(items_.begin(), items_.end(), std::greater<T>());
    items_.pop_back();
  }
  void replace_top(T item) { sift_down(items_.data(), static_cast<Int>(items_.size()), item); }

 private:
  std::vector<T> items_;
};

// The packs of all ranks; of each rank the emptiest is at hand.
class Packs {
 public:
  Packs(Int num_ranks, Int packs_per_rank, const Int* tokens) : per_rank_(packs_per_rank), heap_(num_ranks * packs_per_rank) {
    for (Int pack = 0; pack < num_ranks * packs_per_rank; ++pack) heap_[pack] = {tokens ? tokens[pack] : 0, pack};
    if (tokens)
      for (Int rank = 0; rank < num_ranks; ++rank)
        std::make_heap(first(rank), first(rank) + per_rank_, std::greater<Tokens>());
  }
  Int least(Int rank) const { return heap_[rank * per_rank_].first; }
  Int add(Int rank, Int length) {  // to the emptiest pack, whose number is returned
    Tokens* heap = first(rank);
    const Tokens grown = {heap[0].first + length, heap[0].second};
    sift_down(heap, per_rank_, grown);
    return grown.second;
  }

 private:
  Tokens* first(Int rank) { return heap_.data() + rank * per_rank_; }
  Int per_rank_;
  std::vector<Tokens> heap_;
};

Int spread_over(Int n, const Int* cost, const Int* length, Int num_ranks, Int packs_per_rank, Int capacity,
                const Int* loads, const Int* tokens, Int* pack) {
  Packs packs(num_ranks, packs_per_rank, tokens);
  std::vector<Load> initial(num_ranks);
  for (Int rank = 0; rank < num_ranks; ++rank) initial[rank] = {loads ? loads[rank] : 0, rank};
  Heap<Load> cheapest(std::move(initial));
  Heap<Waiting> waiting;
  for (Int i = 0; i < n; ++i) {
    const Int most = capacity - length[i];
    while (!waiting.empty() && std::get<0>(waiting.top()) <= most) {
      cheapest.push({std::get<1>(waiting.top()), std::get<2>(waiting.top())});
      waiting.pop();
    }
    while (!cheapest.empty() && packs.least(cheapest.top().second) > most) {
      const auto [load, rank] = cheapest.top();
      cheapest.pop();
      waiting.push({packs.least(rank), load, rank});
    }
    if (cheapest.empty()) return 0;
    const auto [load, rank] = cheapest.top();
    cheapest.replace_top({load + cost[i], rank});
    pack[i] = packs.add(rank, length[i]);
  }
  return 1;
}

// Rooms of the ranks in use, in cost and in tokens; finds the first with room for both.
class Rooms {
 public:
  explicit Rooms(Int num_ranks) {
    while (size_ < num_ranks) size_ *= 2;
    cost_.assign(2 * size_, -1);
    tokens_.assign(2 * size_, -1);
  }
  Int first(Int cost, Int tokens) const {
    Int node = 1;
    while (true) {
      if (cost_[node] >= cost && tokens_[node] >= tokens) {
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
  Int cost(Int rank) const { return cost_[size_ + rank]; }
  void set(Int rank, Int cost, Int tokens) {
    Int node = size_ + rank;
    cost_[node] = cost;
    tokens_[node] = tokens;
    for (node /= 2; node; node /= 2) {
      const Int most_cost = std::max(cost_[2 * node], cost_[2 * node + 1]);
      const Int most_tokens = std::max(tokens_[2 * node], tokens_[2 * node + 1]);
      if (cost_[node] == most_cost && tokens_[node] == most_tokens) break;
      cost_[node] = most_cost;
      tokens_[node] = most_tokens;
    }
  }

 private:
  Int size_ = 1;
  std::vector<Int> cost_, tokens_;
};

// At most so many of the sequences that a rank holds, of all costs.
void offer(const std::vector<Int>& held, Int most, std::vector<Int>* offered) {
  const Int size = static_cast<Int>(held.size()), count = std::min(size, most);
  offered->clear();
  for (Int k = 0; k < count; ++k) offered->push_back(held[k * size / count]);
}

// A pass of one model chunk over one microbatch, numbered chunk * num_microbatches + microbatch.
struct Pass {
  bool backward;
  Int number;
};

// 1F1B, or megatron-core's interleaved 1F1B, of one stage; see step_time._program.
std::vector<Pass> program_of(Int stage, Int num_stages, Int num_chunks, Int stage_group, Int num_microbatches) {
  std::vector<Int> forwards, backwards;
  const Int group = num_chunks == 1 ? num_microbatches : stage_group;
  for (Int start = 0; start < num_microbatches; start += group)
    for (Int chunk = 0; chunk < num_chunks; ++chunk)
      for (Int m = start; m < std::min(start + group, num_microbatches); ++m) {
        forwards.push_back(chunk * num_microbatches + m);
        backwards.push_back((num_chunks - 1 - chunk) * num_microbatches + m);
      }
  const Int size = static_cast<Int>(forwards.size());
  Int warmup = num_stages - stage - 1;
  if (num_chunks > 1) warmup = warmup * 2 + (num_chunks - 1) * stage_group;
  warmup = std::min(warmup, size);
  std::vector<Pass> program;
  for (Int i = 0; i < warmup; ++i) program.push_back({false, forwards[i]});
  for (Int i = warmup; i < size; ++i) {
    program.push_back({false, forwards[i]});
    program.push_back({true, backwards[i - warmup]});
  }
  for (Int i = size - warmup; i < size; ++i) program.push_back({true, backwards[i]});
  return program;
}

}  // namespace

extern "C" {

Int simulate(Int num_ranks, Int num_microbatches, const Int* costs, Int num_stages, Int num_chunks, Int stage_group,
             Int* end) {
  std::vector<std::vector<Pass>> programs;
  for (Int stage = 0; stage < num_stages; ++stage)
    programs.push_back(program_of(stage, num_stages, num_chunks, stage_group, num_microbatches));
  const Int places = num_stages * num_chunks, passes = num_chunks * num_microbatches;
  // When forward and backward end, by place (chunk * num_stages + stage) and microbatch; -1 until they are known.
  std::vector<Int> forward(places * num_microbatches), backward(places * num_microbatches);
  std::vector<Int> next(num_stages), free(num_stages);
  for (Int rank = 0; rank < num_ranks; ++rank) {
    std::fill(forward.begin(), forward.end(), -1);
    std::fill(backward.begin(), backward.end(), -1);
    std::fill(next.begin(), next.end(), 0);
    std::fill(free.begin(), free.end(), 0);
    for (Int done = 0; done < 2 * num_stages * passes;) {
      const Int before = done;
      for (Int stage = 0; stage < num_stages; ++stage) {
        const auto& program = programs[stage];
        for (; next[stage] < static_cast<Int>(program.size()); ++next[stage], ++done) {
          const Pass pass = program[next[stage]];
          const Int m = pass.number % num_microbatches;
          const Int place = pass.number / num_microbatches * num_stages + stage;
          const Int at = place * num_microbatches + m;
          Int ready = 0;
          if (pass.backward)
            ready = place + 1 == places ? forward[at] : backward[at + num_microbatches];
          else if (place > 0)
            ready = forward[at - num_microbatches];
          if (ready < 0) break;
          const Int cost = costs[rank * num_microbatches + m] / num_chunks;
          free[stage] = std::max(free[stage], ready) + (pass.backward ? 2 * cost : cost);
          (pass.backward ? backward : forward)[at] = free[stage];
        }
      }
      if (done == before) return 0;  // stages wait for one another
    }
    end[rank] = *std::max_element(free.begin(), free.end());
  }
  return 1;
}

Int spread(Int n, const Int* cost, const Int* length, Int num_ranks, Int packs_per_rank, Int capacity,
           const Int* loads, const Int* tokens, Int* pack) {
  return spread_over(n, cost, length, num_ranks, packs_per_rank, capacity, loads, tokens, pack);
}

Int split(Int num_ranks, const Int* starts, const Int* cost, const Int* length, Int packs_per_rank, Int capacity,
          const Int* weights, Int* pack) {
  Int sum_of_weights = 0, heaviest = 0, failed = 0;
  for (Int m = 0; m < packs_per_rank; ++m) {
    sum_of_weights += weights[m];
    heaviest = std::max(heaviest, weights[m]);
  }
  std::vector<Int> loads(packs_per_rank);
  for (Int rank = 0; rank < num_ranks; ++rank) {
    const Int start = starts[rank], n = starts[rank + 1] - start;
    Int total = 0;
    for (Int i = start; i < start + n; ++i) total += cost[i];
    for (Int m = 0; m < packs_per_rank; ++m) loads[m] = (heaviest - weights[m]) * (total / sum_of_weights);
    if (!spread_over(n, cost + start, length + start, packs_per_rank, 1, capacity, loads.data(), nullptr, pack + start)) {
      std::fill(pack + start, pack + start + n, Int(-1));
      ++failed;
    }
  }
  return failed;
}

Int first_fit(Int n, const Int* cost, const Int* length, Int num_ranks, Int packs_per_rank, Int capacity, Int limit,
              Int ceiling, Int overhead, Int opens_above, Int* pack) {
  Packs packs(num_ranks, packs_per_rank, nullptr);
  Rooms rooms(num_ranks);
  Int in_use = 0;
  for (Int i = 0; i < n; ++i) {
    Int rank = rooms.first(cost[i], length[i]);
    Int room;
    if (rank >= 0) {
      room = rooms.cost(rank);
    } else {
      room = std::min(limit, ceiling - overhead * cost[i]);
      if (in_use == num_ranks || cost[i] <= opens_above || room < cost[i] || capacity < length[i]) {
        pack[i] = -1;
        continue;
      }
      rank = in_use++;
    }
    pack[i] = packs.add(rank, length[i]);
    rooms.set(rank, room - cost[i], capacity - packs.least(rank));
  }
  return in_use;
}

Int best_fit(Int n, const Int* length, Int capacity, Int* pack) {
  std::set<std::pair<Int, Int>> rooms;  // room of a pack, its number
  Int num_packs = 0;
  for (Int i = 0; i < n; ++i) {
    const auto found = rooms.lower_bound({length[i], 0});
    std::pair<Int, Int> chosen = {capacity, num_packs};
    if (found == rooms.end()) {
      ++num_packs;
    } else {
      chosen = *found;
      rooms.erase(found);
    }
    rooms.insert({chosen.first - length[i], chosen.second});
    pack[i] = chosen.second;
  }
  return num_packs;
}

void keep(Int n, const Int* cost, const Int* length, const Int* home, Int num_ranks, Int packs_per_rank, Int capacity,
          Int limit, Int* pack) {
  Packs packs(num_ranks, packs_per_rank, nullptr);
  std::vector<Int> loads(num_ranks, 0);
  for (Int i = 0; i < n; ++i) {
    const Int rank = home[i];
    if (loads[rank] + cost[i] > limit || packs.least(rank) + length[i] > capacity) {
      pack[i] = -1;
    } else {
      loads[rank] += cost[i];
      pack[i] = packs.add(rank, length[i]);
    }
  }
}

void trade(Int n, const Int* cost, const Int* length, Int num_ranks, Int packs_per_rank, Int capacity, const Int* initial,
           Int partners, Int traded, Int budget, Int* pack) {
  std::vector<std::vector<Int>> held(num_ranks);
  std::vector<Int> loads(num_ranks, 0), tokens(num_ranks * packs_per_rank, 0), counts(num_ranks * packs_per_rank, 0);
  if (initial) loads.assign(initial, initial + num_ranks);
  for (Int i = 0; i < n; ++i) {
    const Int rank = pack[i] / packs_per_rank;
    held[rank].push_back(i);
    loads[rank] += cost[i];
    tokens[pack[i]] += length[i];
    ++counts[pack[i]];
  }
  std::vector<Load> by_load(num_ranks);
  std::vector<Int> offered, wanted;
  partners = std::min(partners, num_ranks);
  Int asked = partners;
  while (true) {
    Int giver = 0;
    for (Int rank = 0; rank < num_ranks; ++rank) {
      by_load[rank] = {loads[rank], rank};
      if (loads[rank] > loads[giver]) giver = rank;
    }
    std::partial_sort(by_load.begin(), by_load.begin() + asked, by_load.end());
    Int best = loads[giver], given = -1, taken = -1, taker = -1, place = -1;
    for (Int p = 0; p < asked; ++p) {
      const Int other = by_load[p].second;
      const Int gap = loads[giver] - loads[other];
      if (gap < 2) break;
      offer(held[giver], traded, &offered);
      offer(held[other], traded, &wanted);
      budget -= static_cast<Int>(offered.size() * (wanted.size() + 1));
      if (budget < 0) return;
      Int emptiest = other * packs_per_rank;
      for (Int q = emptiest; q < (other + 1) * packs_per_rank; ++q)
        if (tokens[q] < tokens[emptiest]) emptiest = q;
      for (const Int i : offered) {
        const Int alone = std::max(loads[giver] - cost[i], loads[other] + cost[i]);
        if (alone < best && counts[pack[i]] > 1 && tokens[emptiest] + length[i] <= capacity)
          best = alone, given = i, taken = -1, taker = other, place = emptiest;
        for (const Int j : wanted) {
          const Int difference = cost[i] - cost[j];
          const Int both = std::max(loads[giver] - difference, loads[other] + difference);
          if (both < best && tokens[pack[i]] - length[i] + length[j] <= capacity &&
              tokens[pack[j]] - length[j] + length[i] <= capacity)
            best = both, given = i, taken = j, taker = other, place = pack[j];
        }
      }
    }
    if (given < 0) {
      if (asked == num_ranks) return;
      asked = num_ranks;
      continue;
    }
    asked = partners;
    const auto hand_over = [&](Int i, Int from, Int to, Int to_pack) {
      held[from].erase(std::lower_bound(held[from].begin(), held[from].end(), i));
      held[to].insert(std::lower_bound(held[to].begin(), held[to].end(), i), i);
      loads[from] -= cost[i];
      loads[to] += cost[i];
      tokens[pack[i]] -= length[i];
      --counts[pack[i]];
      tokens[to_pack] += length[i];
      ++counts[to_pack];
      pack[i] = to_pack;
    };
    const Int from_pack = pack[given];
    hand_over(given, giver, taker, place);
    if (taken >= 0) hand_over(taken, taker, giver, from_pack);
  }
}

}  // extern "C"
