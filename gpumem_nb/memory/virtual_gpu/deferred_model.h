// The caching model, following allocations and releases many at once: its blocks and trees lie in the processor's cache
// then. One by one, between operators, each would take up to a microsecond.
#pragma once

#include "caching_model.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace gpumem {

// The caller holds the allocator's lock. An allocation is known by a slot, which is used again after its release.
class DeferredModel {
 public:
  CachingModel cache;  // without what is pending: catch_up() comes before it is asked for anything

  // Whether an allocation may be followed later: within the limit (0: none), whatever comes of those before it.
  bool may_wait(size_t size, uint64_t limit) {
    if (fits(size, limit)) return true;
    catch_up(limit);
    return fits(size, limit);
  }

  uint32_t allocate_later(uint64_t id, size_t size) {
    const uint32_t slot = free_slot();
    pending_.push_back({id, size, slot});
    most_ += most_reserved(size);
    return slot;
  }

  uint32_t allocated(uint64_t id, Block* block) {
    block->id = id;
    const uint32_t slot = free_slot();
    blocks_[slot] = block;
    return slot;
  }

  void give_back_later(uint32_t slot, uint64_t limit) {
    if (pending_.size() >= kMostPending) catch_up(limit);
    pending_.push_back({0, 0, slot});
  }

  void catch_up(uint64_t limit) {
    for (const Pending& event : pending_) {
      if (event.size) {
        Block* block = cache.allocate(event.size, limit, limit);
        if (!block) block = cache.from_device(event.size);  // not reached: see fits()
        block->id = event.id;
        blocks_[event.slot] = block;
      } else {
        cache.give_back(blocks_[event.slot]);
        free_slots_.push_back(event.slot);
      }
    }
    pending_.clear();
    most_ = 0;
  }

 private:
  struct Pending {  // an allocation, or with size 0 a release
    uint64_t id;
    size_t size;
    uint32_t slot;
  };
  static constexpr size_t kMostPending = 1024;

  std::vector<Pending> pending_;
  uint64_t most_ = 0;  // bytes that this may reserve, at most
  std::vector<Block*> blocks_;  // by slot
  std::vector<uint32_t> free_slots_;

  bool fits(size_t size, uint64_t limit) const {
    return pending_.size() < kMostPending && (!limit || cache.reserved + most_ + most_reserved(size) <= limit);
  }

  uint32_t free_slot() {
    if (free_slots_.empty()) {
      blocks_.push_back(nullptr);
      return static_cast<uint32_t>(blocks_.size() - 1);
    }
    const uint32_t slot = free_slots_.back();
    free_slots_.pop_back();
    return slot;
  }
};

}  // namespace gpumem
