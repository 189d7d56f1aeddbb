#include "blocks.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>

#include "types.h"

namespace echelon {

namespace {

constexpr uint64_t PAGE = 4096, COLOURS = 16, COLOUR = PAGE / COLOURS;
constexpr uint64_t SLACK = 16;  // one part in so many of what was in use at the most may be free and kept beside it

uint64_t up(uint64_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

}  // namespace

Blocks::Blocks(uint64_t reserve_bytes, int64_t window_ns)
    : bytes_(up(reserve_bytes)), window_ns_(window_ns), window_ends_ns_(now_ns() + window_ns) {
    void* at = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) throw Error(std::string("no addresses for blocks of memory: ") + strerror(errno));
    base_ = static_cast<char*>(at);
    shelve(extents_.insert({0, {bytes_, false, false}}).first);
}

Blocks::~Blocks() { munmap(base_, bytes_); }

void Blocks::shelve(Place place) { free_[place->second.resident].insert({place->second.bytes, place->first}); }
void Blocks::unshelve(Place place) { free_[place->second.resident].erase({place->second.bytes, place->first}); }

// The smallest that suffices: one that has its pages if there is any, else the lowest part of what has none.
Blocks::Place Blocks::fit(uint64_t bytes) {
    for (int kind : {1, 0}) {
        auto found = free_[kind].lower_bound({bytes, 0});
        if (found != free_[kind].end()) return extents_.find(found->second);
    }
    return extents_.end();
}

// `place`, shortened to `bytes`; the rest goes into the free lists.
Blocks::Place Blocks::cut(Place place, uint64_t bytes) {
    Extent rest = place->second;
    if (rest.bytes == bytes) return place;
    rest.bytes -= bytes;
    place->second.bytes = bytes;
    shelve(extents_.insert({place->first + bytes, rest}).first);
    return place;
}

Blocks::Place Blocks::join(Place place) {
    auto joins = [&](Place other) { return !other->second.used && other->second.resident == place->second.resident; };
    if (auto after = std::next(place); after != extents_.end() && joins(after)) {
        unshelve(after);
        place->second.bytes += after->second.bytes;
        extents_.erase(after);
    }
    if (place != extents_.begin())
        if (auto before = std::prev(place); joins(before)) {
            unshelve(before);
            before->second.bytes += place->second.bytes;
            extents_.erase(place);
            place = before;
        }
    return place;
}

void Blocks::release(uint64_t bytes) {
    while (bytes > 0 && !free_[1].empty()) {
        auto largest = extents_.find(std::prev(free_[1].end())->second);
        unshelve(largest);
        if (largest->second.bytes > bytes) cut(largest, up(bytes));
        bytes -= std::min(bytes, largest->second.bytes);
        madvise(base_ + largest->first, largest->second.bytes, MADV_DONTNEED);
        resident_ -= largest->second.bytes;
        largest->second.resident = false;
        shelve(join(largest));
    }
}

void Blocks::trim() {
    const uint64_t most = std::max(most_[0], most_[1]);
    const uint64_t limit = most + (tight_ ? 0 : most / SLACK);
    if (resident_ > limit) release(resident_ - limit);
}

void Blocks::turn() {
    const int64_t now = now_ns();
    if (now < window_ends_ns_) return;
    window_ends_ns_ = now + window_ns_;
    most_[1] = most_[0];
    most_[0] = used_;
    trim();
}

void* Blocks::take(uint64_t bytes) {
    if (bytes > bytes_) return nullptr;
    std::lock_guard hold(lock_);
    turn();
    const uint64_t whole = up(bytes + (COLOURS - 1) * COLOUR);
    Place place = fit(whole);
    if (place == extents_.end()) return nullptr;
    unshelve(place);
    place = cut(place, whole);
    place->second.used = true;
    used_ += whole;
    most_[0] = std::max(most_[0], used_);
    if (!place->second.resident) {
        place->second.resident = true;
        resident_ += whole;
        fresh_ += whole;
        trim();
    }
    void* at = base_ + place->first + colour_++ % COLOURS * COLOUR;
    given_[at] = place;
    return at;
}

void Blocks::give(void* block) {
    std::lock_guard hold(lock_);
    auto found = given_.find(block);
    if (found == given_.end()) {  // as the C library does: what goes on after a second free goes on with somebody else's memory
        fprintf(stderr, "echelon: free() of a block of memory that is not in use\n");
        abort();
    }
    Place place = found->second;
    given_.erase(found);
    used_ -= place->second.bytes;
    place->second.used = false;
    shelve(join(place));
    turn();
}

void Blocks::tighten() {
    std::lock_guard hold(lock_);
    tight_ = true;
    trim();
}

void Blocks::settle() {
    std::lock_guard hold(lock_);
    most_[0] = most_[1] = used_;
    trim();
}

void Blocks::age() {
    std::lock_guard hold(lock_);
    turn();
}

Blocks::Sizes Blocks::sizes() const {
    std::lock_guard hold(lock_);
    return {used_, std::max(most_[0], most_[1]), resident_, fresh_};
}

}  // namespace echelon
