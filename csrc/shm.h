// Shared memory among the ranks of one host: one control segment, and an arena a rank.
//
// Both are memfds that somebody else made and handed over; nothing here has a name. The control segment holds a slot a rank:
// its ticks (one counter a lane: how far it is in the common sequence of phases), what it is calling, whether it sleeps, and
// how it ended. An arena holds the rank's chunks, its message rings, and the buffers it was asked for; peers map a
// buffer when they first see it in a call. A rank is alive while it holds the lock on its byte of the control segment:
// the kernel lets go when the process dies, whoever else inherited the descriptor.
#pragma once

#include <string.h>

#include <functional>
#include <map>
#include <mutex>

#include "engine.h"
#include "far.h"

namespace echelon {

constexpr size_t NUM_IN = 3, NUM_RES = 4;

// What a rank is calling, told with its first tick: the others compare it with what they call themselves.
struct Call {
    uint8_t kind, dtype, op, in_segment;
    int32_t root;
    uint64_t count;       // elements
    uint64_t most;        // all_to_all: the most bytes to any one rank
    uint64_t region, region_bytes, offset;  // where x lies in the arena, if in_segment
    uint64_t whole, whole_count;  // what it is a part of, packed; 0: nothing
};
static_assert(sizeof(Call) == 64);

struct alignas(128) LaneSlot {
    std::atomic<uint32_t> tick;
    alignas(64) Call calls[2];
};

enum class State : uint32_t { joining, here, left, gave_up };

struct alignas(128) Slot {
    std::atomic<uint32_t> doorbell;  // the rank sleeps on it
    std::atomic<uint32_t> sleeping;
    std::atomic<uint32_t> state;
    std::atomic<int32_t> pid;
    alignas(128) LaneSlot lanes[NUM_LANES];
    int32_t num_blamed, blamed[15];
    char reason[448];
};

struct alignas(128) Header {
    uint64_t magic;
    uint32_t size, version;
    uint64_t chunk_bytes, ring_bytes, term;
    alignas(128) std::atomic<uint32_t> num_sleeping;
};

// One direction of messages between two ranks: the sender counts what it wrote, the receiver what it took.
struct alignas(128) Ring {
    std::atomic<uint64_t> sent;              // in the sender's arena, for each receiver
    alignas(64) std::atomic<uint64_t> taken; // in the receiver's arena, for each sender
};

// Rounded up to whole pages of this kernel (4, 16 or 64 KiB): offsets of mappings must be.
uint64_t whole_pages(uint64_t bytes);

struct Layout {
    uint64_t size, chunk_bytes, ring_bytes;
    uint64_t chunks() const { return size * sizeof(Ring); }
    uint64_t urgent() const { return chunks() + (NUM_IN + NUM_RES) * chunk_bytes; }  // the chunks of the lanes above the first
    uint64_t rings() const { return chunks() + NUM_LANES * (NUM_IN + NUM_RES) * chunk_bytes; }
    uint64_t base_bytes() const { return whole_pages(rings() + size * ring_bytes); }
    uint64_t control_bytes() const { return whole_pages(sizeof(Header) + size * sizeof(Slot)); }
};

struct Region {  // of an arena, mapped here
    uint64_t offset = 0, bytes = 0;
    char* at = nullptr;
};

// A message from one rank to another; peer -1 takes the next of anybody.
class Message final : public Op {
  public:
    Message(bool sends, void* x, uint64_t bytes, int peer, int32_t tag);
    bool step() override { return false; }
    std::vector<int> behind() const override { return peer < 0 ? std::vector<int>{} : std::vector<int>{peer}; }
    std::string what() const override;
    // Up to `most` bytes it is sent by its caller, as far as the ring takes it, and received by whoever waits.
    void lie_ready(uint64_t most);

    static constexpr uint64_t SMALL_BYTES = 65536;  // fits a ring, and a socket
    const bool sends;
    char* const x;
    const uint64_t bytes;
    int peer;
    const int32_t tag;
    uint64_t done = 0;     // bytes moved, the frame's header included for a send
    bool claimed = false;  // a recv has its message: whoever else had it on its list forgets it
    std::string trouble;   // why it cannot be: told as a failure of the group
};

class Shm final : public Transport {
  public:
    // Takes over the descriptors. `make` is true on the one rank that made the control segment, before it is handed on.
    static void format(int control_fd, const Layout& layout, uint64_t term);
    static void reserve(int arena_fd, const Layout& layout);
    Shm(int rank, int control_fd, const std::vector<int>& arena_fds, uint64_t term);
    ~Shm() override;

    const int rank, size;
    const Layout layout;
    // Cores for each rank of this host, as far as they are of use: long copies are made by so many threads while the caller waits.
    const int threads;

    // In a forked child: the place belongs to the parent; nothing that happens here is said in its name.
    void after_fork() { mine_no_more_ = true; }

