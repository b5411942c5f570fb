// The inner loop of a blend's order: a plain C function over arrays, called through ctypes (see
// compiled.py, which must name the same arguments). shares.py has the same in Python.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

using Int = int64_t;

namespace {

constexpr Int kNever = Int{1} << 62;

Int floor_divide(Int value, Int positive) {
  const Int quotient = value / positive;
  return quotient - (value % positive < 0);
}

// The windows of a child's outputs, asked for in ascending order. Its share at an output is
// (slope * output + offset) / unit, on each segment's line; `at_start` is where a line begins.
class Windows {
 public:
  Windows(Int num_segments, Int stride, Int unit, const Int* slope, const Int* offset,
          const Int* at_start, Int output)
      : num_segments_(num_segments), stride_(stride), unit_(unit), slope_(slope), offset_(offset),
        at_start_(at_start), output_(output) {}
  Int output() const { return output_; }
  // (release, deadline) of the next output.
  std::pair<Int, Int> next() {
    const Int begin = output_++ * unit_, end = begin + unit_;
    while (begins_by(release_line_ + 1, begin)) ++release_line_;
    while (begins_by(deadline_line_ + 1, end - 1)) ++deadline_line_;
    return {solve(release_line_, begin), solve(deadline_line_, end - 1)};
  }

 private:
  bool begins_by(Int line, Int share) const {
    return line < num_segments_ && at_start_[line * stride_] <= share;
  }
  Int solve(Int line, Int share) const {
    const Int slope = slope_[line * stride_];
    return slope ? floor_divide(share - offset_[line * stride_], slope) : kNever;
  }
  Int num_segments_, stride_, unit_;
  const Int *slope_, *offset_, *at_start_;
  Int output_, release_line_ = 0, deadline_line_ = 0;
};

}  // namespace

extern "C" {

Int interface_version() { return 1; }

// Places outputs `start` to `end` - 1, the earliest deadline first. `slopes`, `offsets` and
// `at_starts` are [segment, child]; `counts` are each child's outputs before, and are advanced.
// `found` is [output, 4]: child, number, release, deadline; it may be null.
void earliest_deadline_first(Int num_children, Int num_segments, Int unit, const Int* slopes,
                             const Int* offsets, const Int* at_starts, Int start, Int end,
                             Int* counts, Int* found) {
  using Ready = std::pair<Int, Int>;  // deadline, child
  std::priority_queue<Ready, std::vector<Ready>, std::greater<Ready>> ready;
  std::vector<Windows> windows;
  std::vector<std::pair<Int, Int>> next;  // window of each child's next output
  // Children whose next output is released at a place: a list for each place, linked by child.
  std::vector<Int> first_of(end - start, -1), other(num_children, -1);
  std::vector<char> waits(num_children, false);
  const auto wait = [&](Int child, Int place) {
    next[child] = windows[child].next();
    waits[child] = true;
    const Int at = std::max(next[child].first, place) - start;
    if (at < end - start) other[child] = first_of[at], first_of[at] = child;
  };
  const auto release = [&](Int child) {
    if (waits[child]) ready.emplace(next[child].second, child);
    waits[child] = false;
  };
  for (Int child = 0; child < num_children; ++child) {
    windows.emplace_back(num_segments, num_children, unit, slopes + child, offsets + child,
                         at_starts + child, counts[child]);
    next.emplace_back();
    wait(child, start);
  }
  for (Int place = start; place < end; ++place) {
    for (Int child = first_of[place - start]; child >= 0; child = other[child]) release(child);
    if (ready.empty()) {  // what is released soonest, before its time
      Int soonest = -1;
      for (Int child = 0; child < num_children; ++child)
        if (waits[child] && (soonest < 0 || next[child] < next[soonest])) soonest = child;
      const Int at = next[soonest].first - start;
      if (at < end - start) {
        Int* link = &first_of[at];
        while (*link != soonest) link = &other[*link];
        *link = other[soonest];
      }
      release(soonest);
    }
    const Int child = ready.top().second;
    ready.pop();
    if (found != nullptr) {
      *found++ = child, *found++ = counts[child];
      *found++ = next[child].first, *found++ = next[child].second;
    }
    ++counts[child];
    wait(child, place + 1);
  }
}
}
