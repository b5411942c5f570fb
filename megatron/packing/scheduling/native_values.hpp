// Values of sequences that tell how many packs they need; see pack_values, whose functions of the same names say what
// those do that have no comment here.

#pragma once

#include <set>

#include "native_simplex.hpp"

class PackValues {
 public:
  PackValues(Int n, const Int* length, Int capacity, Int num_packs, Int budget)
      : n_(n), length_(length), unit_((capacity + kMostUnits - 1) / kMostUnits), capacity_(capacity / unit_),
        num_packs_(num_packs), budget_(budget) {
    for (Int i = n - 1; i >= 0; --i) {
      const Int units = length[i] / unit_;
      if (units * kShortestShare < capacity_ || (!lengths_.empty() && lengths_.back() == units)) continue;
      lengths_.push_back(units);
      num_from_.push_back(i + 1);
    }
    num_from_.push_back(0);
  }

  // The most value of a pack; that of each sequence into `value`.
  Int run(Int* value) {
    if (!lengths_.empty()) {
      begin();
      while (budget_ > 0) {
        improve();
        const bool is_new = price();
        if (best_sum_ > num_packs_ * best_most_ || (!is_new && !refine())) break;
      }
    }
    for (Int i = 0; i < n_; ++i) {
      const auto found = std::upper_bound(best_units_.begin(), best_units_.end(), length_[i] / unit_);
      value[i] = found == best_units_.begin() ? 0 : best_value_[found - best_units_.begin() - 1];
    }
    return best_most_;
  }

 private:
  using Pattern = std::vector<Int>;  // tiers, ascending by number, each as often as the pack holds one of it
  struct Column {
    Pattern pattern;
    Int shorter = -1, longer = -1;  // of a column that gives the longer tier's place to one of the shorter
  };
  static constexpr Int kMostUnits = 8192, kShortestShare = 128, kScale = Int(1) << 24, kSlack = 16;
  static constexpr Int kNumParts = 5, kMostTiers = 96;
  static constexpr double kLeastGain = 1e-8, kLeastMissing = 1e-6, kMostLost = 0.1;

  Int num_tiers() const { return static_cast<Int>(order_.size()); }
  Int units_of(Int tier) const { return lengths_[first_[tier]]; }
  double alone(Int tier) const { return 1.0 / static_cast<double>(capacity_ / units_of(tier)); }
  Int first_above(Int units) const {
    return std::upper_bound(lengths_.begin(), lengths_.end(), units) - lengths_.begin();
  }
  // The first length of the tier after the place-th.
  Int end_of(Int place) const {
    return place + 1 < num_tiers() ? first_[order_[place + 1]] : static_cast<Int>(lengths_.size());
  }

  void begin() {
    first_ = order_ = {0};
    basis_ = Basis(1.0, alone(0) * static_cast<double>(num_from_[0]), alone(0));
    add(Pattern(capacity_ / units_of(0), 0));
    basic_ = {{pool_[0]}};
    const Int num_short = first_above(capacity_ / 2);
    std::set<Int> starts = {num_short};
    for (Int part = 0; part <= kNumParts && num_short > 0; ++part) {
      const Int start = part * (num_short - 1) / kNumParts;
      starts.insert(start);
      starts.insert(first_above(capacity_ - lengths_[start]));
    }
    for (const Int start : starts) split(start);
  }

  void split(Int start) {
    if (start == static_cast<Int>(lengths_.size()) || num_tiers() == kMostTiers) return;
    Int place = 0;
    while (place + 1 < num_tiers() && end_of(place) <= start) ++place;
    const Int tier = order_[place], added = num_tiers(), end = end_of(place);
    if (first_[tier] == start) return;
    order_.insert(order_.begin() + place + 1, added);
    first_.push_back(start);
    basis_.grow(tier, alone(added), static_cast<double>(num_from_[start] - num_from_[end]));
    basic_.emplace_back();
    add(Pattern(capacity_ / units_of(added), added));
  }

  bool add(Pattern pattern) {
    std::sort(pattern.begin(), pattern.end());
    if (!known_.insert(pattern).second) return false;
    pool_.push_back(std::move(pattern));
    return true;
  }

