// The CUDA caching allocator without a device: which segments it would hold for the blocks that tensors ask of it.
#pragma once

#include "caching_blocks.h"

#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

namespace gpumem {

// The caller holds the allocator's lock. Blocks and the pools' nodes are kept for the next
// use, because asking the heap for them would cost more than all the rest.
class CachingModel {
 public:
  uint64_t reserved = 0;
  uint64_t reserved_peak = 0;
  Config config;

  // A layout has three numbers for each block, in the order of addresses: its bytes, the allocation that it serves or one
  // of the first two, and what kind of block it is, as a sum of the others.
  static constexpr int64_t kFree = 0, kUnmapped = -1;
  static constexpr int64_t kSmall = 1, kExpandable = 2, kBegins = 4;  // the last: a segment
  static constexpr size_t kNumbers = 3;

  explicit CachingModel(Config given = {}) : config(given) {}
  CachingModel(const CachingModel&) = delete;
  ~CachingModel() {  // whoever makes one for a while has released everything
    for (Pool* pool : {&small_, &large_}) {
      for (Block* block : pool->unmapped) delete block;
    }
    for (Block* block : spare_blocks_) delete block;
  }

  size_t block_size(size_t nbytes) const {
    const size_t divisions = config.roundup_divisions;
    if (divisions <= 1 || nbytes <= kMinBlockSize * divisions) return round_up(nbytes, kMinBlockSize);
    size_t power = kMinBlockSize * divisions;  // of two, the largest that is not above
    while (power <= nbytes / 2) power *= 2;
    return round_up(nbytes, power / divisions);
  }

  // A block of a size that block_size() gave; nullptr where reserved bytes would pass the limit (0: none), even with
  // free segments given back. Garbage is collected above a share of what is allowed (0: never).
  Block* allocate(size_t size, uint64_t limit, uint64_t allowed) {
    if (Block* block = from_cache(size)) return block;
    return from_device_within(size, limit, allowed);
  }

  // The same on a thread that keeps to the limit: what other threads have reserved beyond it is not for this one to use.
  Block* allocate_within(size_t size, uint64_t limit, uint64_t allowed) {
    if (limit && reserved > limit) release_free_segments();
    return limit && reserved > limit ? nullptr : allocate(size, limit, allowed);
  }

  Block* from_device_within(size_t size, uint64_t limit, uint64_t allowed) {
    const auto passes = [&] { return limit && reserved + segment_size(size) > limit; };
    collect_garbage(allowed);
    if (passes()) release_oversize(size);
    if (passes()) release_free_segments();
    return passes() ? nullptr : from_device(size);
  }

  Block* from_device(size_t size) {
    if (config.expandable) return take(expanded(size), size);
    Block* block = make({next_address_, segment_size(size), size <= kSmallSize});
    next_address_ += block->size;
    segments_.insert(block);
    add_reserved(block->size);
    return take(block, size);
  }

  std::vector<int64_t> layout() const {
    std::vector<int64_t> numbers;
    for (const Block* head : segments_) {
      for (const Block* block = head; block; block = block->next) {
        const int64_t kind = (block->small ? kSmall : 0) | (block->expandable ? kExpandable : 0);
        const int64_t serves = block->in_use ? static_cast<int64_t>(block->id) : block->mapped ? kFree : kUnmapped;
        numbers.insert(numbers.end(), {static_cast<int64_t>(block->size), serves, kind | (block == head ? kBegins : 0)});
      }
    }
    return numbers;
  }

  // Takes in such a layout, before anything else; gives the blocks in use.
  std::vector<Block*> restore(const int64_t* numbers, size_t count) {
    std::vector<Block*> in_use;
    Block* prev = nullptr;
    for (const int64_t* at = numbers; at != numbers + count; at += kNumbers) {
      const int64_t serves = at[1], kind = at[2];
      if (kind & kBegins) next_address_ = round_up(next_address_, kLargeSegment);  // where pages begin
      Block* block = make({next_address_, static_cast<size_t>(at[0]), bool(kind & kSmall)});
      next_address_ += block->size;
      block->expandable = bool(kind & kExpandable);
      block->mapped = serves != kUnmapped;
      block->in_use = serves > 0;
      if (kind & kBegins) {
        segments_.insert(block);
      } else {
        block->prev = prev;
        prev->next = block;
      }
      prev = block;
      if (block->mapped) add_reserved(block->size);
      if (block->in_use) {
        block->id = static_cast<uint64_t>(serves);
        in_use.push_back(block);
      } else if (block->mapped) {
        insert(block);
      } else {
        pool_for(block->small).unmapped.insert(block);
      }
    }
    return in_use;
  }

