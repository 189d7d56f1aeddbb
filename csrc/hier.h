// Several ranks on each of several hosts: shared memory within a host, TCP among hosts.
//
// Of each host, local rank c is in charge of column c of the data (as many columns as the smallest host has ranks): the ranks of a
// host add up the column in shared memory, its owners on all hosts meet over TCP, and shared memory brings it to everybody. So
// each byte crosses a host's link once in each direction, whatever the number of ranks, and all owners share the work.
// Sums are a fold over hosts in order, each a fold over its ranks in order.
//
// Sleeping is done on the sockets: a peer of this host that would ring the bell in shared memory knocks on its control stream.
#pragma once

#include "tcp_ops.h"

namespace echelon {

class Hier final : public Transport {
  public:
    // hosts: the ranks of each, in order. `shm` holds those of this host, in the same order.
    Hier(std::unique_ptr<Tcp> tcp, std::unique_ptr<Shm> shm, std::vector<std::vector<int>> hosts);

    const std::vector<std::vector<int>> hosts;  // before the two: shared memory knocks until its very end
    const std::unique_ptr<Tcp> tcp;
    const std::unique_ptr<Shm> shm;
    int host = 0, local = 0;        // where I am
    int columns = 0;
    bool even = false;              // every host has the same number of ranks, numbered host by host
    Team team(int column) const;    // the owners of a column, one a host
    bool owns(int column) const { return local == column; }
    void belongs_to(Engine* owner); // the engine that owns this one drives both

    void arm() override { shm->arm(); }
    void rest(int64_t ns) override { tcp->rest(ns); }
    void disarm() override { shm->disarm(); }
    void wake() override { tcp->wake(); }
    bool trouble(const std::vector<int>& behind, Failure& failure) override { return tcp->trouble(behind, failure); }
    void tell(const Failure& failure) override { tcp->tell(failure); }
    void leave() override;
    // Messages within a host go through shared memory. A recv from anybody is on both lists: who has a message for it claims it.
    void accept(std::shared_ptr<Op> op) override;
    bool serve(std::vector<std::shared_ptr<Op>>& finished) override;
    std::vector<std::shared_ptr<Op>> drop() override;
    size_t num_served() const override { return tcp->num_served() + shm->num_served(); }
    std::vector<int> served_behind() const override;
};

// Made of operations of the two transports, in one order on every rank of a host and on every owner of a column.
class HierCollective final : public Op {
  public:
    HierCollective(Engine& engine, Hier& hier, Request request);
    ~HierCollective() override;
    bool step() override;
    std::vector<int> behind() const override;
    std::string what() const override;
    static bool handles(const Hier& hier, const Request& request);  // otherwise TCP alone does it

  private:
    struct Piece { char* at; uint64_t count; };  // count: of one column
    Task run();
    Task all_reduce();
    Task little();
    Task broadcast();
    Task all_gather();
    Task reduce_scatter();

    void near(Kind kind, int root, uint64_t count, char* x, char* out);  // begins an operation of this host
    bool near_over();
    void far(Kind kind, int column, int root, uint64_t count, char* x, char* out);  // and one among hosts, if I own the column
    bool far_over(size_t left);  // at most `left` are still under way
    char* borrow(uint64_t bytes);
    std::vector<Piece> pieces() const;
    uint64_t bytes() const { return request.count * element; }
    char* x(uint64_t elements = 0) const { return static_cast<char*>(request.x) + elements * element; }
    char* out(uint64_t elements = 0) const { return static_cast<char*>(request.out) + elements * element; }

    static constexpr uint64_t LITTLE_BYTES = 32768;
    static constexpr uint64_t PIECE_BYTES = 2 << 20;

    Engine& engine;
    Hier& hier;
    const Request request;
    const uint64_t element;
    const Call said;
    Task task{};
    bool moved = false;
    std::unique_ptr<Collective> near_;
    std::deque<std::unique_ptr<TcpCollective>> far_;  // nullptr: another rank's column
    std::unique_ptr<char[]> scratch;
    uint64_t capacity = 0;
};

}  // namespace echelon