  void improve() {
    basis_.revalue();
    Pattern tiers, ends;  // of all patterns, one after another
    for (const Pattern& pattern : pool_) {
      tiers.insert(tiers.end(), pattern.begin(), pattern.end());
      ends.push_back(static_cast<Int>(tiers.size()));
    }
    while (budget_ > 0) {
      budget_ -= num_tiers() * num_tiers() + 4 * static_cast<Int>(pool_.size());
      Column column;
      const double gain = choose(tiers, ends, &column);
      if (gain == 0.0) return;
      const bool is_pattern = !column.pattern.empty();
      const Pattern shorter(column.shorter >= 0 ? 1 : 0, column.shorter);
      const Pattern& more = is_pattern ? column.pattern : shorter;
      const Int basic = basis_.enter(more, column.longer, is_pattern ? 1.0 : 0.0, gain);
      if (basic < 0) return;
      basic_[basic] = std::move(column);
    }
  }

  // The column that saves most, and how much: a negative number; 0 where none saves enough.
  double choose(const Pattern& tiers, const Pattern& ends, Column* column) const {
    double least = -kLeastGain;
    Int place = -1, pattern = -1;
    for (Int k = 0; k < num_tiers(); ++k) {
      const double gain = basis_.value[order_[k]] - (k > 0 ? basis_.value[order_[k - 1]] : 0.0);
      if (gain < least) {
        least = gain;
        place = k;
      }
    }
    Int next = 0;
    for (Int k = 0; k < static_cast<Int>(ends.size()); ++k) {
      double gain = 1.0;
      for (; next < ends[k]; ++next) gain -= basis_.value[tiers[next]];
      if (gain < least) {
        least = gain;
        pattern = k;
      }
    }
    if (pattern >= 0) {
      column->pattern = pool_[pattern];
    } else if (place >= 0) {
      column->longer = order_[place];
      if (place > 0) column->shorter = order_[place - 1];
    } else {
      return 0.0;
    }
    return least;
  }

  bool price() {
    const Int size = num_tiers();
    units_.resize(size);
    value_.resize(size);
    Int sum = 0;
    for (Int k = 0; k < size; ++k) {
      units_[k] = units_of(order_[k]);
      const Int most = kScale / (capacity_ / units_[k]);
      const double scaled = basis_.value[order_[k]] * static_cast<double>(kScale);
      value_[k] = scaled > 0.0 ? static_cast<Int>(std::min(scaled, static_cast<double>(most))) : 0;
      if (k > 0) value_[k] = std::max(value_[k], value_[k - 1]);
      sum += value_[k] * (num_from_[first_[order_[k]]] - num_from_[end_of(k)]);
    }
    num_short_ = std::upper_bound(units_.begin(), units_.end(), capacity_ / 2) - units_.begin();
    within_.assign(capacity_ + 1, 0);
    for (Int k = 0; k < num_short_; ++k)
      if (value_[k] > 0) fill_in(units_[k], static_cast<int32_t>(value_[k]));
    Int most = within_[capacity_];
    for (Int k = num_short_; k < size; ++k) most = std::max<Int>(most, value_[k] + within_[capacity_ - units_[k]]);
    if (best_sum_ * most < sum * best_most_) {
      best_sum_ = sum;
      best_most_ = most;
      best_value_ = value_;
      best_units_ = units_;
    }
    bool is_new = false;
    for (Int k = 0; k < size && most > kScale + kSlack; ++k) is_new |= add_best_with(k);
    return is_new;
  }

  // In spans of `units`, in each of which nothing is read that it writes.
  void fill_in(Int units, int32_t value) {
    budget_ -= capacity_ / 4;
    int32_t* within = within_.data();
    for (Int from = units; from <= capacity_; from += units) {
      const Int end = std::min(from + units, capacity_ + 1);
      for (Int c = from; c < end; ++c) within[c] = std::max(within[c], within[c - units] + value);
    }
  }

  bool add_best_with(Int place) {
    Pattern pattern = {order_[place]};
    Int room = capacity_ - units_[place], most = value_[place] + within_[room], beside = -1;
    for (Int other = num_short_; other < num_tiers() && place < num_short_ && units_[other] <= room; ++other) {
      const Int value = value_[place] + value_[other] + within_[room - units_[other]];
      if (value > most) {
        most = value;
        beside = other;
      }
    }
    if (most <= kScale + kSlack) return false;
    if (beside >= 0) {
      pattern.push_back(order_[beside]);
      room -= units_[beside];
    }
    while (within_[room] > 0) {
      Int next = 0;
      while (value_[next] == 0 || within_[room] != value_[next] + within_[room - units_[next]]) ++next;
      pattern.push_back(order_[next]);
      room -= units_[next];
    }
    return add(std::move(pattern));
  }

