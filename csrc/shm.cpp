#include "shm.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

namespace echelon {

namespace {

constexpr uint64_t MAGIC = 0x6563'6865'6c6f'6e31;  // "echelon1"
constexpr uint32_t VERSION = 1;

[[noreturn]] void refuse(const std::string& what) { throw Error(what + ": " + strerror(errno)); }

#if defined(ECHELON_ONE_MAPPING)
// The stress program plays all ranks in one process: one address for each byte, so that a sanitizer sees who meets whom.
struct Mapping { char* at; int users; };
std::mutex mappings_lock;
std::map<std::tuple<ino_t, uint64_t, uint64_t>, Mapping> mappings;

char* map(int fd, uint64_t offset, uint64_t bytes) {
    struct stat about;
    fstat(fd, &about);
    std::lock_guard hold(mappings_lock);
    Mapping& one = mappings[{about.st_ino, offset, bytes}];
    if (one.users++ == 0) one.at = static_cast<char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, off_t(offset)));
    return one.at;
}

void unmap(void* at, uint64_t bytes) {
    std::lock_guard hold(mappings_lock);
    for (auto it = mappings.begin(); it != mappings.end(); ++it) {
        if (it->second.at != at || std::get<2>(it->first) != bytes) continue;
        if (--it->second.users == 0) {
            munmap(at, bytes);
            mappings.erase(it);
        }
        return;
    }
}
#else
void unmap(void* at, uint64_t bytes) { munmap(at, bytes); }

char* map(int fd, uint64_t offset, uint64_t bytes) {
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, off_t(offset));
    if (at == MAP_FAILED) refuse("cannot map " + std::to_string(bytes) + " bytes of shared memory");
    madvise(at, bytes, MADV_HUGEPAGE);  // if the system allows it; it costs nothing to ask
    return static_cast<char*>(at);
}
#endif

void allot(int fd, uint64_t offset, uint64_t bytes) {
    int failed;
    do failed = fallocate(fd, 0, off_t(offset), off_t(bytes));
    while (failed != 0 && errno == EINTR);
    if (failed != 0) refuse("no memory for " + std::to_string(bytes) + " bytes that the ranks of this host share");
}

int cores_each(int ranks) {
    constexpr int MOST = 4;
    cpu_set_t cores;
    if (sched_getaffinity(0, sizeof cores, &cores) != 0) return 1;
    return std::clamp(CPU_COUNT(&cores) / ranks, 1, MOST);
}

Layout layout_of(int control_fd) {
    Header header;
    if (pread(control_fd, &header, sizeof header, 0) != ssize_t(sizeof header)) refuse("cannot read the control segment");
    if (header.magic != MAGIC || header.version != VERSION) throw Error("this is not a control segment of this version");
    return {header.size, header.chunk_bytes, header.ring_bytes};
}

}  // namespace

uint64_t whole_pages(uint64_t bytes) {
    const uint64_t page = uint64_t(sysconf(_SC_PAGESIZE));
    return (bytes + page - 1) / page * page;
}

void Shm::format(int control_fd, const Layout& layout, uint64_t term) {
    allot(control_fd, 0, layout.control_bytes());
    char* at = map(control_fd, 0, layout.control_bytes());
    Header* header = new (at) Header{};
    header->size = uint32_t(layout.size);
    header->version = VERSION;
    header->chunk_bytes = layout.chunk_bytes;
    header->ring_bytes = layout.ring_bytes;
    header->term = term;
    Slot* slots = reinterpret_cast<Slot*>(at + sizeof(Header));
    for (uint64_t r = 0; r < layout.size; r++) new (slots + r) Slot{};
    header->magic = MAGIC;
    unmap(at, layout.control_bytes());
}

void Shm::reserve(int arena_fd, const Layout& layout) {
    if (ftruncate(arena_fd, off_t(layout.base_bytes())) != 0)
        refuse("no memory for an arena of " + std::to_string(layout.base_bytes()) + " bytes that the ranks of this host share");
    allot(arena_fd, 0, layout.urgent());  // what is seldom used takes its pages when it is: the upper lane, messages
}

