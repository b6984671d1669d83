// The virtual GPU: a counting wrapper around torch's CPU allocator, used through ctypes.
//
// It counts the requested bytes of every allocation of every thread (live, peak), models what the CUDA caching
// allocator would hold from the device for them (reserved, peak), and raises torch.OutOfMemoryError when that model
// would pass the limit. Bytes come from the same function as without it (c10::alloc_cpu), and the profiler is told as
// before. Not seen: memory that torch does not ask of its current CPU allocator, which are shared memory of data
// loaders, NumPy arrays, and storages that Python code makes (deepcopy and unpickling of tensors) until cloned.

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/alignment.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>

#include <pthread.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

extern "C" struct GpumemReading {  // bytes, and counts since install
  uint64_t live;
  uint64_t live_peak;
  uint64_t reserved;
  uint64_t reserved_peak;
  uint64_t limit;        // 0: none
  uint64_t allocations;
  uint64_t over_limit;   // allocations that passed the limit on a thread where it is not enforced
  uint64_t foreign;      // of the live bytes, those that threads of somebody else have asked for
};

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

namespace {

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

size_t segment_size(size_t block_size) {
  if (block_size <= kSmallSize) return kSmallSegment;
  return block_size < kMinLargeAlloc ? kLargeSegment : round_up(block_size, kRoundLarge);
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

bool BySizeThenAddress::operator()(const Block* a, const Block* b) const {
  return a->size != b->size ? a->size < b->size : a->address < b->address;
}

// The caching allocator without a device. The caller holds the lock. Blocks and the pools' nodes are kept for the next
// use, because asking the heap for them would cost more than all the rest.
class CacheModel {
 public:
  uint64_t reserved = 0;
  uint64_t reserved_peak = 0;

  CacheModel() = default;
  CacheModel(const CacheModel&) = delete;
  ~CacheModel() {  // whoever makes one for a while has released everything
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

struct State {
  std::mutex mutex;  // guards everything below; taken once per allocation and once per release
  CacheModel cache;
  uint64_t live = 0;
  uint64_t live_peak = 0;
  uint64_t limit = 0;
  uint64_t allocations = 0;
  uint64_t over_limit = 0;
  uint64_t foreign = 0;
  bool logging = false;
  std::vector<GpumemEvent> log;
  std::vector<const void*> parameters;  // sorted
  std::vector<GpumemCast> casts;
  std::vector<int32_t> foreign_threads;  // sorted
  std::atomic<uint32_t> call{0};         // the operator that runs on the thread that computes, 0 between operators
};

State& state() {
  static State* leaked = new State;  // tensors may be freed after static destructors have run
  return *leaked;
}

thread_local bool enforced = false;
thread_local bool ours = false;  // since it enforced the limit for the first time

// Whether this thread works for somebody else, as Horovod's does. Threads that help an operator are none of those.
bool is_foreign(const State& s) {
  if (ours) return false;
#ifdef __linux__
  thread_local const auto id = static_cast<int32_t>(syscall(SYS_gettid));
  return std::binary_search(s.foreign_threads.begin(), s.foreign_threads.end(), id);
#else
  return true;
#endif
}

// Operators call one another: only the outermost one counts.
thread_local uint32_t depth = 0;
thread_local uint32_t calls = 0;

constexpr size_t kLongestLog = size_t{4} << 20;  // 128 MiB; what happens after that is not logged

std::string in_words(uint64_t bytes) {
  char text[32];
  if (bytes < (uint64_t{1} << 20)) {
    std::snprintf(text, sizeof text, "%.2f KiB", static_cast<double>(bytes) / (1 << 10));
  } else if (bytes < (uint64_t{1} << 30)) {
    std::snprintf(text, sizeof text, "%.2f MiB", static_cast<double>(bytes) / (1 << 20));
  } else {
    std::snprintf(text, sizeof text, "%.2f GiB", static_cast<double>(bytes) / (1 << 30));
  }
  return text;
}

[[noreturn]] void raise_out_of_memory(size_t asked, size_t segment, const GpumemReading& at) {
  c10::profiledCPUMemoryReporter().OutOfMemory(asked);
  const uint64_t free = at.limit > at.reserved ? at.limit - at.reserved : 0;
  TORCH_CHECK_WITH(
      OutOfMemoryError, false, "virtual GPU out of memory. Tried to allocate ", in_words(segment),
      ". The virtual GPU has a total capacity of ", in_words(at.limit), " of which ", in_words(free), " is free. ",
      in_words(at.live), " is allocated by tensors and ", in_words(at.reserved - at.live),
      " is reserved but unallocated.");
  __builtin_unreachable();
}

GpumemReading read_locked(const State& s) {
  return {s.live, s.live_peak, s.cache.reserved, s.cache.reserved_peak, s.limit, s.allocations, s.over_limit, s.foreign};
}

// In front of every tensor's bytes, so that a pointer is all the deleter needs.
constexpr uint64_t kMagic = 0x6770756d656d6e62;  // "gpumemnb"
struct alignas(c10::gAlignment) Header {
  uint64_t magic;
  size_t nbytes;
  Block* block;
  uint64_t id;
  bool foreign;
};
static_assert(sizeof(Header) == c10::gAlignment, "tensors must stay aligned");

void note(State& s, const Header& header, bool release) {
  const auto bytes = static_cast<int64_t>(header.nbytes);
  if (header.foreign) s.foreign += release ? -bytes : bytes;
  if (!s.logging || s.log.size() >= kLongestLog) return;
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  const auto time_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
  const uint32_t call = header.foreign ? 0 : s.call.load();
  s.log.push_back({header.id, release ? -bytes : bytes, static_cast<uint64_t>(time_ns), header.foreign, call});
}

Header count_in(size_t nbytes) {
  const size_t size = round_up(nbytes, kMinBlockSize);
  const size_t segment = segment_size(size);
  State& s = state();
  std::unique_lock<std::mutex> lock(s.mutex);
  Block* block = s.cache.from_cache(size);
  if (!block) {
    const auto passes = [&] { return s.limit != 0 && s.cache.reserved + segment > s.limit; };
    if (passes()) s.cache.release_free_segments();
    if (passes()) {
      if (enforced) {
        const GpumemReading at = read_locked(s);
        lock.unlock();
        raise_out_of_memory(nbytes, segment, at);
      }
      ++s.over_limit;
    }
    block = s.cache.from_new_segment(size);
  }
  s.live += nbytes;
  s.live_peak = std::max(s.live_peak, s.live);
  const Header header{kMagic, nbytes, block, ++s.allocations, is_foreign(s)};
  note(s, header, false);
  return header;
}

void count_out(const Header& header) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.live -= header.nbytes;
  s.cache.give_back(header.block);
  note(s, header, true);
}

void release(void* data) {
  if (!data) return;
  c10::profiledCPUMemoryReporter().Delete(data);
  Header* header = static_cast<Header*>(data) - 1;
  if (header->magic != kMagic) {  // raw_allocate before install, raw_deallocate after it
    c10::free_cpu(data);
    return;
  }
  count_out(*header);
  header->magic = 0;
  c10::free_cpu(header);
}

// As on a GPU, memory that was used once is kept: giving it back to the system after each step and faulting it in again
// costs 6 to 10 % of a step (1,200 page faults; measured on text-gpt and digits-resnet, one thread).
void keep_freed_memory() {
#ifdef __GLIBC__
  mallopt(M_MMAP_THRESHOLD, 32 << 20);  // the largest value that glibc takes
  mallopt(M_TRIM_THRESHOLD, INT32_MAX);
#endif
}

uint64_t allocation_of(const c10::StorageImpl* storage) {
  const c10::DataPtr& data = storage->data_ptr();
  if (!data.get() || data.get_deleter() != &release) return 0;
  const Header* header = static_cast<const Header*>(data.get()) - 1;
  return header->magic == kMagic ? header->id : 0;
}

// Autocast copies a parameter with aten::_to_copy; nothing else would tell the copy from an activation.
struct Copying final : at::ObserverContext {
  const void* parameter;
  explicit Copying(const void* of) : parameter(of) {}
};

std::unique_ptr<at::ObserverContext> operator_begins(const at::RecordFunction& function) {
  if (depth++ == 0) state().call = ++calls;
  if (std::strcmp(function.name(), "aten::_to_copy") != 0) return nullptr;
  const auto inputs = function.inputs();
  if (inputs.empty() || !inputs[0].isTensor()) return nullptr;
  const void* source = inputs[0].toTensor().unsafeGetTensorImpl();
  const auto& parameters = state().parameters;
  if (!std::binary_search(parameters.begin(), parameters.end(), source)) return nullptr;
  return std::make_unique<Copying>(source);
}

void operator_ends(const at::RecordFunction& function, at::ObserverContext* context) {
  if (--depth == 0) state().call = 0;
  if (!context) return;
  const auto& outputs = function.outputs();
  if (outputs.empty() || !outputs[0].isTensor() || !outputs[0].toTensor().has_storage()) return;
  const uint64_t copy = allocation_of(outputs[0].toTensor().storage().unsafeGetStorageImpl());
  state().casts.push_back({static_cast<Copying*>(context)->parameter, copy});
}

struct VirtualAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* data = nbytes ? counted(nbytes) : nullptr;
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* dest, const void* src, std::size_t count) const override { default_copy_data(dest, src, count); }

 private:
  static void* counted(size_t nbytes) {
    const Header counted_as = count_in(nbytes);
    try {
      auto* header = static_cast<Header*>(c10::alloc_cpu(nbytes + sizeof(Header)));
      *header = counted_as;
      c10::profiledCPUMemoryReporter().New(header + 1, nbytes);
      return header + 1;
    } catch (...) {  // the host itself is out of memory
      count_out(counted_as);
      throw;
    }
  }
};

// A fork while another thread holds the lock would leave it locked in the child for ever.
void before_fork() { state().mutex.lock(); }
void after_fork_in_parent() { state().mutex.unlock(); }
void after_fork_in_child() {
  enforced = false;  // a data loader's worker is not on the device
  state().mutex.unlock();
}

}  // namespace

