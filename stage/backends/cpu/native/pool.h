// The engine's threads: the caller is thread 0, the others wait, spinning for some tens of microseconds (the
// gap between two layers) and sleeping after that, so that an idle stage takes no processor time.
#pragma once
#include <stdint.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

class Pool {
 public:
  // Threads other than the caller's stay on these processors, wherever among them the scheduler puts them: a
  // thread tied to one processor waits there for other programs while the next stands idle. Empty: anywhere.
  Pool(int threads, const std::vector<int32_t>& cpus);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Calls work(arg, thread) on the first `threads` and returns when all are done. One caller at a time: callers
  // hold `mutex()`.
  void run(int threads, void (*work)(void*, int), void* arg);
  // Inside work: returns when every thread of the run has arrived.
  void barrier();
  std::mutex& mutex() { return mutex_; }

 private:
  // How many tasks a worker was given. Each has its own, so that those a run leaves out sleep on.
  struct alignas(64) Tasks {
    std::atomic<uint32_t> given{0};
  };

  void worker(int thread);
  void wake(int thread);

  const std::vector<int32_t> cpus_;
  const std::unique_ptr<Tasks[]> tasks_;
  std::vector<std::thread> workers_;
  std::mutex mutex_;
  void (*work_)(void*, int) = nullptr;
  void* arg_ = nullptr;
  int running_ = 1;
  std::atomic<bool> stopping_{false};
  alignas(64) std::atomic<uint32_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
};
