// Blocks: memory for large tensors, kept for the next one, and little more of it than was in use at once.
//
// One stretch of addresses is reserved; blocks are cut from it where they fit best, and what is freed grows together with its free
// neighbours. Freed pages stay, so that the next block costs no page faults. But before pages are taken beyond what was in use at the
// most (and one part in SLACK of it), as many free ones go back to the system: the process does not grow by what no longer fits its
// gaps. "At the most" forgets: what was needed once, and not again for a window or two, goes back as well.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>

namespace echelon {

class Blocks {
  public:
    // Reserves addresses, takes no memory. Throws Error when the system refuses even that.
    explicit Blocks(uint64_t reserve_bytes, int64_t window_ns = 60'000'000'000);
    ~Blocks();
    Blocks(const Blocks&) = delete;

    // nullptr when there are no addresses left. Aligned to 64 bytes; two blocks of one size seldom begin at the same place of a page.
    void* take(uint64_t bytes);
    // What was not taken, or was given before, ends the process.
    void give(void* block);
    bool has(const void* at) const { return at >= base_ && at < base_ + bytes_; }

    // From now on nothing beyond what was in use at the most is kept.
    void tighten();
    // What was in use until now says nothing of what comes: free pages go back.
    void settle();
    // A look at the clock, for when nobody takes or gives.
    void age();

    struct Sizes {
        uint64_t used, most_used, resident, fresh;  // fresh: bytes that were taken without pages, ever
    };
    Sizes sizes() const;

    // Around fork(), which copies the lock as it is.
    void lock() { lock_.lock(); }
    void unlock() { lock_.unlock(); }

  private:
    struct Extent {
        uint64_t bytes;
        bool used;
        bool resident;  // its pages are taken, or may be
    };
    using Place = std::map<uint64_t, Extent>::iterator;  // by offset

    void shelve(Place place);    // into the free lists
    void unshelve(Place place);
    Place fit(uint64_t bytes);
    Place join(Place place);     // with free neighbours of its kind
    Place cut(Place place, uint64_t bytes);
    void release(uint64_t bytes);  // so many bytes of free pages, the largest first
    void trim();
    void turn();                   // the window, when it is over

    mutable std::mutex lock_;
    char* base_ = nullptr;
    const uint64_t bytes_;
    const int64_t window_ns_;
    std::map<uint64_t, Extent> extents_;
    std::set<std::pair<uint64_t, uint64_t>> free_[2];  // (bytes, offset): 0 without pages, 1 with them
    std::map<const void*, Place> given_;               // what users hold
    uint64_t used_ = 0, resident_ = 0, fresh_ = 0, colour_ = 0;
    uint64_t most_[2] = {0, 0};  // in this window, in the one before
    int64_t window_ends_ns_;
    bool tight_ = false;
};

}  // namespace echelon
