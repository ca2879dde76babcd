#include "pool.h"

#include <signal.h>
#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

// Some tens of microseconds: longer than the gap between layers. Spinning longer at a barrier, so as not to
// lose the processor, is many times slower where other programs want it too (docs/decisions.md).
constexpr int kSpins = 3000;

// Returns when value differs from `old`.
void wait_change(std::atomic<uint32_t>& value, uint32_t old) {
  for (int i = 0; i < kSpins; i++) {
    if (value.load(std::memory_order_acquire) != old) return;
    relax();
  }
  while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

// Keeps the calling thread on these processors; where that is refused (a changed cgroup) it stays free.
void keep_on([[maybe_unused]] const std::vector<int32_t>& cpus) {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int32_t cpu : cpus) CPU_SET(cpu, &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);
#endif
}

}  // namespace

Pool::Pool(int threads, const std::vector<int32_t>& cpus) : cpus_(cpus), tasks_(new Tasks[threads]) {
  // Signals are for the program's own threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  for (int i = 1; i < threads; i++) workers_.emplace_back(&Pool::worker, this, i);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Pool::~Pool() {
  stopping_.store(true, std::memory_order_relaxed);
  for (size_t i = 1; i <= workers_.size(); i++) wake((int)i);
  for (std::thread& worker : workers_) worker.join();
}

void Pool::wake(int thread) {
  tasks_[thread].given.fetch_add(1, std::memory_order_release);
  tasks_[thread].given.notify_one();
}

void Pool::worker(int thread) {
  if (!cpus_.empty()) keep_on(cpus_);
  for (uint32_t seen = 0;; seen++) {
    wait_change(tasks_[thread].given, seen);
    if (stopping_.load(std::memory_order_relaxed)) return;
    work_(arg_, thread);
    barrier();
  }
}

void Pool::barrier() {
  const uint32_t running = (uint32_t)running_;  // once arrived, the next run may change it
  if (running == 1) return;
  uint32_t phase = phase_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == running) {
    arrived_.store(0, std::memory_order_relaxed);
    phase_.fetch_add(1, std::memory_order_release);
    phase_.notify_all();
  } else {
    wait_change(phase_, phase);
  }
}

void Pool::run(int threads, void (*work)(void*, int), void* arg) {
  work_ = work;
  arg_ = arg;
  running_ = threads;
  for (int i = 1; i < threads; i++) wake(i);
  work(arg, 0);
  barrier();
}