Shm::Shm(int rank, int control_fd, const std::vector<int>& arena_fds, uint64_t term)
    : rank(rank), size(int(arena_fds.size())), layout(layout_of(control_fd)), threads(cores_each(size)), control_fd_(control_fd),
      arena_fds_(arena_fds), theirs_(arena_fds.size()), incoming_(arena_fds.size()) {
    char* at = map(control_fd_, 0, layout.control_bytes());
    header_ = reinterpret_cast<Header*>(at);
    slots_ = reinterpret_cast<Slot*>(at + sizeof(Header));
    if (int(layout.size) != size) throw Error("the control segment is for " + std::to_string(layout.size) + " ranks");
    if (header_->term != term) throw Error("the control segment is of term " + std::to_string(header_->term));
    for (int fd : arena_fds_) bases_.push_back(map(fd, 0, layout.base_bytes()));
    end_ = layout.base_bytes();
    struct flock lock{};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = rank;
    lock.l_len = 1;
    if (fcntl(control_fd_, F_SETLK, &lock) != 0) refuse("rank " + std::to_string(rank) + "'s place is taken");
    slots_[rank].pid.store(getpid());
    slots_[rank].state.store(uint32_t(State::here), std::memory_order_release);
}

Shm::~Shm() {
    leave();
    for (auto& [at, region] : mine_) unmap(region.at, region.bytes);
    for (auto& peer : theirs_)
        for (auto& [offset, region] : peer) unmap(region.at, region.bytes);
    for (char* base : bases_) unmap(base, layout.base_bytes());
    unmap(header_, layout.control_bytes());
    close(control_fd_);
    for (int fd : arena_fds_) close(fd);
}

// --- ticks -------------------------------------------------------------------------------------------------------

void Shm::post(int lane) {
    slots_[rank].lanes[lane].tick.fetch_add(1, std::memory_order_seq_cst);
    if (header_->num_sleeping.load(std::memory_order_seq_cst) == 0) return;
    for (int peer = 0; peer < size; peer++)
        if (peer != rank) knock(peer);
}

void Shm::knock(int peer) {
    Slot& slot = slots_[peer];
    if (slot.sleeping.load(std::memory_order_seq_cst) == 0) return;
    if (on_knock) return on_knock(peer);
    slot.doorbell.fetch_add(1, std::memory_order_seq_cst);
    futex_wake(slot.doorbell, true);
}

bool Shm::reached(int lane, uint32_t target) const {
    for (int peer = 0; peer < size; peer++)
        if (int32_t(tick(lane, peer) - target) < 0) return false;
    return true;
}

std::vector<int> Shm::short_of(int lane, uint32_t target) const {
    std::vector<int> ranks;
    for (int peer = 0; peer < size; peer++)
        if (peer != rank && int32_t(tick(lane, peer) - target) < 0) ranks.push_back(peer);
    return ranks;
}

// --- memory ------------------------------------------------------------------------------------------------------

char* Shm::allocate(uint64_t bytes) {
    std::lock_guard hold(regions_lock_);
    Region region{end_, whole_pages(std::max<uint64_t>(bytes, 1)), nullptr};
    const int fd = arena_fds_[rank];
    try {
        if (ftruncate(fd, off_t(region.offset + region.bytes)) != 0)
            refuse("no memory for " + std::to_string(region.bytes) + " bytes more in the arena that the ranks of this host share");
        allot(fd, region.offset, region.bytes);
        region.at = map(fd, region.offset, region.bytes);
    } catch (const Error&) {
        if (ftruncate(fd, off_t(end_)) != 0) throw;  // gives back what was got; if not, there is nothing else to do
        throw;
    }
    end_ += region.bytes;
    mine_[region.at] = region;
    return region.at;
}

void Shm::release(char* buffer) {
    if (mine_no_more_) return;
    std::lock_guard hold(regions_lock_);
    auto found = mine_.find(buffer);
    if (found == mine_.end()) return;
    Region region = found->second;
    mine_.erase(found);
    unmap(region.at, region.bytes);
    fallocate(arena_fds_[rank], FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, off_t(region.offset), off_t(region.bytes));
}

