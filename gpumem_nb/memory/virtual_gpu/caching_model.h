// The CUDA caching allocator without a device: which segments it would hold for the blocks that tensors ask of it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <utility>
#include <vector>

namespace gpumem {

// Sizes of the CUDA caching allocator: c10/core/AllocatorConfig.h and c10/cuda/CUDACachingAllocator.cpp, torch 2.13.
constexpr size_t kMinBlockSize = 512;
constexpr size_t kSmallSize = size_t{1} << 20;
constexpr size_t kSmallSegment = size_t{2} << 20;
constexpr size_t kLargeSegment = size_t{20} << 20;
constexpr size_t kMinLargeAlloc = size_t{10} << 20;
constexpr size_t kRoundLarge = size_t{2} << 20;

constexpr size_t round_up(size_t size, size_t multiple) {
  return multiple * ((size + multiple - 1) / multiple);
}

constexpr size_t block_size(size_t nbytes) { return round_up(nbytes, kMinBlockSize); }

inline size_t segment_size(size_t size) {
  if (size <= kSmallSize) return kSmallSegment;
  return size < kMinLargeAlloc ? kLargeSegment : round_up(size, kRoundLarge);
}

struct Block;

struct BySizeThenAddress {
  bool operator()(const Block* a, const Block* b) const;
};

using Pool = std::set<Block*, BySizeThenAddress>;

// A piece of a segment. Addresses are the model's own: they only order blocks and never touch memory.
struct Block {
  size_t address;
  size_t size;
  bool small;
  bool in_use = false;
  Block* prev = nullptr;  // neighbours within the segment
  Block* next = nullptr;
  Pool::iterator place = {};  // in its pool while not in use
};

inline bool BySizeThenAddress::operator()(const Block* a, const Block* b) const {
  return a->size != b->size ? a->size < b->size : a->address < b->address;
}

// The caller holds the allocator's lock. Blocks and the pools' nodes are kept for the next
// use, because asking the heap for them would cost more than all the rest.
class CachingModel {
 public:
  uint64_t reserved = 0;
  uint64_t reserved_peak = 0;

  CachingModel() = default;
  CachingModel(const CachingModel&) = delete;
  ~CachingModel() {  // whoever makes one for a while has released everything
    for (Block* block : spare_blocks_) delete block;
  }

  Block* from_cache(size_t size) {
    Pool& pool = pool_for(size <= kSmallSize);
    Block key{0, size, false};
    const auto found = pool.lower_bound(&key);  // best fit
    if (found == pool.end()) return nullptr;
    Block* block = *found;
    remove(block);
    return take(block, size);
  }

  Block* from_new_segment(size_t size) {
    Block* block = make({next_address_, segment_size(size), size <= kSmallSize});
    next_address_ += block->size;
    reserved += block->size;
    reserved_peak = std::max(reserved_peak, reserved);
    return take(block, size);
  }

  void give_back(Block* block) {
    block->in_use = false;
    if (Block* next = block->next; next && !next->in_use) {
      remove(next);
      absorb(block, next);
    }
    if (Block* prev = block->prev; prev && !prev->in_use) {
      remove(prev);
      absorb(prev, block);
      block = prev;
    }
    insert(block);
  }

  void release_free_segments() {
    for (Pool* pool : {&small_, &large_}) {
      for (auto it = pool->begin(); it != pool->end();) {
        Block* block = *it++;
        if (block->prev || block->next) continue;
        remove(block);
        reserved -= block->size;
        spare_blocks_.push_back(block);
      }
    }
  }

 private:
  Pool small_, large_;
  std::vector<Pool::node_type> spare_nodes_;
  std::vector<Block*> spare_blocks_;
  size_t next_address_ = 0;

  Pool& pool_for(bool small) { return small ? small_ : large_; }

  Block* take(Block* block, size_t size) {
    block->in_use = true;
    const size_t rest = block->size - size;
    if (block->small ? rest >= kMinBlockSize : rest > kSmallSize) {
      Block* tail = make({block->address + size, rest, block->small});
      tail->prev = block;
      tail->next = block->next;
      if (tail->next) tail->next->prev = tail;
      block->next = tail;
      block->size = size;
      insert(tail);
    }
    return block;
  }

  void absorb(Block* block, Block* next) {
    block->size += next->size;
    block->next = next->next;
    if (block->next) block->next->prev = block;
    spare_blocks_.push_back(next);
  }

  void remove(Block* block) { spare_nodes_.push_back(pool_for(block->small).extract(block->place)); }

  void insert(Block* block) {
    Pool& pool = pool_for(block->small);
    if (spare_nodes_.empty()) {
      block->place = pool.insert(block).first;
      return;
    }
    auto node = std::move(spare_nodes_.back());
    spare_nodes_.pop_back();
    node.value() = block;
    block->place = pool.insert(std::move(node)).position;
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
