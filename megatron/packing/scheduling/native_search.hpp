// Bin completion; see pack_search.

#pragma once

#include <functional>
#include <tuple>

#include "native_order.hpp"

class PackSearch {
 public:
  PackSearch(const Int* length, Int capacity, const Int* value, Int most_value, Int room_counts, Int most_sets,
             Int steps_per_pack, Int budget, Int* pack)
      : length_(length), value_(value), capacity_(capacity), most_value_(most_value), room_counts_(room_counts),
        most_sets_(most_sets), steps_per_pack_(steps_per_pack), budget_(budget), pack_(pack) {}

  // 1 with all packs filled; 0 where that can't be; -1 where it is not known. `rest` descends.
  Int fill(const std::vector<Int>& rest, Int number, Int spare, Int spare_value, Int swerves) {
    if (rest.empty()) return 1;
    const std::vector<Set> sets = sets_of(rest, spare, spare_value);
    if (budget_ < 0) return -1;
    std::vector<Int> others;
    for (Int tried = 0; tried < static_cast<Int>(sets.size()); ++tried) {
      if (tried > swerves) {
        misses_none_ = false;
        break;
      }
      const Set& set = sets[tried];
      others.clear();
      pack_[rest[0]] = number;
      size_t next = 0;
      for (Int place = 1; place < static_cast<Int>(rest.size()); ++place) {
        if (next < set.places.size() && set.places[next] == place) {
          pack_[rest[place]] = number;
          ++next;
        } else {
          others.push_back(rest[place]);
        }
      }
      const Int found =
          fill(others, number + 1, spare - set.room_left, spare_value - set.value_left, swerves - tried);
      if (found == 1 || budget_ < 0) return found;
    }
    return misses_none_ ? 0 : -1;
  }

 private:
  struct Set {
    std::vector<Int> places;
    Int room_left, value_left;
    Wide waste;
  };

  std::vector<Set> sets_of(const std::vector<Int>& rest, Int spare, Int spare_value) {
    const Int size = static_cast<Int>(rest.size());
    lengths_.resize(size);
    left_from_.assign(size + 1, 0);
    used_.assign(size, 0);
    for (Int place = size - 1; place >= 0; --place) {
      lengths_[place] = length_[rest[place]];
      left_from_[place] = left_from_[place + 1] + lengths_[place];
    }
    budget_ -= size;
    const Int enough = budget_ - steps_per_pack_;
    std::vector<Set> found;
    std::vector<Int> places;
    Int room = capacity_ - lengths_[0], value_left = most_value_ - value_[rest[0]], place = 1;
    used_[0] = 1;
    while (budget_ >= 0) {
      --budget_;
      place = first_within(room, place);
      if (place < size && room - left_from_[place] <= spare) {
        places.push_back(place);
        used_[place] = 1;
        value_left -= value_[rest[place]];
        room -= lengths_[place++];
        continue;
      }
      if (room <= spare && value_left <= spare_value && !is_dominated(places, room))
        found.push_back({places, room, value_left, waste_of(room, value_left, spare, spare_value)});
      if (places.empty()) break;
      const Int sets = static_cast<Int>(found.size());
      if (sets == most_sets_ || (sets > 0 && budget_ < enough)) {
        misses_none_ = false;
        break;
      }
      const Int last = places.back();
      places.pop_back();
      used_[last] = 0;
      room += lengths_[last];
      value_left += value_[rest[last]];
      place = first_within(lengths_[last] - 1, last);
    }
    std::stable_sort(found.begin(), found.end(), [](const Set& a, const Set& b) {
      return std::make_tuple(a.waste, a.places.size(), a.room_left) <
             std::make_tuple(b.waste, b.places.size(), b.room_left);
    });
    return found;
  }

  Wide waste_of(Int room_left, Int value_left, Int spare, Int spare_value) const {
    if (!room_counts_) return value_left;
    return 2 * static_cast<Wide>(value_left) * spare + static_cast<Wide>(room_left) * spare_value;
  }

  bool is_dominated(const std::vector<Int>& places, Int room_left) {
    const Int count = static_cast<Int>(places.size()), size = static_cast<Int>(lengths_.size());
    budget_ -= count * count;
    Int unused = size - 1;
    while (unused > 0 && used_[unused]) --unused;
    if (unused > 0 && lengths_[unused] <= room_left) return true;
    for (const Int place : places) {
      Int longer = place - 1;
      while (longer > 0 && (used_[longer] || lengths_[longer] == lengths_[place])) --longer;
      if (longer > 0 && lengths_[longer] - lengths_[place] <= room_left) return true;
    }
    for (Int i = 0; i < count; ++i)
      for (Int j = i + 1; j < count; ++j) {
        const Int both = lengths_[places[i]] + lengths_[places[j]];
        Int one = first_within(both + room_left, 1);
        while (one < size && used_[one]) ++one;
        if (one < size && lengths_[one] >= both) return true;
      }
    return false;
  }

  // The first place, from `place` on, of a sequence of at most so many tokens.
  Int first_within(Int tokens, Int place) const {
    const auto found = std::lower_bound(lengths_.begin() + place, lengths_.end(), tokens, std::greater<Int>());
    return found - lengths_.begin();
  }

  const Int *length_, *value_;
  Int capacity_, most_value_, room_counts_, most_sets_, steps_per_pack_, budget_;
  Int* pack_;
  bool misses_none_ = true;
  std::vector<Int> lengths_, left_from_;  // of the places of the pack that sets are looked for
  std::vector<char> used_;
};
