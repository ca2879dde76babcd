// The engine's threads: the caller is thread 0, the others wait, spinning for some tens of microseconds (the
// gap between two layers) and sleeping after that, so that an idle stage takes no processor time.
#pragma once
#include <stdint.h>

#include <atomic>
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

  int threads() const { return threads_; }
  // Calls work(arg, thread) on every thread and returns when all are done. One caller at a time: callers
  // hold `mutex()`.
  void run(void (*work)(void*, int), void* arg);
  // Inside work: returns when every thread has arrived.
  void barrier();
  std::mutex& mutex() { return mutex_; }

 private:
  void worker(int thread);

  const int threads_;
  const std::vector<int32_t> cpus_;
  std::vector<std::thread> workers_;
  std::mutex mutex_;
  void (*work_)(void*, int) = nullptr;
  void* arg_ = nullptr;
  alignas(64) std::atomic<uint32_t> task_{0};
  std::atomic<bool> stopping_{false};
  alignas(64) std::atomic<uint32_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
};