  void give_back(Block* block) {
    block->in_use = false;
    insert(merged(block));
  }

  // Bytes that release_free_segments() would give back.
  uint64_t releasable() const {
    uint64_t bytes = 0;
    for (const Pool* pool : {&small_, &large_}) {
      for (const Block* block : pool->free) {
        if (block->expandable) {
          const auto [begin, end] = whole_pages(block);
          bytes += begin < end ? end - begin : 0;
        } else if (!block->is_split()) {
          bytes += block->size;
        }
      }
    }
    return bytes;
  }

  void release_free_segments() {
    std::vector<Block*> expandable;
    for (Pool* pool : {&small_, &large_}) {
      for (auto it = pool->free.begin(); it != pool->free.end();) {
        Block* block = *it++;
        if (block->expandable) {
          expandable.push_back(block);
        } else if (!block->is_split()) {
          release(block);
        }
      }
    }
    for (Block* block : expandable) unmap(block);
  }

 private:
  Pool small_, large_;
  std::set<Block*, ByAddress> segments_;  // by the first block of each
  std::vector<FreeBlocks::node_type> spare_nodes_;
  std::vector<Block*> spare_blocks_;
  size_t next_address_ = 0;

  Pool& pool_for(bool small) { return small ? small_ : large_; }

  void add_reserved(size_t bytes) {
    reserved += bytes;
    reserved_peak = std::max(reserved_peak, reserved);
  }

  Block* from_cache(size_t size) {
    Pool& pool = pool_for(size <= kSmallSize);
    ++pool.searches;
    Block key{0, size, false};
    auto found = pool.free.lower_bound(&key);  // best fit
    if (found == pool.free.end()) return nullptr;
    if (config.expandable) {  // what can grow counts as large as it can become
      for (auto next = std::next(found); next != pool.free.end() && room(*next) < room(*found); ++next) found = next;
    }
    Block* block = *found;
    if (size < config.max_split ? block->size >= config.max_split : block->size >= size + kMaxNonSplitRounding) {
      return nullptr;
    }
    remove(block);
    return take(block, size);
  }

  static size_t room(const Block* block) {
    return block->size + (block->next && !block->next->mapped ? block->next->size : 0);
  }

  Block* take(Block* block, size_t size) {
    block->in_use = true;
    const size_t rest = block->size - size;
    const bool any_rest = block->small || config.expandable;
    if (any_rest ? rest >= kMinBlockSize : size < config.max_split && rest > kSmallSize) {
      insert(cut(block, size));
    }
    return block;
  }

  // The rest of a block that keeps so many bytes.
  Block* cut(Block* block, size_t size) {
    Block* rest = make({block->address + size, block->size - size, block->small});
    rest->mapped = block->mapped;
    rest->expandable = block->expandable;
    rest->prev = block;
    rest->next = block->next;
    if (rest->next) rest->next->prev = rest;
    block->next = rest;
    block->size = size;
    return rest;
  }

  // One with its free neighbours, which leave their pool; it is in none itself.
  Block* merged(Block* block) {
    const auto joins = [&](const Block* other) { return other && !other->in_use && other->mapped == block->mapped; };
    if (Block* next = block->next; joins(next)) {
      leave(next);
      absorb(block, next);
    }
    if (Block* prev = block->prev; joins(prev)) {
      leave(prev);
      absorb(prev, block);
      block = prev;
    }
    return block;
  }

  void absorb(Block* block, Block* next) {
    block->size += next->size;
    block->next = next->next;
    if (block->next) block->next->prev = block;
    spare_blocks_.push_back(next);
  }

  void release(Block* block) {
    remove(block);
    segments_.erase(block);
    reserved -= block->size;
    spare_blocks_.push_back(block);
  }

  // With max_split: the smallest free segment that is large enough, or the largest ones until they are enough together.
  // What a layout of other settings has left in pieces of that size stays.
  void release_oversize(size_t size) {
    if (config.max_split == UINT64_MAX) return;
    const FreeBlocks& free = pool_for(size <= kSmallSize).free;
    const size_t wanted = std::max<size_t>(size, config.max_split);
    const auto whole = [](const Block* block) { return !block->is_split() && !block->expandable; };
    Block key{0, wanted, false};
    const auto found = std::find_if(free.lower_bound(&key), free.end(), whole);
    if (found != free.end()) return release(*found);
    for (size_t released = 0; released < wanted;) {
      const auto largest = std::find_if(free.rbegin(), free.rend(), whole);
      if (largest == free.rend() || (*largest)->size < config.max_split) return;
      released += (*largest)->size;
      release(*largest);
    }
  }

