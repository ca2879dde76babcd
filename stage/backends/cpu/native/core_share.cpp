#include "core_share.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>

namespace {

// Bytes [0, kSlots) are locked while a program computes, those after them for as long as it has the slot.
constexpr int kSlots = 64;
constexpr std::chrono::milliseconds kKeepSharing{100};  // several steps of most models

}  // namespace

#if defined(F_OFD_SETLK)

CoreShare::CoreShare(const char* path) {
  if (!*path) return;
  fd_ = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd_ < 0) return;
  while (slot_ < kSlots && !lock(kSlots + slot_, true)) slot_++;
  if (slot_ < kSlots) return;
  close(fd_);
  fd_ = -1;
}

bool CoreShare::lock(int byte, bool taken) {
  struct flock range = {};
  range.l_type = taken ? F_WRLCK : F_UNLCK;
  range.l_whence = SEEK_SET;
  range.l_start = byte;
  range.l_len = 1;
  return fcntl(fd_, F_OFD_SETLK, &range) == 0;
}

int CoreShare::others_computing() const {
  int others = 0;
  for (struct flock range = {};; others++) {
    off_t from = range.l_start + range.l_len;
    range = {};
    range.l_type = F_WRLCK;
    range.l_whence = SEEK_SET;
    range.l_start = from;
    range.l_len = kSlots - from;
    if (from >= kSlots || fcntl(fd_, F_OFD_GETLK, &range) != 0 || range.l_type == F_UNLCK) return others;
  }
}

#else  // no locks of an open file: alone

CoreShare::CoreShare(const char*) {}
bool CoreShare::lock(int, bool) { return false; }
int CoreShare::others_computing() const { return 0; }

#endif

CoreShare::~CoreShare() {
  if (fd_ >= 0) close(fd_);
}

int CoreShare::begin(int threads) {
  if (fd_ < 0 || threads == 1) return threads;
  lock(slot_, true);
  int sharers = 1 + others_computing();
  auto now = std::chrono::steady_clock::now();
  if (sharers >= sharers_ || now - shared_at_ > kKeepSharing) {
    sharers_ = sharers;
    shared_at_ = now;
  }
  return std::max(1, threads / sharers_);
}

void CoreShare::end() {
  if (fd_ >= 0) lock(slot_, false);
}