extern "C" {

void gpumem_install() {
  static const bool once = [] {
    static auto* allocator = new VirtualAllocator;
    pthread_atfork(&before_fork, &after_fork_in_parent, &after_fork_in_child);
    keep_freed_memory();
    c10::SetCPUAllocator(allocator, /*priority=*/UINT8_MAX);
    return true;
  }();
  (void)once;
}

void gpumem_set_limit(uint64_t bytes) {
  std::lock_guard<std::mutex> lock(state().mutex);
  state().limit = bytes;
}

// Returns what it was before. Horovod's own thread never asks for it: an exception there would end the process.
bool gpumem_enforce_on_this_thread(bool enforce) {
  const bool before = enforced;
  enforced = enforce;
  if (enforce) ours = true;
  return before;
}

// The threads of somebody else, by the system's numbers, sorted.
void gpumem_set_foreign_threads(const int32_t* ids, size_t count) {
  std::lock_guard<std::mutex> lock(state().mutex);
  state().foreign_threads.assign(ids, ids + count);
}

void gpumem_read(GpumemReading* out) {
  std::lock_guard<std::mutex> lock(state().mutex);
  *out = read_locked(state());
}

void gpumem_reset_peak() {
  std::lock_guard<std::mutex> lock(state().mutex);
  state().live_peak = state().live;
  state().cache.reserved_peak = state().cache.reserved;
}

// From now on allocations and releases are logged, and copies of these parameters, given as sorted TensorImpl addresses.
// To be called, and ended, on the thread that computes. The reading is that of the same moment.
uint64_t gpumem_log_begin(const void* const* parameters, size_t count, GpumemReading* out) {
  const uint64_t handle = at::addThreadLocalCallback(at::RecordFunctionCallback(&operator_begins, &operator_ends)
                                                         .needsInputs(true)
                                                         .needsOutputs(true)
                                                         .scopes({at::RecordScope::FUNCTION}));
  state().call = depth = calls = 0;
  std::lock_guard<std::mutex> lock(state().mutex);
  state().parameters.assign(parameters, parameters + count);
  state().casts.clear();
  state().log.clear();
  state().logging = true;
  *out = read_locked(state());
  return handle;
}

// Ends the log; events and casts stay until it is begun again.
void gpumem_log_end(uint64_t handle, const GpumemEvent** events, size_t* length, const GpumemCast** casts,
                    size_t* cast_count) {
  at::removeCallback(handle);
  std::lock_guard<std::mutex> lock(state().mutex);
  state().logging = false;
  *events = state().log.data();
  *length = state().log.size();
  *casts = state().casts.data();
  *cast_count = state().casts.size();
}

// Which allocation a storage lies in; 0 for one that was not counted here.
uint64_t gpumem_allocation(const c10::StorageImpl* storage) { return allocation_of(storage); }

void gpumem_empty_cache() {
  std::lock_guard<std::mutex> lock(state().mutex);
  state().cache.release_free_segments();
}

}  // extern "C"