  // Whole segments of the large pool that were free for longer than the average, until there are enough.
  void collect_garbage(uint64_t allowed) {
    const auto threshold = static_cast<uint64_t>(config.collect_above * static_cast<double>(allowed));
    if (!threshold || reserved <= threshold) return;
    const auto age = [&](const Block* block) { return large_.searches - block->free_since; };
    std::vector<Block*> whole;
    uint64_t ages = 0;
    for (Block* block : large_.free) {
      if (block->is_split()) continue;
      whole.push_back(block);
      ages += age(block);
    }
    for (bool any = true; any && reserved > threshold && !whole.empty();) {
      const double average = static_cast<double>(ages) / static_cast<double>(whole.size());
      std::vector<Block*> kept;
      for (Block* block : whole) {
        if (static_cast<double>(age(block)) < average) {
          kept.push_back(block);
          continue;
        }
        ages -= age(block);
        release(block);
      }
      any = kept.size() < whole.size();
      whole.swap(kept);
    }
  }

  // A free block of at least this size, out of its pool, with memory mapped where there was none: at the lowest address
  // where it can be, together with a free block right before it.
  Block* expanded(size_t size) {
    Pool& pool = pool_for(size <= kSmallSize);
    Block* block = nullptr;
    for (Block* unmapped : pool.unmapped) {
      Block* first = unmapped->prev && !unmapped->prev->in_use ? unmapped->prev : unmapped;
      size_t bytes = 0;
      for (const Block* at = first; at && !at->in_use && bytes < size; at = at->next) bytes += at->size;
      if (bytes < size) continue;
      block = first;
      break;
    }
    if (!block) {
      next_address_ = round_up(next_address_, kLargeSegment);
      block = make({next_address_, kAddressSpace, size <= kSmallSize});
      block->mapped = false;
      block->expandable = true;
      next_address_ += block->size;
      pool.unmapped.insert(block);
      segments_.insert(block);
    }
    if (!block->mapped) block = map(block, std::min(block->size, size));
    while (block->size < size) block = map(block->next, std::min(block->next->size, size - block->size));
    remove(block);
    return block;
  }

  // Gives memory to the beginning of an unmapped block, in whole pages; the free block in which that lies now.
  Block* map(Block* block, size_t size) {
    leave(block);
    const size_t bytes = round_up(size, block->small ? kSmallSegment : kLargeSegment);
    if (bytes < block->size) pool_for(block->small).unmapped.insert(cut(block, bytes));
    block->mapped = true;
    add_reserved(bytes);
    block = merged(block);
    insert(block);
    return block;
  }

  static std::pair<size_t, size_t> whole_pages(const Block* block) {
    const size_t page = block->small ? kSmallSegment : kLargeSegment;
    return {round_up(block->address, page), (block->address + block->size) / page * page};
  }

  // Takes the memory of the whole pages in a free block.
  void unmap(Block* block) {
    const auto [begin, end] = whole_pages(block);
    if (begin >= end) return;
    remove(block);
    if (block->address < begin) {
      Block* rest = cut(block, begin - block->address);
      insert(block);
      block = rest;
    }
    if (block->size > end - begin) insert(cut(block, end - begin));
    block->mapped = false;
    reserved -= block->size;
    block = merged(block);
    pool_for(block->small).unmapped.insert(block);
  }

  void leave(Block* block) {
    if (block->mapped) {
      remove(block);
    } else {
      pool_for(block->small).unmapped.erase(block);
    }
  }

  void remove(Block* block) { spare_nodes_.push_back(pool_for(block->small).free.extract(block->place)); }

  void insert(Block* block) {
    Pool& pool = pool_for(block->small);
    block->free_since = pool.searches;
    if (spare_nodes_.empty()) {
      block->place = pool.free.insert(block).first;
      return;
    }
    auto node = std::move(spare_nodes_.back());
    spare_nodes_.pop_back();
    node.value() = block;
    block->place = pool.free.insert(std::move(node)).position;
  }

  Block* make(Block values) {
    if (spare_blocks_.empty()) return new Block(values);
    Block* block = spare_blocks_.back();
    spare_blocks_.pop_back();
    *block = values;
    return block;
  }
};

}  // namespace gpumem