    // --- ticks
    uint32_t tick(int lane, int of) const { return slots_[of].lanes[lane].tick.load(std::memory_order_acquire); }
    void post(int lane);  // one more of mine; rings those who sleep
    bool reached(int lane, uint32_t target) const;
    std::vector<int> short_of(int lane, uint32_t target) const;
    Call& call(int lane, int of, uint32_t number) { return slots_[of].lanes[lane].calls[number & 1]; }

    // --- memory
    char* in(int lane, int of, uint32_t turn) { return chunk(lane, of, turn % NUM_IN); }
    char* res(int lane, int of, uint32_t turn) { return chunk(lane, of, NUM_IN + turn % NUM_RES); }
    char* allocate(uint64_t bytes);   // a new buffer in my arena, zeroed; Error when there is no memory
    void release(char* buffer);       // gives its pages back
    bool find(const void* x, uint64_t bytes, Call& call) const;  // fills in where x lies; false when not in my arena
    char* of_peer(int peer, const Call& call);                   // where a peer's buffer is mapped here

    // --- Transport
    void arm() override;
    void rest(int64_t ns) override;
    void disarm() override;
    void wake() override;
    bool trouble(const std::vector<int>& behind, Failure& failure) override;
    void tell(const Failure& failure) override;
    void leave() override;
    void accept(std::shared_ptr<Op> op) override;
    bool serve(std::vector<std::shared_ptr<Op>>& finished) override;
    std::vector<std::shared_ptr<Op>> drop() override;
    size_t num_served() const override { return sends_.size() + recvs_.size() + num_open_; }
    std::vector<int> served_behind() const override;

    // What its ranks are called in messages: their numbers among all hosts. Empty: as they are here.
    std::vector<int> names;
    int name(int peer) const { return names.empty() ? peer : names[size_t(peer)]; }
    int number(int name) const;  // the other way; -1 when that one is not of this host
    // Messages up to here are left to callers and to those who wait. Where ranks have cores to spare, the engine's thread copies
    // beside them; where they have not, it would only take the script's core away and give it back.
    uint64_t lying_ready_bytes() const { return threads > 1 ? Message::SMALL_BYTES : layout.ring_bytes / 2; }
    void forget_claimed() { std::erase_if(recvs_, [](auto& message) { return message->claimed; }); }
    // How a peer that sleeps is woken, when it does not sleep on its doorbell.
    std::function<void(int)> on_knock;

    // Copies into memory that peers read. Among many it is plain: they read what several wrote, and how long a copy takes says little.
    void put(void* to, const void* from, uint64_t bytes) { size <= FEW ? far_.copy(to, from, bytes) : void(memcpy(to, from, bytes)); }

    // Per lane, on this side only: how many ticks and chunks were used so far.
    struct Cursor { uint32_t tick = 0, in = 0, res = 0, number = 0; } cursors[NUM_LANES];

  private:
    struct Stash { int32_t tag; std::vector<char> bytes; };
    struct Incoming {  // what is being taken from one sender's ring
        bool open = false;
        int32_t tag = 0;
        uint64_t bytes = 0, done = 0;
        std::shared_ptr<Message> into;
        std::vector<char> stash;
        std::deque<Stash> kept;
    };

    char* chunk(int lane, int of, size_t which) {
        return bases_[of] + layout.chunks() + (lane * (NUM_IN + NUM_RES) + which) * layout.chunk_bytes;
    }
    Ring& ring(int owner, int other) { return reinterpret_cast<Ring*>(bases_[owner])[other]; }
    char* ring_memory(int sender, int receiver) { return bases_[sender] + layout.rings() + receiver * layout.ring_bytes; }
    void knock(int peer);
    bool alive(int peer) const;
    void into_ring(int to, uint64_t at, const char* from, uint64_t bytes);  // from byte `at` of the endless stream on
    bool push(Message& message, int to);
    bool takes(const Message& message, int from) const { return message.peer < 0 || message.peer == name(from); }
    void claim(Message& message, int from) { message.peer = name(from), message.claimed = true; }
    bool pull(int from, std::vector<std::shared_ptr<Op>>& finished);
    void match_kept(std::vector<std::shared_ptr<Op>>& finished, bool& moved);

    static constexpr int FEW = 3;
    Far far_;
    bool mine_no_more_ = false;
    int control_fd_;
    std::vector<int> arena_fds_;
    Header* header_ = nullptr;
    Slot* slots_ = nullptr;
    std::vector<char*> bases_;
    uint32_t bell_seen_ = 0;
    mutable std::mutex regions_lock_;
    std::map<const char*, Region> mine_;                // by address
    std::vector<std::map<uint64_t, Region>> theirs_;    // by offset, a peer
    uint64_t end_ = 0;                                  // of my arena
    std::deque<std::shared_ptr<Message>> sends_, recvs_;
    std::vector<Incoming> incoming_;
    size_t num_open_ = 0;  // messages that are being received: no longer in recvs_
};

}  // namespace echelon