// What an allocator of its own would do with allocations and releases that were recorded elsewhere: the model without
// tensors, without limit, and without touching what is counted here.

extern "C" struct GpumemReplayed {  // bytes
  uint64_t live;
  uint64_t live_peak;
  uint64_t reserved;
  uint64_t reserved_peak;
};

// An event n > 0 allocates n bytes, an event -k releases the k-th allocation, counted from 1. Returns how many events
// could be followed: fewer than given when one releases what is not there.
extern "C" size_t gpumem_replay(const int64_t* events, size_t count, GpumemReplayed* out) {
  CacheModel cache;
  std::vector<std::pair<Block*, uint64_t>> allocations;
  uint64_t live = 0, live_peak = 0;
  size_t followed = 0;
  for (; followed < count; ++followed) {
    const int64_t event = events[followed];
    if (event > 0) {
      const auto nbytes = static_cast<uint64_t>(event);
      const size_t size = round_up(nbytes, kMinBlockSize);
      Block* block = cache.from_cache(size);
      allocations.emplace_back(block ? block : cache.from_new_segment(size), nbytes);
      live += nbytes;
      live_peak = std::max(live_peak, live);
      continue;
    }
    const auto place = static_cast<uint64_t>(-event) - 1;
    if (event == 0 || place >= allocations.size() || !allocations[place].first) break;
    cache.give_back(std::exchange(allocations[place].first, nullptr));
    live -= allocations[place].second;
  }
  *out = {live, live_peak, cache.reserved, cache.reserved_peak};
  for (const auto& [block, nbytes] : allocations) {
    if (block) cache.give_back(block);
  }
  cache.release_free_segments();
  return followed;
}
