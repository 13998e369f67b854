/* Memory of the simulated devices and pinned memory of the host, and the race check on both. */

#pragma once
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <sys/mman.h>

#include <cstring>
#include <map>

#include "streams.h"

namespace simulated {

constexpr auto DEVICE_TYPE = c10::DeviceType::PrivateUse1;
constexpr size_t ARENA_BYTES = size_t(1) << 36; /* addresses, not memory */
constexpr size_t ROUNDING_BYTES = 512, PAGE_BYTES = 4096;
constexpr int HOST = NUM_DEVICES; /* the arena and the pool of pinned memory */

inline thread_local int current_device = 0;
inline thread_local int current_streams[NUM_DEVICES] = {};

inline Stream &current_stream(int device) { return stream(device * STREAMS_PER_DEVICE + current_streams[device]); }

/* Addresses of one device. The host may touch none of them; kernels use a second mapping of the same memory. */
struct Arena {
  char *addresses, *memory;
  size_t used_bytes = 0;

  explicit Arena(bool is_host) {
    const int file = memfd_create("simulated device", 0);
    TORCH_CHECK(file >= 0 && ftruncate(file, ARENA_BYTES) == 0, "the simulated device could not reserve addresses");
    const int flags = MAP_SHARED | MAP_NORESERVE;
    memory = static_cast<char *>(mmap(nullptr, ARENA_BYTES, PROT_READ | PROT_WRITE, flags, file, 0));
    addresses = is_host ? memory : static_cast<char *>(mmap(nullptr, ARENA_BYTES, PROT_NONE, flags, file, 0));
    TORCH_CHECK(memory != MAP_FAILED && addresses != MAP_FAILED, "the simulated device could not map its memory");
  }

  bool has(const void *address) const { return address >= addresses && address < addresses + ARENA_BYTES; }
};

inline Arena &arena(int owner) {
  static auto *arenas = [] {
    auto *all = new std::vector<Arena>;
    for (int at = 0; at <= NUM_DEVICES; ++at) all->emplace_back(at == HOST);
    return all;
  }();
  return (*arenas)[owner];
}

/* Where a kernel finds the bytes of an address of a device, or of the host. */
inline char *kernel_address(const void *address) {
  for (int device = 0; device < NUM_DEVICES; ++device)
    if (arena(device).has(address))
      return arena(device).memory + (static_cast<const char *>(address) - arena(device).addresses);
  return static_cast<char *>(const_cast<void *>(address));
}

/* Bytes of a block that a stream has read or written. */
struct Access {
  size_t first, end;
  int stream;
  uint64_t time; /* of the stream's clock */
  bool is_write;
  std::string what;
};

struct Block {
  char *address;
  size_t size_bytes, requested_bytes = 0;
  int owner, stream; /* of a device's memory, the stream that it was allocated on */
  bool is_live = false, was_used = false, is_poisoned = false;
  std::vector<int> other_streams; /* that use it, and were said to */
  std::vector<Access> accesses;
};

inline std::map<const char *, Block *> blocks; /* guarded by `bookkeeping`; only registered memory is ever removed */
inline std::vector<std::string> races;         /* guarded by `bookkeeping` */

inline Block *find_block(const void *address) {
  auto found = blocks.upper_bound(static_cast<const char *>(address));
  if (found == blocks.begin()) return nullptr;
  Block *block = (--found)->second;
  return static_cast<const char *>(address) < block->address + block->size_bytes ? block : nullptr;
}

/* Notes an access, and reports it as a race where an earlier one is ordered neither by the stream, nor by events, nor
   by a host that has waited. What a later access covers is forgotten. Guarded by `bookkeeping`. */
inline void note_access(const void *address, size_t num_bytes, Stream &on, bool is_write, const std::string &what) {
  Block *block = conditions.check && num_bytes ? find_block(address) : nullptr;
  if (!block) return;
  const size_t first = static_cast<const char *>(address) - block->address, end = first + num_bytes;
  std::vector<Access> kept;
  for (auto &earlier : block->accesses) {
    const bool overlaps = earlier.first < end && first < earlier.end;
    const bool is_before = earlier.stream == on.number || !earlier.time ||
                           (size_t(earlier.stream) < on.clock.size() && on.clock[earlier.stream] >= earlier.time);
    const bool is_race = overlaps && !is_before && (is_write || earlier.is_write);
    if (is_race)
      races.push_back(c10::str(what, is_write ? " writes" : " reads", block->owner == HOST ? " pinned memory" : "",
                               " on stream ", on.number, ", unordered with ", earlier.what, " that ",
                               earlier.is_write ? "writes" : "reads", " it on stream ", earlier.stream));
    const bool is_covered = is_before && first <= earlier.first && earlier.end <= end && (is_write || !earlier.is_write);
    if (!is_race && !is_covered) kept.push_back(std::move(earlier));
  }
  kept.push_back({first, end, on.number, on.clock[on.number], is_write, what});
  block->accesses = std::move(kept);
}

/* Overwrites memory that was handed out again before a stream touches it for the first time. Not when it is handed out:
   what its stream is to wait for may be given to the stream after that. Guarded by `bookkeeping`. */
inline void poison(const void *address, Stream &on) {
  Block *block = find_block(address);
  if (!block || !block->is_poisoned) return;
  block->is_poisoned = false;
  tick(on);
  note_access(block->address, block->size_bytes, on, true, "reuse of freed memory");
  on.push([memory = kernel_address(block->address), size = block->requested_bytes] { memset(memory, 0xff, size); }, false);
}

/* A caching allocator: what was freed last comes first, in the order of the stream that it was allocated on. */
class Pool {
 public:
  explicit Pool(int owner) : owner_(owner) {}

