// The inner loops of scheduling: plain C functions over arrays, called through ctypes (see
// compiled.py, which must name the same arguments), so that no Python headers are needed to build
// them. The Python function of the same name in placement.py, tight_packs.py, step_time.py or
// default.py documents each; `keep` serves default._keep.
//
// Sequences come longest first, or costliest first where they have payloads (placement.py). Pack
// numbers are rank * per_rank + position.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <queue>
#include <set>
#include <utility>
#include <vector>

using Int = int64_t;

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The packs of each rank as a heap, the one with the fewest tokens first.
class PackHeaps {
 public:
  PackHeaps(Int num_ranks, Int per_rank) : per_rank_(per_rank), heap_(num_ranks * per_rank) {
    for (size_t at = 0; at < heap_.size(); ++at) heap_[at] = {0, static_cast<Int>(at)};
  }
  PackHeaps(Int num_ranks, Int per_rank, const std::vector<Int>& tokens)
      : PackHeaps(num_ranks, per_rank) {
    for (size_t at = 0; at < heap_.size(); ++at) heap_[at].first = tokens[at];
    for (Int rank = 0; rank < num_ranks; ++rank)
      std::make_heap(first(rank), first(rank) + per_rank_, std::greater<>());
  }
  Int fewest_tokens(Int rank) const { return heap_[rank * per_rank_].first; }
  // Put a sequence into the rank's emptiest pack, whose number is returned.
  Int add(Int rank, Int length) {
    std::pair<Int, Int>* heap = first(rank);
    const std::pair<Int, Int> grown{heap->first + length, heap->second};
    Int at = 0;
    for (Int child = 1; child < per_rank_; child = 2 * at + 1) {
      if (child + 1 < per_rank_ && heap[child + 1] < heap[child]) ++child;
      if (grown < heap[child]) break;
      heap[at] = heap[child];
      at = child;
    }
    heap[at] = grown;
    return grown.second;
  }

 private:
  std::pair<Int, Int>* first(Int rank) { return heap_.data() + rank * per_rank_; }
  Int per_rank_;
  std::vector<std::pair<Int, Int>> heap_;  // tokens, number of the pack
};

// The least of some values that change: a tree of minima.
class Least {
 public:
  explicit Least(const std::vector<double>& values) {
    while (size_ < static_cast<Int>(values.size())) size_ *= 2;
    tree_.assign(2 * size_, kInfinity);
    std::copy(values.begin(), values.end(), tree_.begin() + size_);
    for (Int node = size_ - 1; node > 0; --node)
      tree_[node] = std::min(tree_[2 * node], tree_[2 * node + 1]);
  }
  double value() const { return tree_[1]; }
  Int place() const {
    Int node = 1;
    while (node < size_) node = 2 * node + (tree_[2 * node + 1] < tree_[2 * node]);
    return node - size_;
  }
  void set(Int place, double value) {
    Int node = size_ + place;
    tree_[node] = value;
    for (; node > 1; node /= 2) tree_[node / 2] = value = std::min(value, tree_[node ^ 1]);
  }

 private:
  Int size_ = 1;
  std::vector<double> tree_;
};

// Free cost and free tokens of ranks; finds the first one with enough of both: a tree of maxima.
class FreeRanks {
 public:
  explicit FreeRanks(Int num_ranks) {
    while (size_ < num_ranks) size_ *= 2;
    tree_.assign(2 * size_, {-1.0, -1});
  }
  Int first(double cost, Int tokens) const {
    const auto is_enough = [&](Int node) {
      return tree_[node].first >= cost && tree_[node].second >= tokens;
    };
    Int node = 1;
    while (!(is_enough(node) && node >= size_)) {
      if (is_enough(node)) {  // perhaps of different ranks: if there is none below, the way goes on
                              // to the right
        node *= 2;
        continue;
      }
      for (; node & 1; node /= 2)
        if (node == 1) return -1;
      ++node;
    }
    return node - size_;
  }
  double cost(Int rank) const { return tree_[size_ + rank].first; }
  void set(Int rank, double cost, Int tokens) {
    Int node = size_ + rank;
    tree_[node] = {cost, tokens};
    for (node /= 2; node; node /= 2) {
      const auto &left = tree_[2 * node], &right = tree_[2 * node + 1];
      const std::pair<double, Int> most{std::max(left.first, right.first),
                                        std::max(left.second, right.second)};
      if (tree_[node] == most) break;
      tree_[node] = most;
    }
  }

