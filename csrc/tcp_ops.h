// The collective operations over TCP, each written as the frames that it sends and the places where frames land.
#pragma once

#include "shm_ops.h"
#include "tcp.h"

namespace echelon {

// Some of the mesh's ranks, in order, and which of them this one is.
struct Team {
    std::vector<int> ranks;
    int me = 0;
    int size() const { return int(ranks.size()); }
    static Team everybody(const Tcp& tcp);
};

class TcpCollective final : public Op, public Landing {
  public:
    TcpCollective(Engine& engine, Tcp& tcp, Team team, Request request);
    ~TcpCollective() override;
    bool step() override;
    std::vector<int> behind() const override;
    std::string what() const override;
    char* place(int peer, const Head& head) override;
    void landed(int peer, const Head& head) override;

  private:
    // What one member sends in one slot: straight to where it belongs, or, without `at`, through a window of chunks.
    struct Inlet {
        char* at = nullptr;
        uint64_t total = 0, placed = 0, got = 0;  // placed: of frames whose place was told
        bool wanted = false, begun = false;
        bool done() const { return !wanted || (begun && got == total); }
    };
    struct Slice { uint64_t begin, bytes; };  // in bytes

    void begin();
    Task first();
    Task flat_reduce();    // everybody's x, added up here
    Task doubling();       // barrier, all_gather, all_reduce in log2(n) rounds
    Task by_slices();      // all_reduce, reduce, reduce_scatter: each adds up its share
    Task direct();         // all_gather, gather, scatter, all_to_all, barrier: everything goes straight to its place
    Task spread();         // broadcast down a tree; flat is a tree of one level
    Task spread_slices();  // broadcast in shares, each passed on by one member

    void expect(int from, uint16_t slot, char* at, uint64_t bytes);
    void send(int to, uint16_t slot, const char* from, uint64_t bytes);            // all of it, in chunks
    void send_chunk(int to, uint16_t slot, const char* from, uint64_t total, uint64_t chunk);
    char* scratch(uint64_t bytes);
    bool all_landed() const;
    Slice slice(int member) const;
    uint64_t num_chunks(uint64_t bytes) const { return bytes == 0 ? 1 : (bytes + chunk_bytes - 1) / chunk_bytes; }
    uint64_t chunk(uint64_t bytes, uint64_t c) const { return std::min(chunk_bytes, bytes - c * chunk_bytes); }
    int after(int steps) const { return (team.me + steps) % team.size(); }
    uint64_t bytes() const { return request.count * element; }
    char* x(uint64_t at = 0) const { return static_cast<char*>(request.x) + at; }
    char* out(uint64_t at = 0) const { return static_cast<char*>(request.out) + at; }
    Inlet& inlet(int member, uint16_t slot) { return inlets[slot * size_t(team.size()) + size_t(member)]; }
    int member_of(int rank) const;
    void fold(void* to, const std::vector<const void*>& from, uint64_t bytes);

    static constexpr uint64_t WINDOW = 6;                // chunks of each peer that are not yet added up
    static constexpr uint64_t SMALL_BYTES = 65536;
    static constexpr uint64_t LEAST_CHUNK = 16384, MOST_CHUNK = 131072;
    static constexpr uint16_t NUM_SLOTS = 32;            // a round of doubling is a slot

    Engine& engine;
    Tcp& tcp;
    const Team team;
    const Request request;
    const uint64_t element;
    const Call said;
    uint64_t number = 0, chunk_bytes = MOST_CHUNK;
    Task task{};
    bool moved = false;
    uint32_t unsent = 0;
    uint16_t num_slots = 2;
    std::vector<Inlet> inlets;
    // slot 0, when it goes through a window
    char* window = nullptr;
    uint64_t folded = 0;                 // chunks of the window that are free again
    std::vector<uint16_t> arrivals;      // by chunk of slot 0: how many members' are here
    std::vector<std::pair<std::unique_ptr<char[]>, uint64_t>> borrowed;
};

}  // namespace echelon