  c10::CachingDeviceAllocator::DeviceStats statistics; /* guarded by `bookkeeping` */

  Block *allocate(size_t num_bytes, int on) {
    std::lock_guard<std::mutex> guard(bookkeeping);
    reclaim();
    const size_t step = owner_ == HOST ? PAGE_BYTES : ROUNDING_BYTES;
    const size_t size_bytes = std::max(step, (num_bytes + step - 1) / step * step);
    const int64_t limit_bytes = owner_ == HOST ? 0 : conditions.limit_bytes.load(), active_bytes = active();
    TORCH_CHECK_WITH(OutOfMemoryError, !limit_bytes || active_bytes + int64_t(size_bytes) <= limit_bytes,
                     "out of memory on simulated device ", owner_, ": asked for ", num_bytes, " B, ", active_bytes,
                     " of ", limit_bytes, " B are in use");
    auto &free_blocks = free_[{on, size_bytes}];
    if (free_blocks.empty()) free_blocks.push_back(reserve(size_bytes, on));
    Block *block = free_blocks.back();
    free_blocks.pop_back();
    block->is_live = true;
    block->is_poisoned = block->was_used && owner_ != HOST && conditions.poison;
    block->requested_bytes = num_bytes;
    block->other_streams.clear();
    statistics.active_bytes[0].increase(size_bytes);
    count(block, true);
    return block;
  }

  void free(Block *block) {
    std::lock_guard<std::mutex> guard(bookkeeping);
    block->is_live = false;
    count(block, false);
    Pending pending{block, {}, {}};
    for (int number : block->other_streams) {
      pending.places.emplace_back(number, stream(number).last());
      join(pending.clock, stream(number).clock);
    }
    pending_.push_back(std::move(pending));
    reclaim();
  }

  /* Another stream uses the block, so that it is not handed out before that has come so far. */
  void record_stream(const void *address, int number) {
    std::lock_guard<std::mutex> guard(bookkeeping);
    Block *block = find_block(address);
    if (!block || !block->is_live || (owner_ != HOST && block->stream == number)) return;
    auto &others = block->other_streams;
    if (std::find(others.begin(), others.end(), number) == others.end()) others.push_back(number);
  }

  /* Gives memory that nobody has back to the system. The caller has synchronized. */
  void empty_cache() {
    std::lock_guard<std::mutex> guard(bookkeeping);
    reclaim();
    for (auto &entry : free_)
      for (Block *block : entry.second) {
        block->was_used = false;
        block->accesses.clear();
        madvise(kernel_address(block->address), block->size_bytes, MADV_REMOVE);
      }
  }

  int64_t active() { return statistics.active_bytes[0].current; }

 private:
  struct Pending {
    Block *block;
    std::vector<std::pair<int, uint64_t>> places; /* that other streams have to pass */
    Clock clock;                                  /* what is complete when they have */
  };

  Block *reserve(size_t size_bytes, int on) {
    Arena &from = arena(owner_);
    TORCH_CHECK(from.used_bytes + size_bytes <= ARENA_BYTES, "the simulated device has no addresses left");
    auto *block = new Block{from.addresses + from.used_bytes, size_bytes, 0, owner_, on};
    from.used_bytes += size_bytes;
    blocks[block->address] = block;
    statistics.reserved_bytes[0].increase(size_bytes);
    return block;
  }

  void reclaim() {
    std::vector<Pending> left;
    for (auto &pending : pending_) {
      bool is_passed = true;
      for (auto &place : pending.places) is_passed &= stream(place.first).is_done(place.second);
      if (!is_passed) {
        left.push_back(std::move(pending));
        continue;
      }
      Block *block = pending.block;
      for (auto &access : block->accesses) /* what was asked of the device orders what comes, as an event would */
        if (size_t(access.stream) < pending.clock.size() && pending.clock[access.stream] >= access.time) access.time = 0;
      block->was_used = true;
      statistics.active_bytes[0].decrease(block->size_bytes);
      free_[{block->stream, block->size_bytes}].push_back(block);
    }
    pending_ = std::move(left);
  }

