// Numbers in order: a stable sort, heaps, and a tree that finds the least. Integers only, ties broken by number.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <utility>
#include <vector>

using Int = int64_t;
using Wide = __int128;

inline Int bits_of(uint64_t value) {
  Int bits = 0;
  for (; value; value >>= 1) ++bits;
  return bits;
}

// A value and a number below `count` as one integer, which compares as the pair does: without branches, which heaps
// would mostly guess wrong. Key is Wide where the two don't fit an Int.
template <class Key>
class Pairs {
 public:
  explicit Pairs(Int count) : bits_(bits_of(std::max<Int>(count - 1, 0))) {}
  bool fit(Int value) const { return bits_ < 62 && std::abs(value) < Int(1) << (62 - bits_); }
  Key times(Int value) const { return static_cast<Key>(value) * (static_cast<Key>(1) << bits_); }
  Key of(Int value, Int number) const { return times(value) + number; }
  Int value(Key pair) const { return static_cast<Int>(pair >> bits_); }
  Int number(Key pair) const { return static_cast<Int>(pair & ((static_cast<Key>(1) << bits_) - 1)); }
  static constexpr Key above_all() { return static_cast<Key>(1) << (8 * sizeof(Key) - 2); }

 private:
  Int bits_;
};

// The least of some keys that change: a tree of minima. The way up from a leaf is known beforehand, so that the
// processor need not wait for one level to read the next.
template <class Key>
class Least {
 public:
  Key* leaves(Int size) {  // to be filled, before `build`
    size_ = size;
    tree_.resize(2 * size);
    return tree_.data() + size;
  }
  void build() {
    for (Int node = size_ - 1; node > 0; --node) tree_[node] = std::min(tree_[2 * node], tree_[2 * node + 1]);
  }
  Key top() const { return tree_[1]; }
  void set(Int leaf, Key key) {
    Int node = size_ + leaf;
    tree_[node] = key;
    for (; node > 1; node /= 2) {
      key = std::min(key, tree_[node ^ 1]);
      tree_[node / 2] = key;
    }
  }

 private:
  Int size_ = 0;
  std::vector<Key> tree_;
};

// `item` in the place of the least of a heap.
template <class Key>
void sift_down(Key* heap, Int size, Key item) {
  Int at = 0;
  for (Int child = 1; child < size; child = 2 * at + 1) {
    if (child + 1 < size) child += heap[child + 1] < heap[child];
    if (item < heap[child]) break;
    heap[at] = heap[child];
    at = child;
  }
  heap[at] = item;
}

// Keys sorted by their bits from `low` on, `bits` of them, in linear time; those above must be 0. Keys that differ only
// below keep their order where they are in order already.
inline void sort_by_bits(std::vector<uint64_t>* keys, Int low, Int bits) {
  const Int n = static_cast<Int>(keys->size());
  if (n < 256) {
    std::sort(keys->begin(), keys->end());
    return;
  }
  const Int most_bits = n < 4096 ? 8 : 11, passes = (bits + most_bits - 1) / most_bits;
  const Int digit_bits = passes ? (bits + passes - 1) / passes : 0;
  const uint64_t mask = (uint64_t(1) << digit_bits) - 1;
  std::vector<Int> starts(passes << digit_bits);
  for (const uint64_t key : *keys)
    for (Int pass = 0; pass < passes; ++pass) ++starts[(pass << digit_bits) + (key >> (low + pass * digit_bits) & mask)];
  std::vector<uint64_t> sorted(passes ? n : 0);
  for (Int pass = 0; pass < passes; ++pass) {
    Int* start = starts.data() + (pass << digit_bits);
    Int before = 0;
    for (uint64_t digit = 0; digit <= mask; ++digit) before += std::exchange(start[digit], before);
    for (const uint64_t key : *keys) sorted[start[key >> (low + pass * digit_bits) & mask]++] = key;
    keys->swap(sorted);
  }
}

// The indices that sort values, equal ones in order.
inline void order_of(Int n, const Int* values, Int* order) {
  if (n == 0) return;
  const auto [least, most] = std::minmax_element(values, values + n);
  const uint64_t smallest = *least;
  const Int bits = bits_of(*most - smallest), index_bits = bits_of(n - 1);
  if (bits + index_bits > 64) {
    std::iota(order, order + n, Int(0));
    std::stable_sort(order, order + n, [values](Int a, Int b) { return values[a] < values[b]; });
    return;
  }
  std::vector<uint64_t> keys(n);
  for (Int i = 0; i < n; ++i) keys[i] = (values[i] - smallest) << index_bits | i;
  sort_by_bits(&keys, index_bits, bits);
  const uint64_t mask = (uint64_t(1) << index_bits) - 1;
  for (Int i = 0; i < n; ++i) order[i] = keys[i] & mask;
}
