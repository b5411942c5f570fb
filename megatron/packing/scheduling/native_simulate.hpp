// 1F1B pipelines, simulated; see step_time.simulate.

#pragma once

#include "native_order.hpp"

// A pass of one model chunk over one microbatch, numbered chunk * num_microbatches + microbatch.
struct Pass {
  bool backward;
  Int number;
};

// A pass of a stage, after that whose result it takes in: when these end is kept at `at` and `need`.
struct Operation {
  Int stage, at, need;
  Int microbatch;
  Int weight;  // thirds of the pack's cost
};

// 1F1B, or megatron-core's interleaved 1F1B, of one stage; see step_time._program.
inline std::vector<Pass> program_of(Int stage, Int num_stages, Int num_chunks, Int stage_group, Int num_microbatches) {
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

// All operations, each after the one that it needs; fewer of them where stages wait for one another. Their ends are
// numbered from 1 by direction, place (chunk * num_stages + stage) and microbatch; at 0 stands the beginning.
inline std::vector<Operation> operations_of(Int num_stages, Int num_chunks, Int stage_group, Int num_microbatches) {
  std::vector<std::vector<Pass>> programs;
  for (Int stage = 0; stage < num_stages; ++stage)
    programs.push_back(program_of(stage, num_stages, num_chunks, stage_group, num_microbatches));
  const Int places = num_stages * num_chunks, passes = num_chunks * num_microbatches;
  std::vector<char> is_done(2 * places * num_microbatches + 1);
  is_done[0] = true;
  std::vector<size_t> next(num_stages);
  std::vector<Operation> operations;
  operations.reserve(2 * num_stages * passes);
  for (size_t before = 1; before != operations.size();) {
    before = operations.size();
    for (Int stage = 0; stage < num_stages; ++stage)
      for (; next[stage] < programs[stage].size(); ++next[stage]) {
        const Pass pass = programs[stage][next[stage]];
        const Int m = pass.number % num_microbatches, place = pass.number / num_microbatches * num_stages + stage;
        const Int forward = 1 + place * num_microbatches + m, backward = forward + places * num_microbatches;
        Int need = place > 0 ? forward - num_microbatches : 0;
        if (pass.backward) need = place + 1 < places ? backward + num_microbatches : forward;
        if (!is_done[need]) break;
        const Int at = pass.backward ? backward : forward;
        is_done[at] = true;
        operations.push_back({stage, at, need, m, pass.backward ? 2 : 1});
      }
  }
  return operations;
}

// When each rank's pipeline ends; false where stages wait for one another. Several ranks at once: each operation of
// one rank waits for the one before it, which leaves the processor idle.
inline bool simulate_ranks(Int num_ranks, Int num_microbatches, const Int* costs, Int num_stages, Int num_chunks,
                           Int stage_group, Int* end) {
  constexpr Int at_once = 8;
  const std::vector<Operation> operations = operations_of(num_stages, num_chunks, stage_group, num_microbatches);
  const Int passes = num_chunks * num_microbatches;
  if (static_cast<Int>(operations.size()) < 2 * num_stages * passes) return false;
  std::vector<Int> ends((2 * num_stages * passes + 1) * at_once), free(num_stages * at_once), cost(num_microbatches * at_once);
  for (Int rank = 0; rank < num_ranks; rank += at_once) {
    const Int count = std::min(at_once, num_ranks - rank);
    for (Int m = 0; m < num_microbatches; ++m)
      for (Int r = 0; r < count; ++r) cost[m * at_once + r] = costs[(rank + r) * num_microbatches + m] / num_chunks;
    std::fill(free.begin(), free.end(), 0);
    for (const Operation& operation : operations) {
      Int *ready = &free[operation.stage * at_once], *done = &ends[operation.at * at_once];
      const Int *need = &ends[operation.need * at_once], *pack = &cost[operation.microbatch * at_once];
      for (Int r = 0; r < at_once; ++r) {
        const Int ended = std::max(ready[r], need[r]) + operation.weight * pack[r];
        ready[r] = done[r] = ended;
      }
    }
    for (Int r = 0; r < count; ++r) {
      end[rank + r] = 0;
      for (Int stage = 0; stage < num_stages; ++stage) end[rank + r] = std::max(end[rank + r], free[stage * at_once + r]);
    }
  }
  return true;
}
