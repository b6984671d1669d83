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

#include "deferred_model.h"
#include "event_log.h"

#include <malloc.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
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

namespace {

using gpumem::Block;

struct State {
  std::mutex mutex;  // guards everything below; taken once per allocation and once per release
  gpumem::DeferredModel model;
  uint64_t live = 0;
  uint64_t live_peak = 0;
  uint64_t limit = 0;
  uint64_t allocations = 0;
  uint64_t over_limit = 0;
  uint64_t foreign = 0;
  gpumem::EventLog log;
  std::vector<int64_t> layout;  // when the log was begun
  std::vector<int32_t> foreign_threads;  // sorted
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
  thread_local const auto id = static_cast<int32_t>(syscall(SYS_gettid));
  return std::binary_search(s.foreign_threads.begin(), s.foreign_threads.end(), id);
}

// Operators call one another: only the outermost one counts.
thread_local uint32_t depth = 0;
thread_local uint32_t calls = 0;

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

// The model as it is after all that has happened.
gpumem::CachingModel& caught_up(State& s) {
  s.model.catch_up(s.limit);
  return s.model.cache;
}

GpumemReading read_locked(State& s) {
  const gpumem::CachingModel& cache = caught_up(s);
  return {s.live, s.live_peak, cache.reserved, cache.reserved_peak, s.limit, s.allocations, s.over_limit, s.foreign};
}

// In front of every tensor's bytes, so that a pointer is all the deleter needs.
constexpr uint64_t kMagic = 0x6770756d656d6e62;  // "gpumemnb"
struct alignas(c10::gAlignment) Header {
  uint64_t magic;
  size_t nbytes;
  uint64_t id;
  uint32_t slot;
  bool foreign;
};
static_assert(sizeof(Header) == c10::gAlignment, "tensors must stay aligned");

void record(State& s, const Header& header, int64_t change) {
  if (header.foreign) s.foreign += change;
  s.log.add(header.id, change, header.foreign);
}

Header count_in(size_t nbytes) {
  State& s = state();
  std::unique_lock<std::mutex> lock(s.mutex);
  gpumem::CachingModel& cache = s.model.cache;
  const size_t size = cache.block_size(nbytes);
  const bool waits = s.model.may_wait(size, s.limit);
  Block* block = nullptr;
  if (!waits) {
    block = enforced ? cache.allocate_within(size, s.limit, s.limit) : cache.allocate(size, s.limit, s.limit);
    if (!block) {
      if (enforced) {
        const GpumemReading at = read_locked(s);
        lock.unlock();
        raise_out_of_memory(nbytes, gpumem::segment_size(size), at);
      }
      ++s.over_limit;
      block = cache.from_device(size);
    }
  }
  s.live += nbytes;
  s.live_peak = std::max(s.live_peak, s.live);
  const uint64_t id = ++s.allocations;
  const uint32_t slot = waits ? s.model.allocate_later(id, size) : s.model.allocated(id, block);
  const Header header{kMagic, nbytes, id, slot, is_foreign(s)};
  record(s, header, static_cast<int64_t>(nbytes));
  return header;
}

void count_out(const Header& header) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.live -= header.nbytes;
  s.model.give_back_later(header.slot, s.limit);
  record(s, header, -static_cast<int64_t>(header.nbytes));
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
  mallopt(M_MMAP_THRESHOLD, 32 << 20);  // the largest value that glibc takes
  mallopt(M_TRIM_THRESHOLD, INT32_MAX);
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
  if (depth++ == 0) state().log.in_call(++calls);
  if (std::strcmp(function.name(), "aten::_to_copy") != 0) return nullptr;
  const auto inputs = function.inputs();
  if (inputs.empty() || !inputs[0].isTensor()) return nullptr;
  const void* source = inputs[0].toTensor().unsafeGetTensorImpl();
  return state().log.is_parameter(source) ? std::make_unique<Copying>(source) : nullptr;
}

void operator_ends(const at::RecordFunction& function, at::ObserverContext* context) {
  if (--depth == 0) state().log.in_call(0);
  if (!context) return;
  const auto& outputs = function.outputs();
  if (outputs.empty() || !outputs[0].isTensor() || !outputs[0].toTensor().has_storage()) return;
  const uint64_t copy = allocation_of(outputs[0].toTensor().storage().unsafeGetStorageImpl());
  state().log.add_cast(static_cast<Copying*>(context)->parameter, copy);
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

// The allocator is configured when it is installed for the first time.
void gpumem_install(const gpumem::Config* config) {
  static const bool once = [config] {
    state().model.cache.config = *config;
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
  caught_up(state());
  state().limit = bytes;
}

// Returns what it was before. Horovod's own thread never asks for it: an exception there would end the process. Cached
// segments beyond the limit go back to the device when the limit is enforced again.
bool gpumem_enforce_on_this_thread(bool enforce) {
  const bool before = enforced;
  enforced = enforce;
  if (!enforce) return before;
  ours = true;
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  gpumem::CachingModel& cache = caught_up(s);
  if (s.limit && cache.reserved > s.limit) cache.release_free_segments();
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
  gpumem::CachingModel& cache = caught_up(state());
  state().live_peak = state().live;
  cache.reserved_peak = cache.reserved;
}

// From now on allocations and releases are logged, and copies of these parameters, given as sorted TensorImpl addresses.
// To be called, and ended, on the thread that computes. The reading is that of the same moment.
uint64_t gpumem_log_begin(const void* const* parameters, size_t count, GpumemReading* out) {
  const uint64_t handle = at::addThreadLocalCallback(at::RecordFunctionCallback(&operator_begins, &operator_ends)
                                                         .needsInputs(true)
                                                         .needsOutputs(true)
                                                         .scopes({at::RecordScope::FUNCTION}));
  depth = calls = 0;
  std::lock_guard<std::mutex> lock(state().mutex);
  state().log.in_call(0);
  state().log.begin(parameters, count);
  *out = read_locked(state());
  state().layout = state().model.cache.layout();
  return handle;
}

// Ends the log; events and casts stay until it is begun again.
void gpumem_log_end(uint64_t handle, const GpumemEvent** events, size_t* length, const GpumemCast** casts,
                    size_t* cast_count) {
  at::removeCallback(handle);
  std::lock_guard<std::mutex> lock(state().mutex);
  gpumem::EventLog& log = state().log;
  log.end();
  *events = log.events().data();
  *length = log.events().size();
  *casts = log.casts().data();
  *cast_count = log.casts().size();
}

// Where the blocks of all segments lay when the log was begun (CachingModel::layout), and how many numbers that takes.
size_t gpumem_log_layout(const int64_t** numbers) {
  std::lock_guard<std::mutex> lock(state().mutex);
  *numbers = state().layout.data();
  return state().layout.size();
}

// Which allocation a storage lies in; 0 for one that was not counted here.
uint64_t gpumem_allocation(const c10::StorageImpl* storage) { return allocation_of(storage); }

// Bytes that gpumem_empty_cache() would give back.
uint64_t gpumem_releasable() {
  std::lock_guard<std::mutex> lock(state().mutex);
  return caught_up(state()).releasable();
}

void gpumem_empty_cache() {
  std::lock_guard<std::mutex> lock(state().mutex);
  caught_up(state()).release_free_segments();
}

}  // extern "C"