  void count(Block *block, bool is_more) {
    auto change = [is_more](c10::CachingAllocator::Stat &of, size_t by) { is_more ? of.increase(by) : of.decrease(by); };
    change(statistics.allocated_bytes[0], block->size_bytes);
    change(statistics.requested_bytes[0], block->requested_bytes);
    change(statistics.allocation[0], 1);
    if (owner_ == HOST) return;
    const auto size_bytes = int64_t(block->size_bytes);
    c10::reportMemoryUsageToProfiler(block->address, is_more ? size_bytes : -size_bytes,
                                     statistics.allocated_bytes[0].current, statistics.reserved_bytes[0].current,
                                     c10::Device(DEVICE_TYPE, owner_));
  }

  const int owner_;
  std::map<std::pair<int, size_t>, std::vector<Block *>> free_;
  std::vector<Pending> pending_;
};

inline Pool &pool(int owner) {
  static auto *pools = [] {
    auto *all = new std::vector<Pool *>;
    for (int at = 0; at <= NUM_DEVICES; ++at) all->push_back(new Pool(at));
    return all;
  }();
  return *pools->at(owner);
}

inline void synchronize_device(int device) {
  for (int at = 0; at < STREAMS_PER_DEVICE; ++at) synchronize(stream(device * STREAMS_PER_DEVICE + at));
}

inline void synchronize_all() {
  for (int device = 0; device < NUM_DEVICES; ++device) synchronize_device(device);
}

inline int number_of(const c10::Stream &given) {
  return std::max<int>(0, given.device_index()) * STREAMS_PER_DEVICE + int(given.id());
}

class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t num_bytes) override {
    const int device = current_device;
    const c10::Device where(DEVICE_TYPE, device);
    if (!num_bytes) return {nullptr, nullptr, &free, where};
    Block *block = pool(device).allocate(num_bytes, current_stream(device).number);
    return {block->address, block, &free, where};
  }
  static void free(void *block) {
    if (block) pool(static_cast<Block *>(block)->owner).free(static_cast<Block *>(block));
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void *to, const void *from, size_t num_bytes) const override {
    synchronize(current_stream(current_device));
    memcpy(kernel_address(to), kernel_address(from), num_bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    synchronize_all();
    for (int device = 0; device < NUM_DEVICES; ++device) pool(device).empty_cache();
  }
  void recordStream(const c10::DataPtr &data, c10::Stream used) override {
    if (data) pool(data.device().index()).record_stream(data.get(), number_of(used));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> guard(bookkeeping);
    return pool(device).statistics;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    for_each(device, [](auto &counter) { counter.reset_accumulated(); });
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    for_each(device, [](auto &counter) { counter.reset_peak(); });
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> guard(bookkeeping);
    const size_t limit_bytes = conditions.limit_bytes, total = limit_bytes ? limit_bytes : ARENA_BYTES;
    return {total - pool(device).active(), total};
  }

 private:
  template <class Change>
  void for_each(int device, Change change) {
    std::lock_guard<std::mutex> guard(bookkeeping);
    auto &of = pool(device).statistics;
    for (auto *counters : {&of.allocation, &of.allocated_bytes, &of.reserved_bytes, &of.active_bytes, &of.requested_bytes})
      change((*counters)[0]);
  }
};

class HostAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t num_bytes) override {
    Block *block = num_bytes ? pool(HOST).allocate(num_bytes, -1) : nullptr;
    return {block ? block->address : nullptr, block, &DeviceAllocator::free, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void *to, const void *from, size_t num_bytes) const override { memcpy(to, from, num_bytes); }
  bool record_event(void *address, void *, c10::Stream used) override {
    pool(HOST).record_stream(address, number_of(used));
    return true;
  }
  void empty_cache() override {
    synchronize_all();
    pool(HOST).empty_cache();
  }
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

inline bool is_pinned(const void *address) {
  std::lock_guard<std::mutex> guard(bookkeeping);
  Block *block = find_block(address);
  return block && block->owner == HOST && block->is_live;
}

/* Registers memory of the host where it is; false where a part of it is registered already. */
inline bool register_host(char *address, size_t num_bytes) {
  std::lock_guard<std::mutex> guard(bookkeeping);
  auto next = blocks.lower_bound(address);
  if (find_block(address) || (next != blocks.end() && next->first < address + num_bytes)) return false;
  auto *block = new Block{address, num_bytes, num_bytes, HOST, -1};
  block->is_live = true;
  blocks[address] = block;
  return true;
}

inline bool unregister_host(const char *address) {
  synchronize_all();
  std::lock_guard<std::mutex> guard(bookkeeping);
  auto found = blocks.find(address);
  if (found == blocks.end() || arena(HOST).has(address)) return false;
  delete found->second;
  blocks.erase(found);
  return true;
}

}  // namespace simulated