 private:
  Int size_ = 1;
  std::vector<std::pair<double, Int>> tree_;
};

// See `place_longest_first`; -1 where a sequence finds no pack. With a limit of ranks' costs such a sequence is
// passed over.
double place_over(Int n, const double* cost, const Int* length, Int num_ranks, Int per_rank,
                   Int capacity, double limit, std::vector<double> loads,
                   const std::vector<Int>* tokens, Int* pack) {
  PackHeaps packs =
      tokens ? PackHeaps(num_ranks, per_rank, *tokens) : PackHeaps(num_ranks, per_rank);
  Least cheapest(loads);
  double costliest = *std::max_element(loads.begin(), loads.end());
  // Ranks whose emptiest pack is too full for now, by its tokens: sequences get shorter.
  std::priority_queue<std::pair<Int, Int>, std::vector<std::pair<Int, Int>>, std::greater<>> full;
  for (Int i = 0; i < n; ++i) {
    if (pack[i] >= 0) continue;
    const Int most = capacity - length[i];
    for (; !full.empty() && full.top().first <= most; full.pop())
      cheapest.set(full.top().second, loads[full.top().second]);
    Int rank = -1;
    while (cheapest.value() < kInfinity) {
      const Int tried = cheapest.place();
      if (packs.fewest_tokens(tried) <= most) {
        rank = tried;
        break;
      }
      cheapest.set(tried, kInfinity);
      full.push({packs.fewest_tokens(tried), tried});
    }
    if (rank < 0 && limit == kInfinity) return -1;
    if (rank < 0 || loads[rank] + cost[i] > limit) continue;
    loads[rank] += cost[i];
    costliest = std::max(costliest, loads[rank]);
    cheapest.set(rank, loads[rank]);
    pack[i] = packs.add(rank, length[i]);
  }
  return costliest;
}

// Sequences by part, each part's in order: those of part p are order[starts[p]] to order[starts[p +
// 1] - 1].
struct Grouped {
  Grouped(Int n, const Int* pack, Int num_parts, Int per_part) : starts(num_parts + 1), order(n) {
    for (Int i = 0; i < n; ++i) ++starts[pack[i] / per_part + 1];
    std::partial_sum(starts.begin(), starts.end(), starts.begin());
    std::vector<Int> next(starts.begin(), starts.end() - 1);
    for (Int i = 0; i < n; ++i) order[next[pack[i] / per_part]++] = i;
  }
  std::vector<Int> starts, order;
};

// See `trade`.
class Trades {
 public:
  Trades(Int n, const double* cost, const Int* length, Int num_ranks, Int per_rank, Int capacity,
         const double* initial, Int* pack)
      : cost_(cost),
        length_(length),
        num_ranks_(num_ranks),
        per_rank_(per_rank),
        capacity_(capacity),
        pack_(pack),
        loads_(initial, initial + num_ranks),
        tokens_(num_ranks * per_rank),
        grouped_(n, pack, num_ranks, per_rank),
        held_(num_ranks),
        is_held_(num_ranks),
        changed_(num_ranks),
        tried_(num_ranks, -1) {
    for (Int i = 0; i < n; ++i) {
      loads_[pack[i] / per_rank] += cost[i];
      tokens_[pack[i]] += length[i];
    }
  }