  bool refine() {
    merge();
    if (num_tiers() == kMostTiers) return false;
    std::vector<std::pair<double, Int>> found = lacking(false);
    if (found.empty()) found = lacking(true);
    std::sort(found.begin(), found.end());
    found.resize(std::min<size_t>(found.size(), std::max<Int>(4, num_tiers() / 8)));
    for (const auto& [missing, start] : found) {
      split(start);
      split(first_above(capacity_ - lengths_[start]));
    }
    return !found.empty();
  }

  std::vector<std::pair<double, Int>> lacking(bool shares_room) const {
    std::vector<std::vector<std::pair<Int, double>>> places(num_tiers());
    for (Int i = 0; i < num_tiers(); ++i) {
      const Pattern& pattern = basic_[i].pattern;
      Int room = capacity_, copies = 0;
      for (const Int tier : pattern) room -= units_of(tier);
      for (size_t k = 0; k < pattern.size(); ++k) {
        copies = k > 0 && pattern[k - 1] == pattern[k] ? copies + 1 : 1;
        const Int parts = shares_room ? static_cast<Int>(pattern.size()) : copies;
        places[pattern[k]].emplace_back(units_of(pattern[k]) + room / parts, basis_.amount[i]);
      }
    }
    std::vector<std::pair<double, Int>> found;
    for (Int k = 0; k < num_tiers(); ++k) {
      const Int tier = order_[k], end = end_of(k);
      double most = kLeastMissing;
      Int chosen = -1;
      for (Int start = first_[tier] + 1; start < end; ++start) {
        double missing = static_cast<double>(num_from_[start] - num_from_[end]);
        for (const auto& [longest, amount] : places[tier])
          if (longest >= lengths_[start]) missing -= amount;
        if (missing > most) {
          most = missing;
          chosen = start;
        }
      }
      if (chosen >= 0) found.emplace_back(-most, chosen);
    }
    return found;
  }

  void merge() {
    const auto wastes_much = [&](const Pattern& pattern) {
      double gain = 1.0;
      for (const Int tier : pattern) gain -= basis_.value[tier];
      return gain > kMostLost;
    };
    pool_.erase(std::remove_if(pool_.begin(), pool_.end(), wastes_much), pool_.end());
    for (Int i = num_tiers() - 1; i >= 0; --i) {
      const auto [pattern, shorter, longer] = basic_[i];
      if (shorter < 0) continue;
      const auto place = std::find(order_.begin(), order_.end(), longer);
      if (place == order_.begin() || place[-1] != shorter) continue;
      order_.erase(place);
      first_.erase(first_.begin() + longer);
      basis_.shrink(longer, i);
      basic_.erase(basic_.begin() + i);
      rename(longer, shorter);
    }
    known_.clear();
    std::vector<Pattern> pool;
    pool.swap(pool_);
    for (Pattern& pattern : pool) add(std::move(pattern));
  }

  // Tier `gone` is now called `other`, and all after it are one less.
  void rename(Int gone, Int other) {
    const auto rename_one = [&](Int& tier) {
      if (tier == gone) tier = other;
      if (tier > gone) --tier;
    };
    std::for_each(order_.begin(), order_.end(), rename_one);
    for (Pattern& pattern : pool_) std::for_each(pattern.begin(), pattern.end(), rename_one);
    for (Column& column : basic_) {
      std::for_each(column.pattern.begin(), column.pattern.end(), rename_one);
      std::sort(column.pattern.begin(), column.pattern.end());
      rename_one(column.shorter);
      rename_one(column.longer);
    }
  }

  Int n_;
  const Int* length_;
  Int unit_, capacity_, num_packs_, budget_;
  std::vector<Int> lengths_, num_from_;  // ascending, in units; how many sequences are that long or longer
  std::vector<Int> first_, order_;       // of a tier the first of lengths_; tiers, ascending by length
  Basis basis_{0.0, 0.0, 0.0};
  std::vector<Column> basic_;
  std::vector<Pattern> pool_;
  std::set<Pattern> known_;
  std::vector<Int> units_, value_;  // of the tiers in order
  Int num_short_ = 0;               // of them fit twice
  std::vector<int32_t> within_;     // the most value of short ones within so many units
  std::vector<Int> best_units_, best_value_;
  Int best_sum_ = 0, best_most_ = 1;
};
