// Copies into memory that another core reads: the way there is measured, because it changes.
//
// A plain store first takes the line away from the reader's cache. Between two cores under one cache that costs little; a virtual machine's
// cores come to lie under two from one second to the next, and then it is most of the time (512 KiB on an AMD EPYC: 35 µs near, 180 far; the
// reader's part 7 and 24). A store past the cache takes nothing from anybody: 25 µs either way, and 14 for the reader. So copies are plain
// while they are fast, and go past the cache once they were slow twice; now and then a plain one is tried again.
#pragma once

#include "stream.h"
#include "types.h"

namespace echelon {

class Far {
  public:
    // Whoever moves a group's operations on calls it: one thread at a time.
    void copy(void* to, const void* from, uint64_t bytes) {
        if (bytes == 0) return;  // a barrier has no memory to copy from
        if (bytes < LEAST_BYTES) return void(std::memcpy(to, from, bytes));
        if (left_ > 0) {
            left_--;
            return stream(to, from, bytes);
        }
        int64_t began = now_ns();
        std::memcpy(to, from, bytes);
        bool slow = now_ns() - began > int64_t(bytes / NEAR_BYTES_A_NS);
        times_slow_ = slow ? times_slow_ + 1 : 0;
        if (times_slow_ >= 2) left_ = PAST;
    }

  private:
    static constexpr uint64_t LEAST_BYTES = 32768;
    static constexpr uint64_t NEAR_BYTES_A_NS = 4;  // near: 10 and more, far: 3
    static constexpr int PAST = 128;                // copies past the cache, until a plain one shows whether it is still far
    int times_slow_ = 0, left_ = 0;
};

}  // namespace echelon