  void run(double aim, Int partners, Int offered, Int budget) {
    std::vector<std::pair<double, Int>> by_load;
    Int asked = partners = std::min(partners, num_ranks_), trades = 0;
    while (true) {
      const Int giver = giver_and_partners(asked, trades, &by_load);
      if (giver < 0 || (budget -= asked) < 0) return;
      best_ = {loads_[giver] * (1 - 1e-9), {-1, -1}, {-1, -1}, -1};
      offer(giver, offered, &given_);
      for (Int p = 0; p < asked && by_load[p].first < loads_[giver]; ++p) {
        if (std::max(changed_[giver], changed_[by_load[p].second]) <= tried_[giver]) continue;
        offer(by_load[p].second, offered, &taken_);
        const bool has_sets =
            per_rank_ == 1 && given_.size() <= kFewHeld && taken_.size() <= kFewHeld;
        if (has_sets) {
          add_pairs(&given_);
          add_pairs(&taken_);
        }
        budget -= static_cast<Int>(given_.size() * (taken_.size() + 1));
        if (budget < 0) return;
        consider(giver, by_load[p].second);
        if (has_sets) offer(giver, offered, &given_);
      }
      if (best_.to_pack < 0 && asked == num_ranks_) {
        tried_[giver] = trades;
        if (*std::max_element(loads_.begin(), loads_.end()) <= aim) return;
      }
      if (best_.to_pack < 0) {
        asked = asked == num_ranks_ ? partners : num_ranks_;
        continue;
      }
      asked = partners;
      const Int from = pack_[best_.given.first];
      changed_[giver] = changed_[best_.to_pack / per_rank_] = ++trades;
      for (const Int i : {best_.given.first, best_.given.second})
        if (i >= 0) hand_over(i, best_.to_pack);
      for (const Int i : {best_.taken.first, best_.taken.second})
        if (i >= 0) hand_over(i, from);
    }
  }

 private:
  using OneOrTwo = std::pair<Int, Int>;  // sequences of one pack; -1: none
  struct Trade {
    double higher_load;  // of the two ranks, afterwards
    OneOrTwo given, taken;
    Int to_pack;
  };
  struct Offer {
    OneOrTwo sequences;
    Int length, longest;  // their pack can hold so many tokens instead
    double cost;
  };
  static constexpr size_t kFewHeld =
      12;  // sequences; of ranks of one pack with no more, two are offered together too

  // The costliest rank that has not tried all others in vain, -1 for none; and the cheapest ranks
  // of all.
  Int giver_and_partners(Int num_cheapest, Int trades,
                         std::vector<std::pair<double, Int>>* cheapest) const {
    cheapest->resize(num_cheapest);
    for (Int rank = 0; rank < num_cheapest; ++rank) (*cheapest)[rank] = {loads_[rank], rank};
    std::sort(cheapest->begin(), cheapest->end());
    double low = cheapest->back().first, high = -kInfinity;
    Int costliest = -1;
    for (Int rank = 0; rank < num_ranks_; ++rank) {
      const double load = loads_[rank];
      if (load > high && tried_[rank] < trades) {
        high = load;
        costliest = rank;
      }
      if (load < low && rank >= num_cheapest) {
        const std::pair<double, Int> entry{load, rank};
        cheapest->pop_back();
        cheapest->insert(std::upper_bound(cheapest->begin(), cheapest->end(), entry), entry);
        low = cheapest->back().first;
      }
    }
    return costliest;
  }

  // At most so many of the sequences that a rank holds, of all costs.
  void offer(Int rank, Int most, std::vector<Offer>* offers) {
    const std::vector<Int>& held = held_by(rank);
    const Int size = static_cast<Int>(held.size()), count = std::min(size, most);
    offers->clear();
    for (Int k = 0; k < count; ++k) {
      const Int i = held[k * size / count];
      offers->push_back(
          {{i, -1}, length_[i], capacity_ - tokens_[pack_[i]] + length_[i], cost_[i]});
    }
  }

  static void add_pairs(std::vector<Offer>* offers) {
    const size_t size = offers->size();
    for (size_t k = 0; k < size; ++k)
      for (size_t l = k + 1; l < size; ++l) {
        const Offer one = (*offers)[k], other = (*offers)[l];
        offers->push_back({{one.sequences.first, other.sequences.first},
                           one.length + other.length,
                           one.longest + other.length,
                           one.cost + other.cost});
      }
  }