bool Shm::find(const void* x, uint64_t bytes, Call& call) const {
    std::lock_guard hold(regions_lock_);
    auto after = mine_.upper_bound(static_cast<const char*>(x));
    if (after == mine_.begin()) return false;
    const Region& region = std::prev(after)->second;
    uint64_t offset = uint64_t(static_cast<const char*>(x) - region.at);
    if (offset + bytes > region.bytes) return false;
    call.region = region.offset;
    call.region_bytes = region.bytes;
    call.offset = offset;
    return true;
}

char* Shm::of_peer(int peer, const Call& call) {
    if (peer == rank) {
        std::lock_guard hold(regions_lock_);
        for (auto& [at, region] : mine_)
            if (region.offset == call.region) return region.at + call.offset;
    }
    Region& region = theirs_[peer][call.region];
    if (region.at == nullptr) region = {call.region, call.region_bytes, map(arena_fds_[peer], call.region, call.region_bytes)};
    return region.at + call.offset;
}

// --- Transport ---------------------------------------------------------------------------------------------------

void Shm::arm() {
    Slot& me = slots_[rank];
    bell_seen_ = me.doorbell.load(std::memory_order_seq_cst);
    me.sleeping.store(1, std::memory_order_seq_cst);
    header_->num_sleeping.fetch_add(1, std::memory_order_seq_cst);
}

void Shm::rest(int64_t ns) { futex_wait(slots_[rank].doorbell, bell_seen_, ns, true); }

void Shm::disarm() {
    header_->num_sleeping.fetch_sub(1, std::memory_order_seq_cst);
    slots_[rank].sleeping.store(0, std::memory_order_seq_cst);
}

void Shm::wake() {
    slots_[rank].doorbell.fetch_add(1, std::memory_order_seq_cst);
    futex_wake(slots_[rank].doorbell, true);
}

bool Shm::alive(int peer) const {
    if (slots_[peer].pid.load() == getpid()) return true;  // a thread of ours plays that rank
    struct flock lock{};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = peer;
    lock.l_len = 1;
    return fcntl(control_fd_, F_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

bool Shm::trouble(const std::vector<int>& behind, Failure& failure) {
    for (int peer : behind) {
        Slot& slot = slots_[peer];
        State state = State(slot.state.load(std::memory_order_acquire));
        if (state == State::gave_up) {
            failure.reason = std::string("rank ") + std::to_string(peer) + " gave up: " + std::string(slot.reason, strnlen(slot.reason, sizeof slot.reason));
            for (int i = 0; i < std::clamp(slot.num_blamed, 0, 15); i++)
                if (slot.blamed[i] != rank) failure.peers.push_back(slot.blamed[i]);
            if (failure.peers.empty()) failure.peers.push_back(peer);
            failure.cause = "gave up";
            return true;
        }
        if (state == State::left) {
            failure.peers.push_back(peer);
            failure.reason = "rank " + std::to_string(peer) + " has left";
            failure.cause = "left";
        } else if (state == State::here && !alive(peer)) {
            failure.peers.push_back(peer);
            failure.reason = "rank " + std::to_string(peer) + " (pid " + std::to_string(slot.pid.load()) + ") is dead";
            failure.cause = "dead";
        }
    }
    return !failure.peers.empty();
}

void Shm::tell(const Failure& failure) {
    if (mine_no_more_) return;
    Slot& me = slots_[rank];
    me.num_blamed = int32_t(std::min<size_t>(failure.peers.size(), 15));
    std::copy_n(failure.peers.begin(), me.num_blamed, me.blamed);
    strncpy(me.reason, failure.reason.c_str(), sizeof me.reason - 1);
    me.state.store(uint32_t(State::gave_up), std::memory_order_seq_cst);
    for (int peer = 0; peer < size; peer++)
        if (peer != rank) knock(peer);
}

void Shm::leave() {
    if (mine_no_more_) return;
    uint32_t here = uint32_t(State::here);
    if (!slots_[rank].state.compare_exchange_strong(here, uint32_t(State::left))) return;
    for (int peer = 0; peer < size; peer++)
        if (peer != rank) knock(peer);
}

}  // namespace echelon
