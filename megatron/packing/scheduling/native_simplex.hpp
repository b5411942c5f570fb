// The simplex method with an explicit inverse of its basis; see simplex.py, whose floating-point operations these are
// one for one, so that both forms choose alike.

#pragma once

#include "native_order.hpp"

class Basis {
 public:
  std::vector<double> cost, amount, value;  // of basic columns: cost and amount; of rows: dual value

  Basis(double cost_of_one, double amount_of_one, double inverse)
      : cost{cost_of_one}, amount{amount_of_one}, value{cost_of_one * inverse}, inverse_{{inverse}} {}

  Int size() const { return static_cast<Int>(cost.size()); }

  // A row more, whose column also takes from row `like`.
  void grow(Int like, double cost_of_one, double amount_of_one) {
    for (auto& numbers : inverse_) numbers.push_back(numbers[like]);
    inverse_.emplace_back(size() + 1);
    inverse_.back().back() = 1.0;
    cost.push_back(cost_of_one);
    amount.push_back(amount_of_one);
    value.push_back(value[like] + cost_of_one);
  }

  void shrink(Int row, Int basic) {
    for (auto& numbers : inverse_) numbers.erase(numbers.begin() + row);
    inverse_.erase(inverse_.begin() + basic);
    cost.erase(cost.begin() + basic);
    amount.erase(amount.begin() + basic);
    value.erase(value.begin() + row);
  }

  void revalue() {
    std::fill(value.begin(), value.end(), 0.0);
    for (Int i = 0; i < size(); ++i) add_times(cost[i], inverse_[i], &value);
  }

  // A column of cost `cost_of_one`, `reduced` by what it holds, replaces a basic one, whose number is the result; -1
  // where none gives way.
  Int enter(const std::vector<Int>& more, Int less, double cost_of_one, double reduced) {
    entering_.resize(size());
    Int leaving = -1;
    double least = 0.0;
    for (Int i = 0; i < size(); ++i) {
      double sum = 0.0;
      for (const Int row : more) sum += inverse_[i][row];
      if (less >= 0) sum -= inverse_[i][less];
      entering_[i] = sum;
      if (sum > kLeastPivot && (leaving < 0 || amount[i] / sum < least)) {
        leaving = i;
        least = amount[i] / sum;
      }
    }
    if (leaving < 0) return -1;
    for (double& number : inverse_[leaving]) number /= entering_[leaving];
    for (Int i = 0; i < size(); ++i) {
      if (i == leaving || entering_[i] == 0.0) continue;
      add_times(-entering_[i], inverse_[leaving], &inverse_[i]);
      amount[i] = std::max(amount[i] - entering_[i] * least, 0.0);
    }
    add_times(reduced, inverse_[leaving], &value);
    amount[leaving] = least;
    cost[leaving] = cost_of_one;
    return leaving;
  }

 private:
  static constexpr double kLeastPivot = 1e-9;

  static void add_times(double factor, const std::vector<double>& from, std::vector<double>* to) {
    const double* __restrict source = from.data();
    double* __restrict sum = to->data();
    const Int size = static_cast<Int>(from.size());
    for (Int k = 0; k < size; ++k) sum[k] += factor * source[k];
  }

  std::vector<std::vector<double>> inverse_;
  std::vector<double> entering_;
};