  std::vector<Int>& held_by(
      Int rank) {  // ascending; copied when first asked for, as most never are
    if (!is_held_[rank])
      held_[rank].assign(grouped_.order.begin() + grouped_.starts[rank],
                         grouped_.order.begin() + grouped_.starts[rank + 1]);
    is_held_[rank] = true;
    return held_[rank];
  }

  void consider(Int giver, Int other) {
    const double load = loads_[giver], other_load = loads_[other];
    const auto first = tokens_.begin() + other * per_rank_;
    const Int emptiest = std::min_element(first, first + per_rank_) - tokens_.begin();
    for (const Offer& i : given_) {
      const double alone = std::max(load - i.cost, other_load + i.cost);
      if (alone < best_.higher_load && tokens_[emptiest] + i.length <= capacity_)
        best_ = {alone, i.sequences, {-1, -1}, emptiest};
      for (const Offer& j : taken_) {
        const double difference = i.cost - j.cost,
                     both = std::max(load - difference, other_load + difference);
        if (both < best_.higher_load && j.length <= i.longest && i.length <= j.longest)
          best_ = {both, i.sequences, j.sequences, pack_[j.sequences.first]};
      }
    }
  }

  void hand_over(Int i, Int to_pack) {
    const Int from = pack_[i] / per_rank_, to = to_pack / per_rank_;
    std::vector<Int>&source = held_by(from), &target = held_by(to);
    source.erase(std::lower_bound(source.begin(), source.end(), i));
    target.insert(std::lower_bound(target.begin(), target.end(), i), i);
    loads_[from] -= cost_[i];
    loads_[to] += cost_[i];
    tokens_[pack_[i]] -= length_[i];
    tokens_[to_pack] += length_[i];
    pack_[i] = to_pack;
  }

  const double* cost_;
  const Int* length_;
  Int num_ranks_, per_rank_, capacity_;
  Int* pack_;
  std::vector<double> loads_;
  std::vector<Int> tokens_;
  Grouped grouped_;
  std::vector<std::vector<Int>> held_;
  std::vector<char> is_held_;
  // By rank, how many trades there had been: after its last one; when it found none with any other
  // (-1: not yet). It need not look again at ranks that have not changed since.
  std::vector<Int> changed_, tried_;
  std::vector<Offer> given_, taken_;
  Trade best_{};
};

// Bin completion; see `complete_packs`.
class Completion {
 public:
  Completion(const Int* length, Int capacity, Int budget, Int* pack)
      : length_(length), capacity_(capacity), budget_(budget), pack_(pack) {}

  // Whether the sequences of `rest`, descending, were put into packs from `number` on. Together
  // these may leave `spare` tokens free; the first set found for a pack is passed over at most
  // `swerves` times on the way down.
  bool fill(const std::vector<Int>& rest, Int number, Int spare, Int swerves) {
    if (rest.empty()) return true;
    const std::vector<Set> sets = sets_of(rest, spare);
    for (Int tried = 0; tried < static_cast<Int>(sets.size()) && tried <= swerves && budget_ >= 0;
         ++tried) {
      std::vector<Int> others;
      size_t next = 0;
      for (Int place = 0; place < static_cast<Int>(rest.size()); ++place) {
        const bool is_in = next < sets[tried].places.size() && sets[tried].places[next] == place;
        next += is_in;
        if (is_in)
          pack_[rest[place]] = number;
        else
          others.push_back(rest[place]);
      }
      if (fill(others, number + 1, spare - sets[tried].free, swerves - tried)) return true;
    }
    return false;
  }

 private:
  struct Set {
    std::vector<Int> places;  // in `rest`; the longest sequence, at 0, is in each
    Int free;                 // tokens
  };
  static constexpr Int kMostSets = 50, kStepsPerPack = 4000;

