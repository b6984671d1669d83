// What the caching allocator's memory is cut into, and the sizes in which it takes it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>

namespace gpumem {

// Sizes of the CUDA caching allocator: c10/core/AllocatorConfig.h and c10/cuda/CUDACachingAllocator.cpp, torch 2.13.
constexpr size_t kMinBlockSize = 512;
constexpr size_t kSmallSize = size_t{1} << 20;
constexpr size_t kSmallSegment = size_t{2} << 20;
constexpr size_t kLargeSegment = size_t{20} << 20;
constexpr size_t kMinLargeAlloc = size_t{10} << 20;
constexpr size_t kRoundLarge = size_t{2} << 20;
constexpr size_t kMaxNonSplitRounding = size_t{20} << 20;
constexpr size_t kAddressSpace = kLargeSegment << 24;  // of an expandable segment: more than any GPU has

constexpr size_t round_up(size_t size, size_t multiple) {
  return multiple * ((size + multiple - 1) / multiple);
}

inline size_t segment_size(size_t size) {
  if (size <= kSmallSize) return kSmallSegment;
  return size < kMinLargeAlloc ? kLargeSegment : round_up(size, kRoundLarge);
}

// What a block of this size may add to reserved bytes, at most, whatever the settings: whole pages of an expandable segment.
inline size_t most_reserved(size_t size) {
  return size <= kSmallSize ? kSmallSegment : round_up(size, kLargeSegment);
}

// What PYTORCH_CUDA_ALLOC_CONF may say; as it stands here, it says nothing.
struct Config {
  uint64_t roundup_divisions = 1;  // a power of two
  uint64_t max_split = UINT64_MAX;  // bytes
  double collect_above = 0;  // garbage_collection_threshold, a share of what is allowed; 0: never
  bool expandable = false;
};

struct Block;

struct BySizeThenAddress {
  bool operator()(const Block* a, const Block* b) const;
};

struct ByAddress {
  bool operator()(const Block* a, const Block* b) const;
};

using FreeBlocks = std::set<Block*, BySizeThenAddress>;

struct Pool {
  FreeBlocks free;
  std::set<Block*, ByAddress> unmapped;  // parts of expandable segments that have no memory
  uint64_t searches = 0;
};

// A piece of a segment. Addresses are the model's own: they only order blocks and never touch memory.
struct Block {
  size_t address;
  size_t size;
  bool small;
  bool in_use = false;
  bool mapped = true;
  bool expandable = false;
  Block* prev = nullptr;  // neighbours within the segment
  Block* next = nullptr;
  uint64_t free_since = 0;  // searches of its pool
  uint64_t id = 0;          // of the allocation that it serves
  FreeBlocks::iterator place = {};  // in its pool while not in use

  bool is_split() const { return prev || next; }
};

inline bool BySizeThenAddress::operator()(const Block* a, const Block* b) const {
  return a->size != b->size ? a->size < b->size : a->address < b->address;
}

inline bool ByAddress::operator()(const Block* a, const Block* b) const { return a->address < b->address; }

}  // namespace gpumem
