/* Streams of the simulated devices: each is a queue with a worker thread, and has a vector clock for the race check. */

#pragma once
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace simulated {

constexpr int NUM_DEVICES = 2;
constexpr int STREAMS_PER_DEVICE = 33; /* the default stream is number 0 */
constexpr int NUM_STREAMS = NUM_DEVICES * STREAMS_PER_DEVICE;

struct Conditions {
  std::atomic<int> least_delay_us{0}, most_delay_us{0}; /* before each copy */
  std::atomic<bool> lazy{false};                        /* tasks run only when somebody waits for them */
  std::atomic<int> late_percent{0};                     /* of operators whose results are written by a queued task */
  std::atomic<bool> poison{false};                      /* freed memory is overwritten when it is handed out again */
  std::atomic<bool> check{true};                        /* report unordered accesses */
  std::atomic<int64_t> limit_bytes{0};                  /* of a device's memory; 0: none */
  std::atomic<double> patience_s{60};                   /* a host that waits longer raises */
  std::atomic<uint32_t> seed{0};
};
inline Conditions conditions;

/* How much of every stream's work is known to be complete. */
using Clock = std::vector<uint64_t>;

inline void join(Clock &clock, const Clock &other) {
  if (clock.size() < other.size()) clock.resize(other.size());
  for (size_t at = 0; at < other.size(); ++at) clock[at] = std::max(clock[at], other[at]);
}

inline std::mutex bookkeeping; /* guards clocks, blocks and their accesses; taken before a stream's own lock */
inline Clock host_clock;

inline double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

class Stream {
 public:
  explicit Stream(int number) : number(number) { reseed(); }

  const int number; /* over all devices */
  Clock clock;      /* of the work that the host has queued; guarded by `bookkeeping` */

  /* Queues a task and returns its place in the queue. Copies are the tasks that conditions delay. */
  uint64_t push(std::function<void()> task, bool is_copy) {
    std::lock_guard<std::mutex> guard(lock_);
    if (!is_started_) std::thread([this] { work(); }).detach();
    is_started_ = true;
    tasks_.push_back({std::move(task), is_copy});
    changed_.notify_all();
    return ++num_queued_;
  }

  uint64_t last() {
    std::lock_guard<std::mutex> guard(lock_);
    return num_queued_;
  }

  /* Whether a task has run. Asking lets a lazy stream make one step. */
  bool is_done(uint64_t place) {
    std::lock_guard<std::mutex> guard(lock_);
    if (num_done_ < place && conditions.lazy) want(num_done_ + 1);
    return num_done_ >= place;
  }

  /* Blocks the host until a task has run. */
  void wait(uint64_t place) {
    std::unique_lock<std::mutex> guard(lock_);
    if (num_done_ >= place) return;
    TORCH_CHECK(!is_held_, "the host would wait for stream ", number, ", which a test holds");
    want(place);
    const auto patience = std::chrono::duration<double>(conditions.patience_s.load());
    TORCH_CHECK(changed_.wait_for(guard, patience, [&] { return num_done_ >= place; }), "stream ", number,
                " has not finished within ", conditions.patience_s.load(), " s: two streams may wait for each other");
  }

  /* Blocks the worker of another stream until a task has run. */
  void wait_on_device(uint64_t place) {
    std::unique_lock<std::mutex> guard(lock_);
    want(place);
    changed_.wait(guard, [&] { return num_done_ >= place; });
  }

  void hold(bool is_held) {
    std::lock_guard<std::mutex> guard(lock_);
    is_held_ = is_held;
    changed_.notify_all();
  }

  uint64_t num_pending() {
    std::lock_guard<std::mutex> guard(lock_);
    return num_queued_ - num_done_;
  }

  /* After conditions have changed. */
  void reseed() {
    std::lock_guard<std::mutex> guard(lock_);
    delays_.seed(conditions.seed + number);
    lateness_.seed(conditions.seed + NUM_STREAMS + number);
    changed_.notify_all();
  }

  bool draws_late() {
    std::lock_guard<std::mutex> guard(lock_);
    return conditions.late_percent > 0 && int(lateness_() % 100) < conditions.late_percent;
  }

 private:
  struct Task {
    std::function<void()> run;
    bool is_copy;
  };

  void want(uint64_t place) {
    num_wanted_ = std::max(num_wanted_, place);
    changed_.notify_all();
  }

  void work() {
    std::unique_lock<std::mutex> guard(lock_);
    for (;;) {
      changed_.wait(guard, [&] {
        return !tasks_.empty() && !is_held_ && (!conditions.lazy || num_done_ < num_wanted_);
      });
      Task task = std::move(tasks_.front());
      tasks_.pop_front();
      const int least = conditions.least_delay_us, most = std::max(least, conditions.most_delay_us.load());
      const int delay_us = task.is_copy && most > 0 ? least + int(delays_() % uint32_t(most - least + 1)) : 0;
      guard.unlock();
      if (delay_us) std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
      task.run();
      task.run = nullptr;
      guard.lock();
      ++num_done_;
      changed_.notify_all();
    }
  }

  std::mutex lock_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  uint64_t num_queued_ = 0, num_done_ = 0, num_wanted_ = 0;
  bool is_held_ = false, is_started_ = false;
  std::mt19937 delays_, lateness_;
};

/* Never destroyed: workers outlive main(). */
inline Stream &stream(int number) {
  static auto *streams = [] {
    auto *all = new std::vector<Stream *>;
    for (int at = 0; at < NUM_STREAMS; ++at) all->push_back(new Stream(at));
    return all;
  }();
  return *streams->at(number);
}

/* One more piece of work on a stream, queued by the host now, after all that the host knows. Guarded by `bookkeeping`. */
inline void tick(Stream &on) {
  join(on.clock, host_clock);
  if (on.clock.size() <= size_t(on.number)) on.clock.resize(on.number + 1);
  ++on.clock[on.number];
}

inline void host_has_seen(const Clock &clock) {
  std::lock_guard<std::mutex> guard(bookkeeping);
  join(host_clock, clock);
}

inline void synchronize(Stream &on) {
  Clock queued; /* before the wait: another thread may queue more in the meantime */
  uint64_t last;
  {
    std::lock_guard<std::mutex> guard(bookkeeping);
    queued = on.clock;
    last = on.last();
  }
  on.wait(last);
  host_has_seen(queued);
}

/* One recording of an event. */
struct Mark {
  Stream *on;
  uint64_t place;
  Clock clock;
  double passed_s = 0;

  bool is_done() const { return on->is_done(place); }
};

inline std::shared_ptr<Mark> record(Stream &on) {
  auto mark = std::make_shared<Mark>();
  mark->on = &on;
  std::lock_guard<std::mutex> guard(bookkeeping);
  tick(on);
  mark->clock = on.clock;
  mark->place = on.push([mark] { mark->passed_s = now_s(); }, false);
  return mark;
}

/* Lets later work of a stream wait for a mark. */
inline void wait(Stream &waiting, const std::shared_ptr<Mark> &mark) {
  std::lock_guard<std::mutex> guard(bookkeeping);
  join(waiting.clock, mark->clock);
  if (mark->on != &waiting) waiting.push([mark] { mark->on->wait_on_device(mark->place); }, false);
}

}  // namespace simulated