  std::vector<Set> sets_of(const std::vector<Int>& rest, Int spare) {
    const Int size = static_cast<Int>(rest.size());
    std::vector<Int> lengths(size), left(size + 1), places{0};
    for (Int place = size - 1; place >= 0; --place) {
      lengths[place] = length_[rest[place]];
      left[place] = left[place + 1] + lengths[place];
    }
    const auto first_within = [&](Int tokens, Int from) {
      return std::lower_bound(lengths.begin() + from, lengths.end(), tokens, std::greater<Int>()) -
             lengths.begin();
    };
    const Int enough = (budget_ -= size) - kStepsPerPack;
    std::vector<Set> found;
    Int free = capacity_ - lengths[0], place = 1;
    while (--budget_ >= 0 && static_cast<Int>(found.size()) < kMostSets &&
           (found.empty() || budget_ > enough)) {
      place = first_within(free, place);
      if (place < size && free - left[place] <= spare) {
        places.push_back(place);
        free -= lengths[place++];
        continue;
      }
      // Where one that is left out would still fit in, the set with it is as good.
      if (free <= spare && !has_place_for_another(places, lengths, free))
        found.push_back({places, free});
      if (places.size() == 1) break;
      place = first_within(lengths[places.back()] - 1, places.back());
      free += lengths[places.back()];
      places.pop_back();
    }
    std::stable_sort(found.begin(), found.end(), [](const Set& a, const Set& b) {
      return std::make_pair(a.places.size(), a.free) < std::make_pair(b.places.size(), b.free);
    });
    return found;
  }

  static bool has_place_for_another(const std::vector<Int>& places, const std::vector<Int>& lengths,
                                    Int free) {
    Int unused = static_cast<Int>(lengths.size()) - 1;
    for (size_t k = places.size(); k > 0 && places[k - 1] == unused; --k) --unused;
    return unused > 0 && lengths[unused] <= free;
  }

  const Int* length_;
  Int capacity_, budget_;
  Int* pack_;
};

// A pass of one stage, after the one whose result it takes in: their ends are kept at `at` and
// `need`.
struct Pass {
  Int stage, place, at, need, microbatch, thirds;
};

// All passes of all stages in an order in which they can run, fewer where stages wait for one
// another; see step_time.timeline. Ends are numbered from 1 by direction, place (chunk * num_stages
// + stage) and microbatch.
std::vector<Pass> passes_of(Int num_stages, Int num_chunks, Int stage_group, Int num_microbatches) {
  struct Step {
    bool is_backward;
    Int chunk, microbatch;
  };
  std::vector<Step> forwards, backwards;
  const Int group = num_chunks == 1 ? num_microbatches : stage_group;
  for (Int start = 0; start < num_microbatches; start += group)
    for (Int chunk = 0; chunk < num_chunks; ++chunk)
      for (Int m = start; m < std::min(start + group, num_microbatches); ++m) {
        forwards.push_back({false, chunk, m});
        backwards.push_back({true, num_chunks - 1 - chunk, m});
      }
  const Int size = static_cast<Int>(forwards.size()), places = num_stages * num_chunks;
  std::vector<std::vector<Step>> programs(num_stages);
  for (Int stage = 0; stage < num_stages; ++stage) {
    Int warmup = num_stages - stage - 1;
    if (num_chunks > 1) warmup = warmup * 2 + (num_chunks - 1) * stage_group;
    warmup = std::min(warmup, size);
    for (Int i = 0; i < size + warmup; ++i) {
      if (i < size) programs[stage].push_back(forwards[i]);
      if (i >= warmup) programs[stage].push_back(backwards[i - warmup]);
    }
  }
  std::vector<char> is_done(2 * places * num_microbatches + 1);
  is_done[0] = true;
  std::vector<size_t> next(num_stages);
  std::vector<Pass> passes;
  for (size_t before = 1; before != passes.size();) {
    before = passes.size();
    for (Int stage = 0; stage < num_stages; ++stage)
      for (; next[stage] < programs[stage].size(); ++next[stage]) {
        const Step& step = programs[stage][next[stage]];
        const Int place = step.chunk * num_stages + stage,
                  forward = 1 + place * num_microbatches + step.microbatch;
        const Int backward = forward + places * num_microbatches;
        Int need = place > 0 ? forward - num_microbatches : 0;
        if (step.is_backward) need = place + 1 < places ? backward + num_microbatches : forward;
        if (!is_done[need]) break;
        const Int at = step.is_backward ? backward : forward;
        is_done[at] = true;
        passes.push_back({stage, place, at, need, step.microbatch, step.is_backward ? 2 : 1});
      }
  }
  return passes;
}

}  // namespace

