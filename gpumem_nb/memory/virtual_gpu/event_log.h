// The log of one step: allocations and releases, and which allocations are copies of a parameter in another type.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

extern "C" struct GpumemEvent {  // an allocation or a release
  uint64_t id;       // of the allocation: 1 for the first one of the process
  int64_t bytes;     // negative for a release
  uint64_t time_ns;  // on the monotonic clock
  uint32_t foreign;  // 1: asked for by a thread of somebody else
  uint32_t call;     // of an operator, during which it happened; 0 for none
};

extern "C" struct GpumemCast {  // a parameter and the allocation of its copy of another type
  const void* parameter;
  uint64_t allocation;
};

namespace gpumem {

constexpr size_t kLongestLog = size_t{4} << 20;  // 128 MiB; what happens after that is not logged

// Whoever begins it, ends it or adds an event holds the allocator's lock. Operator calls and casts are told by the thread
// that computes alone, which is also the one that begins and ends the log.
class EventLog {
 public:
  void begin(const void* const* parameters, size_t count) {
    parameters_.assign(parameters, parameters + count);
    casts_.clear();
    events_.clear();
    logging_ = true;
  }

  void end() { logging_ = false; }

  void add(uint64_t allocation, int64_t bytes, bool foreign) {
    if (!logging_ || events_.size() >= kLongestLog) return;
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    const auto time_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
    events_.push_back({allocation, bytes, static_cast<uint64_t>(time_ns), foreign, foreign ? 0 : call_.load()});
  }

  void in_call(uint32_t number) { call_ = number; }  // 0 between operators

  bool is_parameter(const void* tensor) const {
    return std::binary_search(parameters_.begin(), parameters_.end(), tensor);
  }

  void add_cast(const void* parameter, uint64_t allocation) { casts_.push_back({parameter, allocation}); }

  const std::vector<GpumemEvent>& events() const { return events_; }
  const std::vector<GpumemCast>& casts() const { return casts_; }

 private:
  bool logging_ = false;
  std::vector<GpumemEvent> events_;
  std::vector<const void*> parameters_;  // sorted
  std::vector<GpumemCast> casts_;
  std::atomic<uint32_t> call_{0};
};

}  // namespace gpumem
