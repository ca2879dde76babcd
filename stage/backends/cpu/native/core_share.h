// Programs of one host that compute on the same cores share them: whoever computes holds a lock on a byte of a file,
// which the kernel takes back should the program end. Stages that compute in turn, as the stages of one stream do,
// each have all cores; those that compute at one time have equal parts, and keep to them for a while: more threads
// than cores wait for one another at every barrier.
#pragma once
#include <chrono>

class CoreShare {
 public:
  // `path` empty, or a file that cannot be had: alone.
  explicit CoreShare(const char* path);
  ~CoreShare();
  CoreShare(const CoreShare&) = delete;
  CoreShare& operator=(const CoreShare&) = delete;

  // Of so many threads those to compute with until `end`: at least one.
  int begin(int threads);
  void end();

 private:
  bool lock(int byte, bool taken);
  int others_computing() const;

  int fd_ = -1, slot_ = 0, sharers_ = 1;
  std::chrono::steady_clock::time_point shared_at_{};
};