extern "C" {

// Raised with every change of a function's arguments or results: compiled.py must ask for the same.
Int interface_version() { return 9; }

double place_longest_first(Int n, const double* cost, const Int* length, Int num_ranks, Int per_rank,
              Int capacity, double limit, const double* initial, Int* pack) {
  std::vector<Int> tokens(num_ranks * per_rank);
  std::vector<double> loads(initial, initial + num_ranks);
  bool is_begun = false;
  for (Int i = 0; i < n; ++i)
    if (pack[i] >= 0) {
      loads[pack[i] / per_rank] += cost[i];
      tokens[pack[i]] += length[i];
      is_begun = true;
    }
  return place_over(n, cost, length, num_ranks, per_rank, capacity, limit, std::move(loads),
                     is_begun ? &tokens : nullptr, pack);
}

Int first_fit(Int n, const double* cost, const Int* length, Int num_ranks, Int per_rank,
              Int capacity, double limit, double ceiling, double overhead, double opens_above,
              Int* pack) {
  PackHeaps packs(num_ranks, per_rank);
  FreeRanks free(num_ranks);
  Int in_use = 0;
  for (Int i = 0; i < n; ++i) {
    Int rank = free.first(cost[i], length[i]);
    double left = 0;
    if (rank >= 0) {
      left = free.cost(rank);
    } else {
      left = std::min(limit, ceiling - overhead * cost[i]);
      if (in_use < num_ranks && cost[i] > opens_above && left >= cost[i] && length[i] <= capacity)
        rank = in_use++;
    }
    pack[i] = rank < 0 ? -1 : packs.add(rank, length[i]);
    if (rank >= 0) free.set(rank, left - cost[i], capacity - packs.fewest_tokens(rank));
  }
  return in_use;
}

Int best_fit(Int n, const Int* length, Int capacity, Int* pack) {
  std::set<std::pair<Int, Int>>
      free;  // tokens, pack; none with fewer than the shortest sequence has
  Int num_packs = 0;
  for (Int i = 0; i < n; ++i) {
    const auto found = free.lower_bound({length[i], 0});
    const std::pair<Int, Int> chosen =
        found == free.end() ? std::make_pair(capacity, num_packs++) : *found;
    if (found != free.end()) free.erase(found);
    pack[i] = chosen.second;
    if (chosen.first - length[i] >= length[n - 1])
      free.insert({chosen.first - length[i], chosen.second});
  }
  return num_packs;
}

Int complete_packs(Int n, const Int* length, Int capacity, Int num_packs, Int swerves, Int budget,
                   Int* pack) {
  std::vector<Int> all(n);
  std::iota(all.begin(), all.end(), Int(0));
  const Int spare = num_packs * capacity - std::accumulate(length, length + n, Int(0));
  return spare >= 0 && Completion(length, capacity, budget, pack).fill(all, 0, spare, swerves);
}

void keep(Int n, const double* cost, const Int* length, const Int* source, Int num_ranks,
          Int per_rank, Int capacity, double limit, Int* pack) {
  PackHeaps packs(num_ranks, per_rank);
  std::vector<double> loads(num_ranks);
  for (Int i = 0; i < n; ++i) {
    const Int rank = source[i];
    const bool fits = (loads[rank] == 0 || loads[rank] + cost[i] <= limit) &&
                      packs.fewest_tokens(rank) + length[i] <= capacity;
    if (fits) loads[rank] += cost[i];
    pack[i] = fits ? packs.add(rank, length[i]) : -1;
  }
}

void trade(Int n, const double* cost, const Int* length, Int num_ranks, Int per_rank, Int capacity,
           const double* initial, double aim, Int partners, Int offered, Int budget, Int* pack) {
  Trades(n, cost, length, num_ranks, per_rank, capacity, initial, pack)
      .run(aim, partners, offered, budget);
}

void split_ranks(Int n, const double* cost, const Int* length, const Int* pack, Int num_ranks,
                 Int per_rank, Int capacity, const double* weights, Int only_where_lower,
                 Int* other) {
  const Grouped grouped(n, pack, num_ranks, per_rank);
  const double sum_of_weights = std::accumulate(weights, weights + per_rank, 0.0);
  const double heaviest = *std::max_element(weights, weights + per_rank);
  std::vector<double> costs, loads(per_rank), before(per_rank), after(per_rank);
  std::vector<Int> lengths, position;
  for (Int rank = 0; rank < num_ranks; ++rank) {
    const Int size = grouped.starts[rank + 1] - grouped.starts[rank], first = rank * per_rank;
    const Int* mine = grouped.order.data() + grouped.starts[rank];
    costs.resize(size);
    lengths.resize(size);
    position.assign(size, -1);
    std::fill(before.begin(), before.end(), 0);
    for (Int k = 0; k < size; ++k) {
      costs[k] = cost[mine[k]];
      lengths[k] = length[mine[k]];
      before[pack[mine[k]] - first] += costs[k];
    }
    const double share = std::accumulate(costs.begin(), costs.end(), 0.0) / sum_of_weights;
    for (Int m = 0; m < per_rank; ++m) loads[m] = (heaviest - weights[m]) * share;
    bool is_taken = place_over(size, costs.data(), lengths.data(), per_rank, 1, capacity,
                                kInfinity, loads, nullptr, position.data()) >= 0;
    if (is_taken && only_where_lower) {
      std::fill(after.begin(), after.end(), 0);
      for (Int k = 0; k < size; ++k) after[position[k]] += costs[k];
      is_taken = *std::max_element(after.begin(), after.end()) <
                 *std::max_element(before.begin(), before.end());
    }
    for (Int k = 0; k < size; ++k) other[mine[k]] = is_taken ? first + position[k] : pack[mine[k]];
  }
}

Int simulate(Int num_ranks, Int num_microbatches, const double* costs, Int num_stages,
             Int num_chunks, Int stage_group, const double* shares, double* end) {
  constexpr Int at_once =
      8;  // ranks: each pass of one waits for the one before it, which leaves the processor idle
  const std::vector<Pass> passes = passes_of(num_stages, num_chunks, stage_group, num_microbatches);
  const Int size = 2 * num_stages * num_chunks * num_microbatches;
  if (static_cast<Int>(passes.size()) < size) return 0;
  std::vector<double> ends((size + 1) * at_once), free(num_stages * at_once),
      third(num_microbatches * at_once);
  for (Int rank = 0; rank < num_ranks; rank += at_once) {
    const Int count = std::min(at_once, num_ranks - rank);
    for (Int m = 0; m < num_microbatches; ++m)
      for (Int r = 0; r < count; ++r)
        third[m * at_once + r] =
            costs[(rank + r) * num_microbatches + m] / (3.0 * num_stages * num_chunks);
    std::fill(free.begin(), free.end(), 0.0);
    for (const Pass& pass : passes) {
      double *ready = &free[pass.stage * at_once], *done = &ends[pass.at * at_once];
      const double *need = &ends[pass.need * at_once], *cost = &third[pass.microbatch * at_once];
      const double thirds = pass.thirds * shares[pass.place];
      for (Int r = 0; r < at_once; ++r)
        ready[r] = done[r] = std::max(ready[r], need[r]) + thirds * cost[r];
    }
    for (Int r = 0; r < count; ++r) {
      end[rank + r] = 0;
      for (Int stage = 0; stage < num_stages; ++stage)
        end[rank + r] = std::max(end[rank + r], free[stage * at_once + r]);
    }
  }
  return 1;
}

void match(Int num_pairs, const Int* part, const Int* place, Int size, Int* place_of) {
  std::vector<char> is_taken(size);
  for (Int k = 0; k < num_pairs; ++k)
    if (place_of[part[k]] < 0 && !is_taken[place[k]]) is_taken[place_of[part[k]] = place[k]] = true;
  for (Int p = 0, left = 0; p < size; ++p)
    if (place_of[p] < 0) {
      while (is_taken[left]) ++left;
      place_of[p] = left++;
    }
}

}  // extern "C"
