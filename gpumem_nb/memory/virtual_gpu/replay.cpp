// What an allocator of its own would do with allocations and releases that were recorded elsewhere: the model without
// tensors, without limit, and without touching what is counted in this process.

#include "caching_model.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

extern "C" struct GpumemReplayed {  // bytes
  uint64_t live;
  uint64_t live_peak;
  uint64_t reserved;
  uint64_t reserved_peak;
  uint64_t over_limit;  // allocations that the limit would not have allowed, even with free segments given back
};

// An event n > 0 allocates n bytes, -k releases the k-th allocation, counted from 1, and 0 empties the cache. Returns how many events
// could be followed: fewer than given when one releases what is not there. With a limit (0: none) free segments are
// given back where it would be passed, and what passes it all the same is counted and allocated. Garbage is collected
// above a share of what is allowed. A layout (CachingModel::layout) is what is there at the beginning, without free
// segments; the blocks in use that it names are the first allocations, by the number that it gives.
extern "C" size_t gpumem_replay(const int64_t* events, size_t count, const int64_t* layout, size_t layout_length,
                                uint64_t limit, uint64_t allowed, const gpumem::Config* config, GpumemReplayed* out) {
  gpumem::CachingModel cache(*config);
  std::vector<std::pair<gpumem::Block*, uint64_t>> allocations;
  uint64_t live = 0, live_peak = 0, over_limit = 0;
  for (gpumem::Block* block : cache.restore(layout, layout_length)) {
    allocations.resize(std::max<size_t>(allocations.size(), block->id));
    allocations[block->id - 1] = {block, block->size};
    live_peak = live += block->size;
  }
  cache.release_free_segments();
  cache.reserved_peak = cache.reserved;
  size_t followed = 0;
  for (; followed < count; ++followed) {
    const int64_t event = events[followed];
    if (event > 0) {
      const auto nbytes = static_cast<uint64_t>(event);
      const size_t size = cache.block_size(nbytes);
      gpumem::Block* block = cache.allocate(size, limit, allowed);
      if (!block) ++over_limit;
      allocations.emplace_back(block ? block : cache.from_device(size), nbytes);
      live += nbytes;
      live_peak = std::max(live_peak, live);
      continue;
    }
    if (event == 0) {
      cache.release_free_segments();
      continue;
    }
    const auto place = static_cast<uint64_t>(-event) - 1;
    if (place >= allocations.size() || !allocations[place].first) break;
    cache.give_back(std::exchange(allocations[place].first, nullptr));
    live -= allocations[place].second;
  }
  *out = {live, live_peak, cache.reserved, cache.reserved_peak, over_limit};
  for (const auto& [block, nbytes] : allocations) {
    if (block) cache.give_back(block);
  }
  cache.release_free_segments();
  return followed;
}
